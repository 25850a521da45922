"""The door for the plugin: a private socket that lets exactly one peer in."""

import asyncio
import contextlib
import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_ext.wire.codes import ErrorCode

from ...errors import HarnessError
from .link import end_connection

__all__ = ("Door", "Greeting")

_PROTOCOL = 1
"""What is said over the link; the plugin names the one that it speaks."""

_CAPABILITIES = (
    *("createRoot", "startChild", "discardChild", "report"),
    *("registerTool", "listTools", "callTool", "promptSection", "listModels"),
)
"""What the plugin must have found in its harness; it names the method of each."""

_MAX_SHOWN_CHARS = 40

_GREETING_S = 5.0
"""A peer that has not said who it is within this time is sent away."""

_MAX_STRANGERS = 8
"""Peers that may be about to greet at one time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """The one peer that came in; its ``hello`` waits for an answer."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    call_id: str | int
    protocol: Any
    capabilities: Mapping[str, Any]

    def check(self) -> None:
        """Refuse a plugin that speaks otherwise, or a harness that can do too little.

        Raises:
            HarnessError: PROTOCOL_MISMATCH, or HARNESS_UNAVAILABLE with what is missing.
        """
        if self.protocol != _PROTOCOL or isinstance(self.protocol, bool):
            spoken = repr(self.protocol)[:_MAX_SHOWN_CHARS]
            raise HarnessError(
                ErrorCode.PROTOCOL_MISMATCH,
                f"the plugin in DeepSeek Harness speaks protocol {spoken}, this host "
                f"bridge speaks protocol {_PROTOCOL}",
            )
        found = self.capabilities
        if missing := [name for name in _CAPABILITIES if not found.get(name)]:
            raise HarnessError(
                ErrorCode.HARNESS_UNAVAILABLE,
                "this version of DeepSeek Harness lacks what the host bridge needs: "
                + ", ".join(missing),
            )


class Door:
    """Listens until a peer greets with the token, then for nobody.

    Args:
        directory: A private directory for the socket; None listens on a loopback
            port instead, for systems without unix sockets.
        max_line_bytes: The longest line that a peer may send.
    """

    def __init__(self, directory: Path | None, *, max_line_bytes: int) -> None:
        self._path = None if directory is None else directory / "bridge.sock"
        self._max_line_bytes = max_line_bytes
        self._token = secrets.token_hex(32)
        self._server: asyncio.Server | None = None
        self._address = ""
        self._strangers: set[asyncio.Task[Any]] = set()
        self._entered: asyncio.Future[Greeting] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What the plugin needs to find and to pass the door."""
        return {
            "RLM_BRIDGE_ADDRESS": self._address,
            "RLM_BRIDGE_TOKEN": self._token,
            "RLM_BRIDGE_MAX_LINE_BYTES": str(self._max_line_bytes),
        }

    async def open(self) -> None:
        """Begin to listen."""
        self._entered = asyncio.get_running_loop().create_future()
        if self._path is None:
            self._server = await asyncio.start_server(
                self._meet, "127.0.0.1", 0, limit=self._max_line_bytes
            )
            port = self._server.sockets[0].getsockname()[1]
            self._address = f"tcp:127.0.0.1:{port}"
            return
        self._server = await asyncio.start_unix_server(
            self._meet, self._path, limit=self._max_line_bytes
        )
        # The directory is private already; this guards a directory that is opened up.
        self._path.chmod(0o600)
        self._address = f"unix:{self._path}"

    @property
    def has_entered(self) -> bool:
        """Whether the one peer is in."""
        return self._entered is not None and self._entered.done()

    async def entered(self) -> Greeting:
        """Wait for the one peer."""
        if self._entered is None:
            msg = "the door is not open"
            raise RuntimeError(msg)
        return await asyncio.shield(self._entered)

    async def close(self) -> None:
        """Stop listening and end every connection; safe to call twice."""
        self._shut()
        for task in self._strangers:
            task.cancel()
        await asyncio.gather(*self._strangers, return_exceptions=True)
        if self._entered is not None and self._entered.done():
            await end_connection(self._entered.result().writer)

    def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        if task is None or self.has_entered or len(self._strangers) >= _MAX_STRANGERS:
            await end_connection(writer)
            return
        self._strangers.add(task)
        try:
            greeting = await self._hear(reader, writer)
            if greeting is None or self._entered is None or self._entered.done():
                await end_connection(writer)
                return
            self._entered.set_result(greeting)
            self._shut()
        except asyncio.CancelledError:
            await end_connection(writer)  # by `close`; nobody else has this task
        finally:
            self._strangers.discard(task)

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> Greeting | None:
        """The peer's greeting, if it is one and has the token."""
        with contextlib.suppress(TimeoutError, OSError, ValueError, RecursionError):
            async with asyncio.timeout(_GREETING_S):
                message = json.loads(await reader.readline())
            match message:
                case {
                    "method": "hello",
                    "id": str() | int() as call_id,
                    "params": {"token": str(token)} as params,
                } if hmac.compare_digest(
                    token.encode(errors="replace"), self._token.encode()
                ):
                    capabilities = params.get("capabilities")
                    return Greeting(
                        reader=reader,
                        writer=writer,
                        call_id=call_id,
                        protocol=params.get("protocol"),
                        capabilities=capabilities
                        if isinstance(capabilities, dict)
                        else {},
                    )
        return None
