"""The port's promises about agents, tools and children, on a real DSH."""

import asyncio
import json

import pytest
import pytest_asyncio

from host_bridge.errors import HarnessError
from host_bridge.harness.port import (
    AgentCreated,
    AgentDisposed,
    AgentStatusChanged,
    AssistantText,
    ChildEnded,
    ChildRequest,
    MailRead,
    ToolOutcome,
    TurnEnded,
)
from host_bridge.harness.script import Reply, ToolUse
from kernel_ext.wire.codes import ErrorCode

from .conftest import FLASH, PRO, WAIT_S, World

pytestmark = [pytest.mark.dsh, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("dsh"))
    try:
        yield await world.start(permission_mode="danger-full-access")
    finally:
        await world.close()


def child_of(parent_id, prompt, **more):
    return ChildRequest(
        **{
            "parent_id": parent_id,
            "prompt": prompt,
            "label": "kid",
            "max_depth": 2,
            **more,
        }
    )


async def settled(world, parent_id, child_id):
    """Wait until *parent_id* has read that *child_id* has settled; that mail."""

    def found():
        for read in world.of(MailRead, parent_id):
            for mail in read.mail:
                if mail.settled and mail.sender_id == child_id:
                    return mail
        return None

    return await world.until(found)


# -- tools -------------------------------------------------------------------------


async def test_a_tool_call_says_which_agent_makes_it_and_where(world):
    async def cell(call):
        return ToolOutcome(text="41", value={"n": 41})

    root = await world.root()
    await world.ask(root, world.runs(cell))

    call = world.calls[-1]
    assert call.tool == "ipython"
    assert call.call_id
    assert (call.agent.id, call.agent.parent_id, call.agent.depth) == (root, None, 0)
    assert call.agent.cwd == str(world.workspace)
    assert call.agent.status == "running"
    assert not call.cancelled.is_set()


async def test_a_childs_tool_call_carries_its_depth_and_parent(world):
    async def cell(call):
        return ToolOutcome(text="x")

    root = await world.root(muted=True)
    child = await world.harness.start_child(child_of(root, world.runs(cell)))
    await settled(world, root, child.id)

    agent = world.calls[-1].agent
    assert (agent.id, agent.parent_id, agent.depth) == (child.id, root, 1)


async def test_the_model_reads_the_outcomes_text(world):
    async def cell(call):
        return ToolOutcome(text="the text", value={"other": [1, 2.5, None]})

    root = await world.root()
    await world.ask(root, world.runs(cell))

    body = json.dumps(world.requests_of(root)[-1].body)
    assert "the text" in body
    assert "2.5" not in body


async def test_an_error_outcome_is_read_as_an_error(world):
    async def cell(call):
        return ToolOutcome(text="it broke", is_error=True, code="TOOL_FAILED")

    root = await world.root()
    ended = await world.ask(root, world.runs(cell))

    assert ended.reason == "completed"
    assert "Error: it broke" in json.dumps(world.requests_of(root)[-1].body)


async def test_a_fault_in_a_tool_ends_the_call_and_not_the_link(world):
    async def cell(call):
        raise ZeroDivisionError

    root = await world.root()
    ended = await world.ask(root, world.runs(cell))

    assert ended.reason == "completed"
    assert "the host bridge failed" in json.dumps(world.requests_of(root)[-1].body)


async def test_text_that_no_encoding_can_carry_does_not_fail_the_call(world):
    async def cell(call):
        return ToolOutcome(text="lone \ud800 surrogate")

    root = await world.root()
    await world.ask(root, world.runs(cell))

    assert "lone ? surrogate" in json.dumps(world.requests_of(root)[-1].body)


async def test_tools_and_sections_are_in_the_first_request(world):
    root = await world.root()
    await world.ask(root, world.says(lambda t: Reply(text="hello")))

    transcript = world.server.requests[-1]
    assert "ipython" in transcript.tools
    assert "THE-TEST-SECTION" in transcript.system


async def test_a_nested_call_runs_a_tool_of_the_harness(world):
    results = []

    async def cell(call):
        command = {"command": "echo nested-$((40+2)); pwd", "description": "say"}
        results.append(
            await world.harness.call_tool(
                call.execution_id, name="bash", arguments=command, number=1
            )
        )
        return ToolOutcome(text="done")

    root = await world.root()
    await world.ask(root, world.runs(cell))

    (result,) = results
    assert not result.is_error
    assert result.content[0]["type"] == "text"
    assert "nested-42" in result.content[0]["text"]
    assert str(world.workspace) in result.content[0]["text"]


