"""The lines of a run, and what is counted on the way."""

import pytest

from host_bridge.agents import AgentTree
from host_bridge.cli.progress import Progress
from host_bridge.events import ChildAdmitted, ReportSent
from host_bridge.harness.port import AgentInfo, ChildEnded, ModelRequestFailed


@pytest.fixture
def lines():
    return []


@pytest.fixture
async def agents():
    agents = AgentTree()
    agents.add_root(AgentInfo(id="root", parent_id=None, depth=0, cwd="/"))
    agents.admit(AgentInfo(id="c", parent_id="root", depth=1, cwd="/"), "counter")
    return agents


async def test_children_are_shown_by_their_labels_and_counted(agents, lines):
    progress = Progress(agents, lines.append)

    progress.on_event(ChildAdmitted(agent_id="c", parent_id="root", label="counter"))
    progress.on_event(ReportSent(agent_id="c", label="counter"))
    progress.on_event(
        ChildEnded(agent_id="c", parent_id="root", stop_reason="completed", text=None)
    )

    assert (progress.children, progress.reports) == (1, 1)
    assert [line.split("s  ", 1)[1].split() for line in lines] == [
        ["counter", "admitted"],
        ["counter", "reported"],
        ["counter", "ended:", "completed"],
    ]
    assert set(progress.first_s) == {"first_report"}


@pytest.mark.parametrize(
    ("status", "said"), [(429, "429"), (500, "500"), (None, "no answer")]
)
async def test_a_busy_server_is_shown_with_the_number_of_the_retry(
    agents, lines, status, said
):
    progress = Progress(agents, lines.append, max_retries=1)

    for attempt in (1, 2):
        progress.on_event(
            ModelRequestFailed(
                agent_id="root", status=status, attempt=attempt, message=""
            )
        )

    (line,) = lines
    assert line.endswith(f"model server busy ({said}), retry 1")


async def test_a_refused_request_is_no_busy_server(agents, lines):
    Progress(agents, lines.append).on_event(
        ModelRequestFailed(agent_id="root", status=401, attempt=1, message="no")
    )

    assert lines == []
