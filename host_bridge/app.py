"""Builds the object graph of a bridge; the only module that knows the adapters."""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from kernel_ext.wire.envelope import ErrorReply, OkReply, Request
from kernel_ext.wire.messages import REQUEST_TYPES

from .bridge import Bridge, BridgeSettings
from .credentials import Credential, close_to_other_processes, forget_keys
from .demo.model_server import ModelServer
from .errors import HarnessError, SetupError
from .events import BridgeEvent
from .harness.dsh.adapter import DshHarness, DshSettings
from .harness.port import (
    HarnessEvent,
    HarnessLost,
    Route,
)
from .harness.script import Script, run_fenced_python
from .harness.scripted import ScriptedHarness
from .kernels.attachment import Asker
from .kernels.kernel import KernelSettings
from .model import ModelChoice, ModelSetup
from .paths import StateRoot
from .requests.context import RequestContext
from .requests.dispatcher import Dispatcher, Handler
from .resources import claim_directory

__all__ = (
    "NotebookBridge",
    "dsh_bridge",
    "scripted_bridge",
    "scripted_model_bridge",
    "try_harness",
)

_DSH_ROUTE = Route(provider="deepseek-official", model="deepseek-v4-flash")
"""What DSH is initialised with; roots are given a route of their own."""


def scripted_bridge(
    state: StateRoot, script: Script, *, kernels: KernelSettings | None = None
) -> Bridge:
    """A bridge on the in-memory harness: no model, no process but kernels."""
    close_to_other_processes()
    forget_keys()
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
            redact=setup.credential.redact,
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
    forget_keys()
    server = ModelServer(script)
    await server.start()
    setup = ModelSetup(
        route=None,
        credential=Credential.placeholder("DEEPSEEK_API_KEY", "scripted"),
        base_url=server.base_url,
    )
    try:
        return dsh_bridge(state, session, setup, on_close=server.close)
    except BaseException:
        await server.close()
        raise


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
        self._door = Dispatcher(
            {name: self._forward(name) for name in REQUEST_TYPES}, redact=self._redact
        )

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

    def _redact(self, text: str) -> str:
        setup = self._setup
        return setup.credential.redact(text) if isinstance(setup, ModelSetup) else text

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
