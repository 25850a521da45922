"""What the bridge asks of a harness, and what a harness tells the bridge.

Two adapters fill this port: ``dsh`` (the real DeepSeek Harness) and ``scripted``
(in memory, for unit tests and for machines without a DSH wheel). Nothing outside
``app`` knows which one is in use (design 3.2).
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

__all__ = (
    "AgentCreated",
    "AgentDisposed",
    "AgentInfo",
    "AgentStatusChanged",
    "Agents",
    "AssistantText",
    "ChildEnded",
    "ChildRequest",
    "Harness",
    "HarnessEvent",
    "HarnessLost",
    "Mail",
    "MailRead",
    "ModelRequestFailed",
    "Models",
    "NestedResult",
    "PromptSection",
    "Registration",
    "Route",
    "Subagents",
    "ToolCall",
    "ToolOutcome",
    "ToolSpec",
    "Tools",
    "TurnEnded",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Which model answers an agent."""

    provider: str
    model: str

    @property
    def selector(self) -> str:
        """``provider/model``, the form that people and Prime write."""
        return f"{self.provider}/{self.model}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentInfo:
    """One live agent; *depth* is 0 for a root, from the session's lineage."""

    id: str
    parent_id: str | None
    depth: int
    cwd: str
    status: Literal["idle", "running"] = "idle"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A tool of ours as the model sees it; exclusive within a tool batch."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSection:
    """A piece of the system prompt; tool guidance has orders 100 to 199."""

    name: str
    order: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A model's call of a tool of ours.

    *execution_id* names the open call: nested calls attach to it until the
    handler returns. *cancelled* is set when the harness wants the call to end;
    the handler still returns an outcome.
    """

    execution_id: str
    call_id: str
    tool: str
    arguments: Mapping[str, Any]
    agent: AgentInfo | None
    cancelled: asyncio.Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOutcome:
    """What a call of a tool of ours came to.

    *text* is what the model reads. *value* is the structured result, JSON only.
    An error has *is_error* and a code.
    """

    text: str
    value: Mapping[str, Any] = field(default_factory=dict)
    is_error: bool = False
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedResult:
    """What a harness tool gave to a nested call from a cell."""

    is_error: bool
    content: Sequence[Mapping[str, Any]]
    value: Any
    message: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildRequest:
    """A child to admit. *route* None: the parent's running route."""

    parent_id: str
    prompt: str
    label: str
    max_depth: int
    route: Route | None = None


# What a harness tells. One stream, in the order in which it happened.


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCreated:
    """An agent is live."""

    agent: AgentInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentDisposed:
    """An agent is not live any more."""

    agent_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatusChanged:
    """An agent began or ended a turn."""

    agent_id: str
    status: Literal["idle", "running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEnded:
    """A child's activation ended; *text* is its closing message, if it had one."""

    agent_id: str
    parent_id: str
    stop_reason: str
    text: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mail:
    """One message in an inbox. A settlement notice has *settled* True."""

    message_id: str
    sender_id: str | None
    text: str
    settled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MailRead:
    """An agent took these messages out of its inbox and into a step.

    Of a muted root: the messages it would have read; they woke no model.
    """

    agent_id: str
    mail: tuple[Mail, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantText:
    """Text of one assistant message; the last one before idle is the answer."""

    agent_id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnded:
    """A turn ended; *error* is the harness's text where *reason* is ``error``."""

    agent_id: str
    reason: str
    error: str | None = None
    code: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequestFailed:
    """A model request failed; the harness may try again."""

    agent_id: str
    status: int | None
    attempt: int
    message: str

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later: no answer, 429, or 5xx."""
        return self.status is None or self.status == 429 or self.status >= 500


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessLost:
    """The harness is gone; nothing more comes."""

    message: str


HarnessEvent = (
    AgentCreated
    | AgentDisposed
    | AgentStatusChanged
    | ChildEnded
    | MailRead
    | AssistantText
    | TurnEnded
    | ModelRequestFailed
    | HarnessLost
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What the bridge brings into a harness before its first prompt.

    *on_event* must not block and must not raise.
    """

    tools: Sequence[ToolSpec]
    sections: Sequence[PromptSection]
    on_tool_call: Callable[[ToolCall], Awaitable[ToolOutcome]]
    on_event: Callable[[HarnessEvent], None]


class Agents(Protocol):
    """Roots: all are made and driven through here (design 3.3)."""

    async def create_root(
        self, *, agent_id: str, cwd: str, route: Route, muted: bool = False
    ) -> AgentInfo:
        """Make a root. A muted root never steps: its mail comes as `MailRead`.

        Raises:
            HarnessError: The harness refuses, or is gone.
        """
        ...

    async def send(self, agent_id: str, text: str) -> None:
        """Give a root a message; it starts a turn if it is idle."""
        ...

    async def is_quiet(self, agent_id: str) -> bool:
        """Whether the agent is idle (or gone) *and* its inbox is empty."""
        ...

    async def cancel(self, agent_id: str) -> None:
        """Abort the agent's running turn, its open tool calls included."""
        ...


class Subagents(Protocol):
    """Children, in the harness's own lineage (section 11.1, 11.3, 11.5)."""

    async def start_child(self, request: ChildRequest) -> AgentInfo:
        """Admit a child; returns when its inbox has the prompt.

        When this task is cancelled, the child is taken back: it ends, and its parent
        hears nothing of it. The cancellation waits for that, for some seconds at most.

        Raises:
            HarnessError: DEPTH_LIMIT, AGENT_NOT_LIVE, or the harness's refusal.
        """
        ...

    async def report(self, child_id: str, text: str) -> str:
        """Send *text* from a live child to its parent; the message's id."""
        ...


class Tools(Protocol):
    """The harness's tools, for cells (section 11.6)."""

    async def list_tools(self, agent_id: str) -> list[dict[str, Any]]:
        """The schemas of the tools that this agent may use."""
        ...

    async def call_tool(
        self, execution_id: str, *, name: str, arguments: Mapping[str, Any], number: int
    ) -> NestedResult:
        """Run a tool nested in an open call of ours; *number* makes its id.

        Raises:
            HarnessError: REQUEST_SCOPE_CLOSED when that call has ended.
        """
        ...


class Models(Protocol):
    """The routes that the harness knows."""

    async def running_route(self, agent_id: str) -> Route:
        """The route of the agent's running request, else the one it was made with."""
        ...

    async def advertised_models(self) -> list[Route]:
        """Every model that a provider of the harness advertises."""
        ...


class Harness(Agents, Subagents, Tools, Models, Protocol):
    """A running harness."""

    async def start(self, registration: Registration) -> None:
        """Start; returns when tools and sections are in place.

        Raises:
            HarnessError: HARNESS_UNAVAILABLE, with the reason.
        """
        ...

    async def close(self) -> None:
        """End everything that `start` began; safe to call twice."""
        ...

    @property
    def version(self) -> str:
        """Which harness this is, for people."""
        ...
