"""Who a process is, and how trees of them are ended."""

import asyncio
import os
import secrets
import subprocess
import sys

import pytest

from host_bridge.processes import (
    ProcessMark,
    carriers,
    descendants,
    end_processes,
    mark_of,
)

pytestmark = pytest.mark.posix


@pytest.fixture
def start():
    """Starts processes; none of them is left."""
    made = []

    def start(*command, **options):
        made.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
        )
        return made[-1]

    yield start
    for process in made:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_mark_is_a_pid_and_its_start(start):
    process = start("sleep", "60")
    mark = mark_of(process.pid)

    assert mark.is_alive
    assert ProcessMark.from_json(mark.as_json()) == mark
    assert not ProcessMark(mark.pid, mark.started_at - 100).is_alive


def test_a_process_that_ended_is_not_alive_though_nobody_has_reaped_it(start):
    process = start("true")
    mark = mark_of(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert mark is None or not mark.is_alive


def test_there_is_no_mark_of_nobody():
    assert mark_of(2**22 + 7) is None


@pytest.mark.parametrize("data", [{}, {"pid": "x", "started_at": 1}, {"pid": 1}, []])
def test_what_is_no_mark_is_refused(data):
    with pytest.raises((KeyError, TypeError, ValueError)):
        ProcessMark.from_json(data)


def test_descendants_are_found_with_sessions_of_their_own(start):
    outer = start("bash", "-c", "setsid sleep 60 & sleep 60 & echo ready; wait")
    assert outer.stdout.readline() == "ready\n"

    found = descendants(outer.pid)

    assert len(found) == 2
    asyncio.run(end_processes(found, grace_s=0))
    assert not any(mark.is_alive for mark in found)


SIGNALLED = (
    "import signal, sys, time\n"
    "def heard(*_):\n"
    "    print('heard', flush=True)\n"
    "    if sys.argv[1] == 'polite': sys.exit(5)\n"
    "signal.signal(15, heard)\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(60)"
)


@pytest.mark.parametrize(
    ("manner", "grace_s", "said", "status"),
    [
        pytest.param("polite", 10, "heard\n", 5, id="ends by itself in its grace"),
        pytest.param("deaf", 0.2, "heard\n", -9, id="is ended after its grace"),
        pytest.param("polite", 0, "", -9, id="is ended at once without one"),
    ],
)
def test_a_process_is_asked_first_then_ended(start, manner, grace_s, said, status):
    process = start(sys.executable, "-c", SIGNALLED, manner)
    assert process.stdout.readline() == "ready\n"

    asyncio.run(end_processes([mark_of(process.pid)], grace_s=grace_s))

    assert process.wait(5) == status
    assert process.stdout.read() == said


def test_a_reused_pid_is_never_signalled(start):
    process = start("sleep", "60")
    other = ProcessMark(process.pid, mark_of(process.pid).started_at - 3600)

    asyncio.run(end_processes([other], grace_s=0))

    assert process.poll() is None


def test_processes_are_found_by_what_they_were_started_with(start):
    token = secrets.token_hex(8)
    environment = {**os.environ, "RLM_TEST_TOKEN": token}
    outer = start(
        "bash", "-c", "setsid sleep 60 >/dev/null & echo $!; exit 0", env=environment
    )
    orphan = int(outer.stdout.readline())
    outer.wait(5)

    found = carriers("RLM_TEST_TOKEN", token)

    assert [mark.pid for mark in found] == [orphan]
    assert carriers("RLM_TEST_TOKEN", "another") == []
    asyncio.run(end_processes(found, grace_s=0))
    assert not found[0].is_alive


def test_ending_nothing_is_fine():
    asyncio.run(end_processes([], grace_s=1))
