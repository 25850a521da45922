"""The messages of the link, as lines and as errors."""

import json
from collections.abc import Mapping
from typing import Any

from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.strict import PayloadError, check_json

from ...errors import HarnessError, HostBridgeError

__all__ = ("encode_message", "error_message", "error_of")

_PLUGIN_CODES = frozenset(
    {
        ErrorCode.AGENT_NOT_LIVE,
        ErrorCode.CANCELLED,
        ErrorCode.DEPTH_LIMIT,
        ErrorCode.PAYLOAD_TOO_LARGE,
        ErrorCode.REQUEST_SCOPE_CLOSED,
        ErrorCode.UNSUPPORTED_REQUEST,
    }
)
"""Codes that the peer may end a call with; any other is HOST_REQUEST_FAILED."""


def encode_message(message: Mapping[str, Any], *, max_bytes: int) -> bytes:
    """One line for *message*.

    Raises:
        HarnessError: INVALID_ARGUMENT for what is no strict JSON,
            PAYLOAD_TOO_LARGE for more than *max_bytes*.
    """
    try:
        check_json(message, path="message")
    except PayloadError as error:
        raise HarnessError(ErrorCode.INVALID_ARGUMENT, str(error)) from error
    text = json.dumps(
        message, ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    line = text.encode() + b"\n"
    if len(line) > max_bytes:
        raise HarnessError(
            ErrorCode.PAYLOAD_TOO_LARGE,
            f"a message of {len(line)} bytes exceeds the link's limit of {max_bytes}; "
            "pass a file",
        )
    return line


def error_message(call_id: str | int, error: HostBridgeError) -> dict[str, Any]:
    """The answer to a call that ended with *error*."""
    details = {"code": -32000, "message": str(error), "data": {"code": str(error.code)}}
    return {"id": call_id, "error": details}


def error_of(error: Any) -> HarnessError:
    """How the peer ended a call, from the ``error`` of its answer."""
    details = error if isinstance(error, dict) else {}
    data = details.get("data")
    code = data.get("code") if isinstance(data, dict) else None
    known = next((c for c in _PLUGIN_CODES if c == code), None)
    text = str(details.get("message") or "the harness refused the operation")
    return HarnessError(known or ErrorCode.HOST_REQUEST_FAILED, text)
