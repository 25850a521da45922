"""`rlm.*` on the harness in memory: admission, labels, models, reports."""

import asyncio
from types import SimpleNamespace

import pytest

from host_bridge.errors import HarnessError
from host_bridge.harness.port import AssistantText, Route
from host_bridge.harness.script import Reply
from host_bridge.kernels.attachment import Asker
from host_bridge.kernels.execution import Cell, OutputBudget
from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import Request

OTHER = Route(provider="gateway", model="org/model/version")
WAIT_S = 10.0


@pytest.fixture
async def world(open_stage):
    """A bridge without kernels: requests are put straight to its handlers."""
    async with open_stage(
        models=(Route(provider="scripted", model="m"), OTHER)
    ) as stage:
        await stage.root()
        yield World(stage)


class World:
    def __init__(self, stage):
        self.stage = stage
        self.bridge = stage.bridge
        self.current = True
        self._ids = iter(range(1, 100_000))

    async def ask(self, request_type, agent_id="root", **payload):
        request = Request(
            id=next(self._ids), type=request_type, generation="g", payload=payload
        )
        asker = Asker(
            agent_id=agent_id,
            generation="g",
            cell=None,
            is_current=lambda: self.current,
        )
        async with asyncio.timeout(WAIT_S):
            return await self.dispatch(request, asker)

    async def dispatch(self, request, asker):
        from host_bridge.requests.dispatcher import Dispatcher

        return await Dispatcher(self.bridge.handlers).dispatch(request, asker)

    async def run(self, prompt="p", agent_id="root", **kwargs):
        return await self.ask("rlm.run", agent_id, prompt=prompt, kwargs=kwargs)

    async def child(self, prompt="p", **kwargs):
        reply = await self.run(prompt, **kwargs)
        assert reply.status == "ok", reply
        return SimpleNamespace(**reply.result)


async def test_a_child_is_admitted_with_all_that_a_handle_needs(world):
    child = await world.child("hello", name="mine")

    assert child.name == "mine"
    assert child.model == "scripted/generic"
    directory = world.bridge.settings.state.session(child.rlm_child_id).directory
    assert child.session_dir == str(directory)
    assert directory.is_absolute()
    assert (directory / "exports").is_dir()


async def test_a_child_is_admitted_before_its_first_words(world):
    child = await world.child()

    assert world.stage.of(AssistantText) == []
    await world.stage.until(
        lambda: [
            e for e in world.stage.of(AssistantText) if e.agent_id == child.rlm_child_id
        ]
    )


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"temperature": 1}, "Unsupported rlm.run kwargs: temperature"),
        ({"b": 1, "a": 2, "name": "n"}, "Unsupported rlm.run kwargs: a, b"),
    ],
)
async def test_unknown_options_are_refused_by_name(world, kwargs, text):
    reply = await world.run(**kwargs)

    assert (reply.code, reply.error) == ("INVALID_ARGUMENT", text)
    assert world.bridge.agents.children("root") == []


@pytest.mark.parametrize("prompt", ["", "   \n"])
async def test_a_prompt_says_something(world, prompt):
    assert (await world.run(prompt)).code == "INVALID_ARGUMENT"


async def test_a_prompt_has_a_largest_size(world):
    assert (await world.run("ü" * 500_001)).code == "PAYLOAD_TOO_LARGE"


async def test_thinking_is_refused_in_this_version(world):
    assert (await world.run(thinking="low")).code == "UNSUPPORTED_REASONING_EFFORT"


@pytest.mark.parametrize(
    "model",
    [
        "missing/local",
        "m",
        "scripted/",
        "/m",
        "scripted/m ",
        "Scripted/M",
        "gateway/org",
        "",
    ],
)
async def test_a_model_that_is_not_advertised_is_refused_before_any_child(world, model):
    reply = await world.run(model=model)

    assert reply.code == "MODEL_UNAVAILABLE"
    assert world.bridge.agents.children("root") == []
    # Its label is free still.
    assert (await world.child(name="rlm-1")).name == "rlm-1"


