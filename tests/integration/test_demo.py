"""`rlm-kernel demo`: the main job on the real harness, from a real command line."""

import signal
import sys

import pytest

from host_bridge.processes import mark_of

pytestmark = [pytest.mark.kernel, pytest.mark.dsh, pytest.mark.posix]

NO_HARNESS = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("deepseek_harness"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
"""

DEAD_PROXIES = {
    "NODE_USE_ENV_PROXY": "1",
    **dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "ALL_PROXY"), "http://127.0.0.1:9"
    ),
}


@pytest.fixture
def running(place, until):
    """A demo whose children are at work."""
    command = place.start("demo", "--json")
    until(lambda: len(command.kernels()) >= 2)
    return command


@pytest.mark.parametrize(
    "environ",
    [{}, DEAD_PROXIES],
    ids=["plain", "with-proxies"],
)
def test_three_children_report_and_the_sum_matches_every_time(place, environ):
    ended = place.run("demo", "--json", **environ)

    facts = ended.json
    assert ended.status == 0
    assert ended.stderr == ""
    assert facts["children"] == 3
    assert facts["reports"] == 3
    assert facts["sum_matched"] is True
    assert facts["distributions"] == sum(facts["licences"].values()) > 0
    assert not {"MIT License", "BSD License"} & set(facts["licences"])
    assert facts["processes_left"] == 0
    assert facts["stopped"] is False
    assert {"harness_up", "first_cell", "first_report", "answer", "all_closed"} == set(
        facts["times_s"]
    )
    assert facts["peak_memory_mb"] > 0
    assert place.is_clean()
    assert len(place.sessions()) == 1, "only the root's, with the pieces"


def test_people_see_the_table_and_what_to_do_next(place):
    ended = place.run("demo")

    assert ended.status == 0
    assert ended.stderr == ""
    assert "sum of 3 reports matched: True" in ended.stdout
    assert "count  licence" in ended.stdout
    for child in ("count-0", "count-1", "count-2"):
        assert f"{child}    reported" in ended.stdout
    assert "0 processes left" in ended.stdout
    assert ended.next_step.startswith("rlm-kernel install --scripted")
    assert max(map(len, ended.stdout.splitlines())) <= 120
    assert place.is_clean()


def test_an_interrupt_in_the_middle_ends_with_130_and_leaves_nothing(place, running):
    running.interrupt()

    ended = running.ended()
    assert ended.status == 130
    assert ended.json["stopped"] is True
    assert ended.json["processes_left"] == 0
    assert "Traceback" not in ended.stderr
    assert place.is_clean()


def test_an_interrupt_while_the_harness_starts_makes_no_model_request(place, until):
    command = place.start("demo", "--json")
    until(command.harness)

    command.interrupt()

    ended = command.ended()
    assert ended.status == 130
    assert ended.json["cells"] == 0
    assert place.is_clean()


def test_a_second_interrupt_ends_and_more_of_them_do_not_break_the_cleaning_up(
    place, running, until
):
    def ends_while_it_is_interrupted():
        running.interrupt()
        return running.process.poll() is not None

    until(ends_while_it_is_interrupted)

    ended = running.ended()
    # The last one can meet a process that has nothing more to do.
    assert ended.status in (130, -signal.SIGINT)
    assert "Traceback" not in ended.stderr
    assert place.is_clean()


def test_sigterm_in_the_middle_leaves_nothing(place, running):
    running.process.terminate()

    assert running.ended().status == 130
    assert place.is_clean()


def test_a_harness_that_is_killed_is_said_with_its_code(place, running):
    running.harness()[0].kill()

    ended = running.ended()
    assert ended.status == 2
    assert ended.json["code"] == "HARNESS_LOST"
    assert ended.json["next"].startswith("rlm-kernel ")
    assert place.is_clean()


def test_the_run_ends_although_a_childs_kernel_is_killed(place, running, until):
    victims = until(lambda: running.kernels()[1:])

    victims[0].kill()

    ended = running.ended()
    assert ended.status in (0, 1)
    assert ended.json["children"] == 3
    assert ended.json["processes_left"] == 0
    assert place.is_clean()


def test_a_killed_bridge_takes_harness_and_kernels_along(place, running, until):
    ours = [mark for p in running.below() if (mark := mark_of(p.pid))]
    assert len(ours) >= 3

    running.kill()

    until(lambda: not any(mark.is_alive for mark in ours), within_s=2)
    running.ended()


def test_without_the_harness_the_command_that_installs_it_is_said(place):
    (place.cwd / "sitecustomize.py").write_text(NO_HARNESS)

    ended = place.run("demo", PYTHONPATH=str(place.cwd))

    assert ended.status == 2
    assert ended.stderr.startswith("HARNESS_UNAVAILABLE: ")
    assert ended.next_step == 'pip install "rlm-kernel[dsh]"'
    assert place.is_clean()
    assert place.sessions() == set()


def test_a_home_that_can_not_be_written_is_said_before_anything_starts(place):
    (place.directory / "file").write_text("")

    ended = place.run("demo", RLM_KERNEL_HOME=str(place.directory / "file" / "home"))

    assert ended.status == 2
    assert ended.stderr.startswith("STATE_ROOT_UNUSABLE: ")
    assert "RLM_KERNEL_HOME" in ended.next_step
    assert place.is_clean()


def test_a_stopped_reader_of_its_output_does_not_leave_anything(place, until):
    command = place.start_program(
        ["sh", "-c", f"{sys.executable} -m host_bridge demo | head -2"]
    )

    ended = command.ended()

    assert len(ended.stdout.splitlines()) == 2
    until(place.is_clean, within_s=15)
