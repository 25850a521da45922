"""A real DSH with a scripted model, and what tests need to play on it."""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from host_bridge.demo.model_server import ModelRequest, ModelServer
from host_bridge.harness.dsh.adapter import DshHarness, DshSettings
from host_bridge.harness.port import (
    AgentCreated,
    HarnessEvent,
    PromptSection,
    Registration,
    Route,
    ToolCall,
    ToolOutcome,
    ToolSpec,
    TurnEnded,
)
from host_bridge.harness.script import Reply, ToolUse, Transcript

WAIT_S = 15.0
FLASH = Route(provider="deepseek-official", model="deepseek-v4-flash")
PRO = Route(provider="deepseek-official", model="deepseek-v4-pro")
CREDENTIALS = b"version: 1\nrefs:\n  DEEPSEEK_API_KEY: sk-from-the-file\n"
IPYTHON = ToolSpec(
    name="ipython",
    description="Run Python.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
        "additionalProperties": False,
    },
)
SECTION = PromptSection(name="rlm:test", order=150, text="THE-TEST-SECTION")

Cell = Callable[[ToolCall], Awaitable[ToolOutcome]]
Line = Callable[[Transcript], Reply]


@dataclass
class World:
    """One DSH, its scripted model, and what the two have said."""

    directory: Path
    events: list[HarnessEvent] = field(default_factory=list)
    requests: list[ModelRequest] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    _lines: dict[str, Line] = field(default_factory=dict)
    _cells: dict[str, Cell] = field(default_factory=dict)
    _numbers: Any = field(default_factory=itertools.count)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    harness: DshHarness = field(init=False)

    def __post_init__(self) -> None:
        self.server = ModelServer(self._play, on_request=self._record)
        self.workspace = self.directory / "workspace"

    async def start(self, **settings: Any) -> "World":
        max_line_bytes = settings.pop("max_line_bytes", 16 * 2**20)
        if not self.server.base_url:
            await self.server.start()
        self.workspace.mkdir(exist_ok=True)
        chosen = {"credentials": CREDENTIALS, "base_url": self.server.base_url}
        self.harness = DshHarness(
            DshSettings(
                home=self.directory / "dsh",
                workspace=self.workspace,
                default_route=FLASH,
                **{**chosen, **settings},
            ),
            max_line_bytes=max_line_bytes,
        )
        await self.harness.start(self.registration())
        return self

    def registration(self) -> Registration:
        return Registration(
            tools=[IPYTHON],
            sections=[SECTION],
            on_tool_call=self._call,
            on_event=self._hear,
        )

    async def close(self) -> None:
        if hasattr(self, "harness"):
            await self.harness.close()
        await self.server.close()

    # -- the model's words -------------------------------------------------------

    def says(self, line: Line) -> str:
        """A prompt that the model answers by *line*."""
        prompt = f"<job-{next(self._numbers)}>"
        self._lines[prompt] = line
        return prompt

    def runs(self, cell: Cell, *, then: str = "done") -> str:
        """A prompt that makes the model run *cell* once and then close."""
        code = f"cell {next(self._numbers)}"
        self._cells[code] = cell

        def line(transcript: Transcript) -> Reply:
            if transcript.tool_results:
                return Reply(text=then)
            return Reply(tool_uses=(ToolUse(name="ipython", arguments={"code": code}),))

        return self.says(line)

    def _play(self, transcript: Transcript) -> Reply:
        said = "\n".join(transcript.prompts)
        found = next((p for p in self._lines if p in said), None)
        return self._lines[found](transcript) if found else Reply(text="nothing to do")

    def _record(self, request: ModelRequest) -> None:
        self.requests.append(request)
        self._touch()

    def requests_of(self, agent_id: str) -> list[ModelRequest]:
        name = "x-deepseek-harness-session-id"
        return [r for r in self.requests if r.headers.get(name) == agent_id]

    # -- what DSH says -----------------------------------------------------------

    async def _call(self, call: ToolCall) -> ToolOutcome:
        self.calls.append(call)
        self._touch()
        return await self._cells[call.arguments["code"]](call)

    def _hear(self, event: HarnessEvent) -> None:
        self.events.append(event)
        self._touch()

    def _touch(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, kind: type, agent_id: str) -> list[Any]:
        """The events of *kind* about one agent, oldest first."""
        return [
            event
            for event in self.events
            if isinstance(event, kind)
            and (event.agent.id if hasattr(event, "agent") else event.agent_id)
            == agent_id
        ]

    async def until(self, holds: Callable[[], Any]) -> Any:
        """Wait for something about events, calls or requests to become true."""
        async with asyncio.timeout(WAIT_S):
            while not (found := holds()):
                changed = self._changed
                # What the model server counts is told to nobody: look again.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), 0.05)
        return found

    # -- shorthands --------------------------------------------------------------

    async def root(self, *, route: Route = FLASH, muted: bool = False) -> str:
        """A new root's id."""
        info = await self.harness.create_root(
            agent_id=f"root-{next(self._numbers)}",
            cwd=str(self.workspace),
            route=route,
            muted=muted,
        )
        return info.id

    async def ask(self, agent_id: str, prompt: str) -> TurnEnded:
        """Send *prompt* and wait until the agent is idle; its last turn's end."""
        await self.harness.send(agent_id, prompt)
        await self.idle(agent_id)
        return self.of(TurnEnded, agent_id)[-1]

    async def idle(self, agent_id: str) -> None:
        """Wait until an agent has no turn and no mail."""
        async with asyncio.timeout(WAIT_S):
            while not await self.harness.is_quiet(agent_id):
                changed = self._changed
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), 0.05)

    def children_of(self, agent_id: str) -> list[str]:
        """The ids of all children that an agent ever had."""
        return [
            event.agent.id
            for event in self.events
            if isinstance(event, AgentCreated) and event.agent.parent_id == agent_id
        ]


@pytest.fixture
async def make_world(tmp_path):
    """Worlds of one test; all are closed at its end."""
    worlds: list[World] = []

    def make() -> World:
        directory = tmp_path / f"world-{len(worlds)}"
        directory.mkdir()
        worlds.append(World(directory))
        return worlds[-1]

    yield make
    for world in worlds:
        await world.close()
