"""A model server on this machine that plays a script, for demonstrations and tests.

It speaks what both DSH lines speak to their default provider, and what any
OpenAI-compatible client speaks. It listens on loopback alone.
"""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from ..harness.script import Reply, Script, Transcript
from .wire_formats import read_anthropic, read_openai, stream_anthropic, stream_openai

__all__ = ("ModelRequest", "ModelServer")

_HEAD_BYTES = 64 * 1024
_BODY_BYTES = 64 * 2**20
_KEPT_REQUESTS = 1000
_READ_S = 30.0
"""A client must have said its request within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """A request as it came, for whoever wants to look at it.

    Attributes:
        headers: By lower-case names.
    """

    path: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]


class _Refused(Exception):
    """The client gets this status, and the connection ends."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ModelServer:
    """Plays *script* to every client, each request on its own.

    Args:
        script: Called in the event loop; it must not block (use `Reply.delay_s`).
        on_request: Sees each model request before the script does.
    """

    def __init__(
        self,
        script: Script,
        *,
        on_request: Callable[[ModelRequest], None] | None = None,
    ) -> None:
        self._script = script
        self._on_request = on_request
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[Any]] = set()
        self.base_url = ""
        self.requests: deque[Transcript] = deque(maxlen=_KEPT_REQUESTS)
        """The newest model requests, oldest first."""
        self.count = 0
        """All model requests so far."""
        self.abandoned = 0
        """Model requests whose client hung up before the end of the answer."""

    async def start(self) -> None:
        """Listen on a free port of the loopback interface."""
        self._server = await asyncio.start_server(
            self._meet, "127.0.0.1", 0, limit=_HEAD_BYTES
        )
        port = self._server.sockets[0].getsockname()[1]
        self.base_url = f"http://127.0.0.1:{port}"

    async def close(self) -> None:
        """Stop, and hang up on whoever still waits; safe to call twice."""
        if self._server is not None:
            self._server.close()
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _meet(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._clients.add(task)
        try:
            await self._serve(reader, writer)
        except _Refused as refusal:
            writer.write(_json_answer(refusal.status, {}, str(refusal)))
            with contextlib.suppress(OSError):
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            self.abandoned += 1
        except asyncio.CancelledError:
            pass  # by `close`; nobody else has this task
        finally:
            self._clients.discard(task)
            writer.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        method, path, headers, body = await _read_request(reader)
        if method == "GET" and path.endswith("/models"):
            writer.write(_json_answer(200, {}, {"object": "list", "data": []}))
            await writer.drain()
            return
        if method == "POST" and path.endswith("/chat/completions"):
            transcript, stream = read_openai(body, headers), stream_openai
        elif method == "POST" and path.endswith("/v1/messages"):
            transcript, stream = read_anthropic(body, headers), stream_anthropic
        else:
            raise _Refused(HTTPStatus.NOT_FOUND, "this server only plays a model")
        self.count += 1
        self.requests.append(transcript)
        if self._on_request is not None:
            self._on_request(ModelRequest(path=path, headers=headers, body=body))
        reply = self._script(transcript)
        if reply.delay_s and await _hangs_up(reader, within_s=reply.delay_s):
            self.abandoned += 1
            return
        await _answer(writer, reply, stream(reply, str(body.get("model", "scripted"))))


async def _answer(
    writer: asyncio.StreamWriter, reply: Reply, events: Iterator[bytes]
) -> None:
    if reply.status != HTTPStatus.OK:
        message = reply.text or HTTPStatus(reply.status).phrase
        writer.write(_json_answer(reply.status, reply.headers, message))
        await writer.drain()
        return
    head = {"content-type": "text/event-stream", "cache-control": "no-cache"}
    writer.write(_head(HTTPStatus.OK, {**head, **reply.headers}))
    for event in events:
        writer.write(event)
        await writer.drain()


async def _read_request(
    reader: asyncio.StreamReader,
) -> tuple[str, str, Mapping[str, str], Mapping[str, Any]]:
    """Method, path without query, headers by lower-case names, and the JSON body."""
    try:
        async with asyncio.timeout(_READ_S):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head.rstrip().split("\r\n")
            method, target, _ = first.split(" ", 2)
            pairs = (line.partition(":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
            size = int(headers.get("content-length", "0"))
            if size > _BODY_BYTES:
                raise _Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "too large")
            raw = await reader.readexactly(size)
        body = json.loads(raw) if raw else {}
    except TimeoutError:
        raise _Refused(HTTPStatus.REQUEST_TIMEOUT, "the request is too slow") from None
    except (ValueError, asyncio.LimitOverrunError):
        raise _Refused(HTTPStatus.BAD_REQUEST, "not a request of JSON") from None
    if not isinstance(body, dict):
        raise _Refused(HTTPStatus.BAD_REQUEST, "the body must be an object")
    return method, target.partition("?")[0], headers, body


async def _hangs_up(reader: asyncio.StreamReader, *, within_s: float) -> bool:
    """Wait; True as soon as the client is gone."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            # It has said all it has to say: the next thing to come is its end.
            await reader.read(1)
        return True
    return False


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    fields = {**headers, "connection": "close"}
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _json_answer(
    status: int, headers: Mapping[str, str], content: str | Mapping[str, Any]
) -> bytes:
    """An answer of JSON; a plain string is an error's message."""
    data = content
    if isinstance(content, str):
        data = {"type": "error", "error": {"type": "error", "message": content}}
    body = json.dumps(data).encode()
    fields = {"content-type": "application/json", "content-length": str(len(body))}
    return _head(status, {**headers, **fields}) + body
