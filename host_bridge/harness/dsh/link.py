"""A JSON-RPC 2.0 peer: one object a line, both ways, over a reader and a writer.

Nothing here grows without a bound: lines, unsent bytes, open calls of either side.
"""

import asyncio
import itertools
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.strict import PayloadError, check_json

from ...errors import HarnessError, HostBridgeError
from .message import encode_message, error_message, error_of

__all__ = ("MAX_LINE_BYTES", "Link", "Serve", "Undo", "end_connection")

Undo = Callable[[Any], Awaitable[None]]
"""Takes back what a call has done; gets the call's result."""

Serve = Callable[[str, Mapping[str, Any], asyncio.Event], Awaitable[Any]]
"""``(method, params, cancelled) -> result``. It settles also when cancelled."""

MAX_LINE_BYTES = 64 * 2**20
"""One message. What is larger travels as a file."""

_MAX_OPEN_CALLS = 1024
"""Open calls of either side; a cell's requests are bounded far below."""

_UNSENT_LINES = 4
"""A peer that leaves this many of the largest lines unread is taken for dead."""

_SETTLE_S = 2.0
"""How long `close` waits for calls in work after they have been cancelled."""

_UNDO_S = 5.0
"""How long one who gives up a call waits until it has settled and is undone."""

_FLUSH_S = 1.0
"""For what is still to be sent when a connection is closed."""

_MAX_KIND_CHARS = 40

_log = logging.getLogger(__name__)


async def end_connection(writer: asyncio.StreamWriter) -> None:
    """Close *writer*; a peer that does not read is not waited for."""
    writer.close()
    try:
        async with asyncio.timeout(_FLUSH_S):
            await writer.wait_closed()
    except (OSError, TimeoutError):
        writer.transport.abort()
        await asyncio.sleep(0)


