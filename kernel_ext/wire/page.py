"""The page ``docs/wire.md``, made from the dataclasses it describes."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from . import envelope, messages
from .codes import ErrorCode

__all__ = ("wire_page",)

_ENVELOPE = (
    envelope.Request,
    envelope.Cancel,
    envelope.OkReply,
    envelope.ErrorReply,
    envelope.AttachRequest,
    envelope.AttachReply,
)


def wire_page() -> str:
    """Describe every message, field and code of the protocol in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "# The wire: kernel and host bridge"
    yield ""
    yield "<!-- Made by `python -m kernel_ext.wire > docs/wire.md`; a test compares. -->"
    yield ""
    yield f"Protocol version {envelope.PROTOCOL_VERSION}, comm target `{envelope.COMM_TARGET}`."
    yield inspect.getdoc(envelope) or ""
    yield ""
    yield "## Envelope"
    for message in _ENVELOPE:
        yield from _message(message, "###")
    yield ""
    yield "## Requests"
    for request_type, (payload, result) in messages.REQUEST_TYPES.items():
        yield ""
        yield f"### `{request_type}`"
        yield from _message(payload, "####")
        for part in _nested(payload):
            yield from _message(part, "####")
        if result is not None:
            yield from _message(result, "####")
            for part in _nested(result):
                yield from _message(part, "####")
    yield ""
    yield "## Error codes"
    yield ""
    yield "| code | when |"
    yield "|---|---|"
    for code in ErrorCode:
        yield f"| `{code.value}` | {code.__doc__} |"
    yield ""


def _message(message: type[Any], heading: str) -> Iterator[str]:
    yield ""
    yield f"{heading} {message.__name__}"
    yield ""
    yield inspect.getdoc(message) or ""
    fields = dataclasses.fields(message)
    if fields:
        yield ""
        yield "| field | type | default |"
        yield "|---|---|---|"
    for field in fields:
        kind = (
            getattr(field.type, "__name__", None)
            if isinstance(field.type, type)
            else None
        )
        name = kind or str(field.type).replace("typing.", "").replace("|", "or")
        name = name.rpartition("wire.codes.")[2].rpartition("wire.messages.")[2]
        yield f"| `{field.name}` | {name} | {_default(field)} |"


def _nested(message: type[Any]) -> Iterator[type[Any]]:
    for field in dataclasses.fields(message):
        for candidate in (field.type, *getattr(field.type, "__args__", ())):
            if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
                yield candidate


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    if field.default_factory is not dataclasses.MISSING:
        return "empty"
    return "required"
