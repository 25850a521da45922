"""Builds the object graph of a bridge; the only module that knows the adapters."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .agents import AgentTree
from .harness.port import (
    AgentInfo,
    Harness,
    HarnessEvent,
    Registration,
    Route,
)
from .harness.script import Script
from .harness.scripted import ScriptedHarness
from .kernels.kernel import Kernel, KernelSettings, KernelSpec
from .kernels.registry import KernelRegistry
from .paths import StateRoot
from .requests.agent_message import AgentMessageRequests
from .requests.dispatcher import Dispatcher
from .requests.dsh_tools import DshToolsRequests
from .requests.rlm import RlmRequests
from .tools import ipython

__all__ = ("Bridge", "BridgeSettings", "EventListener", "scripted_bridge")

EventListener = Callable[[HarnessEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings:
    """What a bridge is built from."""

    state: StateRoot
    route: Route
    kernels: KernelSettings = field(default_factory=KernelSettings)


class Bridge:
    """A harness, its agents and their kernels, put together.

    Args:
        harness: Runs model loops; not started yet.
        settings: Bounds and places.
    """

    def __init__(self, harness: Harness, settings: BridgeSettings) -> None:
        self.harness = harness
        self.settings = settings
        self.agents = AgentTree()
        self._listeners: list[EventListener] = [self.agents.apply]
        max_depth = settings.kernels.max_depth
        self.dispatcher = Dispatcher(
            {
                **RlmRequests(
                    self.agents, harness, settings.state, max_depth=max_depth
                ).handlers,
                **AgentMessageRequests(self.agents, harness).handlers,
                **DshToolsRequests(harness).handlers,
            }
        )
        self.kernels = KernelRegistry(
            settings.kernels, dispatch=self.dispatcher.dispatch
        )
        self._ipython = ipython.IpythonTool(self.kernels, self.spec_of)

    async def start(self) -> None:
        """Start the harness with our tool and our prompt section in it.

        Raises:
            HarnessError: It can not be started here.
        """
        await self.harness.start(
            Registration(
                tools=(ipython.SPEC,),
                sections=(ipython.GUIDANCE,),
                on_tool_call=self._ipython.run,
                on_event=self._on_event,
            )
        )

    def listen(self, listener: EventListener) -> None:
        """Give *listener* every event, after the agents have taken it."""
        self._listeners.append(listener)

    async def create_root(
        self, agent_id: str, *, cwd: Path, muted: bool = False
    ) -> AgentInfo:
        """Make a root agent; a muted one is a person, who takes no turns."""
        info = await self.harness.create_root(
            agent_id=agent_id, cwd=str(cwd), route=self.settings.route, muted=muted
        )
        self.agents.add_root(info)
        return info

    async def kernel_of(self, agent: AgentInfo) -> Kernel:
        """The live kernel of an agent."""
        return await self.kernels.kernel(self.spec_of(agent))

    def spec_of(self, agent: AgentInfo) -> KernelSpec:
        """Where an agent's kernel works and keeps its files."""
        return KernelSpec(
            agent_id=agent.id,
            depth=agent.depth,
            cwd=Path(agent.cwd),
            paths=self.settings.state.session(agent.id),
        )

    async def close(self) -> None:
        """End kernels, then the harness: open tool calls settle first."""
        await self.kernels.close()
        await self.harness.close()

    def _on_event(self, event: HarnessEvent) -> None:
        for listener in self._listeners:
            listener(event)


def scripted_bridge(
    state: StateRoot, script: Script, *, kernels: KernelSettings | None = None
) -> Bridge:
    """A bridge on the in-memory harness: no model, no process but kernels."""
    route = Route(provider="scripted", model="generic")
    harness = ScriptedHarness(script, models=(route,))
    settings = BridgeSettings(
        state=state, route=route, kernels=kernels or KernelSettings()
    )
    return Bridge(harness, settings)