async def test_a_model_is_taken_exactly_slashes_and_all(world):
    child = await world.child(model="gateway/org/model/version")

    assert child.model == OTHER.selector
    route = await world.bridge.harness.running_route(child.rlm_child_id)
    assert route == OTHER


async def test_an_inherited_route_is_not_checked(world):
    """The root runs scripted/generic, which this harness does not advertise."""
    advertised = {r.selector for r in await world.bridge.harness.advertised_models()}
    assert "scripted/generic" not in advertised

    child = await world.child()

    assert child.model == "scripted/generic"


async def test_the_depth_limit_is_one_by_default(world):
    child = await world.child()

    reply = await world.run("deeper", agent_id=child.rlm_child_id)

    assert reply.code == "DEPTH_LIMIT"
    assert reply.error == (
        "RLM recursion depth limit reached (RLM_DEPTH=1, RLM_MAX_DEPTH=1)"
    )


async def test_a_raised_limit_allows_grandchildren_and_no_more(open_stage):
    async with open_stage(max_depth=2) as stage:
        await stage.root()
        world = World(stage)
        child = await world.child()

        grandchild = await world.run("deeper", agent_id=child.rlm_child_id)
        refused = await world.run(
            "too deep", agent_id=grandchild.result["rlm_child_id"]
        )

        assert grandchild.status == "ok"
        assert refused.code == "DEPTH_LIMIT"


async def test_a_taken_name_is_refused(world):
    await world.child(name="x")

    reply = await world.run(name="x")

    assert reply.code == "DUPLICATE_LABEL"
    assert len(world.bridge.agents.children("root")) == 1


async def test_of_many_children_of_one_name_at_once_one_is_admitted(world):
    replies = await asyncio.gather(*(world.run(name="x") for _ in range(8)))

    assert sorted(r.status for r in replies) == ["error"] * 7 + ["ok"]
    assert {r.code for r in replies if r.status == "error"} == {"DUPLICATE_LABEL"}


async def test_children_without_a_name_are_numbered(world):
    replies = await asyncio.gather(*(world.run() for _ in range(5)))

    assert sorted(r.result["name"] for r in replies) == [
        f"rlm-{n}" for n in range(1, 6)
    ]


async def test_the_name_of_a_child_that_could_not_be_made_is_free(world, monkeypatch):
    async def refuse(request):
        from host_bridge.errors import HarnessError
        from kernel_ext.wire.codes import ErrorCode

        raise HarnessError(ErrorCode.HOST_REQUEST_FAILED, "no")

    with monkeypatch.context() as patched:
        patched.setattr(world.bridge.harness, "start_child", refuse)
        assert (await world.run(name="x")).code == "HOST_REQUEST_FAILED"

    assert (await world.child(name="x")).name == "x"


async def test_a_replaced_kernel_admits_no_child(world):
    world.current = False

    assert (await world.run()).code == "STALE_GENERATION"
    assert world.bridge.agents.children("root") == []


async def test_an_agent_that_nobody_knows_admits_no_child(world):
    assert (await world.run(agent_id="nobody")).code == "AGENT_NOT_LIVE"


async def test_children_are_listed_in_order_with_primes_fields(world):
    first = await world.child("a", name="one")
    second = await world.child("b")
    await world.bridge.agents.until(
        lambda: all(c.endings for c in world.bridge.agents.children("root"))
    )

    reply = await world.ask("rlm.list_subagents")

    assert reply.result["subagents"] == [
        {
            "rlm_child_id": child.rlm_child_id,
            "active_session_id": child.rlm_child_id,
            "session_id": child.rlm_child_id,
            "session_name": child.name,
            "session_dir": child.session_dir,
            "status": "completed",
        }
        for child in (first, second)
    ]


async def test_a_child_that_runs_is_listed_as_running(world, stage_gate):
    child = await world.child(stage_gate.prompt(world.stage))

    listed = await world.ask("rlm.list_subagents")
    stage_gate.open()

    assert [row["status"] for row in listed.result["subagents"]] == ["running"]
    assert listed.result["subagents"][0]["rlm_child_id"] == child.rlm_child_id


