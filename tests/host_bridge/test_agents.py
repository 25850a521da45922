"""Who is whose child, labels, reports, and when everything has settled."""

import asyncio

import pytest

from host_bridge.agents import AgentTree
from host_bridge.errors import RequestError
from host_bridge.events import ChildAdmitted, ReportSent
from host_bridge.harness.port import (
    AgentCreated,
    AgentDisposed,
    AgentInfo,
    AgentStatusChanged,
    AssistantText,
    ChildEnded,
    HarnessLost,
    Mail,
    MailRead,
)

WAIT_S = 5.0


def info(agent_id, parent=None, depth=1):
    return AgentInfo(
        id=agent_id, parent_id=parent, depth=depth if parent else 0, cwd="/"
    )


def admit(tree, agent_id, parent="root"):
    child = info(agent_id, parent)
    tree.apply(AgentCreated(agent=child))
    return tree.admit(child, agent_id)


def status(tree, agent_id, value):
    tree.apply(AgentStatusChanged(agent_id=agent_id, status=value))


def end(tree, agent_id, parent="root", reason="completed", text=None):
    status(tree, agent_id, "idle")
    tree.apply(
        ChildEnded(agent_id=agent_id, parent_id=parent, stop_reason=reason, text=text)
    )


def read_notice(tree, agent_id, reader="root"):
    notice = Mail(message_id="m", sender_id=agent_id, text="ended", settled=True)
    tree.apply(MailRead(agent_id=reader, mail=(notice,)))


@pytest.fixture
def tree():
    tree = AgentTree()
    tree.add_root(info("root"))
    return tree


def unsettled(tree):
    return [agent.info.id for agent in tree.unsettled("root")]


def test_an_admitted_child_is_waited_for_from_its_admission(tree):
    admit(tree, "c")

    assert unsettled(tree) == ["c"]
    assert tree.get("c").status == "running"


def test_while_all_are_idle_and_the_notice_is_unread_nothing_has_settled(tree):
    admit(tree, "c")
    status(tree, "c", "running")
    end(tree, "c")

    assert not any(agent.is_running for agent in tree.descendants("root"))
    assert unsettled(tree) == ["c"]
    read_notice(tree, "c")
    assert unsettled(tree) == []


def test_a_child_that_is_woken_again_is_waited_for_again(tree):
    admit(tree, "c")
    end(tree, "c")
    read_notice(tree, "c")
    status(tree, "c", "running")
    assert unsettled(tree) == ["c"]

    end(tree, "c")
    assert unsettled(tree) == ["c"]
    read_notice(tree, "c")
    assert unsettled(tree) == []


def test_a_message_is_no_notice(tree):
    admit(tree, "c")
    end(tree, "c")

    mail = Mail(message_id="m", sender_id="c", text="hello")
    tree.apply(MailRead(agent_id="root", mail=(mail,)))

    assert unsettled(tree) == ["c"]


def test_a_grandchild_is_waited_for(tree):
    admit(tree, "c")
    admit(tree, "g", parent="c")
    end(tree, "c")
    read_notice(tree, "c")
    assert unsettled(tree) == ["g"]

    end(tree, "g", parent="c")
    read_notice(tree, "g", reader="c")

    assert unsettled(tree) == []
    assert [a.info.id for a in tree.descendants("root")] == ["c", "g"]


def test_the_harness_own_delegates_are_waited_for_only_while_they_run(tree):
    tree.apply(AgentCreated(agent=info("d", "root")))
    assert unsettled(tree) == []

    status(tree, "d", "running")
    assert unsettled(tree) == ["d"]
    status(tree, "d", "idle")

    assert unsettled(tree) == []
    assert tree.get("d").status == "completed"


def test_a_child_that_was_disposed_before_its_end_will_not_end(tree):
    admit(tree, "c")

    tree.apply(AgentDisposed(agent_id="c"))

    assert unsettled(tree) == []


def test_a_child_that_was_disposed_after_its_end_is_read_of_still(tree):
    admit(tree, "c")
    end(tree, "c")
    tree.apply(AgentDisposed(agent_id="c"))

    assert unsettled(tree) == ["c"]


def test_a_notice_that_nobody_is_left_to_read_is_not_waited_for(tree):
    admit(tree, "c")
    admit(tree, "g", parent="c")
    end(tree, "c")
    read_notice(tree, "c")
    tree.apply(AgentDisposed(agent_id="c"))

    assert unsettled(tree) == ["g"]
    end(tree, "g", parent="c")
    assert unsettled(tree) == []


def test_events_may_come_before_the_admission(tree):
    child = info("c", "root")
    tree.apply(AgentCreated(agent=child))
    status(tree, "c", "running")
    end(tree, "c", text="quick")
    read_notice(tree, "c")

    agent = tree.admit(child, "label")

    assert (agent.label, agent.status) == ("label", "completed")
    assert unsettled(tree) == []


def test_when_the_harness_is_lost_nothing_is_waited_for(tree):
    admit(tree, "running")
    status(tree, "running", "running")
    admit(tree, "ended")
    end(tree, "ended")

    tree.apply(HarnessLost(message="gone"))

    assert unsettled(tree) == []


def test_events_of_strangers_change_nothing(tree):
    status(tree, "x", "running")
    end(tree, "x")
    read_notice(tree, "x")
    tree.apply(AgentDisposed(agent_id="x"))
    tree.apply(AssistantText(agent_id="x", text="t"))

    assert unsettled(tree) == []
    with pytest.raises(RequestError) as caught:
        tree.get("x")
    assert caught.value.code == "AGENT_NOT_LIVE"


