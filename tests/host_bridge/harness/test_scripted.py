"""The harness in memory: turns, mail, children and tool calls."""

import asyncio
from typing import Any

import pytest

from host_bridge.errors import HarnessError
from host_bridge.harness.port import (
    AgentStatusChanged,
    AssistantText,
    ChildEnded,
    ChildRequest,
    MailRead,
    Registration,
    Route,
    ToolCall,
    ToolOutcome,
    ToolSpec,
    TurnEnded,
)
from host_bridge.harness.script import Reply, ToolUse, run_fenced_python
from host_bridge.harness.scripted import ScriptedHarness

WAIT_S = 5.0
ROUTE = Route(provider="p", model="m")
TOOL = ToolSpec(name="ipython", description="d", parameters={"type": "object"})


class World:
    """A scripted harness and what it tells."""

    def __init__(self, script: Any) -> None:
        self.events: list[Any] = []
        self.calls: list[ToolCall] = []
        self.on_call: Any = None
        self.harness = ScriptedHarness(script, models=(ROUTE,))

    async def start(self) -> "World":
        await self.harness.start(
            Registration(
                tools=(TOOL,),
                sections=(),
                on_tool_call=self._call,
                on_event=self.events.append,
            )
        )
        return self

    async def _call(self, call: ToolCall) -> ToolOutcome:
        self.calls.append(call)
        if self.on_call is not None:
            return await self.on_call(call)
        return ToolOutcome(text=f"ran {call.arguments['code']}")

    async def root(self, **options: Any) -> str:
        info = await self.harness.create_root(
            agent_id="root", cwd="/", route=ROUTE, **options
        )
        return info.id

    async def idle(self, agent_id: str = "root") -> None:
        async with asyncio.timeout(WAIT_S):
            while not await self.harness.is_quiet(agent_id):
                await asyncio.sleep(0)

    def child(self, **fields: Any) -> ChildRequest:
        return ChildRequest(
            **{"parent_id": "root", "prompt": "p", "label": "l", "max_depth": 1}
            | fields
        )

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
async def make_world():
    worlds = []

    async def make(script: Any = lambda transcript: Reply(text="done")) -> World:
        worlds.append(await World(script).start())
        return worlds[-1]

    yield make
    for world in worlds:
        await world.harness.close()


async def test_a_message_starts_a_turn_that_ends_with_its_text(make_world):
    world = await make_world()
    await world.root()

    await world.harness.send("root", "hello")
    await world.idle()

    assert [event.text for event in world.of(AssistantText)] == ["done"]
    assert [event.status for event in world.of(AgentStatusChanged)] == [
        "running",
        "idle",
    ]
    assert [event.reason for event in world.of(TurnEnded)] == ["completed"]
    assert await world.harness.is_quiet("root")


async def test_fenced_python_runs_as_a_tool_call(make_world):
    world = await make_world(run_fenced_python)
    await world.root()

    await world.harness.send("root", "please\n```python\n1 + 1\n```\n")
    await world.idle()

    assert world.calls[0].arguments == {"code": "1 + 1\n"}
    assert world.of(AssistantText)[-1].text == "ran 1 + 1\n"


async def test_a_child_is_admitted_before_its_first_words(make_world):
    world = await make_world()
    await world.root()

    info = await world.harness.start_child(world.child())

    assert (info.parent_id, info.depth, info.status) == ("root", 1, "running")
    assert world.of(AssistantText) == []
    await world.idle(info.id)
    await world.idle()
    assert world.of(ChildEnded)[0].text == "done"
    notices = [m for e in world.of(MailRead) for m in e.mail if m.settled]
    assert [notice.sender_id for notice in notices] == [info.id]


async def test_a_child_that_would_be_too_deep_is_refused(make_world):
    world = await make_world()
    await world.root()
    info = await world.harness.start_child(world.child())

    with pytest.raises(HarnessError) as caught:
        await world.harness.start_child(world.child(parent_id=info.id))

    assert caught.value.code == "DEPTH_LIMIT"