@pytest.fixture
def stage_gate():
    """A child whose model is busy until the gate is opened."""

    class Gate:
        def __init__(self):
            self.agent = None

        def prompt(self, stage):
            # The scripted model thinks for so long; the test ends before.
            return stage.plays(
                "<busy>", lambda transcript: Reply(text="late", delay_s=60)
            )

        def open(self):
            pass

    return Gate()


async def test_grandchildren_are_not_listed(open_stage):
    async with open_stage(max_depth=2) as stage:
        await stage.root()
        world = World(stage)
        child = await world.child()
        await world.run("deeper", agent_id=child.rlm_child_id)

        listed = await world.ask("rlm.list_subagents")

        assert [r["rlm_child_id"] for r in listed.result["subagents"]] == [
            child.rlm_child_id
        ]


# -- reports ---------------------------------------------------------------------------


async def test_a_report_is_the_childs_message(world):
    child = await world.child("x")
    await world.ask(
        "agent_message.send", child.rlm_child_id, message="hi", receiver_role="parent"
    )

    reply = await world.ask("rlm.report", rlm_child_id=child.rlm_child_id)

    assert reply.result == {"text": "hi", "source": "message"}


async def test_a_report_is_the_closing_text_where_no_message_came(world):
    child = await world.child("x")

    reply = await world.ask("rlm.report", rlm_child_id=child.rlm_child_id)

    assert reply.result == {"text": "done", "source": "closing"}


async def test_a_report_that_is_late_names_the_child(world, stage_gate):
    child = await world.child(stage_gate.prompt(world.stage), name="slow one")

    reply = await world.ask(
        "rlm.report", rlm_child_id=child.rlm_child_id, timeout_s=0.01
    )

    assert reply.code == "TIMEOUT"
    assert '"slow one"' in reply.error


async def test_a_child_that_was_stopped_without_a_word_has_failed(world, stage_gate):
    child = await world.child(stage_gate.prompt(world.stage))
    waiting = asyncio.create_task(
        world.ask("rlm.report", rlm_child_id=child.rlm_child_id)
    )
    await asyncio.sleep(0)

    await world.bridge.harness.cancel(child.rlm_child_id)

    assert (await waiting).code == "CHILD_FAILED"


@pytest.mark.parametrize("timeout_s", [-1, -0.001])
async def test_a_negative_wait_is_refused(world, timeout_s):
    child = await world.child()

    reply = await world.ask(
        "rlm.report", rlm_child_id=child.rlm_child_id, timeout_s=timeout_s
    )

    assert reply.code == "INVALID_ARGUMENT"


async def test_another_agents_child_reports_nothing(world):
    child = await world.child()
    await world.stage.root("other")

    reply = await world.ask("rlm.report", "other", rlm_child_id=child.rlm_child_id)

    assert reply.code == "CHILD_NOT_FOUND"


# -- what this version does not have ------------------------------------------------------


@pytest.mark.parametrize(
    ("request_type", "payload", "code"),
    [
        ("rlm.find_models", {}, "UNSUPPORTED_MODEL_SEARCH"),
        ("rlm.find_models", {"query": "x", "limit": 3}, "UNSUPPORTED_MODEL_SEARCH"),
        ("rlm.delete_subagent", {"target": "x"}, "UNSUPPORTED_DELETION"),
    ],
)
async def test_what_is_not_offered_says_so(world, request_type, payload, code):
    assert (await world.ask(request_type, **payload)).code == code


# -- messages -------------------------------------------------------------------------------


async def test_a_message_reaches_the_parent_under_the_senders_name(world):
    from host_bridge.harness.port import MailRead

    child = await world.child("x")

    reply = await world.ask(
        "agent_message.send", child.rlm_child_id, message="hi", receiver_role="parent"
    )

    assert reply.result["receiver_role"] == "parent"
    assert reply.result["message_id"]
    mail = await world.stage.until(
        lambda: [m for e in world.stage.of(MailRead) for m in e.mail if m.text == "hi"]
    )
    assert [m.sender_id for m in mail] == [child.rlm_child_id]


