"""A harness in memory: deterministic agents that follow a script.

For unit tests, and for `rlm-kernel exec`, where no harness runtime is needed.
"""

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kernel_ext.wire.codes import ErrorCode

from ..errors import HarnessError
from .port import (
    AgentCreated,
    AgentInfo,
    AgentStatusChanged,
    AssistantText,
    ChildEnded,
    ChildRequest,
    HarnessEvent,
    Mail,
    MailRead,
    NestedResult,
    Registration,
    Route,
    ToolCall,
    TurnEnded,
)
from .script import Reply, Script, ToolUse, Transcript, Turn

__all__ = ("ScriptedHarness",)

_SYSTEM = "scripted"


@dataclass(slots=True, eq=False)
class _Agent:
    """One agent: its conversation, its inbox, its running turn."""

    info: AgentInfo
    route: Route
    muted: bool = False
    turns: list[Turn] = field(default_factory=list)
    inbox: list[Mail] = field(default_factory=list)
    turn: "asyncio.Task[None] | None" = None
    call: ToolCall | None = None

    @property
    def status(self) -> Literal["idle", "running"]:
        return "idle" if self.turn is None else "running"


class ScriptedHarness:
    """Fills the harness port without a model and without a process.

    Args:
        script: What every agent says.
        models: The advertised models.
    """

    def __init__(self, script: Script, *, models: tuple[Route, ...] = ()) -> None:
        self._script = script
        self._models = list(models)
        self._agents: dict[str, _Agent] = {}
        self._ids = itertools.count(1)
        self._registration: Registration | None = None
        self._open: dict[str, _Agent] = {}

    @property
    def version(self) -> str:
        """Which harness this is, for people."""
        return "scripted (in memory)"

    async def start(self, registration: Registration) -> None:
        """Take tools, sections and listeners."""
        self._registration = registration

    async def close(self) -> None:
        """End every turn."""
        running = [agent.turn for agent in self._agents.values() if agent.turn]
        for turn in running:
            turn.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # -- roots -------------------------------------------------------------------

    async def create_root(
        self, *, agent_id: str, cwd: str, route: Route, muted: bool = False
    ) -> AgentInfo:
        """Make a root; see the port."""
        if agent_id in self._agents:
            raise HarnessError(
                ErrorCode.HOST_REQUEST_FAILED, "an agent of that id exists"
            )
        info = AgentInfo(id=agent_id, parent_id=None, depth=0, cwd=cwd)
        self._agents[agent_id] = _Agent(info, route, muted=muted)
        self._tell(AgentCreated(agent=info))
        return info

    async def send(self, agent_id: str, text: str) -> None:
        """Give an agent a message; it starts a turn if it is idle."""
        self._deliver(
            self._live(agent_id), Mail(message_id="", sender_id=None, text=text)
        )

    async def is_quiet(self, agent_id: str) -> bool:
        """Whether the agent is idle and its inbox empty."""
        agent = self._agents.get(agent_id)
        return agent is None or (agent.turn is None and not agent.inbox)

    async def cancel(self, agent_id: str) -> None:
        """Abort the running turn, its open tool call included."""
        agent = self._live(agent_id)
        if agent.call is not None:
            agent.call.cancelled.set()
        elif agent.turn is not None:
            agent.turn.cancel()

    # -- children ------------------------------------------------------------------

    async def start_child(self, request: ChildRequest) -> AgentInfo:
        """Admit a child; its turn begins after this returns."""
        parent = self._live(request.parent_id)
        depth = parent.info.depth + 1
        if depth > request.max_depth:
            raise HarnessError(ErrorCode.DEPTH_LIMIT, "delegation depth limit reached")
        info = AgentInfo(
            id=f"scripted-{next(self._ids)}",
            parent_id=parent.info.id,
            depth=depth,
            cwd=parent.info.cwd,
        )
        child = _Agent(info, request.route or parent.route)
        self._agents[info.id] = child
        self._tell(AgentCreated(agent=info))
        self._deliver(child, Mail(message_id="", sender_id=None, text=request.prompt))
        return replace(info, status="running")

    async def report(self, child_id: str, text: str) -> str:
        """Send *text* from a child to its parent."""
        parent_id = self._live(child_id).info.parent_id
        mail = Mail(
            message_id=f"message-{next(self._ids)}", sender_id=child_id, text=text
        )
        self._deliver(self._live(parent_id or ""), mail)
        return mail.message_id

    # -- tools and models ------------------------------------------------------------

    async def list_tools(self, agent_id: str) -> list[dict[str, Any]]:
        """The tools that were registered, as schemas."""
        self._live(agent_id)
        return [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            }
            for tool in self._registered.tools
        ]

    async def call_tool(
        self, execution_id: str, *, name: str, arguments: Mapping[str, Any], number: int
    ) -> NestedResult:
        """Answer a nested call: there are no tools beside ours here."""
        if execution_id not in self._open:
            raise HarnessError(
                ErrorCode.REQUEST_SCOPE_CLOSED,
                "the originating tool execution has completed",
            )
        return NestedResult(
            is_error=True,
            content=(),
            value=None,
            message=f'unknown tool "{name}"',
            code="UNKNOWN_TOOL",
        )

    async def running_route(self, agent_id: str) -> Route:
        """The route the agent was made with."""
        return self._live(agent_id).route

    async def advertised_models(self) -> list[Route]:
        """The models given at construction."""
        return list(self._models)

    # -- the loop ----------------------------------------------------------------------

    def _deliver(self, agent: _Agent, mail: Mail) -> None:
        if agent.muted:
            self._tell(MailRead(agent_id=agent.info.id, mail=(mail,)))
            return
        agent.inbox.append(mail)
        if agent.turn is None:
            agent.turn = asyncio.create_task(self._turn(agent))

    async def _turn(self, agent: _Agent) -> None:
        agent_id = agent.info.id
        self._tell(AgentStatusChanged(agent_id=agent_id, status="running"))
        # A script that fails ends its turn, as a model that fails does.
        reason, text = "error", None
        try:
            text = await self._steps(agent)
            reason = "completed"
        except asyncio.CancelledError:
            reason = "aborted"
        finally:
            self._end_turn(agent, reason, text)

    def _end_turn(self, agent: _Agent, reason: str, text: str | None) -> None:
        agent_id = agent.info.id
        self._tell(TurnEnded(agent_id=agent_id, reason=reason))
        agent.turn = None
        self._tell(AgentStatusChanged(agent_id=agent_id, status="idle"))
        if agent.info.parent_id is not None:
            self._settle(agent, agent.info.parent_id, reason, text)

    def _settle(
        self, agent: _Agent, parent_id: str, reason: str, text: str | None
    ) -> None:
        agent_id = agent.info.id
        self._tell(
            ChildEnded(
                agent_id=agent_id, parent_id=parent_id, stop_reason=reason, text=text
            )
        )
        notice = f"Background subagent {agent_id} finished.\n{text or ''}"
        mail = Mail(message_id="", sender_id=agent_id, text=notice, settled=True)
        self._deliver(self._agents[parent_id], mail)

    async def _steps(self, agent: _Agent) -> str | None:
        text = None
        while True:
            if agent.inbox:
                mail, agent.inbox = tuple(agent.inbox), []
                agent.turns += [Turn("user", message.text) for message in mail]
                self._tell(MailRead(agent_id=agent.info.id, mail=mail))
            reply = await self._ask(agent)
            text = reply.text or text
            for use in reply.tool_uses:
                result = await self._use(agent, use)
                agent.turns += [Turn("call", use.name), Turn("tool", result)]
            if not reply.tool_uses and not agent.inbox:
                return text

    async def _ask(self, agent: _Agent) -> Reply:
        reply = self._script(
            Transcript(
                system=_SYSTEM,
                turns=tuple(agent.turns),
                tools=frozenset(tool.name for tool in self._registered.tools),
                session_id=agent.info.id,
            )
        )
        await asyncio.sleep(reply.delay_s)
        if reply.text:
            agent.turns.append(Turn("assistant", reply.text))
            self._tell(AssistantText(agent_id=agent.info.id, text=reply.text))
        return reply

    async def _use(self, agent: _Agent, use: ToolUse) -> str:
        number = next(self._ids)
        call = ToolCall(
            execution_id=f"execution-{number}",
            call_id=f"call-{number}",
            tool=use.name,
            arguments=use.arguments,
            agent=agent.info,
            cancelled=asyncio.Event(),
        )
        agent.call, self._open[call.execution_id] = call, agent
        try:
            outcome = await self._registered.on_tool_call(call)
        finally:
            agent.call = None
            del self._open[call.execution_id]
        if call.cancelled.is_set():
            raise asyncio.CancelledError
        return outcome.text

    # -- small things --------------------------------------------------------------------

    @property
    def _registered(self) -> Registration:
        if self._registration is None:
            raise HarnessError(
                ErrorCode.HARNESS_UNAVAILABLE, "the harness is not started"
            )
        return self._registration

    def _tell(self, event: HarnessEvent) -> None:
        self._registered.on_event(event)

    def _live(self, agent_id: str) -> _Agent:
        agent = self._agents.get(agent_id)
        if agent is None:
            raise HarnessError(ErrorCode.AGENT_NOT_LIVE, "no live agent of that id")
        return agent
