"""Builds the object graph of a bridge; the only module that knows the adapters."""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import ErrorReply, OkReply, Request
from kernel_ext.wire.messages import REQUEST_TYPES

from .agents import AgentTree
from .credentials import Credential, close_to_other_processes
from .demo.model_server import ModelServer
from .errors import HarnessError, SetupError
from .events import BridgeEvent, redacted
from .harness.dsh.adapter import DshHarness, DshSettings
from .harness.port import (
    AgentInfo,
    Harness,
    HarnessEvent,
    HarnessLost,
    Registration,
    Route,
)
from .harness.script import Script, run_fenced_python
from .harness.scripted import ScriptedHarness
from .kernels.attachment import Asker
from .kernels.kernel import Kernel, KernelSettings, KernelSpec
from .kernels.registry import KernelRegistry
from .model import ModelChoice, ModelSetup
from .paths import StateRoot
from .requests.agent_message import AgentMessageRequests
from .requests.context import RequestContext
from .requests.dispatcher import Dispatcher, Handler
from .requests.dsh_tools import DshToolsRequests
from .requests.rlm import RlmRequests
from .resources import claim_directory
from .tools import ipython

__all__ = (
    "Bridge",
    "BridgeSettings",
    "EventListener",
    "NotebookBridge",
    "dsh_bridge",
    "scripted_bridge",
    "scripted_model_bridge",
    "try_harness",
)

_DSH_ROUTE = Route(provider="deepseek-official", model="deepseek-v4-flash")
"""What DSH is initialised with; roots are given a route of their own."""

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
        self._dispatcher = Dispatcher(self.handlers)
        self.kernels = KernelRegistry(settings.kernels, dispatch=self.dispatch)
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

    async def dispatch(self, request: Request, asker: Asker) -> OkReply | ErrorReply:
        """Answer one request of a kernel."""
        reply = await self._dispatcher.dispatch(request, asker)
        if isinstance(reply, ErrorReply):
            return replace(reply, error=self.redact(reply.error))
        return reply

    async def close(self) -> None:
        """End the harness, which gives out the work, then the kernels that do it.

        The sessions of children that left no files go with them.
        """
        await self.harness.close()
        await self.kernels.close()
        for agent in self.agents.everyone():
            if agent.info.parent_id is not None:
                paths = self.settings.state.session(agent.info.id)
                await asyncio.to_thread(paths.remove_if_empty)
        if self._on_close is not None:
            await self._on_close()

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

    def _tell(self, event: HarnessEvent | BridgeEvent) -> None:
        for listener in self._listeners:
            listener(event)


def scripted_bridge(
    state: StateRoot, script: Script, *, kernels: KernelSettings | None = None
) -> Bridge:
    """A bridge on the in-memory harness: no model, no process but kernels."""
    route = Route(provider="scripted", model="generic")
    settings = BridgeSettings(
        state=state, route=route, kernels=kernels or KernelSettings()
    )
    return Bridge(ScriptedHarness(script, models=(route,)), settings)


def dsh_bridge(
    state: StateRoot,
    session: str,
    setup: ModelSetup,
    *,
    kernels: KernelSettings | None = None,
    on_close: Callable[[], Awaitable[None]] | None = None,
) -> Bridge:
    """A bridge on the real DeepSeek Harness, in a private home of *session*.

    Args:
        state: The home is made below it, and removed at the end.
        session: The root's session id.
        setup: The model and its key.
        kernels: Bounds of the kernels.
        on_close: Awaited after the harness has ended.

    Raises:
        SetupError: The home can not be made.
    """
    close_to_other_processes()
    home = state.dsh / state.session(session).directory.name

    async def clean_up() -> None:
        # It holds the key's file; conversations are not resumed by this version.
        await asyncio.to_thread(shutil.rmtree, home, ignore_errors=True)
        if on_close is not None:
            await on_close()

    claim_directory(home)
    harness = DshHarness(
        DshSettings(
            home=home,
            workspace=home,
            base_url=setup.base_url,
            credentials=setup.credential.as_dsh_file(),
            extra_patch_rows=setup.patch_rows,
            # A provider of the person's choice may be unknown: `create_root` says so.
            default_route=setup.route
            if setup.route and setup.patch_rows
            else _DSH_ROUTE,
        )
    )
    settings = BridgeSettings(
        state=state, route=setup.route, kernels=kernels or KernelSettings()
    )
    redact = setup.credential.redact
    return Bridge(harness, settings, redact=redact, on_close=clean_up)


