"""DeepSeek Harness behind the port: one runtime, one plugin, one link."""

import asyncio
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernel_ext.wire.codes import ErrorCode

from ...errors import HarnessError
from ...paths import new_socket_directory
from ..port import (
    AgentInfo,
    ChildRequest,
    HarnessLost,
    NestedResult,
    Registration,
    Route,
    ToolCall,
    ToolOutcome,
)
from .door import Door, Greeting
from .events import read_agent, read_event
from .launch import DshSettings, installed_version
from .link import MAX_LINE_BYTES, Link, Undo
from .runtime import Runtime

__all__ = ("DshHarness", "DshSettings")

_CALL_S = 60.0
"""For calls that wait for nothing but DSH itself."""

_LAST_LINES_S = 0.5
"""After the end of the process, for what it still had to say."""

_EXIT_S = 0.1
"""After the end of the link, for the process to tell how it ended."""


class DshHarness:
    """A DSH of our own, from `start` to `close`.

    Args:
        settings: How to run it.
        max_line_bytes: The longest message of the link, either way.
    """

    def __init__(
        self, settings: DshSettings, *, max_line_bytes: int = MAX_LINE_BYTES
    ) -> None:
        self._settings = settings
        self._max_line_bytes = max_line_bytes
        self._registration: Registration | None = None
        self._sockets: Path | None = None
        self._door: Door | None = None
        self._runtime: Runtime | None = None
        self._link: Link | None = None
        self._ready = asyncio.Event()
        self._is_up = False
        self._exit: str | None = None
        self._ending: str | None = None
        self._cleaning: asyncio.Task[None] | None = None
        self._clean_lock = asyncio.Lock()

    @property
    def version(self) -> str:
        """Which harness this is, for people."""
        return installed_version()

    @property
    def pid(self) -> int | None:
        """The process of the runtime, once it is started."""
        return None if self._runtime is None else self._runtime.pid

    # -- life ---------------------------------------------------------------------

    async def start(self, registration: Registration) -> None:
        """Start DSH; returns when tools and sections are in place.

        Raises:
            HarnessError: HARNESS_UNAVAILABLE, with the reason.
            SetupError: Its home, or a place for its socket, can not be used.
        """
        self._registration = registration
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._start(registration)
        except TimeoutError:
            words = "" if self._runtime is None else self._runtime.last_words()
            await self._abandon()
            raise HarnessError(
                ErrorCode.HARNESS_UNAVAILABLE,
                "DeepSeek Harness was not up within "
                f"{self._settings.start_timeout_s:g} s{words}",
            ) from None
        except BaseException:
            await self._abandon()
            raise

    async def _start(self, registration: Registration) -> None:
        if sys.platform != "win32":
            self._sockets = new_socket_directory()
        self._door = Door(self._sockets, max_line_bytes=self._max_line_bytes)
        await self._door.open()
        self._runtime = Runtime(
            self._settings, self._door.environment, on_exit=self._hear_exit
        )
        await self._runtime.start()
        # The runtime is up only when the plugin has been answered: both at once.
        joining = asyncio.create_task(self._join(self._door, registration))
        starting = asyncio.create_task(self._runtime.initialize())
        try:
            await asyncio.wait({starting, joining}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()  # a plugin that was refused says more than DSH
            await starting
            if not self._door.has_entered:
                raise HarnessError(
                    ErrorCode.HARNESS_UNAVAILABLE,
                    "DeepSeek Harness did not load the plugin"
                    f"{self._runtime.last_words()}",
                )
            await joining
            await self._ready.wait()
        finally:
            for task in (starting, joining):
                task.cancel()
            await asyncio.gather(starting, joining, return_exceptions=True)
        self._remove_sockets()
        if self._ending is not None:
            raise HarnessError(ErrorCode.HARNESS_UNAVAILABLE, self._ending)
        self._is_up = True

    async def _join(self, door: Door, registration: Registration) -> None:
        greeting: Greeting = await door.entered()
        self._link = Link(
            greeting.reader,
            greeting.writer,
            serve=self._serve,
            on_notify=self._hear,
            on_lost=self._hear_link_end,
            max_line_bytes=self._max_line_bytes,
        )
        self._link.start()
        try:
            greeting.check()
        except HarnessError as error:
            await self._link.refuse(greeting.call_id, error)
            raise HarnessError(ErrorCode.HARNESS_UNAVAILABLE, str(error)) from error
        tools = [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            }
            for tool in registration.tools
        ]
        sections = [
            {"name": section.name, "order": section.order, "text": section.text}
            for section in registration.sections
        ]
        await self._link.respond(
            greeting.call_id, {"tools": tools, "sections": sections}
        )

    async def close(self) -> None:
        """End everything that `start` began; safe to call twice."""
        if self._ending is None:
            self._ending = "the host bridge has closed the harness"
        if self._cleaning is None:
            self._cleaning = asyncio.create_task(self._clean())
        await asyncio.shield(self._cleaning)

    async def _abandon(self) -> None:
        """Clean up after a start that failed; `close` may have run before its end."""
        await self.close()
        await self._clean()

    async def _clean(self) -> None:
        async with self._clean_lock:
            if self._runtime is not None:
                await self._runtime.stop()
            if self._link is not None:
                await self._link.close()
            if self._door is not None:
                await self._door.close()
            self._remove_sockets()

    def _remove_sockets(self) -> None:
        if self._sockets is not None:
            # Empty once the door is shut; a second call finds it gone.
            with contextlib.suppress(OSError):
                self._sockets.rmdir()

    def _hear_exit(self, reason: str) -> None:
        """The process has ended by itself; its last lines may be on the link yet."""
        self._exit = reason
        if self._link is None or self._link.is_lost:
            self._lose(reason)
        else:
            asyncio.get_running_loop().call_later(_LAST_LINES_S, self._lose, reason)

    def _hear_link_end(self, reason: str) -> None:
        """The link has ended; mostly because the process has, which says more."""
        if self._exit is not None:
            self._lose(self._exit)
        else:
            asyncio.get_running_loop().call_later(_EXIT_S, self._lose, reason)

    def _lose(self, reason: str) -> None:
        """Tell, once, that the harness is gone, and end what is left of it."""
        if self._ending is not None:
            return
        self._ending = reason
        self._ready.set()
        # Before that, `start` raises it.
        if self._is_up and self._registration is not None:
            self._registration.on_event(HarnessLost(message=reason))
        self._cleaning = asyncio.create_task(self._clean())

    # -- what the plugin says -----------------------------------------------------

    def _hear(self, method: str, params: Mapping[str, Any]) -> None:
        if method != "event" or self._ending is not None:
            return
        event = read_event(params)
        if event is not None and self._registration is not None:
            self._registration.on_event(event)

    async def _serve(
        self, method: str, params: Mapping[str, Any], cancelled: asyncio.Event
    ) -> Any:
        match method:
            case "tool/execute":
                return await self._execute(params, cancelled)
            case "ready":
                self._ready.set()
                return {}
        raise HarnessError(
            ErrorCode.UNSUPPORTED_REQUEST, f"the host bridge has no method {method}"
        )

    async def _execute(
        self, params: Mapping[str, Any], cancelled: asyncio.Event
    ) -> dict[str, Any]:
        if self._registration is None:
            raise HarnessError(ErrorCode.HOST_UNAVAILABLE, "no tool is registered")
        agent = params["agent"]
        outcome = await self._registration.on_tool_call(
            ToolCall(
                execution_id=params["executionId"],
                call_id=params["callId"],
                tool=params["tool"],
                arguments=params["arguments"],
                agent=None if agent is None else read_agent(agent),
                cancelled=cancelled,
            )
        )
        return _outcome(outcome)

    # -- what the port asks -------------------------------------------------------

    async def _call(
        self,
        method: str,
        *,
        timeout_s: float | None = _CALL_S,
        undo: Undo | None = None,
        **params: Any,
    ) -> Any:
        if self._link is None or self._ending is not None:
            reason = self._ending or "the harness is not started"
            raise HarnessError(ErrorCode.HARNESS_LOST, reason)
        return await self._link.request(method, params, timeout_s=timeout_s, undo=undo)

    async def create_root(
        self, *, agent_id: str, cwd: str, route: Route, muted: bool = False
    ) -> AgentInfo:
        """Make a root; its id is that of its session as well."""
        return read_agent(
            await self._call(
                "agents/create",
                agentId=agent_id,
                cwd=cwd,
                provider=route.provider,
                model=route.model,
                mute=muted,
            )
        )

    async def send(self, agent_id: str, text: str) -> None:
        """Give a root a message; it starts a turn if it is idle."""
        await self._call("agents/send", agentId=agent_id, text=_sendable(text))

    async def is_quiet(self, agent_id: str) -> bool:
        """Whether the agent is idle (or gone) *and* its inbox is empty."""
        return bool(await self._call("agents/quiet", agentId=agent_id))

    async def cancel(self, agent_id: str) -> None:
        """Abort the running turn; mail that waits stays in the inbox."""
        await self._call("agents/cancel", agentId=agent_id)

    async def start_child(self, request: ChildRequest) -> AgentInfo:
        """Admit a child; returns when its inbox has the prompt.

        Cancelled, it ends when there is no child, if that is soon.
        """
        route = request.route

        async def discard(child: Mapping[str, Any]) -> None:
            await self._call(
                "subagents/discard", parentId=request.parent_id, childId=child["id"]
            )

        return read_agent(
            await self._call(
                "subagents/start",
                undo=discard,
                parentId=request.parent_id,
                prompt=_sendable(request.prompt),
                label=request.label,
                maxDepth=request.max_depth,
                route=route and {"provider": route.provider, "model": route.model},
            )
        )

    async def report(self, child_id: str, text: str) -> str:
        """Send *text* from a live child to its parent; the message's id."""
        return str(
            await self._call("subagents/report", childId=child_id, text=_sendable(text))
        )

    async def list_tools(self, agent_id: str) -> list[dict[str, Any]]:
        """The schemas of the tools that this agent may use."""
        return list(await self._call("tools/list", agentId=agent_id))

    async def call_tool(
        self, execution_id: str, *, name: str, arguments: Mapping[str, Any], number: int
    ) -> NestedResult:
        """Run a tool nested in an open call of ours, for as long as it takes."""
        result = await self._call(
            "tools/call",
            timeout_s=None,
            executionId=execution_id,
            name=name,
            arguments=dict(arguments),
            number=number,
        )
        return NestedResult(
            is_error=result["isError"],
            content=result["content"],
            value=result["value"],
            message=result["message"],
            code=result["code"],
        )

    async def running_route(self, agent_id: str) -> Route:
        """The route of the agent's last request, else the one it was made with."""
        found = await self._call("agents/route", agentId=agent_id)
        return Route(provider=found["provider"], model=found["model"])

    async def advertised_models(self) -> list[Route]:
        """Every model that a provider of the harness advertises."""
        found = await self._call("llm/models")
        return [Route(provider=m["provider"], model=m["model"]) for m in found]


def _outcome(outcome: ToolOutcome) -> dict[str, Any]:
    return {
        "text": _sendable(outcome.text),
        "value": dict(outcome.value),
        "isError": outcome.is_error,
        "code": outcome.code,
    }


def _sendable(text: str) -> str:
    """*text* for the link: what no encoding can carry becomes a question mark."""
    return text.encode(errors="replace").decode()
