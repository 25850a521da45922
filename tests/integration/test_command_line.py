"""`rlm-kernel` itself, `install` and `doctor`, from a real command line."""

import json
import sys

import pytest

pytestmark = [pytest.mark.posix]


def test_without_a_verb_it_says_what_it_is_and_what_to_do_next(place):
    ended = place.run()

    lines = ended.stdout.splitlines()
    assert ended.status == 0
    assert ended.stderr == ""
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 80
    assert ended.next_step == "rlm-kernel demo"
    assert not place.home.exists()


@pytest.mark.parametrize(
    ("words", "said", "step"),
    [
        (("dmeo",), "dmeo", "rlm-kernel demo"),
        (("docter",), "docter", "rlm-kernel doctor"),
        (("print(1)",), "print(1)", "rlm-kernel --help"),
        (("run",), "task", "rlm-kernel run --help"),
        (("run", "x", "--modle", "y"), "--modle", "rlm-kernel run --help"),
        (("run", "x", "--retries", "-1"), "--retries", "rlm-kernel run --help"),
        (("demo", "extra"), "extra", "rlm-kernel demo --help"),
        (("--nosuch",), "--nosuch", "rlm-kernel --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_a_line_that_is_not_understood_runs_nothing_and_leads_on(
    place, words, said, step
):
    ended = place.run(*words)

    assert ended.status == 2
    assert ended.stdout == ""
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.next_step == step
    assert not place.home.exists()


def test_a_near_miss_is_told_the_verb_that_was_meant(place):
    assert "Did you mean 'demo'?" in place.run("dmeo").stderr


@pytest.mark.parametrize("verb", ["demo", "run", "exec", "install", "doctor"])
def test_every_verb_explains_itself_on_a_small_screen(place, verb):
    ended = place.run(verb, "--help")

    assert ended.status == 0
    assert max(map(len, ended.stdout.splitlines())) <= 80
    assert len(ended.stdout.splitlines()) <= 30


# -- install ----------------------------------------------------------------------


def spec_of(place) -> dict:
    return json.loads((place.directory / "jupyter/kernels/rlm/kernel.json").read_text())


def test_install_writes_the_kernelspec_for_the_user(place):
    ended = place.run("install", OPENAI_API_KEY="sk-0123456789abcdef")

    spec = spec_of(place)
    assert ended.status == 0
    assert ended.next_step.startswith("jupyter lab")
    assert spec["argv"][0] == sys.executable
    assert spec["argv"][-1] == "{connection_file}"
    assert spec["interrupt_mode"] == "message"
    assert spec["metadata"]["supported_encryption"] == "curve"
    assert "sk-0123456789abcdef" not in json.dumps(spec)


def test_install_replaces_what_stood_there(place):
    place.run("install", "--scripted")
    before = spec_of(place)

    ended = place.run("install", "--model", "a/b", "--key-env", "MINE", "--json")

    after = spec_of(place)
    assert ended.status == 0
    assert ended.json["kernelspec"].endswith("kernels/rlm")
    assert before["env"]["RLM_KERNEL_SCRIPTED"] == "1"
    assert before["display_name"] != after["display_name"] == "RLM"
    assert "RLM_KERNEL_SCRIPTED" not in after["env"]
    assert after["env"]["RLM_KERNEL_MODEL"] == "a/b"


@pytest.mark.parametrize(
    "words",
    [("--base-url", "nonsense", "--model", "m"), ("--base-url", "http://127.0.0.1:9")],
    ids=["address", "no-model"],
)
def test_install_refuses_options_that_no_notebook_could_use(place, words):
    ended = place.run("install", *words)

    assert ended.status == 2
    assert ended.stderr.startswith("CONFIG_INVALID: ")
    assert not (place.directory / "jupyter").exists()


def test_install_says_where_it_can_not_write_and_what_else_there_is(place):
    (place.directory / "file").write_text("")

    ended = place.run("install", JUPYTER_DATA_DIR=str(place.directory / "file" / "x"))

    assert ended.status == 2
    assert ended.stderr.startswith("STATE_ROOT_UNUSABLE: ")
    assert ended.next_step == "rlm-kernel install --sys-prefix"


# -- doctor -----------------------------------------------------------------------


@pytest.mark.kernel
def test_doctor_changes_nothing_and_finds_this_machine_sound(place):
    before = place.snapshot()

    ended = place.run(
        "doctor",
        "--json",
        HTTPS_PROXY="http://127.0.0.1:9",
        HTTP_PROXY="http://127.0.0.1:9",
    )

    findings = {row["topic"]: row for row in ended.json["findings"]}
    assert ended.status == 0
    assert ended.stderr == ""
    assert place.snapshot() == before
    assert place.is_clean()
    assert {
        "Python",
        "wheels",
        "harness",
        "state root",
        "kernel",
        "leftovers",
        "key",
    } <= set(findings)
    assert "42" in findings["kernel"]["text"]
    assert "RLM_KERNEL_HOME" in findings["state root"]["text"]
    assert {row["level"] for row in ended.json["findings"]} <= {"ok", "note"}
    assert list((place.directory / "tmp").rglob("rlm-doctor-*")) == []


@pytest.mark.kernel
@pytest.mark.dsh
def test_doctor_starts_the_harness_when_it_is_to_look_deep(place):
    ended = place.run("doctor", "--deep")

    assert ended.status == 0
    assert "started and ended" in ended.stdout
    assert ended.next_step == "rlm-kernel demo"
    assert not place.home.exists()
    assert list(place.cwd.iterdir()) == []
    assert place.is_clean()


@pytest.mark.kernel
def test_doctor_names_the_variable_of_a_key_and_never_the_key(place):
    key = "sk-0123456789abcdef"

    ended = place.run("doctor", DEEPSEEK_API_KEY=key)

    assert ended.status == 0
    assert "DEEPSEEK_API_KEY" in ended.stdout
    assert key not in ended.everything


@pytest.mark.kernel
def test_doctor_says_one_command_for_a_state_root_that_can_not_be_written(place):
    (place.directory / "file").write_text("")

    ended = place.run("doctor", RLM_KERNEL_HOME=str(place.directory / "file" / "x"))

    assert ended.status == 1
    assert "state root" in ended.stdout
    assert (
        "RLM_KERNEL_HOME" in ended.stdout.split("can not be written")[1].splitlines()[1]
    )
    assert "Traceback" not in ended.stderr


@pytest.mark.kernel
@pytest.mark.dsh
def test_doctor_finds_what_a_killed_bridge_has_left_and_its_commands_remove_it(
    place, until
):
    command = place.start("demo")
    until(lambda: len(command.kernels()) >= 2)
    command.kill()
    until(lambda: not place.processes())
    command.ended()
    assert place.harness_homes()

    found = [
        r
        for r in place.run("doctor", "--json").json["findings"]
        if r["topic"] == "leftovers"
    ]
    for row in found:
        assert row["level"] == "note"
        place.start_program(["sh", "-c", row["command"]]).ended()
    after = place.run("doctor", "--json").json["findings"]

    assert any("key" in row["text"] for row in found)
    assert [r["text"] for r in after if r["topic"] == "leftovers"] == ["none"]
    assert place.is_clean()


@pytest.mark.kernel
def test_doctor_leaves_a_live_bridge_alone(place, until):
    command = place.start(
        "exec", "import pathlib, time; pathlib.Path('began').touch(); time.sleep(600)"
    )
    until((place.cwd / "began").exists)

    ended = place.run("doctor", "--json")
    alive = command.process.poll() is None
    command.interrupt()
    command.ended()

    assert alive
    assert [r["text"] for r in ended.json["findings"] if r["topic"] == "leftovers"] == [
        "none"
    ]