async def test_a_nested_call_of_an_unknown_tool_has_its_code(world):
    results = []

    async def cell(call):
        results.append(
            await world.harness.call_tool(
                call.execution_id, name="no-such-tool", arguments={}, number=1
            )
        )
        return ToolOutcome(text="done")

    root = await world.root()
    await world.ask(root, world.runs(cell))

    (result,) = results
    assert result.is_error
    assert result.code == "UNKNOWN_TOOL"
    assert result.message


async def test_a_nested_call_after_the_outer_call_is_out_of_scope(world):
    async def cell(call):
        return ToolOutcome(text="done")

    root = await world.root()
    await world.ask(root, world.runs(cell))
    with pytest.raises(HarnessError) as refused:
        await world.harness.call_tool(
            world.calls[-1].execution_id, name="bash", arguments={}, number=1
        )

    assert refused.value.code is ErrorCode.REQUEST_SCOPE_CLOSED


async def test_cancelling_a_nested_call_ends_the_tool(world):
    outcome = {}

    async def cell(call):
        command = {"command": "sleep 300", "description": "sleep"}
        nested = asyncio.create_task(
            world.harness.call_tool(
                call.execution_id, name="bash", arguments=command, number=1
            )
        )
        done, _ = await asyncio.wait([nested], timeout=0.3)
        nested.cancel()
        await asyncio.wait([nested], timeout=WAIT_S)
        outcome["early"], outcome["cancelled"] = bool(done), nested.cancelled()
        return ToolOutcome(text="went on")

    root = await world.root()
    ended = await world.ask(root, world.runs(cell))

    assert outcome == {"early": False, "cancelled": True}
    assert ended.reason == "completed"


async def test_the_tools_of_an_agent_can_be_listed(world):
    root = await world.root()

    tools = await world.harness.list_tools(root)

    named = {tool["name"]: tool for tool in tools}
    assert {"ipython", "bash"} <= set(named)
    assert named["ipython"]["parameters"]["required"] == ["code"]


# -- turns -------------------------------------------------------------------------


async def test_events_of_a_turn_come_in_their_order(world):
    root = await world.root()
    await world.ask(root, world.says(lambda t: Reply(text="the answer")))

    told = [type(e) for kind in (object,) for e in world.of(kind, root)]
    assert told == [
        AgentCreated,
        AgentStatusChanged,
        MailRead,
        AssistantText,
        TurnEnded,
        AgentStatusChanged,
    ]
    assert world.of(AssistantText, root)[-1].text == "the answer"
    assert world.of(TurnEnded, root)[-1].reason == "completed"
    assert world.of(AgentStatusChanged, root)[-1].status == "idle"


async def test_an_idle_root_is_quiet_and_a_running_one_is_not(world):
    root = await world.root()
    prompt = world.says(lambda t: Reply(text="late", delay_s=60))

    before = await world.harness.is_quiet(root)
    await world.harness.send(root, prompt)
    during = await world.harness.is_quiet(root)
    await world.harness.cancel(root)
    await world.idle(root)
    after = await world.harness.is_quiet(root)

    assert (before, during, after) == (True, False, True)


async def test_an_agent_that_is_gone_is_quiet(world):
    assert await world.harness.is_quiet("no-such-agent")


@pytest.mark.parametrize(
    "call",
    [
        lambda h: h.send("no-such-agent", "x"),
        lambda h: h.cancel("no-such-agent"),
        lambda h: h.start_child(child_of("no-such-agent", "x")),
        lambda h: h.report("no-such-agent", "x"),
        lambda h: h.list_tools("no-such-agent"),
        lambda h: h.running_route("no-such-agent"),
    ],
    ids=["send", "cancel", "start_child", "report", "tools", "route"],
)
async def test_an_unknown_agent_is_refused(world, call):
    with pytest.raises(HarnessError) as refused:
        await call(world.harness)

    assert refused.value.code is ErrorCode.AGENT_NOT_LIVE


async def test_a_roots_id_can_not_be_used_twice(world):
    root = await world.root()
    with pytest.raises(HarnessError) as refused:
        await world.harness.create_root(
            agent_id=root, cwd=str(world.workspace), route=FLASH
        )

    assert refused.value.code is ErrorCode.HOST_REQUEST_FAILED


async def test_a_refused_muted_twin_does_not_mute_the_first(world):
    root = await world.root()
    with pytest.raises(HarnessError):
        await world.harness.create_root(
            agent_id=root, cwd=str(world.workspace), route=FLASH, muted=True
        )

    ended = await world.ask(root, world.says(lambda t: Reply(text="I speak")))

    assert ended.reason == "completed"


