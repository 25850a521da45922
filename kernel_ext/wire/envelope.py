"""What travels on the one comm and around it (specification rlm.md section 10).

A kernel asks with a `Request` and takes back with a `Cancel`; both are the data
of a ``comm_msg`` on IOPub. The host answers a request once, with an `OkReply`
or an `ErrorReply`, as the data of a ``comm_msg`` on the control channel. The
host says that it is there with an `AttachRequest`, again and again; each
`AttachReply` tells it what the kernel still waits for.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .codes import ErrorCode

__all__ = (
    "ATTACH_REPLY",
    "ATTACH_REQUEST",
    "COMM_TARGET",
    "PROTOCOL_VERSION",
    "STRICT",
    "AttachReply",
    "AttachRequest",
    "Cancel",
    "ErrorReply",
    "OkReply",
    "Request",
)

PROTOCOL_VERSION = 1
"""Changes when a field changes its meaning; both sides refuse another one."""

COMM_TARGET = "host.request"
"""The comm's target name. The host owns the only comm of this target."""

ATTACH_REQUEST = "host_attach_request"
"""Message type, host to kernel, on control."""

ATTACH_REPLY = "host_attach_reply"
"""Message type, kernel to host, on control."""

STRICT: dict[str, Any] = {"extra": "forbid", "strict": True}
"""Read by pydantic on the host; nothing in the kernel looks at it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Ask the host for one operation.

    The id counts up within a generation and is the request's identity: asked
    again under the same id, the work is not done again.
    """

    id: int
    type: str
    generation: str
    payload: dict[str, Any] = field(default_factory=dict)
    kind: Literal["request"] = "request"
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Tell the host that nobody waits for these requests any more."""

    ids: list[int]
    generation: str
    kind: Literal["cancel"] = "cancel"
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class OkReply:
    """The operation's fields, nested so that none can shadow the envelope."""

    id: int
    result: dict[str, Any]
    status: Literal["ok"] = "ok"
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """Why the operation was refused or failed; the text is fit to be shown."""

    id: int
    code: ErrorCode
    error: str
    status: Literal["error"] = "error"
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachRequest:
    """The host is here for another *lease_s* seconds; 0 says goodbye.

    *working* names the ids in the host's hands; the kernel asks again for those
    it waits for that are not among them.
    """

    comm_id: str
    generation: str
    lease_s: float
    working: list[int]
    protocol: int = PROTOCOL_VERSION
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachReply:
    """What the kernel still waits for.

    Every id below *next_id* that is not in *pending* is over: the host forgets
    its answer, ends its work, and refuses a late duplicate of it.
    """

    status: Literal["ok", "error"]
    generation: str
    pid: int
    pending: list[int]
    next_id: int
    code: ErrorCode | None = None
    protocol: int = PROTOCOL_VERSION
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT
