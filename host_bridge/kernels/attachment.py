"""The host's end of `host.request` for one kernel: lease, ids, answers, cancels.

Serves kernels that we start and kernels that a front end owns alike: all it
needs is a way to send on control (specification 10, design 3.6).
"""

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import (
    ATTACH_REPLY,
    ATTACH_REQUEST,
    PROTOCOL_VERSION,
    AttachReply,
    AttachRequest,
    Cancel,
    ErrorReply,
    OkReply,
    Request,
)
from kernel_ext.wire.strict import MAX_PAYLOAD_BYTES

from .channels import Message
from .execution import Cell

__all__ = ("Asker", "Attachment", "Dispatch", "Timing")

Reply = OkReply | ErrorReply

_REQUEST = TypeAdapter[Request | Cancel](Request | Cancel)
_ATTACH_REPLY = TypeAdapter(AttachReply)
_ENVELOPE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who is asking: decided by the host, never by the request.

    *cell* is the open cell that the request comes from; None when that cell has
    ended, or when the code that asks belongs to no cell.
    """

    agent_id: str
    generation: str
    cell: Cell | None
    is_current: Callable[[], bool]


Dispatch = Callable[[Request, Asker], Awaitable[Reply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How the host says that it is there.

    The first beats come *first_s* apart, then twice that, up to *beat_s*. A
    kernel believes in its host for *lease_s* after the last one.
    """

    first_s: float = 0.1
    beat_s: float = 2.0
    lease_s: float = 6.0


