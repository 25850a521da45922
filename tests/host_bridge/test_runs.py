"""When a run is over, and how it ends otherwise; on a harness that a test plays."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from host_bridge.agents import AgentTree
from host_bridge.errors import HarnessError
from host_bridge.harness.port import (
    AgentCreated,
    AgentInfo,
    AgentStatusChanged,
    AssistantText,
    ChildEnded,
    HarnessEvent,
    HarnessLost,
    Mail,
    MailRead,
    ModelRequestFailed,
    TurnEnded,
)
from host_bridge.runs import Run, RunLimits, RunOutcome
from kernel_ext.wire.codes import ErrorCode

BOUND_S = 5.0


@dataclass
class PlayedHarness:
    """The three calls that a run makes; the test says what they come to."""

    sent: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    quiet: bool = True
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    gate: asyncio.Event | None = None
    lost: bool = False

    async def send(self, agent_id: str, text: str) -> None:
        self._check()
        self.sent.append(text)

    async def cancel(self, agent_id: str) -> None:
        self._check()
        self.cancelled.append(agent_id)

    async def is_quiet(self, agent_id: str) -> bool:
        quiet = self.quiet
        self.asked.set()
        if self.gate is not None:
            await self.gate.wait()
        self._check()
        return quiet

    def _check(self) -> None:
        if self.lost:
            raise HarnessError(ErrorCode.HARNESS_LOST, "it is closed")


class Theatre:
    """A run, and the events that a test lets happen."""

    def __init__(self, **limits: Any) -> None:
        self.harness = PlayedHarness()
        self.agents = AgentTree(tell=self._hear)
        self.agents.add_root(info("root", None))
        self.run = Run(self.harness, self.agents, "root", limits=RunLimits(**limits))  # type: ignore[arg-type]
        self.task: asyncio.Task[RunOutcome] | None = None

    def _hear(self, event: Any) -> None:
        self.run.on_event(event)

    def tell(self, *events: HarnessEvent) -> None:
        for event in events:
            self.agents.apply(event)
            self.run.on_event(event)

    async def begin(self) -> None:
        self.task = asyncio.create_task(self.run.drive("the task"))
        await settle()

    async def end(self) -> RunOutcome:
        assert self.task is not None
        async with asyncio.timeout(BOUND_S):
            return await self.task

    async def goes_on(self) -> bool:
        await settle()
        assert self.task is not None
        return not self.task.done()

    # What agents do.

    def root_turn(self, text: str = "", reason: str = "completed", **more: Any) -> None:
        """A turn of the root from its begin to its end."""
        self.tell(AgentStatusChanged(agent_id="root", status="running"))
        if text:
            self.tell(AssistantText(agent_id="root", text=text))
        self.tell(TurnEnded(agent_id="root", reason=reason, **more))
        self.tell(AgentStatusChanged(agent_id="root", status="idle"))

    def admit(self, child: str, parent: str = "root", depth: int = 1) -> None:
        self.tell(AgentCreated(agent=info(child, parent, depth)))
        self.agents.admit(info(child, parent, depth), child)
        self.tell(AgentStatusChanged(agent_id=child, status="running"))

    def end_child(self, child: str, parent: str = "root") -> None:
        self.tell(
            AgentStatusChanged(agent_id=child, status="idle"),
            ChildEnded(
                agent_id=child, parent_id=parent, stop_reason="completed", text=None
            ),
        )

    def read_notice(self, child: str, parent: str = "root") -> None:
        mail = Mail(message_id="", sender_id=child, text="finished", settled=True)
        self.tell(MailRead(agent_id=parent, mail=(mail,)))


def info(agent_id: str, parent_id: str | None, depth: int = 0) -> AgentInfo:
    return AgentInfo(id=agent_id, parent_id=parent_id, depth=depth, cwd="/")


async def settle() -> None:
    """Let everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
def stage() -> Callable[..., Theatre]:
    """Makes theatres inside the test's loop."""
    return Theatre


async def test_a_run_without_children_is_over_with_the_roots_turn(stage):
    theatre = stage()
    await theatre.begin()

    theatre.root_turn("the answer")

    assert await theatre.end() == RunOutcome(
        answer="the answer", stopped=False, silent=()
    )
    assert theatre.harness.sent == ["the task"]


async def test_a_run_is_not_over_before_the_root_had_a_turn(stage):
    theatre = stage()

    await theatre.begin()

    assert await theatre.goes_on()
    theatre.root_turn("x")
    await theatre.end()


async def test_everybody_idle_is_not_the_end_while_a_childs_notice_is_unread(stage):
    theatre = stage()
    await theatre.begin()
    theatre.admit("child")
    theatre.root_turn("waiting")

    theatre.end_child("child")

    assert await theatre.goes_on()
    theatre.read_notice("child")
    theatre.root_turn("done")
    assert (await theatre.end()).answer == "done"


