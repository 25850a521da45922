"""The sockets of one kernel: signed messages out, verified messages in."""

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import zmq
import zmq.asyncio
from jupyter_client.client import KernelClient

from kernel_ext.wire.codes import ErrorCode

from ..errors import KernelError

__all__ = ("Channels", "Message")

_log = logging.getLogger(__name__)

_NUDGE_S = 0.25

Channel = Literal["shell", "control", "iopub"]


@dataclass(frozen=True, slots=True)
class Message:
    """One verified message of a kernel. *parent_id* is "" where it has no parent."""

    type: str
    content: dict[str, Any]
    parent_id: str


class Channels:
    """A client of one kernel; two never share a session id.

    Args:
        connection_file: Read once, now: ports, key and CURVE keys.
        with_output: False subscribes to comms only. Where a front end owns the
            kernel, its outputs would otherwise travel twice (design 3.6).

    Raises:
        KernelError: KERNEL_START_FAILED for a file without a key.
    """

    def __init__(self, connection_file: Path, *, with_output: bool) -> None:
        # Asked of the file: a session without a key makes one up.
        if not json.loads(connection_file.read_bytes()).get("key"):
            raise KernelError(
                ErrorCode.KERNEL_START_FAILED, "the connection file has no key"
            )
        self._context = zmq.asyncio.Context()
        # Default for the sockets below: no queue drops a message in silence.
        self._context.setsockopt(zmq.RCVHWM, 0)
        self._context.setsockopt(zmq.SNDHWM, 0)
        client = KernelClient(
            context=self._context, connection_file=str(connection_file)
        )
        client.load_connection_file()
        self._session = client.session
        identity = self._session.bsession
        self._sockets: dict[Channel, Any] = {
            "shell": client.connect_shell(identity=identity),
            "control": client.connect_control(identity=identity),
            "iopub": client.connect_iopub(),
        }
        if not with_output:
            self._sockets["iopub"].unsubscribe(b"")
            self._sockets["iopub"].subscribe(b"comm-")
        self.refused = 0

    async def send(
        self, channel: Channel, message_type: str, content: dict[str, Any]
    ) -> str:
        """Sign and send one message; its id."""
        message = self._session.msg(message_type, content)
        await self._sockets[channel].send_multipart(self._session.serialize(message))
        return str(message["header"]["msg_id"])

    async def receive(self, channel: Channel) -> AsyncIterator[Message]:
        """Yield what the kernel sends. A message that is not its own is dropped.

        Unsigned, wrongly signed, replayed and malformed frames are counted in
        `refused`; none of them ends the loop.
        """
        while True:
            frames = await self._sockets[channel].recv_multipart()
            try:
                _, parts = self._session.feed_identities(frames)
                raw = self._session.deserialize(parts)
                message = Message(
                    str(raw["header"]["msg_type"]),
                    dict(raw["content"]),
                    str((raw["parent_header"] or {}).get("msg_id", "")),
                )
            except (
                ValueError,
                TypeError,
                KeyError,
                IndexError,
                AttributeError,
                RecursionError,  # nested deeper than the parser goes
            ) as error:
                self.refused += 1
                _log.warning("%s message refused: %s", channel, type(error).__name__)
                continue
            yield message

    async def until_subscribed(self, welcomed: asyncio.Event) -> None:
        """Wait for the kernel's welcome, which says that our subscription is through.

        A kernel that publishes at the moment in which it arrives does not see it
        (ipykernel 7.4: one start in a hundred), until it sees another one.

        Args:
            welcomed: Set by who receives ``iopub_welcome``.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(welcomed.wait(), _NUDGE_S)
                return
            topic = secrets.token_hex(8).encode()
            self._sockets["iopub"].subscribe(topic)
            self._sockets["iopub"].unsubscribe(topic)

    def close(self) -> None:
        """Close the sockets; safe to call twice."""
        self._context.destroy(0)