async def test_cancelling_an_agent_ends_its_model_request(world):
    root = await world.root()
    await world.harness.send(root, world.says(lambda t: Reply(text="late", delay_s=60)))
    await world.until(lambda: world.requests_of(root))
    abandoned = world.server.abandoned

    await world.harness.cancel(root)
    await world.idle(root)

    assert world.of(TurnEnded, root)[-1].reason == "aborted"
    await world.until(lambda: world.server.abandoned > abandoned)


async def test_cancelling_an_agent_reaches_its_open_tool_call(world):
    seen = []

    async def cell(call):
        async with asyncio.timeout(WAIT_S):
            await call.cancelled.wait()
        seen.append(call.execution_id)
        return ToolOutcome(text="interrupted", is_error=True, code="CANCELLED")

    root = await world.root()
    before = len(world.calls)
    await world.harness.send(root, world.runs(cell))
    await world.until(lambda: len(world.calls) > before)
    await world.harness.cancel(root)
    await world.idle(root)

    assert seen == [world.calls[-1].execution_id]
    assert world.of(TurnEnded, root)[-1].reason == "aborted"


# -- children ----------------------------------------------------------------------


async def test_a_child_is_admitted_while_its_model_is_blocked(world):
    root = await world.root(muted=True)
    prompt = world.says(lambda t: Reply(text="late", delay_s=60))

    child = await asyncio.wait_for(
        world.harness.start_child(child_of(root, prompt)), WAIT_S
    )

    await world.until(lambda: world.requests_of(child.id))
    assert (child.parent_id, child.depth) == (root, 1)
    assert world.of(ChildEnded, child.id) == []
    await world.harness.cancel(child.id)
    await world.until(lambda: world.of(ChildEnded, child.id))


async def test_many_children_work_at_the_same_time(world):
    root = await world.root(muted=True)
    prompt = world.says(lambda t: Reply(text="late", delay_s=60))

    admitted = await asyncio.gather(
        *(
            world.harness.start_child(child_of(root, prompt, label=f"kid-{n}"))
            for n in range(12)
        )
    )

    await world.until(lambda: all(world.requests_of(child.id) for child in admitted))
    for child in admitted:
        await world.harness.cancel(child.id)
    for child in admitted:
        await settled(world, root, child.id)


async def test_a_child_that_would_be_too_deep_is_refused(world):
    codes = []

    async def cell(call):
        try:
            await world.harness.start_child(child_of(call.agent.id, "x", max_depth=1))
        except HarnessError as error:
            codes.append(error.code)
        return ToolOutcome(text="tried")

    root = await world.root(muted=True)
    child = await world.harness.start_child(
        child_of(root, world.runs(cell), max_depth=1)
    )
    await settled(world, root, child.id)

    assert codes == [ErrorCode.DEPTH_LIMIT]


async def test_a_grandchild_may_live_within_the_limit(world):
    grand = []
    leaf = world.says(lambda t: Reply(text="leaf"))

    async def cell(call):
        grand.append(await world.harness.start_child(child_of(call.agent.id, leaf)))
        return ToolOutcome(text="started")

    root = await world.root(muted=True)
    child = await world.harness.start_child(child_of(root, world.runs(cell)))
    await settled(world, root, child.id)

    assert [g.depth for g in grand] == [2]
    assert [g.parent_id for g in grand] == [child.id]


async def test_a_childs_report_is_mail_of_its_parent(world):
    sent = []

    async def cell(call):
        sent.append(await world.harness.report(call.agent.id, "the report"))
        return ToolOutcome(text="reported")

    root = await world.root(muted=True)
    child = await world.harness.start_child(child_of(root, world.runs(cell)))
    notice = await settled(world, root, child.id)

    mail = [m for read in world.of(MailRead, root) for m in read.mail]
    (report,) = [m for m in mail if not m.settled]
    assert report.message_id == sent[0]
    assert report.sender_id == child.id
    assert "the report" in report.text
    assert notice.message_id != report.message_id


async def test_a_root_reads_reports_and_notices_in_its_own_turns(world):
    async def report(call):
        await world.harness.report(call.agent.id, "seven")
        return ToolOutcome(text="reported")

    job = world.runs(report)

    async def start(call):
        await world.harness.start_child(child_of(call.agent.id, job))
        return ToolOutcome(text="started")

    root = await world.root()
    await world.ask(root, world.runs(start))
    (created,) = [
        e
        for e in world.events
        if isinstance(e, AgentCreated) and e.agent.parent_id == root
    ]
    await settled(world, root, created.agent.id)
    await world.idle(root)

    assert "seven" in json.dumps(world.requests_of(root)[-1].body)
    assert await world.harness.is_quiet(root)