async def test_a_running_child_keeps_the_run_going(stage):
    theatre = stage()
    await theatre.begin()
    theatre.admit("child")

    theatre.root_turn("waiting")

    assert await theatre.goes_on()
    theatre.end_child("child")
    theatre.read_notice("child")
    await theatre.end()


async def test_mail_in_the_roots_inbox_keeps_the_run_going(stage):
    theatre = stage()
    await theatre.begin()
    theatre.harness.quiet = False

    theatre.root_turn("waiting")

    assert await theatre.goes_on()
    theatre.harness.quiet = True
    theatre.root_turn("done")
    assert (await theatre.end()).answer == "done"


async def test_what_happens_while_the_harness_is_asked_is_not_missed(stage):
    theatre = stage()
    theatre.harness.quiet, theatre.harness.gate = False, asyncio.Event()
    await theatre.begin()
    theatre.root_turn("first")
    await theatre.harness.asked.wait()

    # The last event of all comes before the answer "not quiet" is read.
    theatre.harness.quiet = True
    theatre.root_turn("last")
    theatre.harness.gate.set()

    assert (await theatre.end()).answer == "last"


async def test_a_failure_while_the_harness_is_asked_is_the_outcome(stage):
    theatre = stage()
    theatre.harness.gate = asyncio.Event()
    await theatre.begin()
    theatre.root_turn("first")
    await theatre.harness.asked.wait()

    theatre.root_turn(reason="error", error="overloaded")
    theatre.harness.gate.set()

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.MODEL_REFUSED


async def test_grandchildren_are_waited_for(stage):
    theatre = stage()
    await theatre.begin()
    theatre.admit("child")
    theatre.admit("grandchild", parent="child", depth=2)
    theatre.root_turn("waiting")
    theatre.end_child("child")
    theatre.read_notice("child")

    assert await theatre.goes_on()

    theatre.end_child("grandchild", parent="child")
    assert await theatre.goes_on()
    theatre.read_notice("grandchild", parent="child")
    await theatre.end()


async def test_a_child_that_wakes_again_is_waited_for_again(stage):
    theatre = stage()
    theatre.harness.quiet = False
    await theatre.begin()
    theatre.admit("child")
    theatre.root_turn("waiting")
    theatre.end_child("child")
    theatre.read_notice("child")
    theatre.tell(AgentStatusChanged(agent_id="child", status="running"))
    theatre.harness.quiet = True

    theatre.end_child("child")

    assert await theatre.goes_on()
    theatre.read_notice("child")
    await theatre.end()


async def test_a_delegate_of_the_harness_itself_is_waited_for_while_it_runs(stage):
    theatre = stage()
    await theatre.begin()
    theatre.tell(
        AgentCreated(agent=info("own", "root", 1)),
        AgentStatusChanged(agent_id="own", status="running"),
    )
    theatre.root_turn("waiting")

    assert await theatre.goes_on()

    theatre.tell(AgentStatusChanged(agent_id="own", status="idle"))
    await theatre.end()


async def test_a_child_without_a_report_is_named_at_the_end(stage):
    theatre = stage()
    await theatre.begin()
    for child in ("talks", "mute"):
        theatre.admit(child)
    theatre.agents.record_report("talks", "here")
    theatre.root_turn("waiting")
    for child in ("talks", "mute"):
        theatre.end_child(child)
        theatre.read_notice(child)

    outcome = await theatre.end()

    assert outcome.silent == ("mute",)


async def test_silence_of_children_ends_the_run_and_names_them(stage):
    theatre = stage(silence_s=0.01)
    await theatre.begin()
    for child in ("slow", "slower", "quick"):
        theatre.admit(child)
    theatre.end_child("quick")
    theatre.read_notice("quick")

    theatre.root_turn("waiting")

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.TIMEOUT
    assert "slow, slower" in str(caught.value)
    assert "quick" not in str(caught.value)
    assert {"root", "slow", "slower"} <= set(theatre.harness.cancelled)


async def test_silence_while_the_root_works_is_no_reason_to_give_up(stage):
    theatre = stage(silence_s=0.001)
    await theatre.begin()
    theatre.tell(AgentStatusChanged(agent_id="root", status="running"))

    done, _ = await asyncio.wait({theatre.task}, timeout=0.05)

    assert done == set()
    theatre.root_turn("done")
    await theatre.end()


@pytest.mark.parametrize("status", [400, 401, 403, 404])
async def test_a_refused_request_is_told_by_its_status(stage, status):
    theatre = stage()
    await theatre.begin()
    theatre.tell(
        ModelRequestFailed(agent_id="root", status=status, attempt=1, message="no")
    )

    theatre.root_turn(reason="error", error="no\n\n  such\tthing " + "x" * 2000)

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.MODEL_REFUSED
    assert str(status) in str(caught.value)
    assert "no such thing" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 500
    assert caught.value.next_step


