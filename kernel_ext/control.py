"""Our messages on the control channel: attach, and the host's answers.

They are dispatched by us. ipykernel's own dispatch publishes busy and idle for
each message, which marks a busy kernel idle and keeps an idle one from being
culled (reference notebook.md section 4). A shutdown is dispatched by us too: the
stock dispatch flushes afterwards, and waits up to 10 s for an output thread that
the shutdown has ended (seen in half of all stops, ipykernel 7.4).
"""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from .client import HostClient
from .wire.codes import ErrorCode
from .wire.envelope import ATTACH_REPLY, ATTACH_REQUEST, PROTOCOL_VERSION, AttachRequest

__all__ = ("ControlDispatch",)

_DELIMITER = b"<IDS|MSG>"

_MAX_LEASE_S = 3600.0


class ControlDispatch:
    """Stands before a kernel's control dispatch and takes what is ours.

    Args:
        kernel: The running ``ipykernel.ipkernel.IPythonKernel``.
        client: Gets the answers and the attachments.
    """

    def __init__(self, kernel: Any, client: HostClient) -> None:
        self._kernel = kernel
        self._client = client
        self._stock = kernel.process_control
        self._handlers: dict[
            str, Callable[[list[bytes], dict[str, Any]], Awaitable[None]]
        ] = {
            "comm_msg": self._on_answer,
            ATTACH_REQUEST: self._on_attach,
            "shutdown_request": self._on_shutdown,
        }
        self._marks = tuple(b'"%s"' % name.encode() for name in self._handlers)

    def install(self) -> None:
        """Take over; works before and after the kernel has started."""
        # An instance attribute: the stock dispatch looks the method up by name.
        self._kernel.process_control = self._dispatch

    def remove(self) -> None:
        """Give the kernel its own dispatch back."""
        self._kernel.process_control = self._stock

    async def _dispatch(self, frames: list[Any]) -> None:
        raw = [bytes(getattr(frame, "buffer", frame)) for frame in frames]
        at = raw.index(_DELIMITER) if _DELIMITER in raw else len(raw)
        header = raw[at + 2] if len(raw) > at + 2 else b""
        if not any(mark in header for mark in self._marks):
            await self._stock(frames)
            # An interrupt cancels the cell's await from a signal handler, and
            # nothing wakes the loop to see it (ipykernel 7.4).
            self._kernel.io_loop.add_callback(lambda: None)
            return
        await self._take(raw[:at], raw[at + 1 :])

    async def _take(self, idents: list[bytes], parts: list[bytes]) -> None:
        session = self._kernel.session
        try:
            if session.auth is None:
                msg = "the connection has no key"
                raise ValueError(msg)  # noqa: TRY301  # the one refusal of this loop
            # Checks the signature, and that the message is no replay.
            message = session.deserialize(parts, content=True)
            await self._handlers[message["header"]["msg_type"]](idents, message)
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            IndexError,
            RecursionError,
        ) as error:
            # Whatever one message holds, the next one is received.
            self._kernel.log.warning(
                "control message refused: %s", type(error).__name__
            )

    async def _on_answer(self, idents: list[bytes], message: dict[str, Any]) -> None:
        self._client.answer(message["content"]["data"])

    async def _on_attach(self, idents: list[bytes], message: dict[str, Any]) -> None:
        content = message["content"]
        if content["protocol"] == PROTOCOL_VERSION:
            reply = self._client.attach(_attach_request(content))
        else:
            # Nothing else of it may be understood as we would.
            reply = self._client.refusal(ErrorCode.PROTOCOL_MISMATCH)
        self._kernel.session.send(
            self._kernel.control_stream,
            ATTACH_REPLY,
            asdict(reply),
            parent=message,
            ident=idents,
        )

    async def _on_shutdown(self, idents: list[bytes], message: dict[str, Any]) -> None:
        stream = self._kernel.control_stream
        # A message that came later would be taken up and never be done. asyncio
        # warns of that on stderr, and to write there waits for ever once the
        # output thread has ended (one stop in a hundred, ipykernel 7.4).
        stream.stop_on_recv()
        await self._kernel.control_handlers["shutdown_request"](stream, idents, message)


def _attach_request(content: dict[str, Any]) -> AttachRequest:
    """Read an attach request.

    Raises:
        TypeError, ValueError: A field is not of its type; none must be taken then.
    """
    match content:
        case {
            "comm_id": str(),
            "generation": str(),
            "lease_s": int() | float() as lease_s,
            "working": list(working),
            "protocol": int(),
        } if 0 <= lease_s <= _MAX_LEASE_S:
            if all(isinstance(number, int) for number in working):
                return AttachRequest(**content)
    msg = "no attach request of this protocol"
    raise ValueError(msg)
