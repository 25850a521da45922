"""`HostClient`: asks the host on IOPub, awaits the answer that control brings.

A request lives in a table of our own, not in the comm manager: a front end that
closes a comm it does not know can not end it. It is asked again under the same
id until it is answered, it fails with a code when no host is there, and an
interrupted await takes it back at the host (specification rlm.md section 10).
"""

import asyncio
import contextlib
import itertools
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from . import origin
from .errors import HostError
from .wire.codes import ErrorCode
from .wire.envelope import AttachReply, AttachRequest, Cancel, Request
from .wire.strict import MAX_PAYLOAD_BYTES, PayloadError, check_json, encoded

__all__ = ("ATTACH_WAIT_S", "CLIENT_ATTRIBUTE", "HostClient", "Limits", "Publish")

CLIENT_ATTRIBUTE = "_rlm_kernel_client"
"""Of a kernel: its client, which outlives a reload of the extension."""

ATTACH_WAIT_S = 5.0
"""How long a request waits for a host: from its start, or from the end of a lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How many requests a kernel has at once.

    *on_wire* is what the host sees; the rest waits in the kernel, *waiting* at
    most. A request that the host does not name as in work is asked again after
    *again_s*. Without a host it fails after *attach_wait_s*.
    """

    on_wire: int = 256
    waiting: int = 65_536
    again_s: float = 0.2
    attach_wait_s: float = ATTACH_WAIT_S


class Publish(Protocol):
    """Sends the data of a ``comm_msg`` on IOPub; callable from any thread."""

    def __call__(
        self, comm_id: str, data: dict[str, Any], parent: dict[str, Any]
    ) -> None:
        """Publish *data* on the host's comm, as a child of *parent*."""


@dataclass(slots=True, eq=False)
class _Pending:
    """One request that somebody awaits."""

    loop: asyncio.AbstractEventLoop
    future: "asyncio.Future[dict[str, Any]]"
    type: str
    payload: dict[str, Any]
    parent: dict[str, Any]
    created: float
    id: int = 0
    sent: float = 0.0
    over: bool = False


@dataclass(slots=True)
class _Host:
    """Who is attached, and until when."""

    comm_id: str = ""
    generation: str = ""
    lease_until: float = 0.0


@dataclass(slots=True)
class _Table:
    """The requests on the wire by id, and those that wait for a place there."""

    on_wire: dict[int, _Pending] = field(default_factory=dict)
    waiting: deque[_Pending] = field(default_factory=deque)
    waiting_count: int = 0


