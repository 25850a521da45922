"""`rlm-kernel exec`: one cell in a real kernel, from a real command line."""

import signal
import sys

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.posix]

WAITING_CELL = """
import pathlib, time
print("so far", flush=True)
pathlib.Path("began").touch()
time.sleep(600)
"""


def test_a_result_goes_to_stdout_alone_and_nothing_is_left(place):
    ended = place.run("exec", "6*7")

    assert (ended.status, ended.stdout, ended.stderr) == (0, "42\n", "")
    assert place.is_clean()
    assert place.sessions() == set()


def test_a_failing_cell_ends_with_1_and_its_traceback_on_stderr(place):
    ended = place.run("exec", "print('before'); 1/0")

    assert (ended.status, ended.stdout) == (1, "before\n")
    assert "ZeroDivisionError" in ended.stderr
    assert place.is_clean()


def test_json_is_the_whole_result_of_the_cell(place):
    ended = place.run(
        "exec", "--json", "import sys; print('out'); print('err', file=sys.stderr); 6*7"
    )

    result = ended.json
    assert ended.status == 0
    assert ended.stderr == ""
    assert result["status"] == "ok"
    assert result["stdout"] == "out\n"
    assert result["stderr"] == "err\n"
    assert result["result"] == "42"
    assert result["generation"] == 1
    assert result["error"] is None
    assert isinstance(result["duration_ms"], int)


@pytest.mark.parametrize("words", [("exec", "-"), ("exec",)], ids=["dash", "nothing"])
def test_the_cell_may_come_from_stdin(place, words):
    ended = place.run(*words, input="x = 20\nx + 22\n")

    assert (ended.status, ended.stdout) == (0, "42\n")


def test_output_that_is_no_ascii_arrives_whole(place):
    ended = place.run(
        "exec", "print('日本語 ✓'); '\\x00\\ud83d'.encode('utf-8', 'replace')"
    )

    assert ended.status == 0
    assert ended.stdout.startswith("日本語 ✓\n")


def test_a_named_session_stays_with_what_its_cell_wrote(place):
    code = "import os, pathlib; pathlib.Path(os.environ['RLM_SESSION_DIR'], 'exports', 'a').touch()"

    ended = place.run("exec", "--session", "mine", code)

    assert ended.status == 0
    assert place.sessions() == {"mine"}
    assert (place.home / "sessions/mine/exports/a").exists()
    assert place.is_clean()


def test_a_session_without_a_name_stays_when_its_cell_left_files(place):
    code = "import os, pathlib; pathlib.Path(os.environ['RLM_SESSION_DIR'], 'exports', 'a').touch()"

    ended = place.run("exec", code)

    assert ended.status == 0
    assert len(place.sessions()) == 1


def test_a_session_id_may_have_200_characters(place):
    session = "0" * 200

    ended = place.run("exec", "--session", session, "1")

    assert ended.status == 0
    assert place.sessions() == {session}


@pytest.mark.parametrize(
    "session",
    ["../x", "", "a" * 201, "-x"],
    ids=["up", "empty", "201", "dash"],
)
def test_any_other_session_id_is_refused_before_anything_is_made(place, session):
    ended = place.run("exec", f"--session={session}", "1")

    assert ended.status == 2
    assert ended.stderr.startswith("CONFIG_INVALID: ")
    assert ended.next_step.startswith("rlm-kernel ")
    assert not place.home.exists()


def test_one_interrupt_ends_with_130_and_the_output_so_far(place, until):
    command = place.start("exec", WAITING_CELL)
    until((place.cwd / "began").exists)

    command.interrupt()

    ended = command.ended()
    assert ended.status == 130
    assert ended.stdout == "so far\n"
    assert "Stopped." in ended.stderr
    assert "Traceback" not in ended.stderr
    assert place.is_clean()
    assert place.sessions() == set()


def test_json_says_that_a_cell_was_stopped(place, until):
    command = place.start("exec", "--json", WAITING_CELL)
    until((place.cwd / "began").exists)

    command.interrupt()

    ended = command.ended()
    assert ended.status == 130
    assert ended.json["status"] == "aborted"
    assert ended.json["stdout"] == "so far\n"