async def test_a_childs_end_is_told_before_it_is_gone(world):
    root = await world.root(muted=True)
    child = await world.harness.start_child(
        child_of(root, world.says(lambda t: Reply(text="bye")))
    )
    await settled(world, root, child.id)

    told = [type(e) for e in world.of(object, child.id)]
    assert told[0] is AgentCreated
    assert told.index(ChildEnded) < told.index(AgentDisposed)
    (ended,) = world.of(ChildEnded, child.id)
    assert (ended.parent_id, ended.stop_reason, ended.text) == (
        root,
        "completed",
        "bye",
    )


async def test_a_muted_root_asks_no_model_and_still_gives_its_mail(world):
    root = await world.root(muted=True)
    child = await world.harness.start_child(
        child_of(root, world.says(lambda t: Reply(text="for the person")))
    )
    notice = await settled(world, root, child.id)
    await world.idle(root)

    assert "for the person" in notice.text
    assert world.requests_of(root) == []
    assert await world.harness.is_quiet(root)


# -- routes ------------------------------------------------------------------------


async def test_a_child_takes_the_route_of_its_parents_running_request(world):
    prompt = world.says(lambda t: Reply(text="leaf"))
    children = []

    async def cell(call):
        children.append(
            await world.harness.start_child(child_of(call.agent.id, prompt))
        )
        return ToolOutcome(text="started")

    root = await world.root(route=PRO)
    await world.ask(root, world.runs(cell))
    await world.until(lambda: world.requests_of(children[0].id))

    assert world.requests_of(children[0].id)[0].body["model"] == PRO.model


async def test_an_explicit_route_is_on_a_childs_first_request(world):
    root = await world.root(muted=True, route=FLASH)
    prompt = world.says(lambda t: Reply(text="leaf"))
    child = await world.harness.start_child(child_of(root, prompt, route=PRO))
    await settled(world, root, child.id)

    assert world.requests_of(child.id)[0].body["model"] == PRO.model


async def test_an_agent_without_a_request_has_the_route_it_was_made_with(world):
    root = await world.root(route=PRO, muted=True)

    assert await world.harness.running_route(root) == PRO


async def test_advertised_models_are_of_known_providers(world):
    models = await world.harness.advertised_models()

    assert PRO in models
    assert all(model.provider and model.model for model in models)


async def test_a_tool_of_the_harness_can_be_called_by_the_model_itself(world):
    def line(transcript):
        if transcript.tool_results:
            return Reply(text="done")
        command = {"command": "echo direct", "description": "say"}
        return Reply(tool_uses=(ToolUse(name="bash", arguments=command),))

    root = await world.root()
    ended = await world.ask(root, world.says(line))

    assert ended.reason == "completed"
    assert "direct" in world.server.requests[-1].tool_results[-1]


# -- children that are not wanted any more -------------------------------------------


async def heard_of(world, root, child_ids):
    """Wait until these children are gone; what they and *root* have said of them."""
    await world.until(lambda: all(world.of(AgentDisposed, c) for c in child_ids))
    await world.idle(root)
    said = [text for c in child_ids for text in world.of(AssistantText, c)]
    mail = [m for read in world.of(MailRead, root) for m in read.mail]
    asked = json.dumps([request.body for request in world.requests_of(root)])
    return [
        *said,
        *(m for m in mail if m.sender_id in child_ids),
        *(c for c in child_ids if c in asked),
    ]


@pytest.mark.parametrize("muted", [False, True], ids=["stepping", "muted"])
@pytest.mark.parametrize("after_ms", [0, 1, 2, 4, 7, 11, 15, 20])
async def test_a_child_whose_start_is_given_up_is_taken_back(world, after_ms, muted):
    root = await world.root(muted=muted)
    prompt = world.says(lambda t: Reply(text="late", delay_s=5))
    starts = [
        asyncio.create_task(world.harness.start_child(child_of(root, prompt)))
        for _ in range(3)
    ]
    await asyncio.wait(starts, timeout=after_ms / 1000)
    for start in starts:
        start.cancel()
    await asyncio.wait(starts, timeout=WAIT_S)

    kept = {start.result().id for start in starts if not start.cancelled()}
    lost = set(world.children_of(root)) - kept
    assert await heard_of(world, root, lost) == []
    if not kept:
        assert world.requests_of(root) == []
    for child_id in kept:
        await world.harness.cancel(child_id)
        await settled(world, root, child_id)


