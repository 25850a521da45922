"""Interrupts on their way: one that comes late would hit the next cell."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from .channels import Message

__all__ = ("Interrupts",)

_TAKEN_WAIT_S = 1.0


class Interrupts:
    """Sends interrupts and knows whether the kernel has taken them all.

    Args:
        send: Sends one message on the control channel.
    """

    def __init__(self, send: Callable[[str, dict[str, Any]], Awaitable[Any]]) -> None:
        self._send = send
        self._open = 0
        self._taken = asyncio.Event()

    async def send(self) -> None:
        """Send one."""
        self._open += 1
        self._taken.clear()
        await self._send("interrupt_request", {})

    def on_control(self, message: Message) -> bool:
        """Take a control message; True when it says that one was taken."""
        if message.type != "interrupt_reply" or self._open == 0:
            return False
        # The reply comes after the signal.
        self._open -= 1
        if self._open == 0:
            self._taken.set()
        return True

    async def until_taken(self) -> None:
        """Wait until no interrupt is on its way; not for long: a kernel may be gone."""
        if self._open > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._taken.wait(), _TAKEN_WAIT_S)
            self._open = 0
