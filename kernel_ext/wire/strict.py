"""JSON that every parser on the way reads alike (design 3.14)."""

import json
import math
from typing import Any

__all__ = (
    "MAX_DEPTH",
    "MAX_PAYLOAD_BYTES",
    "PayloadError",
    "check_json",
    "encoded",
)

MAX_PAYLOAD_BYTES = 8 * 2**20
"""A request's payload; larger data belongs in a file of the session."""

MAX_DEPTH = 64
"""Nesting of lists and objects."""

_MAX_INTEGER = 2**53


class PayloadError(ValueError):
    """A value that could change its meaning on the way; the text says where."""


def check_json(value: Any, *, path: str = "payload", depth: int = 0) -> None:
    """Refuse what JSON parsers disagree about.

    Args:
        value: Anything.
        path: Where *value* stands, for the message. It names keys, no contents.
        depth: How deep *value* stands already.

    Raises:
        PayloadError: Not JSON, not finite, an integer beyond 2**53, a lone
            surrogate, a key that is no string, or nested too deep.
    """
    if depth > MAX_DEPTH:
        msg = f"{path[:200]}: nested deeper than {MAX_DEPTH} levels"
        raise PayloadError(msg)
    match value:
        case None | bool():
            return
        case str():
            _check_text(value, path)
        case int():
            if abs(value) > _MAX_INTEGER:
                msg = f"{path}: integers must be within 2**53; send it as text"
                raise PayloadError(msg)
        case float():
            if not math.isfinite(value):
                msg = f"{path}: numbers must be finite"
                raise PayloadError(msg)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    msg = f"{path}: keys must be str, got {type(key).__name__}"
                    raise PayloadError(msg)
                _check_text(key, path)
                check_json(item, path=f"{path}.{key[:40]}", depth=depth + 1)
        case list() | tuple():
            for index, item in enumerate(value):
                check_json(item, path=f"{path}[{index}]", depth=depth + 1)
        case _:
            msg = f"{path}: {type(value).__name__} is not JSON"
            raise PayloadError(msg)


def encoded(value: Any) -> bytes:
    """*value* as compact UTF-8 JSON; it has passed `check_json`."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode()


def _check_text(text: str, path: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        msg = f"{path}: text holds a lone surrogate; encode it first"
        raise PayloadError(msg) from None