class Attachment:
    """One host, one kernel generation, one comm.

    Args:
        agent_id: The agent whose kernel this is.
        generation: The kernel process; requests of another are refused.
        send: Sends one message on the control channel.
        dispatch: Answers a request. It never raises but when it is cancelled.
        open_cell: The cell of a Jupyter message id while it runs, else None.
        max_answers: Answers that are kept until a beat shows that the kernel has
            them; more than these bring the next beat forward.

    Attributes:
        answered: Set once the kernel has said whether it takes this host.
        refusal: Why it does not; None when it does.
    """

    def __init__(
        self,
        *,
        agent_id: str,
        generation: str,
        send: Callable[[str, dict[str, Any]], Awaitable[Any]],
        dispatch: Dispatch,
        open_cell: Callable[[str], Cell | None],
        timing: Timing | None = None,
        max_answers: int = 1024,
    ) -> None:
        self.comm_id = secrets.token_hex(16)
        self.answered = asyncio.Event()
        self.refusal: ErrorCode | None = None
        self._agent_id = agent_id
        self._generation = generation
        self._send = send
        self._dispatch = dispatch
        self._open_cell = open_cell
        self._timing = timing or Timing()
        self._max_answers = max_answers
        self._is_current = True
        self._working: dict[int, asyncio.Task[None]] = {}
        self._answers: OrderedDict[int, dict[str, Any]] = OrderedDict()
        # What the kernel said last. Every id below next that it does not wait
        # for is over for good: executed, or taken back.
        self._next_id = 1
        self._pending: set[int] = set()
        # Answers that went out before the last hello: a kernel that still waits
        # for one of them has lost it.
        self._sent_before: set[int] = set()
        self._resends: set[asyncio.Task[None]] = set()
        self._beat_now = asyncio.Event()

    # -- the lease -------------------------------------------------------------

    async def beat(self) -> None:
        """Say "here I am" until the end; a kernel without our side is asked less."""
        pause = self._timing.first_s
        # Not after the goodbye: it would give the kernel another lease.
        while self._is_current:
            await self._hello(self._timing.lease_s)
            pause = min(pause * 2, self._timing.beat_s)
            self._beat_now.clear()
            try:
                await asyncio.wait_for(self._beat_now.wait(), pause)
            except TimeoutError:
                continue

    def retire(self) -> None:
        """Invalidate every request of this generation: its kernel has ended."""
        self._is_current = False
        for task in (*self._working.values(), *self._resends):
            task.cancel()

    async def close(self, *, drain_s: float) -> None:
        """Say goodbye, end the work that is open, and wait for it to end.

        Args:
            drain_s: The longest wait; what has not ended by then is left.
        """
        self.retire()
        await self._hello(0.0)
        if working := set(self._working.values()):
            await asyncio.wait(working, timeout=drain_s)

    async def _hello(self, lease_s: float) -> None:
        message = AttachRequest(
            comm_id=self.comm_id,
            generation=self._generation,
            lease_s=lease_s,
            working=[*self._working, *self._answers],
        )
        self._sent_before = set(self._answers)
        await self._send(ATTACH_REQUEST, asdict(message))

    # -- what the kernel sends ---------------------------------------------------

    def on_control(self, message: Message) -> None:
        """Take a control message: what the kernel still waits for."""
        if message.type != ATTACH_REPLY:
            return
        try:
            reply = _ATTACH_REPLY.validate_json(_encoded(message.content))
        except (ValidationError, _NotJson):
            return
        if reply.protocol != PROTOCOL_VERSION:
            self.refusal = ErrorCode.PROTOCOL_MISMATCH
        elif reply.status != "ok" or reply.generation not in ("", self._generation):
            self.refusal = reply.code or ErrorCode.STALE_GENERATION
        else:
            self.refusal = None
        self.answered.set()
        if self.refusal is not None:
            return
        self._next_id, self._pending = reply.next_id, set(reply.pending)
        for number in [n for n in self._answers if self._is_over(n)]:
            del self._answers[number]
        for number, task in self._working.items():
            if self._is_over(number):
                task.cancel()
        if lost := self._sent_before & self._answers.keys() & self._pending:
            resend = asyncio.create_task(self._send_again(sorted(lost)))
            self._resends.add(resend)
            resend.add_done_callback(self._resends.discard)

    def _is_over(self, number: int) -> bool:
        return number < self._next_id and number not in self._pending

    async def _send_again(self, numbers: list[int]) -> None:
        for number in numbers:
            if answer := self._answers.get(number):
                await self._answer(answer)

    async def on_comm(self, message: Message) -> None:
        """Take a request or a cancel; anything else on the comm is dropped."""
        if message.type != "comm_msg" or message.content.get("comm_id") != self.comm_id:
            return
        data = message.content.get("data")
        number = _id_of(data)
        try:
            text = _encoded(data)
        except _NotJson:
            text = b""
        if len(text) > MAX_PAYLOAD_BYTES + _ENVELOPE_BYTES:
            await self._refuse(
                number,
                ErrorCode.PAYLOAD_TOO_LARGE,
                f"the request has {len(text)} bytes, {MAX_PAYLOAD_BYTES} are allowed",
            )
            return
        try:
            asked = _REQUEST.validate_json(text)
        except ValidationError:
            await self._refuse(
                number,
                ErrorCode.INVALID_REQUEST,
                "this is not a request of the protocol",
            )
            return
        if asked.generation != self._generation:
            await self._refuse(
                number, ErrorCode.STALE_GENERATION, "another kernel process asked"
            )
        elif isinstance(asked, Cancel):
            for cancelled in asked.ids:
                if task := self._working.get(cancelled):
                    task.cancel()
        else:
            await self._accept(asked, message.parent_id)

    async def _accept(self, request: Request, parent_id: str) -> None:
        if request.id in self._working or not self._is_current:
            return
        if answer := self._answers.get(request.id):
            # Asked again: the answer was lost, the work is not done again.
            await self._answer(answer)
            return
        if self._is_over(request.id):
            await self._refuse(
                request.id, ErrorCode.DUPLICATE_REQUEST, "this id was executed before"
            )
            return
        asker = Asker(
            agent_id=self._agent_id,
            generation=self._generation,
            cell=self._open_cell(parent_id),
            is_current=lambda: self._is_current,
        )
        task = asyncio.create_task(self._work(request, asker))
        self._working[request.id] = task
        task.add_done_callback(lambda task: self._finish(request.id, task))

    def _finish(self, number: int, task: "asyncio.Task[None]") -> None:
        """Note the end of a request's work; a cancelled one may never have begun."""
        self._working.pop(number, None)
        if task.cancelled():
            # A late duplicate must not find the work undone and do it. A kernel
            # that did not ask for this end hears of it after the next hello.
            cancelled = ErrorReply(
                id=number, code=ErrorCode.CANCELLED, error="the request was cancelled"
            )
            self._answers.setdefault(number, asdict(cancelled))
            self._bound_answers()

    async def _work(self, request: Request, asker: Asker) -> None:
        reply = await self._dispatch(request, asker)
        if not self._is_current:
            return
        answer = asdict(reply)
        self._answers[request.id] = answer
        self._working.pop(request.id, None)
        self._bound_answers()
        await self._answer(answer)

    def _bound_answers(self) -> None:
        # What the kernel has taken is forgotten after the next beat.
        if len(self._answers) > self._max_answers:
            self._beat_now.set()

    async def _refuse(self, number: int | None, code: ErrorCode, text: str) -> None:
        if number is not None:
            await self._answer(asdict(ErrorReply(id=number, code=code, error=text)))

    async def _answer(self, data: dict[str, Any]) -> None:
        await self._send("comm_msg", {"comm_id": self.comm_id, "data": data})


class _NotJson(ValueError):
    """A kernel's message that can not be written down again."""


def _encoded(value: Any) -> bytes:
    """*value* as the kernel counted it: compact, and in UTF-8."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _NotJson from error


def _id_of(data: Any) -> int | None:
    number = data.get("id") if isinstance(data, dict) else None
    return number if isinstance(number, int) and not isinstance(number, bool) else None
