"""Payloads and results of each request type (specification rlm.md section 11)."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .envelope import STRICT

__all__ = (
    "AGENT_MESSAGE_SEND",
    "CallToolRequest",
    "CallToolResult",
    "DSH_TOOLS_CALL",
    "DSH_TOOLS_LIST",
    "DeleteSubagentRequest",
    "FindModelsRequest",
    "ListSubagentsRequest",
    "ListSubagentsResult",
    "ListToolsRequest",
    "ListToolsResult",
    "REQUEST_TYPES",
    "RLM_DELETE_SUBAGENT",
    "RLM_FIND_MODELS",
    "RLM_LIST_SUBAGENTS",
    "RLM_REPORT",
    "RLM_RUN",
    "ReportRequest",
    "ReportResult",
    "RunOptions",
    "RunRequest",
    "RunResult",
    "SendMessageRequest",
    "SendMessageResult",
    "SubagentRow",
)

RLM_RUN = "rlm.run"
RLM_LIST_SUBAGENTS = "rlm.list_subagents"
RLM_REPORT = "rlm.report"
RLM_FIND_MODELS = "rlm.find_models"
RLM_DELETE_SUBAGENT = "rlm.delete_subagent"
AGENT_MESSAGE_SEND = "agent_message.send"
DSH_TOOLS_LIST = "dsh_tools.list"
DSH_TOOLS_CALL = "dsh_tools.call"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a child is to be made; nothing here is ever replaced by a fallback."""

    name: str | None = None
    model: str | None = None
    thinking: str | None = None
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """Admit one child agent with *prompt* (section 11.1)."""

    prompt: str
    kwargs: RunOptions = field(default_factory=RunOptions)
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The admission handle: the child has the prompt, it has not answered."""

    rlm_child_id: str
    name: str
    session_dir: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSubagentsRequest:
    """List the caller's direct children (section 11.3)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class SubagentRow:
    """One direct child, with Prime's field names."""

    rlm_child_id: str
    active_session_id: str | None
    session_id: str | None
    session_name: str
    session_dir: str
    status: Literal["running", "completed", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListSubagentsResult:
    """The caller's direct children, in order of admission."""

    subagents: list[SubagentRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRequest:
    """Wait for what a direct child reported (design 3.10).

    Without *timeout_s* the host waits 600 s, then names the child with TIMEOUT.
    """

    rlm_child_id: str
    timeout_s: float | None = None
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """A child's report: its message, or its closing text where it sent none."""

    text: str
    source: Literal["message", "closing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FindModelsRequest:
    """Search the advertised models (section 11.2)."""

    query: str = ""
    limit: int = 8
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteSubagentRequest:
    """Delete a direct child (section 11.4)."""

    target: str
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageRequest:
    """Send a message along the agent tree (section 11.5).

    There is no sender field: the sender is the agent whose kernel asks.
    """

    message: str
    receiver_role: Literal["parent", "sibling", "child"]
    receiver_name: str | None = None
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class SendMessageResult:
    """The receipt of a message that the receiver's inbox has accepted."""

    message_id: str
    receiver_role: Literal["parent", "sibling", "child"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListToolsRequest:
    """List the harness tools that the caller may use (section 11.6)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class ListToolsResult:
    """The schemas of the tools, as the harness gives them."""

    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallToolRequest:
    """Call a harness tool inside the open ipython call (section 11.6)."""

    name: str
    arguments: dict[str, Any]
    __pydantic_config__: ClassVar[dict[str, Any]] = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class CallToolResult:
    """What the tool gave: its value, and the content blocks that a model reads."""

    value: Any
    content: list[dict[str, Any]]


REQUEST_TYPES: dict[str, tuple[type[Any], type[Any] | None]] = {
    RLM_RUN: (RunRequest, RunResult),
    RLM_LIST_SUBAGENTS: (ListSubagentsRequest, ListSubagentsResult),
    RLM_REPORT: (ReportRequest, ReportResult),
    RLM_FIND_MODELS: (FindModelsRequest, None),
    RLM_DELETE_SUBAGENT: (DeleteSubagentRequest, None),
    AGENT_MESSAGE_SEND: (SendMessageRequest, SendMessageResult),
    DSH_TOOLS_LIST: (ListToolsRequest, ListToolsResult),
    DSH_TOOLS_CALL: (CallToolRequest, CallToolResult),
}
"""Request type -> (payload, result); None: refused, there is no result."""