async def test_a_muted_root_reads_its_mail_and_takes_no_turn(make_world):
    world = await make_world()
    await world.root(muted=True)

    info = await world.harness.start_child(world.child())
    await world.harness.report(info.id, "news")
    await world.idle(info.id)

    texts = [m.text for e in world.of(MailRead) for m in e.mail if e.agent_id == "root"]
    assert texts[0] == "news"
    assert not [e for e in world.of(TurnEnded) if e.agent_id == "root"]


async def test_cancelling_a_call_tells_the_call_and_ends_the_turn(make_world):
    world = await make_world(run_fenced_python)
    await world.root()
    opened = asyncio.Event()

    async def wait_for_cancel(call: ToolCall) -> ToolOutcome:
        opened.set()
        await call.cancelled.wait()
        return ToolOutcome(text="stopped", is_error=True)

    world.on_call = wait_for_cancel
    await world.harness.send("root", "```python\nx\n```")
    async with asyncio.timeout(WAIT_S):
        await opened.wait()

    await world.harness.cancel("root")
    await world.idle()

    assert [event.reason for event in world.of(TurnEnded)] == ["aborted"]


async def test_nested_calls_need_the_open_call(make_world):
    world = await make_world(run_fenced_python)
    await world.root()
    inside: list[Any] = []

    async def nested(call: ToolCall) -> ToolOutcome:
        inside.append(
            await world.harness.call_tool(
                call.execution_id, name="x", arguments={}, number=1
            )
        )
        return ToolOutcome(text="ok")

    world.on_call = nested
    await world.harness.send("root", "```python\nx\n```")
    await world.idle()
    with pytest.raises(HarnessError) as caught:
        await world.harness.call_tool(
            world.calls[0].execution_id, name="x", arguments={}, number=2
        )

    assert (inside[0].is_error, inside[0].code) == (True, "UNKNOWN_TOOL")
    assert caught.value.code == "REQUEST_SCOPE_CLOSED"


async def test_a_script_that_fails_ends_its_turn_with_an_error(make_world):
    def broken(transcript: Any) -> Reply:
        raise RuntimeError("broken script")

    world = await make_world(broken)
    await world.root()
    await world.harness.send("root", "go")
    await world.idle()

    assert [event.reason for event in world.of(TurnEnded)] == ["error"]
    assert await world.harness.is_quiet("root")


async def test_a_child_whose_script_fails_is_told_of(make_world):
    def broken(transcript: Any) -> Reply:
        if transcript.session_id != "root":
            raise RuntimeError("broken script")
        return Reply(text="fine")

    world = await make_world(broken)
    await world.root()
    info = await world.harness.start_child(world.child())
    await world.idle(info.id)

    assert [event.stop_reason for event in world.of(ChildEnded)] == ["error"]


async def test_closing_ends_what_runs(make_world):
    world = await make_world(
        lambda transcript: Reply(tool_uses=(ToolUse(name="t", arguments={"code": ""}),))
    )
    await world.root()
    opened, never = asyncio.Event(), asyncio.Event()

    async def hang(call: ToolCall) -> ToolOutcome:
        opened.set()
        await never.wait()
        raise AssertionError

    world.on_call = hang
    await world.harness.send("root", "go")
    async with asyncio.timeout(WAIT_S):
        await opened.wait()
        await world.harness.close()
        await world.harness.close()

    assert [event.reason for event in world.of(TurnEnded)] == ["aborted"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda h: h.send("x", "t"),
        lambda h: h.report("x", "t"),
        lambda h: h.list_tools("x"),
        lambda h: h.running_route("x"),
        lambda h: h.cancel("x"),
    ],
    ids=["send", "report", "tools", "route", "cancel"],
)
async def test_an_agent_that_is_not_there_is_not_live(make_world, ask):
    world = await make_world()

    with pytest.raises(HarnessError) as caught:
        await ask(world.harness)

    assert caught.value.code == "AGENT_NOT_LIVE"


async def test_an_id_is_given_once(make_world):
    world = await make_world()
    await world.root()

    with pytest.raises(HarnessError):
        await world.root()


async def test_before_its_start_it_is_unavailable():
    harness = ScriptedHarness(lambda transcript: Reply())

    with pytest.raises(HarnessError) as caught:
        await harness.create_root(agent_id="r", cwd="/", route=ROUTE)

    assert caught.value.code == "HARNESS_UNAVAILABLE"