@pytest.mark.parametrize(
    ("reason", "shown"),
    [("completed", "completed"), ("aborted", "completed"), ("error", "error")],
)
def test_the_status_of_a_child_that_ended(tree, reason, shown):
    admit(tree, "c")
    end(tree, "c", reason=reason)

    assert tree.get("c").status == shown


# -- labels ------------------------------------------------------------------------


def test_labels_are_given_in_order_and_skip_taken_ones(tree):
    assert tree.reserve_label("root", None) == "rlm-1"
    assert tree.reserve_label("root", "rlm-3") == "rlm-3"
    assert tree.reserve_label("root", None) == "rlm-4"
    assert tree.reserve_label("root", " mine ") == "mine"
    assert tree.reserve_label("other", None) == "rlm-1"


def test_a_label_is_unique_among_the_children_of_one_parent(tree):
    tree.reserve_label("root", "x")

    with pytest.raises(RequestError) as caught:
        tree.reserve_label("root", " x")

    assert caught.value.code == "DUPLICATE_LABEL"
    assert tree.reserve_label("other", "x") == "x"


def test_a_label_that_was_given_back_is_free(tree):
    tree.reserve_label("root", "x")
    tree.release_label("root", "x")
    tree.release_label("nobody", "x")

    assert tree.reserve_label("root", "x") == "x"


def test_an_automatic_label_is_never_one_that_is_taken(tree):
    first, second, third = (tree.reserve_label("root", None) for _ in range(3))
    tree.release_label("root", first)

    found = [tree.reserve_label("root", None) for _ in range(3)]

    assert len({second, third, *found}) == 5


@pytest.mark.parametrize("name", ["", "   ", "x" * 65, "a\nb", "a\x00b", "\x1b[31mred"])
def test_a_label_is_short_and_one_line(tree, name):
    with pytest.raises(RequestError) as caught:
        tree.reserve_label("root", name)

    assert caught.value.code == "INVALID_ARGUMENT"


# -- reports -------------------------------------------------------------------------


async def report(tree, child="c", timeout_s=WAIT_S, parent="root"):
    async with asyncio.timeout(2 * WAIT_S):
        return await tree.report(parent, child, timeout_s=timeout_s)


async def refusal(*args, **options):
    with pytest.raises(RequestError) as caught:
        await report(*args, **options)
    return caught.value


async def test_the_first_message_is_the_report(tree):
    admit(tree, "c")
    waiting = asyncio.create_task(report(tree))
    await asyncio.sleep(0)

    tree.record_report("c", "one")
    tree.record_report("c", "two")

    found = await waiting
    assert (found.text, found.source) == ("one", "message")
    assert (await report(tree)).text == "one"


async def test_a_message_comes_before_the_closing_text(tree):
    admit(tree, "c")
    tree.record_report("c", "sent")
    end(tree, "c", text="closed")

    assert (await report(tree)).source == "message"


async def test_without_a_message_the_closing_text_is_the_report(tree):
    admit(tree, "c")
    end(tree, "c", text="closed")

    found = await report(tree)

    assert (found.text, found.source) == ("closed", "closing")


async def test_a_report_that_does_not_come_in_time_names_the_child(tree):
    admit(tree, "c")

    error = await refusal(tree, timeout_s=0.01)

    assert error.code == "TIMEOUT"
    assert '"c"' in str(error)


async def test_a_child_that_ended_with_nothing_has_failed(tree):
    admit(tree, "c")
    end(tree, "c", reason="aborted")

    error = await refusal(tree)

    assert error.code == "CHILD_FAILED"
    assert '"c"' in str(error)


@pytest.mark.parametrize("child", ["root", "g", "nobody", ""])
async def test_only_direct_children_report(tree, child):
    admit(tree, "c")
    admit(tree, "g", parent="c")

    assert (await refusal(tree, child)).code == "CHILD_NOT_FOUND"


async def test_a_lost_harness_ends_the_wait(tree):
    admit(tree, "c")
    waiting = asyncio.create_task(refusal(tree))
    await asyncio.sleep(0)

    tree.apply(HarnessLost(message="it fell"))

    error = await waiting
    assert error.code == "HARNESS_LOST"
    assert "it fell" in str(error)


async def test_a_disposed_child_ends_the_wait(tree):
    admit(tree, "c")
    waiting = asyncio.create_task(refusal(tree))
    await asyncio.sleep(0)

    tree.apply(AgentDisposed(agent_id="c"))

    assert (await waiting).code == "CHILD_FAILED"


async def test_no_change_is_missed_between_two_looks(tree):
    seen = []

    async def watch():
        while len(seen) < 50:
            await tree.until(lambda: len(tree.get("c").reports) > len(seen))
            seen.append(len(tree.get("c").reports))

    admit(tree, "c")
    watching = asyncio.create_task(watch())
    for number in range(50):
        tree.record_report("c", str(number))
        await asyncio.sleep(0)

    async with asyncio.timeout(WAIT_S):
        await watching


def test_admissions_and_reports_are_told():
    told = []
    tree = AgentTree(tell=told.append)
    tree.add_root(info("root"))
    admit(tree, "c")
    tree.record_report("c", "secret text")

    assert told == [
        ChildAdmitted(agent_id="c", parent_id="root", label="c"),
        ReportSent(agent_id="c", label="c"),
    ]