def test_a_second_interrupt_ends_a_cell_that_refuses_the_first(place, until):
    stubborn = """
import pathlib, time
while True:
    try:
        pathlib.Path("began").touch()
        time.sleep(600)
    except KeyboardInterrupt:
        pathlib.Path("refused").touch()
"""
    command = place.start("exec", stubborn)
    until((place.cwd / "began").exists)
    command.interrupt()
    until((place.cwd / "refused").exists)

    command.interrupt()

    ended = command.ended(within_s=10)
    assert ended.status == 130
    assert "Traceback" not in ended.stderr
    assert place.is_clean()
    assert place.sessions() == set()


def test_sigterm_leaves_nothing(place, until):
    command = place.start("exec", WAITING_CELL)
    until((place.cwd / "began").exists)

    command.process.terminate()

    assert command.ended().status == 130
    assert place.is_clean()
    assert place.sessions() == set()


def test_a_killed_command_takes_its_kernel_and_what_that_started_along(place, until):
    command = place.start(
        "exec",
        "import subprocess\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n" + WAITING_CELL,
    )
    until((place.cwd / "began").exists)
    assert [p.name() for p in place.processes()].count("sleep") == 2

    command.kill()

    until(lambda: place.processes() == [], within_s=2)
    command.ended()


def test_a_killed_kernel_ends_the_command_with_its_code(place, until):
    command = place.start("exec", "--json", WAITING_CELL)
    until((place.cwd / "began").exists)

    command.kernels()[0].send_signal(signal.SIGKILL)

    ended = command.ended()
    assert ended.status == 1
    assert ended.json["error"]["name"] == "KERNEL_DIED"
    assert place.is_clean()


def test_children_of_a_cell_leave_no_session_behind(place):
    code = '''
h = await rlm("""```python
await agent_message.send("21", receiver_role="parent")
```""")
print(2 * int(await h.report(timeout_s=30)))
'''

    ended = place.run("exec", "-", input=code)

    assert (ended.status, ended.stdout) == (0, "42\n")
    assert place.is_clean()
    assert place.sessions() == set()


def test_a_home_that_can_not_be_written_is_said_with_a_remedy(place):
    (place.directory / "file").write_text("")

    ended = place.run(
        "exec", "1", RLM_KERNEL_HOME=str(place.directory / "file" / "home")
    )

    assert ended.status == 2
    assert ended.stderr.startswith("STATE_ROOT_UNUSABLE: ")
    assert "RLM_KERNEL_HOME" in ended.next_step
    assert place.is_clean()


def test_a_long_temporary_directory_is_no_obstacle(place):
    long = place.directory / "tmp" / ("long-" * 40)
    long.mkdir()

    ended = place.run(
        "exec", "import tempfile; print(tempfile.gettempdir())", TMPDIR=str(long)
    )

    assert (ended.status, ended.stdout) == (0, f"{long}\n")
    assert place.processes() == []


def test_proxies_and_keys_do_not_reach_the_kernel(place):
    names = (
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "DEEPSEEK_API_KEY",
        "OPENAI_API_KEY",
    )

    ended = place.run(
        "exec",
        f"import os; print(sorted(set({names!r}) & set(os.environ)))",
        **dict.fromkeys(names, "http://127.0.0.1:9"),
    )

    assert (ended.status, ended.stdout) == (0, "[]\n")


def test_the_cell_runs_where_the_command_was_started(place):
    ended = place.run("exec", "import os; print(os.getcwd())")

    assert ended.stdout == f"{place.cwd}\n"


def test_modules_beside_the_person_do_not_shadow_the_bridges_own(place):
    for name in ("json", "zmq", "ipykernel", "typer", "psutil"):
        (place.cwd / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")

    ended = place.run("exec", "6*7", PYTHONSAFEPATH="1")

    assert (ended.status, ended.stdout) == (0, "42\n")


@pytest.mark.parametrize("closed", [">&- <&-", "2>&-"])
def test_a_closed_stream_is_no_obstacle(place, closed):
    command = place.start_program(
        [
            "sh",
            "-c",
            f"'{sys.executable}' -m host_bridge exec 'open(\"ran\", \"w\")' {closed}",
        ]
    )

    ended = command.ended()

    assert ended.status == 0
    assert "Traceback" not in ended.stderr
    assert (place.cwd / "ran").exists()


def test_a_directory_that_is_gone_is_said(place):
    command = place.start_program(
        [
            "sh",
            "-c",
            f"mkdir x; cd x; rmdir ../x; '{sys.executable}' -P -m host_bridge exec 1",
        ]
    )

    ended = command.ended()

    assert ended.status == 2
    assert ended.stderr.splitlines()[-1] == "Next: cd"
    assert "Traceback" not in ended.stderr
