"""What the doctor finds, and the command that it says for it."""

import importlib.metadata
import json
import os
import shlex

import pytest

from host_bridge import doctor
from host_bridge.doctor import examine
from host_bridge.errors import HarnessError
from host_bridge.processes import mark_of
from kernel_ext.wire.codes import ErrorCode

pytestmark = pytest.mark.kernel

GONE = {"pid": 2**22 - 7, "started_at": 1.0}
"""A process that never was."""


@pytest.fixture
def home(short_path, monkeypatch):
    """A state root of its own, and no key."""
    monkeypatch.setenv("RLM_KERNEL_HOME", str(short_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setattr("host_bridge.paths._LAST_RESORT", str(short_path))
    for name in ("DEEPSEEK_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    return short_path / "state"


@pytest.fixture
def no_kernel(monkeypatch):
    """Leave the kernel out: these tests look at something else."""

    async def skipped(scratch):
        return doctor.Finding(topic="kernel", level="ok", text="left out")

    monkeypatch.setattr(doctor, "_kernel", skipped)


def record(home, session, *, bridge, kernel):
    directory = home / "sessions" / session
    directory.mkdir(parents=True)
    data = {"bridge": bridge, "kernel": kernel}
    (directory / "runtime.json").write_text(json.dumps(data))


async def of(topic, **options):
    return [f for f in await examine(deep=False, **options) if f.topic == topic]


async def test_a_sound_machine_has_no_fault_and_a_kernel_that_ran_a_cell(home):
    findings = await examine(deep=False)

    assert {f.level for f in findings} <= {"ok", "note"}
    assert any(f.topic == "kernel" and "42" in f.text for f in findings)
    assert not home.exists()


async def test_a_kernel_that_does_not_start_is_a_fault_with_a_command(
    home, monkeypatch
):
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    monkeypatch.setattr(
        "host_bridge.kernels.launch.launch.__kwdefaults__",
        {"python": "/nowhere/python"},
    )

    (found,) = await of("kernel")

    assert found.level == "fault"
    assert found.command


async def test_a_missing_wheel_is_a_fault_with_the_command_that_brings_it(
    home, no_kernel, monkeypatch
):
    real = importlib.metadata.version

    def version(name):
        if name in ("pydantic", "deepseek-harness-runtime-bin"):
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr("importlib.metadata.version", version)

    wheels, harness = await of("wheels"), await of("harness")

    missing = [f for f in wheels if f.level == "fault"]
    assert [f.command for f in missing] == ['pip install "rlm-kernel[host]"']
    assert "pydantic" in missing[0].text
    assert harness[0].level == "note"
    assert harness[0].command == 'pip install "rlm-kernel[dsh]"'


async def test_a_kernel_that_outlived_its_bridge_is_named_with_its_kill(
    home, no_kernel
):
    record(home, "left", bridge=GONE, kernel=mark_of(os.getpid()).as_json())

    (found,) = await of("leftovers")

    assert (found.level, found.command) == ("note", f"kill {os.getpid()}")


async def test_sessions_of_live_or_well_ended_bridges_are_no_leftovers(home, no_kernel):
    me = mark_of(os.getpid()).as_json()
    record(home, "live", bridge=me, kernel=me)
    record(home, "ended", bridge=GONE, kernel=GONE)

    (found,) = await of("leftovers")

    assert (found.level, found.text) == ("ok", "none")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"bridge": 1}', '{"kernel": {"pid": "x"}}', "\x00"]
)
async def test_a_record_that_can_not_be_read_is_passed_over(home, no_kernel, text):
    for place in (home / "sessions/x/runtime.json", home / "dsh/x/owner.json"):
        place.parent.mkdir(parents=True)
        place.write_text(text)

    (found,) = await of("leftovers")

    assert found.text == "none"


async def test_a_home_with_a_key_that_a_killed_bridge_left_is_named(home, no_kernel):
    for name, owner in (("left", GONE), ("live", mark_of(os.getpid()).as_json())):
        (home / "dsh" / name).mkdir(parents=True)
        (home / "dsh" / name / "owner.json").write_text(json.dumps(owner))

    (found,) = await of("leftovers")

    assert "key" in found.text
    assert shlex.split(found.command) == ["rm", "-r", str(home / "dsh/left")]


@pytest.mark.posix
async def test_sockets_of_ended_processes_are_named_and_those_of_live_ones_not(
    home, no_kernel
):
    base = home.parent / f"rlm-kernel-{os.geteuid()}"
    for name in (f"{GONE['pid']:x}-11111111", f"{os.getpid():x}-22222222", "other"):
        (base / name).mkdir(parents=True)

    (found,) = await of("leftovers")

    assert found.command == f"rm -r {base / (format(GONE['pid'], 'x') + '-11111111')}"


async def test_a_path_with_spaces_is_quoted_in_the_command(
    home, no_kernel, monkeypatch, short_path
):
    monkeypatch.setenv("RLM_KERNEL_HOME", str(short_path / "two words"))
    home = short_path / "two words/dsh/left"
    home.mkdir(parents=True)
    (home / "owner.json").write_text(json.dumps(GONE))

    (found,) = await of("leftovers")

    assert shlex.split(found.command) == ["rm", "-r", str(home)]


async def test_a_state_root_below_a_file_is_a_fault(
    home, no_kernel, monkeypatch, short_path
):
    (short_path / "file").touch()
    monkeypatch.setenv("RLM_KERNEL_HOME", str(short_path / "file/x"))

    (found,) = await of("state root")

    assert found.level == "fault"
    assert "RLM_KERNEL_HOME" in found.command


async def test_a_harness_that_does_not_start_is_a_fault_with_its_own_command(
    home, no_kernel
):
    async def start(directory):
        raise HarnessError(ErrorCode.HARNESS_UNAVAILABLE, "no", next_step="do this")

    findings = await examine(deep=True, start_harness=start)

    assert [f.command for f in findings if f.topic == "harness"][-1] == "do this"
    assert findings[-2].level == "fault"


async def test_a_key_is_named_and_never_shown(home, no_kernel, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-0123456789abcdef")

    (found,) = await of("key")

    assert "OPENAI_API_KEY" in found.text
    assert "sk-" not in found.text