async def test_a_childs_refusal_is_not_blamed_on_the_root(stage):
    theatre = stage()
    await theatre.begin()
    theatre.tell(
        ModelRequestFailed(agent_id="child", status=401, attempt=1, message="no")
    )

    theatre.root_turn(reason="error", error="something else")

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert "401" not in str(caught.value)
    assert "something else" in str(caught.value)


async def test_a_refusal_that_was_got_over_is_not_blamed_later(stage):
    theatre = stage()
    await theatre.begin()
    theatre.tell(
        ModelRequestFailed(agent_id="root", status=429, attempt=1, message="busy"),
        AssistantText(agent_id="root", text="now it works"),
    )

    theatre.root_turn(reason="error", error="something else")

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.MODEL_REFUSED


@pytest.mark.parametrize("status", [429, 500, 503, None])
async def test_a_busy_server_is_given_up_after_the_limit(stage, status):
    theatre = stage(max_retries=2)
    await theatre.begin()

    def fail(attempt: int) -> None:
        theatre.tell(
            ModelRequestFailed(
                agent_id="root", status=status, attempt=attempt, message="busy"
            )
        )

    fail(1)
    fail(2)
    assert await theatre.goes_on()

    fail(3)

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.MODEL_BUSY
    assert "root" in theatre.harness.cancelled


async def test_a_harness_that_gives_up_on_a_busy_server_first_says_busy_too(stage):
    theatre = stage(max_retries=9)
    await theatre.begin()
    theatre.tell(
        ModelRequestFailed(agent_id="root", status=500, attempt=3, message="busy")
    )

    theatre.root_turn(reason="error", error="overloaded")

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.MODEL_BUSY


@pytest.mark.parametrize("during", ["turn", "question", "waiting"])
async def test_a_harness_that_is_lost_ends_the_run(stage, during):
    theatre = stage()
    if during == "question":
        theatre.harness.gate = asyncio.Event()
    await theatre.begin()
    match during:
        case "turn":
            theatre.tell(AgentStatusChanged(agent_id="root", status="running"))
        case "question":
            theatre.root_turn("first")
            await theatre.harness.asked.wait()
            theatre.harness.gate.set()
        case "waiting":
            theatre.admit("child")
            theatre.root_turn("waiting")
    theatre.harness.lost = True

    theatre.tell(HarnessLost(message="SIGKILL"))

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.HARNESS_LOST
    assert "SIGKILL" in str(caught.value)
    assert caught.value.next_step


async def test_the_first_failure_is_the_one_that_is_told(stage):
    theatre = stage()
    await theatre.begin()

    theatre.tell(HarnessLost(message="SIGKILL"))
    theatre.root_turn(reason="error", error="aborted by the end of the link")

    with pytest.raises(HarnessError) as caught:
        await theatre.end()
    assert caught.value.code is ErrorCode.HARNESS_LOST


async def test_a_stop_cancels_the_root_and_its_running_children(stage):
    theatre = stage()
    await theatre.begin()
    theatre.admit("child")
    theatre.tell(AgentStatusChanged(agent_id="root", status="running"))

    await theatre.run.stop()

    assert set(theatre.harness.cancelled) == {"root", "child"}
    assert await theatre.goes_on()
    theatre.root_turn(reason="aborted")
    assert (await theatre.end()).stopped


async def test_a_stop_while_children_are_waited_for_is_the_end(stage):
    theatre = stage()
    theatre.harness.quiet = False
    await theatre.begin()
    theatre.admit("child")
    theatre.root_turn("waiting")

    await theatre.run.stop()

    assert (await theatre.end()).stopped


async def test_a_stop_before_the_task_is_given_makes_no_turn_at_all(stage):
    theatre = stage()
    await theatre.run.stop()

    await theatre.begin()

    assert (await theatre.end()).stopped
    assert theatre.harness.sent == []


async def test_a_turn_that_begins_after_a_stop_is_cancelled_as_well(stage):
    theatre = stage()
    await theatre.begin()
    await theatre.run.stop()
    theatre.harness.cancelled.clear()

    theatre.tell(AgentStatusChanged(agent_id="root", status="running"))
    await settle()

    assert theatre.harness.cancelled == ["root"]
    theatre.root_turn(reason="aborted")
    assert (await theatre.end()).stopped


async def test_an_error_that_follows_from_a_stop_is_no_failure(stage):
    theatre = stage()
    await theatre.begin()
    await theatre.run.stop()

    theatre.root_turn(reason="error", error="aborted")

    assert (await theatre.end()).stopped