async def scripted_model_bridge(
    state: StateRoot, session: str, script: Script = run_fenced_python
) -> Bridge:
    """A bridge on the real harness whose model is a script on loopback."""
    server = ModelServer(script)
    await server.start()
    setup = ModelSetup(
        route=None,
        credential=Credential.placeholder("DEEPSEEK_API_KEY", "scripted"),
        base_url=server.base_url,
    )
    return dsh_bridge(state, session, setup, on_close=server.close)


async def try_harness(directory: Path) -> str:
    """Start the real harness in a home below *directory*, end it, name it.

    Raises:
        HarnessError: It can not be started here.
    """
    bridge = await scripted_model_bridge(StateRoot(directory, "doctor"), "doctor")
    try:
        await bridge.start()
        return bridge.harness.version
    finally:
        await bridge.close()


class NotebookBridge:
    """The bridge of a person's notebook: the harness starts at the first request.

    A harness that is lost is replaced at the next one; what its children reported
    can still be read.

    Args:
        state: The state root.
        session: The person's root agent, and its session.
        cwd: Where the notebook is.
        choice: The children's model. Its key is read now, so that this process's
            environment loses it; a missing one is told at the first request.
    """

    def __init__(
        self, state: StateRoot, session: str, *, cwd: Path, choice: ModelChoice
    ) -> None:
        self._state = state
        self._session = session
        self._cwd = cwd
        self._setup: ModelSetup | SetupError | None = None
        if not choice.scripted:
            try:
                self._setup = choice.setup()
            except SetupError as error:
                self._setup = error
        self._starting: asyncio.Task[Bridge] | None = None
        self._lost: list[Bridge] = []
        self._door = Dispatcher({name: self._forward(name) for name in REQUEST_TYPES})

    async def dispatch(self, request: Request, asker: Asker) -> OkReply | ErrorReply:
        """Answer one request of the person's kernel."""
        return await self._door.dispatch(request, asker)

    async def close(self) -> None:
        """End what was started, if anything was."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()  # no effect on a start that is done
            with contextlib.suppress(HarnessError, SetupError, asyncio.CancelledError):
                await (await starting).close()
        for bridge in self._lost:
            await bridge.close()

    def _forward(self, name: str) -> Handler:
        async def handler(payload: Any, context: RequestContext) -> Any:
            bridge = self._former(payload, context)
            if bridge is None:
                bridge = await context.step(self._bridge())
            return await bridge.handlers[name](payload, context)

        return handler

    def _former(self, payload: Any, context: RequestContext) -> Bridge | None:
        """The lost bridge whose child is asked about, if it is one."""
        child_id = getattr(payload, "rlm_child_id", None)
        for bridge in self._lost:
            children = bridge.agents.children(context.agent_id)
            if any(child.info.id == child_id for child in children):
                return bridge
        return None

    async def _bridge(self) -> Bridge:
        """The started bridge; concurrent first requests share one start."""
        if self._starting is not None and _failed(self._starting):
            self._starting = None
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Bridge:
        if isinstance(self._setup, SetupError):
            raise self._setup
        for former in self._lost:
            await former.close()
        if self._setup is None:
            bridge = await scripted_model_bridge(self._state, self._session)
        else:
            bridge = dsh_bridge(self._state, self._session, self._setup)

        def on_event(event: HarnessEvent | BridgeEvent) -> None:
            if isinstance(event, HarnessLost):
                self._lost.append(bridge)
                self._starting = None

        try:
            await bridge.start()
            bridge.listen(on_event)
            await bridge.create_root(self._session, cwd=self._cwd, muted=True)
        except BaseException:
            await bridge.close()
            raise
        return bridge


def _failed(task: "asyncio.Task[Bridge]") -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
