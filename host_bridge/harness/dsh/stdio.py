"""DSH's own protocol on its standard streams, as far as we need it: start and end.

Its notifications repeat what our plugin tells; they are read, so that the pipe can
not fill up, and thrown away unparsed.
"""

import asyncio
import contextlib
import itertools
import json
from collections.abc import Mapping
from typing import Any

from kernel_ext.wire.codes import ErrorCode

from ...errors import HarnessError

__all__ = ("StdioClient",)

_CHUNK_BYTES = 64 * 1024
_MAX_LINE_BYTES = 2**20
"""Answers are short; of a longer line nothing is kept."""


class StdioClient:
    """Calls ``initialize`` and ``shutdown``."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[Any]] = {}
        self._ended = False

    async def call(
        self, method: str, params: Mapping[str, Any] | None = None
    ) -> Mapping[str, Any]:
        """Call the runtime.

        Raises:
            HarnessError: HARNESS_LOST, or HOST_REQUEST_FAILED with its text.
        """
        call_id = f"b{next(self._numbers)}"
        message: dict[str, Any] = {"jsonrpc": "2.0", "id": call_id, "method": method}
        if params is not None:
            message["params"] = dict(params)
        if self._ended:
            raise HarnessError(ErrorCode.HARNESS_LOST, "the harness has ended")
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[call_id] = answer
        try:
            self._writer.write(json.dumps(message).encode() + b"\n")
            # A broken pipe shows on the other stream as the end of output.
            with contextlib.suppress(OSError):
                await self._writer.drain()
            result = await answer
        finally:
            del self._pending[call_id]
        return result if isinstance(result, dict) else {}

    async def pump(self) -> None:
        """Read until the runtime closes its output."""
        rest = b""
        skipping = False
        try:
            while chunk := await self._reader.read(_CHUNK_BYTES):
                first, *others = chunk.split(b"\n")
                lines = [rest + first, *others]
                for line in lines[:-1]:
                    if not skipping:
                        self._take(line)
                    skipping = False
                rest = lines[-1]
                if len(rest) > _MAX_LINE_BYTES:
                    skipping = True
                if skipping:
                    rest = b""
        finally:
            self._ended = True
            for answer in self._pending.values():
                if not answer.done():
                    answer.set_exception(
                        HarnessError(ErrorCode.HARNESS_LOST, "the harness has ended")
                    )

    def _take(self, line: bytes) -> None:
        if b'"method"' in line[:64]:
            return
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not isinstance(message, dict):
            return
        call_id = message.get("id")
        answer = self._pending.get(call_id) if isinstance(call_id, str) else None
        if answer is None or answer.done():
            return
        if (error := message.get("error")) is None:
            answer.set_result(message.get("result"))
        else:
            text = str(error.get("message")) if isinstance(error, dict) else "refused"
            answer.set_exception(HarnessError(ErrorCode.HOST_REQUEST_FAILED, text))
