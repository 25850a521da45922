"""The process of a runtime, played by a small program with bad habits."""

import asyncio
import json
import os
import sys

import psutil
import pytest

from host_bridge.errors import HarnessError
from host_bridge.harness.dsh.launch import DshSettings
from host_bridge.harness.dsh.runtime import Runtime
from host_bridge.harness.port import Route
from kernel_ext.wire.codes import ErrorCode

WAIT_S = 10.0
SECRET = "sk-0123456789"

PLAYED = """
import json, os, signal, subprocess, sys, time
habits = json.loads(sys.argv[1])
if "prints" in habits:
    sys.stderr.write("x" * 200_000 + "\\n" + habits["prints"] + "\\n")
    sys.stderr.flush()
if "leaves" in habits:
    subprocess.run(["sh", "-c", "setsid sleep " + habits["leaves"] + " &"])
if "ignores_signals" in habits:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "exits" in habits:
    sys.exit(habits["exits"])
for line in sys.stdin:
    call = json.loads(line)
    if call["method"] == "shutdown" and "ignores_shutdown" in habits:
        time.sleep(60)
    answer = {"id": call["id"], "result": {}}
    if call["method"] == "initialize" and "refuses" in habits:
        answer = {"id": call["id"], "error": {"code": 1, "message": habits["refuses"]}}
    print(json.dumps(answer), flush=True)
    if call["method"] == "shutdown":
        break
"""


@pytest.fixture
async def play(tmp_path, monkeypatch):
    """Runtimes of one test; all are stopped at its end."""
    runtimes = []

    async def play(**habits):
        command = (sys.executable, "-c", PLAYED, json.dumps(habits))
        monkeypatch.setattr(
            "host_bridge.harness.dsh.runtime.find_command", lambda: command
        )
        settings = DshSettings(
            home=tmp_path / "home",
            workspace=tmp_path,
            default_route=Route(provider="p", model="m"),
            credentials=f"refs:\n  KEY: {SECRET}\n".encode(),
            redact=lambda text: text.replace(SECRET, "[credential]"),
        )
        ends = []
        runtime = Runtime(settings, {}, on_exit=ends.append)
        runtimes.append(runtime)
        await runtime.start()
        return runtime, ends

    yield play
    for runtime in runtimes:
        await runtime.stop()


async def test_a_runtime_that_ends_in_order_is_waited_for(play):
    runtime, ends = await play()
    await runtime.initialize()
    await asyncio.wait_for(runtime.stop(), WAIT_S)
    await runtime.stop()

    assert not psutil.pid_exists(runtime.pid)
    assert ends == []


async def test_a_runtime_that_ends_by_itself_is_told_of(play):
    runtime, ends = await play(exits=3)
    with pytest.raises(HarnessError) as refused:
        await asyncio.wait_for(runtime.initialize(), WAIT_S)

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    async with asyncio.timeout(WAIT_S):
        while not ends:
            await asyncio.sleep(0)
    assert ends == ["DeepSeek Harness ended (status 3)"]


async def test_a_runtime_that_will_not_end_is_killed(play, monkeypatch):
    monkeypatch.setattr("host_bridge.harness.dsh.runtime._SHUTDOWN_S", 0.1)
    monkeypatch.setattr("host_bridge.harness.dsh.runtime._EXIT_S", 0.1)
    monkeypatch.setattr("host_bridge.harness.dsh.runtime._TERMINATE_S", 0.1)
    runtime, _ = await play(ignores_shutdown=True, ignores_signals=True)
    await runtime.initialize()

    await asyncio.wait_for(runtime.stop(), WAIT_S)

    assert not psutil.pid_exists(runtime.pid)


async def test_its_last_words_are_short_and_without_the_credential(play):
    runtime, _ = await play(prints=f"bad key {SECRET} here", refuses=f"no {SECRET}")
    with pytest.raises(HarnessError) as refused:
        await asyncio.wait_for(runtime.initialize(), WAIT_S)
    await runtime.stop()

    words = runtime.last_words()
    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert words.endswith("bad key [credential] here")
    assert len(words) < 1000
    assert SECRET not in str(refused.value)
    assert "no [credential]" in str(refused.value)


async def test_a_process_that_holds_its_pipes_does_not_hold_up_the_end(play):
    marker = f"87{os.getpid()}"
    runtime, _ = await play(leaves=marker)
    await runtime.initialize()

    await asyncio.wait_for(runtime.stop(), WAIT_S)

    (left,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", marker]
    ]
    left.kill()
    assert not psutil.pid_exists(runtime.pid)