class Link:
    """One end of a link.

    Args:
        reader: Its limit must be *max_line_bytes*.
        writer: Closed by `close` and when the link is lost.
        serve: Runs the peer's calls, each in a task of its own.
        on_notify: Takes the peer's notifications in order; must not block. One that
            it fails on is logged and dropped.
        on_lost: Told once, with the reason, when the link ends without `close`.
        max_line_bytes: The longest line of either side.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        serve: Serve,
        on_notify: Callable[[str, Mapping[str, Any]], None],
        on_lost: Callable[[str], None],
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._serve = serve
        self._on_notify = on_notify
        self._on_lost = on_lost
        self._max_line_bytes = max_line_bytes
        self._numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[Any]] = {}
        self._cancels: dict[str | int, asyncio.Event] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._lost: str | None = None
        self._receiving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to receive."""
        self._receiving = asyncio.create_task(self._receive())

    @property
    def is_lost(self) -> bool:
        """Whether nothing can be sent or received any more."""
        return self._lost is not None

    # -- our calls ----------------------------------------------------------------

    async def request(
        self,
        method: str,
        params: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        undo: Undo | None = None,
    ) -> Any:
        """Call the peer. When this task is cancelled, so is the call.

        Args:
            method: What to call.
            params: Its parameters.
            timeout_s: The call is cancelled after that time.
            undo: For calls that change something: run when the call has been given
                up, but was done all the same. Giving up then waits for it.

        Raises:
            HarnessError: HARNESS_LOST, TIMEOUT, TOO_MANY_REQUESTS, what
                `encode_message` raises, or how the peer ended the call.
        """
        if len(self._pending) >= _MAX_OPEN_CALLS:
            raise HarnessError(
                ErrorCode.TOO_MANY_REQUESTS,
                f"{_MAX_OPEN_CALLS} calls of the harness are open already",
            )
        call_id = f"b{next(self._numbers)}"
        line = self._encode({"id": call_id, "method": method, "params": params})
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        answer.add_done_callback(lambda _: self._pending.pop(call_id, None))
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(line)
                return await asyncio.shield(answer)
        except TimeoutError:
            await self._give_up(call_id, answer, undo)
            raise HarnessError(
                ErrorCode.TIMEOUT, f"{method} was not answered within {timeout_s:g} s"
            ) from None
        except asyncio.CancelledError:
            await self._give_up(call_id, answer, undo)
            raise
        except HarnessError:
            answer.cancel()  # no effect on the one that has raised it
            raise

    async def respond(self, call_id: str | int, result: Any) -> None:
        """Answer a call that reached us before this link existed."""
        await self._send(self._encode({"id": call_id, "result": result}))

    async def refuse(self, call_id: str | int, error: HostBridgeError) -> None:
        """Refuse a call that reached us before this link existed."""
        await self._send(self._encode(error_message(call_id, error)))

    async def _give_up(
        self, call_id: str, answer: "asyncio.Future[Any]", undo: Undo | None
    ) -> None:
        """Cancel a call of ours; wait for its end only if that can be undone."""
        if self._lost is None:
            params = {"id": call_id}
            self._writer.write(self._encode({"method": "$/cancel", "params": params}))
        if undo is None:
            answer.cancel()
            return
        undoing = asyncio.create_task(self._undo(answer, undo))
        self._work.add(undoing)
        undoing.add_done_callback(self._work.discard)
        # It goes on when it takes longer, or when this task is cancelled again.
        await asyncio.wait({undoing}, timeout=_UNDO_S)

    async def _undo(self, answer: "asyncio.Future[Any]", undo: Undo) -> None:
        try:
            result = await answer
        except HarnessError:
            return  # cancelled in time, refused, or lost with the harness
        try:
            await undo(result)
        except HarnessError as error:
            _log.warning("a call that was given up stays done: %s", error)

    # -- ending -------------------------------------------------------------------

    async def close(self) -> None:
        """End the link: open calls fail, the peer's are cancelled and settle."""
        self._lose("the host bridge closed the link", tell=False)
        if self._work:
            _, late = await asyncio.wait(self._work, timeout=_SETTLE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if self._receiving is not None:
            self._receiving.cancel()
            await asyncio.gather(self._receiving, return_exceptions=True)
        await end_connection(self._writer)

    def _lose(self, reason: str, *, tell: bool = True) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(HarnessError(ErrorCode.HARNESS_LOST, reason))
                answer.exception()  # taken note of, where nobody waits any more
        for cancelled in self._cancels.values():
            cancelled.set()
        self._writer.close()
        if tell:
            self._on_lost(reason)

    # -- receiving ----------------------------------------------------------------

    async def _receive(self) -> None:
        reason = "the harness closed its link"
        try:
            while line := await self._reader.readline():
                self._take(line)
                # A full buffer would be worked off without a turn for others.
                await asyncio.sleep(0)
        except ValueError:
            reason = f"the harness sent a line over {self._max_line_bytes} bytes"
        except OSError as error:
            reason = f"the link to the harness broke ({error.strerror or 'I/O error'})"
        finally:
            self._lose(reason)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            _log.warning("a line of the link that is no message was dropped")
            return
        problem = None
        try:
            check_json(message, path="message")
        except PayloadError as error:
            problem = str(error)
        call_id, method = message.get("id"), message.get("method")
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        if not isinstance(method, str):
            self._settle(call_id, message, problem)
        elif method == "$/cancel":
            self._cancel_work(params.get("id"))
        elif isinstance(call_id, str | int):
            self._begin(call_id, method, params, problem)
        elif problem is None:
            self._notify(method, params)
        else:
            _log.warning("a notification was dropped: %s", problem)

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        try:
            self._on_notify(method, params)
        except Exception:  # noqa: BLE001  # the same boundary for notifications: one bad message must not end the link
            kind = str(params.get("kind"))[:_MAX_KIND_CHARS]
            _log.exception("a notification was dropped: %s of kind %s", method, kind)

    def _settle(
        self, call_id: Any, message: dict[str, Any], problem: str | None
    ) -> None:
        answer = self._pending.get(call_id) if isinstance(call_id, str) else None
        if answer is None or answer.done():
            return  # cancelled meanwhile, or never ours
        if problem is not None:
            text = f"the answer of the harness is not usable ({problem})"
            answer.set_exception(HarnessError(ErrorCode.HOST_REQUEST_FAILED, text))
        elif (error := message.get("error")) is not None:
            answer.set_exception(error_of(error))
        else:
            answer.set_result(message.get("result"))

    # -- the peer's calls ---------------------------------------------------------

    def _cancel_work(self, call_id: Any) -> None:
        if isinstance(call_id, str | int) and (found := self._cancels.get(call_id)):
            found.set()

    def _begin(
        self,
        call_id: str | int,
        method: str,
        params: dict[str, Any],
        problem: str | None,
    ) -> None:
        refusal = None
        if problem is not None:
            refusal = HarnessError(ErrorCode.INVALID_REQUEST, problem)
        elif call_id in self._cancels:
            refusal = HarnessError(ErrorCode.DUPLICATE_REQUEST, "this id is in work")
        elif len(self._cancels) >= _MAX_OPEN_CALLS:
            refusal = HarnessError(ErrorCode.TOO_MANY_REQUESTS, "too many open calls")
        if refusal is not None:
            work = self._answer(error_message(call_id, refusal))
        else:
            self._cancels[call_id] = asyncio.Event()
            work = self._run(call_id, method, params)
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _run(
        self, call_id: str | int, method: str, params: Mapping[str, Any]
    ) -> None:
        try:
            result = await self._serve(method, params, self._cancels[call_id])
            line = self._encode({"id": call_id, "result": result})
        except HostBridgeError as error:
            line = self._encode(error_message(call_id, error))
        except Exception:  # noqa: BLE001  # the link's one boundary: a fault in serving a call must not leave the peer waiting
            _log.exception("serving %s failed", method)
            fault = HarnessError(
                ErrorCode.INTERNAL, "the host bridge failed; see its log"
            )
            line = self._encode(error_message(call_id, fault))
        finally:
            del self._cancels[call_id]
        await self._write(line)

    async def _answer(self, message: Mapping[str, Any]) -> None:
        await self._write(self._encode(message))

    # -- sending ------------------------------------------------------------------

    def _encode(self, message: Mapping[str, Any]) -> bytes:
        return encode_message(
            {"jsonrpc": "2.0", **message}, max_bytes=self._max_line_bytes
        )

    async def _send(self, line: bytes) -> None:
        """Write *line*, or say that the link is lost."""
        await self._write(line)
        if self._lost is not None:
            raise HarnessError(ErrorCode.HARNESS_LOST, self._lost)

    async def _write(self, line: bytes) -> None:
        if self._lost is not None:
            return
        unsent = self._writer.transport.get_write_buffer_size()
        if unsent > _UNSENT_LINES * self._max_line_bytes:
            self._writer.transport.abort()
            self._lose("the harness reads nothing from its link")
            return
        self._writer.write(line)
        try:
            await self._writer.drain()
        except OSError:
            self._lose("the harness closed its link")