@pytest.mark.parametrize(
    "extra", [{"sender": "root"}, {"sender_id": "x"}, {"from": "x"}, {"target": "x"}]
)
async def test_no_sender_can_be_named(world, extra):
    child = await world.child("x")

    reply = await world.ask(
        "agent_message.send",
        child.rlm_child_id,
        message="hi",
        receiver_role="parent",
        **extra,
    )

    assert reply.code == "INVALID_ARGUMENT"
    assert world.bridge.agents.get(child.rlm_child_id).reports == []


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (
            {"receiver_role": "sibling", "receiver_name": "s"},
            "UNSUPPORTED_RELATIONSHIP",
        ),
        ({"receiver_role": "child", "receiver_name": "c"}, "UNSUPPORTED_RELATIONSHIP"),
        ({"receiver_role": "parent", "receiver_name": "p"}, "INVALID_ARGUMENT"),
        ({"receiver_role": "all"}, "INVALID_ARGUMENT"),
        ({"receiver_role": "parent", "message": "  "}, "INVALID_ARGUMENT"),
        ({"receiver_role": "parent", "message": "x" * 16_385}, "INVALID_ARGUMENT"),
    ],
    ids=["sibling", "child", "named parent", "all", "blank", "long"],
)
async def test_a_message_that_is_not_offered_is_refused(world, payload, code):
    child = await world.child("x")

    reply = await world.ask(
        "agent_message.send", child.rlm_child_id, **{"message": "m", **payload}
    )

    assert reply.code == code
    assert world.bridge.agents.get(child.rlm_child_id).reports == []


async def test_the_longest_message_is_delivered(world):
    child = await world.child("x")

    reply = await world.ask(
        "agent_message.send",
        child.rlm_child_id,
        message="😀" * 16_384,
        receiver_role="parent",
    )

    assert reply.status == "ok"


async def test_a_root_has_no_parent_to_write_to(world):
    reply = await world.ask("agent_message.send", message="m", receiver_role="parent")

    assert reply.code == "UNSUPPORTED_RELATIONSHIP"


async def test_a_replaced_kernel_sends_nothing(world):
    child = await world.child("x")
    world.current = False

    reply = await world.ask(
        "agent_message.send", child.rlm_child_id, message="m", receiver_role="parent"
    )

    assert reply.code == "STALE_GENERATION"
    assert world.bridge.agents.get(child.rlm_child_id).reports == []


# -- tools -----------------------------------------------------------------------------------


async def test_tools_are_listed_for_the_agent_that_asks(world):
    reply = await world.ask("dsh_tools.list")

    assert [tool["name"] for tool in reply.result["tools"]] == ["ipython"]


async def test_a_tool_call_that_belongs_to_no_open_cell_is_refused(world):
    reply = await world.ask("dsh_tools.call", name="x", arguments={})

    assert reply.code == "REQUEST_SCOPE_CLOSED"


async def test_a_tool_of_the_callers_own_kernel_is_refused(world):
    cell = Cell(OutputBudget(100), "execution")
    request = Request(
        id=1,
        type="dsh_tools.call",
        generation="g",
        payload={"name": "ipython", "arguments": {"code": "1"}},
    )
    asker = Asker(agent_id="root", generation="g", cell=cell, is_current=lambda: True)

    reply = await world.dispatch(request, asker)

    assert reply.code == "INVALID_ARGUMENT"


async def test_nothing_that_fails_after_the_admission_hides_the_child(world):
    async def broken(agent_id):
        raise HarnessError(ErrorCode.TIMEOUT, "too late")

    world.bridge.harness.running_route = broken
    refused = await world.run(name="n")
    world.bridge.harness.running_route = type(
        world.bridge.harness
    ).running_route.__get__(world.bridge.harness)

    assert refused.code == "TIMEOUT"
    assert world.bridge.agents.children("root") == []
    assert (await world.run(name="n")).status == "ok"