async def test_a_child_that_is_known_already_is_taken_back(world):
    root = await world.root()
    prompt = world.says(lambda t: Reply(text="late", delay_s=5))
    starting = asyncio.create_task(world.harness.start_child(child_of(root, prompt)))
    while not world.children_of(root):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting], timeout=WAIT_S)

    assert starting.cancelled()
    (child_id,) = world.children_of(root)
    assert world.of(AgentDisposed, child_id)  # before the one who asked goes on
    assert await heard_of(world, root, {child_id}) == []
    assert world.requests_of(root) == []


@pytest.mark.parametrize("muted", [False, True], ids=["stepping", "muted"])
async def test_a_child_whose_admission_is_on_its_way_is_taken_back(
    world, monkeypatch, muted
):
    root = await world.root(muted=muted)
    prompt = world.says(lambda t: Reply(text="late", delay_s=5))
    starting = asyncio.create_task(world.harness.start_child(child_of(root, prompt)))
    link = world.harness._link
    settle = link._settle

    def settle_too_late(*answer):
        monkeypatch.undo()
        starting.cancel()
        settle(*answer)

    monkeypatch.setattr(link, "_settle", settle_too_late)
    await asyncio.wait([starting], timeout=WAIT_S)

    assert starting.cancelled()
    (child_id,) = world.children_of(root)
    assert world.of(AgentDisposed, child_id)
    assert await heard_of(world, root, {child_id}) == []
    assert world.requests_of(root) == []


async def test_a_child_whose_start_takes_too_long_is_taken_back(world, monkeypatch):
    root = await world.root()
    prompt = world.says(lambda t: Reply(text="late", delay_s=5))
    link = world.harness._link
    request = link.request

    def ask_hastily(method, params, *, timeout_s, undo):
        hasty_s = 0.001 if method == "subagents/start" else timeout_s
        return request(method, params, timeout_s=hasty_s, undo=undo)

    monkeypatch.setattr(link, "request", ask_hastily)
    with pytest.raises(HarnessError) as refused:
        await world.harness.start_child(child_of(root, prompt))

    assert refused.value.code is ErrorCode.TIMEOUT
    assert await heard_of(world, root, set(world.children_of(root))) == []
    assert world.requests_of(root) == []


async def test_a_turn_goes_on_when_its_cell_takes_a_child_back(world):
    leaf = world.says(lambda t: Reply(text="late", delay_s=5))

    async def cell(call):
        request = child_of(call.agent.id, leaf)
        starting = asyncio.create_task(world.harness.start_child(request))
        while not world.children_of(call.agent.id):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting], timeout=WAIT_S)
        return ToolOutcome(text="gave it up")

    root = await world.root()
    ended = await world.ask(root, world.runs(cell, then="the answer"))

    assert ended.reason == "completed"
    assert world.of(AssistantText, root)[-1].text == "the answer"
    assert len(world.requests_of(root)) == 2
    assert await heard_of(world, root, set(world.children_of(root))) == []


async def test_mail_beside_that_of_lost_children_is_read(world):
    root = await world.root()
    quick = world.says(lambda t: Reply(text="quick", delay_s=0.05))
    slow = world.says(lambda t: Reply(text="late", delay_s=5))
    good = [await world.harness.start_child(child_of(root, quick)) for _ in range(4)]
    bad = [
        asyncio.create_task(world.harness.start_child(child_of(root, slow)))
        for _ in range(6)
    ]
    for number, start in enumerate(bad):
        await asyncio.wait([start], timeout=0.01 * number)
        start.cancel()
    await asyncio.wait(bad, timeout=WAIT_S)
    kept = {start.result().id for start in bad if not start.cancelled()}
    for child_id in kept:
        await world.harness.cancel(child_id)

    for child in good:
        await settled(world, root, child.id)
    lost = set(world.children_of(root)) - {child.id for child in good} - kept
    assert await heard_of(world, root, lost) == []


async def test_mail_that_comes_while_a_lost_childs_notice_is_dropped_is_read(world):
    late = world.says(lambda t: Reply(text="late", delay_s=5))
    task = world.says(lambda t: Reply(text="read it"))
    for _ in range(5):
        root = await world.root()
        starting = asyncio.create_task(world.harness.start_child(child_of(root, late)))
        while not world.children_of(root):
            await asyncio.sleep(0)
        starting.cancel()
        while not world.of(AgentStatusChanged, root):
            await asyncio.sleep(0)
        await world.harness.send(root, task)
        await world.until(lambda agent=root: world.of(AssistantText, agent))
        await world.idle(root)

        assert world.of(AssistantText, root)[-1].text == "read it"
        assert len(world.requests_of(root)) == 1
