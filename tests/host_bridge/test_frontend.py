"""The bridge of a front end's kernel: what it starts, watches, and how it ends."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from host_bridge import frontend
from host_bridge.frontend import launch_kernel
from host_bridge.kernels.environment import KernelVariables, kernel_environment

pytestmark = pytest.mark.posix

END_LIKE = (
    "import sys; from host_bridge.frontend import end_like; end_like(int(sys.argv[1]))"
)


@pytest.mark.parametrize(
    "status",
    [0, 1, 7, 255, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV, -signal.SIGINT],
)
def test_a_process_can_end_as_another_did(status):
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0)); " + END_LIKE
    )

    ended = subprocess.run([sys.executable, "-c", program, str(status)])

    assert ended.returncode == status


@pytest.fixture
def started(monkeypatch):
    """What `launch_kernel` would start."""
    calls = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda argv, **options: calls.append((argv, options))
    )
    return calls


def launch(short_path, environ):
    variables = KernelVariables(
        session_dir=short_path,
        ipython_dir=None,
        generation="1-x",
        depth=0,
        max_depth=1,
    )
    launch_kernel(
        short_path / "k.json",
        kernel_environment(variables, environ=environ),
        environ=environ,
    )


def test_the_kernel_gets_a_chosen_environment(started, short_path):
    environ = {
        "PATH": "/bin",
        "JPY_SESSION_NAME": "a.ipynb",
        "VIRTUAL_ENV": "/venv",
        "DEEPSEEK_API_KEY": "k",
        "RLM_KERNEL_KEY_FILE": "/k",
        "HTTPS_PROXY": "http://user:secret@proxy",
        "SSH_AUTH_SOCK": "/s",
    }

    launch(short_path, environ)

    ((_, options),) = started
    assert set(options["env"]) == {
        *("PATH", "JPY_SESSION_NAME", "VIRTUAL_ENV"),
        *("RLM_SESSION_DIR", "RLM_GENERATION", "RLM_DEPTH", "RLM_MAX_DEPTH"),
        "JPY_PARENT_PID",
    }
    assert options["env"]["JPY_PARENT_PID"] == str(os.getpid())


def test_the_kernel_stays_in_the_bridges_process_group(started, short_path):
    launch(short_path, {})

    ((argv, options),) = started
    assert "start_new_session" not in options
    assert "process_group" not in options
    assert options["stdin"] == subprocess.DEVNULL
    assert argv[-2:] == ["-f", str(short_path / "k.json")]


@pytest.fixture
def quick_looks(monkeypatch):
    monkeypatch.setattr(frontend, "_LOOK_S", 0.01)


def sleeper() -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


async def test_the_end_of_the_front_end_is_noticed(monkeypatch, quick_looks):
    front_end = sleeper()
    monkeypatch.setenv("JPY_PARENT_PID", str(front_end.pid))
    stop = asyncio.Event()
    watching = asyncio.create_task(frontend._watch_parent(stop))
    await asyncio.wait({watching}, timeout=0.05)
    before = stop.is_set()

    front_end.communicate()

    async with asyncio.timeout(5):
        await stop.wait()
    assert before is False


async def test_a_front_end_that_started_us_through_another_process_is_the_one_that_counts(
    monkeypatch, quick_looks
):
    front_end = sleeper()
    monkeypatch.setenv("JPY_PARENT_PID", str(front_end.pid))
    parents = iter([1, 2, 3, 4])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 5))
    stop = asyncio.Event()
    watching = asyncio.create_task(frontend._watch_parent(stop))

    await asyncio.wait({watching}, timeout=0.1)

    assert not stop.is_set()
    front_end.communicate()
    async with asyncio.timeout(5):
        await stop.wait()


async def test_where_the_front_end_can_not_be_seen_our_own_parent_counts(
    monkeypatch, quick_looks
):
    monkeypatch.setenv("JPY_PARENT_PID", str(2**22 - 9))
    parents = iter([77, 77, 77])
    monkeypatch.setattr(os, "getppid", lambda: next(parents, 1))
    stop = asyncio.Event()

    async with asyncio.timeout(5):
        await frontend._watch_parent(stop)

    assert stop.is_set()


@pytest.mark.parametrize("value", [None, "", "0", "1"])
async def test_without_a_front_end_nothing_is_watched(monkeypatch, value):
    if value is None:
        monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    else:
        monkeypatch.setenv("JPY_PARENT_PID", value)
    stop = asyncio.Event()

    async with asyncio.timeout(5):
        await frontend._watch_parent(stop)

    assert not stop.is_set()
