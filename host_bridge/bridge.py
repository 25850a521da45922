"""A harness, its agents and their kernels, put together."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernel_ext.wire.codes import ErrorCode

from .agents import AgentTree
from .errors import HarnessError
from .events import BridgeEvent, redacted
from .harness.port import (
    AgentDisposed,
    AgentInfo,
    Harness,
    HarnessEvent,
    Registration,
    Route,
)
from .kernels.kernel import Kernel, KernelSettings, KernelSpec
from .kernels.registry import KernelRegistry
from .paths import StateRoot
from .requests.agent_message import AgentMessageRequests
from .requests.dispatcher import Dispatcher, Handler
from .requests.dsh_tools import DshToolsRequests
from .requests.rlm import RlmRequests
from .tools import ipython

__all__ = ("Bridge", "BridgeSettings", "EventListener")

EventListener = Callable[[HarnessEvent | BridgeEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings:
    """What a bridge is built from.

    *route* None: the first model of *provider* that the harness advertises.
    """

    state: StateRoot
    route: Route | None = None
    kernels: KernelSettings = field(default_factory=KernelSettings)


class Bridge:
    """A harness, its agents and their kernels, put together.

    Args:
        harness: Runs model loops; not started yet.
        settings: Bounds and places.
        redact: Takes the key out of a text of the model's or of the harness's.
        on_close: Awaited last, for what was made for this bridge alone.
    """

    def __init__(
        self,
        harness: Harness,
        settings: BridgeSettings,
        *,
        redact: Callable[[str], str] = str,
        on_close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.harness = harness
        self.settings = settings
        self.redact = redact
        self._on_close = on_close
        self._listeners: list[EventListener] = []
        self.agents = AgentTree(tell=self._tell)
        max_depth = settings.kernels.max_depth
        self.handlers: Mapping[str, Handler] = {
            **RlmRequests(
                self.agents, harness, settings.state, max_depth=max_depth
            ).handlers,
            **AgentMessageRequests(self.agents, harness).handlers,
            **DshToolsRequests(
                harness, own_tools=frozenset({ipython.SPEC.name})
            ).handlers,
        }
        dispatcher = Dispatcher(self.handlers, redact=redact)
        self.kernels = KernelRegistry(settings.kernels, dispatch=dispatcher.dispatch)
        self._endings: set[asyncio.Task[None]] = set()
        self._ipython = ipython.IpythonTool(self.kernels, self.spec_of, self._tell)

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
        """Make a root agent; a muted one is a person, who takes no turns.

        Raises:
            HarnessError: The harness refuses, or advertises no model.
        """
        route = await self._route()
        info = await self.harness.create_root(
            agent_id=agent_id, cwd=str(cwd), route=route, muted=muted
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
        """End the harness, which gives out the work, then the kernels that do it.

        The sessions of children that left no files go with them.
        """
        async with contextlib.AsyncExitStack() as stack:
            # Last in, first out: one that fails does not keep the others from it.
            if self._on_close is not None:
                stack.push_async_callback(self._on_close)
            stack.push_async_callback(self._remove_empty_sessions)
            stack.push_async_callback(self.kernels.close)
            stack.push_async_callback(self.harness.close)

    async def _remove_empty_sessions(self) -> None:
        await asyncio.gather(*self._endings, return_exceptions=True)
        for agent in self.agents.everyone():
            if agent.info.parent_id is not None:
                paths = self.settings.state.session(agent.info.id)
                await asyncio.to_thread(paths.remove_if_empty)

    async def _route(self) -> Route:
        """The chosen model, else the first that the harness advertises.

        Of a known provider it may be any: lists of models are not complete.
        """
        advertised = await self.harness.advertised_models()
        chosen = self.settings.route
        if chosen is not None and chosen.provider in {r.provider for r in advertised}:
            return chosen
        if chosen is None and advertised:
            return advertised[0]
        wanted = f"no provider of {chosen.selector}" if chosen else "no model"
        known = ", ".join(route.selector for route in advertised[:5])
        raise HarnessError(
            ErrorCode.MODEL_UNAVAILABLE,
            f"the harness has {wanted}; it has: {known or 'none'}.",
            next_step="rlm-kernel run --help",
        )

    def _on_event(self, event: HarnessEvent) -> None:
        event = redacted(event, self.redact)
        self.agents.apply(event)
        self._tell(event)
        if isinstance(event, AgentDisposed):
            # A child that has ended needs no kernel; were it woken, it gets another.
            ending = asyncio.create_task(self.kernels.dispose(event.agent_id))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    def _tell(self, event: HarnessEvent | BridgeEvent) -> None:
        for listener in self._listeners:
            listener(event)