class HostClient:
    """The kernel's end of the wire. One for each kernel process.

    Args:
        publish: Sends on IOPub.
        generation: This kernel process; a host of another one is refused. Empty
            in a kernel that no bridge started: it takes any host.
        limits: How many requests at once.
        clock: Seconds that only go forward.
    """

    def __init__(
        self,
        publish: Publish,
        *,
        generation: str = "",
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.generation = generation
        self._publish = publish
        self._limits = limits or Limits()
        self._clock = clock
        self._host = _Host()
        self._table = _Table()
        self._ids = itertools.count(1)
        self._next_id = 1
        # Cells, tasks, threads with a loop of their own and the control thread
        # all come here; what is done under the lock never blocks.
        self._lock = threading.RLock()
        self._watches: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}

    # -- what a proxy calls, in any event loop ---------------------------------

    async def request(
        self, request_type: str, payload: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Ask the host for one operation and await its fields.

        Args:
            request_type: ``rlm.run`` for example.
            payload: The operation's arguments, JSON only.

        Returns:
            The fields of the host's answer.

        Raises:
            TypeError: The type is no non-empty ``str``, or the payload no ``dict``.
            HostError: Refused, failed, or no host is there; see its ``code``.
        """
        __tracebackhide__ = True  # a cell's traceback ends at the cell
        pending = self._new(request_type, {} if payload is None else payload)
        try:
            self._admit(pending)
            self._watch(pending.loop)
            answer = await pending.future
        finally:
            self._close(pending)
        if answer["status"] == "ok":
            return dict(answer["result"])
        raise HostError(answer["code"], answer["error"], request_type)

    @property
    def attached(self) -> bool:
        """Whether a host's lease runs."""
        return self._clock() < self._host.lease_until

    # -- what control calls, on its thread ----------------------------------------

    def answer(self, data: dict[str, Any]) -> None:
        """Settle the request that *data* answers; a late or second one is dropped.

        Raises:
            ValueError, KeyError, TypeError: *data* is no answer.
        """
        match data:
            case {"id": int(), "status": "ok", "result": dict()}:
                pass
            case {"id": int(), "status": "error", "code": str(), "error": str()}:
                pass
            case _:
                msg = "no answer of this protocol"
                raise ValueError(msg)
        with self._lock:
            pending = self._table.on_wire.pop(data["id"], None)
            if pending is None:
                return
            self._settle(pending, data)
            self._promote()

    def attach(self, message: AttachRequest) -> AttachReply:
        """Take *message*'s lease, ask again for what its host does not have in work."""
        if self.generation and message.generation != self.generation:
            return self.refusal(ErrorCode.STALE_GENERATION)
        with self._lock:
            self._host.comm_id = message.comm_id
            self._host.generation = message.generation
            # Lease 0 is a goodbye: requests fail after their attach wait.
            self._host.lease_until = self._clock() + message.lease_s
            if message.lease_s > 0:
                self._ask_again(set(message.working))
                self._promote()
            return self._reply(None)

    def refusal(self, code: ErrorCode) -> AttachReply:
        """The reply to a host that is not taken, with the reason."""
        with self._lock:
            return self._reply(code)

    def _reply(self, code: ErrorCode | None) -> AttachReply:
        return AttachReply(
            status="ok" if code is None else "error",
            generation=self.generation,
            code=code,
            pid=os.getpid(),
            pending=sorted(self._table.on_wire),
            next_id=self._next_id,
        )

    # -- inside ---------------------------------------------------------------------

    def _new(self, request_type: str, payload: dict[str, Any]) -> _Pending:
        if not isinstance(request_type, str) or not request_type:
            msg = "request type must be a non-empty str"
            raise TypeError(msg)
        if not isinstance(payload, dict):
            msg = f"payload must be a dict, got {type(payload).__name__}"
            raise TypeError(msg)
        try:
            check_json(payload)
        except PayloadError as error:
            raise HostError(
                ErrorCode.INVALID_ARGUMENT, str(error), request_type
            ) from None
        text = encoded(payload)
        if (size := len(text)) > MAX_PAYLOAD_BYTES:
            raise HostError(
                ErrorCode.PAYLOAD_TOO_LARGE,
                f"the payload has {size} bytes, {MAX_PAYLOAD_BYTES} are allowed; "
                "write it to a file and pass the path",
                request_type,
            )
        loop = asyncio.get_running_loop()
        return _Pending(
            loop,
            loop.create_future(),
            request_type,
            # A copy: the request may wait, or be asked again, while the caller
            # fills the same dict for the next one.
            json.loads(text),
            origin.current(),
            self._clock(),
        )

    def _admit(self, pending: _Pending) -> None:
        with self._lock:
            table = self._table
            if table.waiting_count >= self._limits.waiting:
                pending.over = True
                raise HostError(
                    ErrorCode.TOO_MANY_REQUESTS,
                    f"{table.waiting_count} requests wait already; await some first",
                    pending.type,
                )
            table.waiting.append(pending)
            table.waiting_count += 1
            self._promote()

    def _promote(self) -> None:
        """Send waiting requests while there is a host and a place on the wire."""
        table = self._table
        while (
            table.waiting
            and self.attached
            and len(table.on_wire) < self._limits.on_wire
        ):
            pending = table.waiting.popleft()
            if pending.over:  # taken back while it waited
                continue
            table.waiting_count -= 1
            # An id is given here, so that ids on the wire have no gaps.
            pending.id = next(self._ids)
            self._next_id = pending.id + 1
            table.on_wire[pending.id] = pending
            self._send(pending)

    def _ask_again(self, working: set[int]) -> None:
        now = self._clock()
        for pending in self._table.on_wire.values():
            fresh = now - pending.sent < self._limits.again_s
            if pending.id not in working and not fresh:
                self._send(pending)

    def _send(self, pending: _Pending) -> None:
        pending.sent = self._clock()
        message = Request(
            id=pending.id,
            type=pending.type,
            generation=self.generation or self._host.generation,
            payload=pending.payload,
        )
        # Not asdict(): it would copy the payload, all of it.
        data = {part.name: getattr(message, part.name) for part in fields(message)}
        self._publish(self._host.comm_id, data, pending.parent)

    def _settle(self, pending: _Pending, data: dict[str, Any]) -> None:
        pending.over = True

        def set_result() -> None:
            if not pending.future.done():
                pending.future.set_result(data)

        # The loop of a thread may have ended; then nobody waits.
        with contextlib.suppress(RuntimeError):
            pending.loop.call_soon_threadsafe(set_result)

    def _close(self, pending: _Pending) -> None:
        """Forget a request whose await has ended, and take it back if it is open."""
        with self._lock:
            if pending.over:
                return
            pending.over = True
            if pending.id == 0:
                self._leave_queue()
                return
            self._table.on_wire.pop(pending.id, None)
            message = Cancel(
                ids=[pending.id], generation=self.generation or self._host.generation
            )
            self._publish(self._host.comm_id, asdict(message), pending.parent)
            self._promote()

    # -- no host ----------------------------------------------------------------------

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep one timer for each loop, which fails what no host will answer."""
        with self._lock:
            for closed in [known for known in self._watches if known.is_closed()]:
                del self._watches[closed]
            if loop not in self._watches:
                self._watches[loop] = loop.call_later(
                    self._limits.attach_wait_s, self._fail_unattended, loop
                )

    def _fail_unattended(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            now = self._clock()
            table = self._table
            mine = [
                p
                for p in (*table.on_wire.values(), *table.waiting)
                if p.loop is loop and not p.over
            ]
            due = {
                id(p): max(p.created, self._host.lease_until)
                + self._limits.attach_wait_s
                for p in mine
            }
            for pending in mine:
                if due[id(pending)] <= now:
                    self._fail(pending)
            left = [due[id(p)] for p in mine if not p.over]
            if left:
                self._watches[loop] = loop.call_later(
                    max(0.05, min(left) - now), self._fail_unattended, loop
                )
            else:
                self._watches.pop(loop, None)

    def _fail(self, pending: _Pending) -> None:
        self._table.on_wire.pop(pending.id, None)
        self._settle(
            pending,
            {
                "status": "error",
                "code": ErrorCode.HOST_UNAVAILABLE,
                "error": f"no host bridge is attached to this kernel (waited "
                f"{self._limits.attach_wait_s:g} s); choose the kernel RLM, or start this one "
                "with rlm-kernel",
            },
        )
        if pending.id == 0:
            self._leave_queue()

    def _leave_queue(self) -> None:
        """Count one waiting request less; what is over leaves now and then."""
        table = self._table
        table.waiting_count -= 1
        if len(table.waiting) > 2 * table.waiting_count + 64:
            table.waiting = deque(p for p in table.waiting if not p.over)
