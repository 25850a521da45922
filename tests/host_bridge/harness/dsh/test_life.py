"""A real DSH from its start to its end, the bad ends included."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from host_bridge.errors import HarnessError
from host_bridge.harness.dsh.adapter import DshHarness, DshSettings
from host_bridge.harness.dsh.door import Door
from host_bridge.harness.port import (
    AgentCreated,
    ChildRequest,
    HarnessLost,
    Route,
    ToolOutcome,
)
from host_bridge.harness.script import Reply
from kernel_ext.wire.codes import ErrorCode

from .conftest import FLASH, WAIT_S

pytestmark = pytest.mark.dsh

ROOT = Path(__file__).parents[4]
LOST_S = 2.0
"""A lost harness must be known within this time; it takes milliseconds."""


def mark_processes(marker):
    """Live processes that carry *marker* in their command line."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if marker in " ".join(process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


async def gone(pid, *, within_s=LOST_S):
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(psutil.Process(pid).wait, within_s)


# -- starting ----------------------------------------------------------------------


async def test_the_socket_is_gone_once_dsh_is_in(make_world):
    world = await make_world().start()
    address = psutil.Process(world.harness.pid).environ()["RLM_BRIDGE_ADDRESS"]
    path = Path(address.removeprefix("unix:"))

    assert address.startswith("unix:")
    assert not path.exists()
    assert not path.parent.exists()


async def test_the_loopback_form_of_the_link_works_as_well(make_world, monkeypatch):
    # What Windows gets: `None` where other systems have a directory for a socket.
    monkeypatch.setattr(
        "host_bridge.harness.dsh.adapter.new_socket_directory", lambda: None
    )
    world = await make_world().start()

    ended = await world.ask(await world.root(), world.says(lambda t: Reply(text="x")))

    assert ended.reason == "completed"


async def test_the_version_names_the_installed_line(make_world):
    world = await make_world().start()

    name, _, version = world.harness.version.rpartition(" ")
    assert name == "DeepSeek Harness"
    assert version[:3] in ("0.1", "0.2")


@pytest.mark.parametrize("content", [None, "throw new Error('broken')\n"])
async def test_a_plugin_that_does_not_load_fails_the_start(
    make_world, monkeypatch, tmp_path, content
):
    plugin = tmp_path / "plugin.mjs"
    if content is not None:
        plugin.write_text(content)
    monkeypatch.setattr("host_bridge.harness.dsh.launch._PLUGIN", plugin)
    world = make_world()
    with pytest.raises(HarnessError) as refused:
        await world.start()

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert str(refused.value)
    assert world.events == []
    await gone(world.harness.pid)
    assert mark_processes(str(world.directory)) == []


async def test_a_plugin_with_another_token_is_not_let_in(make_world, monkeypatch):
    told = Door.environment
    monkeypatch.setattr(
        Door,
        "environment",
        property(lambda door: told.fget(door) | {"RLM_BRIDGE_TOKEN": "another"}),
    )
    world = make_world()
    with pytest.raises(HarnessError) as refused:
        await world.start()

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert mark_processes(str(world.directory)) == []


async def test_an_unknown_provider_is_refused_at_the_start(tmp_path, make_world):
    world = make_world()
    await world.server.start()
    settings = DshSettings(
        home=tmp_path / "home",
        workspace=tmp_path,
        default_route=Route(provider="nobody", model="nothing"),
    )
    harness = DshHarness(settings)
    with pytest.raises(HarnessError) as refused:
        await harness.start(world.registration())

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert "nobody" in str(refused.value)


async def test_a_start_that_takes_too_long_is_given_up(make_world):
    world = make_world()
    with pytest.raises(HarnessError) as refused:
        await world.start(start_timeout_s=0.2)

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    await gone(world.harness.pid)


async def test_without_a_credentials_file_no_request_is_made(make_world, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_API_KEY", "a-key-of-the-environment")
    world = await make_world().start(credentials=None)

    ended = await world.ask(await world.root(), world.says(lambda t: Reply(text="x")))

    assert ended.reason == "error"
    assert ended.code == "MISSING_CREDENTIAL"
    assert world.server.count == 0


async def test_before_its_start_a_harness_answers_nothing(tmp_path):
    settings = DshSettings(home=tmp_path, workspace=tmp_path, default_route=FLASH)
    with pytest.raises(HarnessError) as refused:
        await DshHarness(settings).advertised_models()

    assert refused.value.code is ErrorCode.HARNESS_LOST


async def test_a_plugin_of_another_protocol_is_refused(make_world, monkeypatch):
    monkeypatch.setattr("host_bridge.harness.dsh.door._PROTOCOL", 7)
    world = make_world()
    with pytest.raises(HarnessError) as refused:
        await world.start()

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert "protocol 1" in str(refused.value)
    assert "protocol 7" in str(refused.value)
    assert mark_processes(str(world.directory)) == []


async def test_a_harness_that_can_do_too_little_is_refused(make_world, monkeypatch):
    monkeypatch.setattr(
        "host_bridge.harness.dsh.door._CAPABILITIES", ("report", "flyToTheMoon")
    )
    world = make_world()
    with pytest.raises(HarnessError) as refused:
        await world.start()

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert str(refused.value).endswith("needs: flyToTheMoon")
    assert mark_processes(str(world.directory)) == []


# -- coming back --------------------------------------------------------------------


async def test_a_failed_call_keeps_its_value_and_its_session_resumes(make_world):
    value = {"status": "error", "stdout": "before it", "n": [1, 2.5, None]}

    async def cell(call):
        return ToolOutcome(
            text="it broke", value=value, is_error=True, code="ZeroDivisionError"
        )

    world = make_world()
    record = world.directory / "results.jsonl"
    config = {
        "file": str(record),
        "route": {"provider": FLASH.provider, "model": FLASH.model},
    }
    plugin = Path(__file__).with_name("recorder.mjs")
    row = {"id": "rlm-test-recorder", "name": str(plugin), "config": config}
    await world.start(extra_patch_rows=[{"insert": [row]}])
    root = await world.root()
    first = await world.ask(root, world.runs(cell))
    await world.ask(root, world.says(lambda t: Reply(text="a turn more")))
    await world.harness.close()
    world.events.clear()

    await world.start(extra_patch_rows=[{"insert": [row]}])
    await world.harness.create_root(
        agent_id=f"resume-{root}", cwd=str(world.workspace), route=FLASH
    )
    await world.until(lambda: world.of(AgentCreated, root))
    after = await world.ask(root, world.says(lambda t: Reply(text="back again")))

    (kept,) = [json.loads(line) for line in record.read_text().splitlines()]
    assert kept["sessionId"] == root
    assert kept["meta"] == value
    assert kept["error"]["code"] == "ZeroDivisionError"
    assert (first.reason, after.reason) == ("completed", "completed")
    body = json.dumps(world.requests_of(root)[-1].body)
    assert "Error: it broke" in body
    assert "before it" not in body


async def test_an_aborted_call_keeps_its_value(make_world):
    async def cell(call):
        async with asyncio.timeout(WAIT_S):
            await call.cancelled.wait()
        return ToolOutcome(
            text="[stopped]", value={"status": "aborted"}, is_error=True, code="aborted"
        )

    world = make_world()
    record = world.directory / "results.jsonl"
    plugin = Path(__file__).with_name("recorder.mjs")
    config = {"file": str(record), "route": {}}
    row = {"id": "rlm-test-recorder", "name": str(plugin), "config": config}
    await world.start(extra_patch_rows=[{"insert": [row]}])
    root = await world.root()
    await world.harness.send(root, world.runs(cell))
    await world.until(lambda: world.calls)
    await world.harness.cancel(root)
    await world.idle(root)
    after = await world.ask(root, world.says(lambda t: Reply(text="again")))

    (kept,) = [json.loads(line) for line in record.read_text().splitlines()]
    assert kept["meta"] == {"status": "aborted"}
    assert after.reason == "completed"


# -- ending ------------------------------------------------------------------------


async def test_close_ends_every_process_and_may_be_called_twice(make_world):
    marker = f"43{os.getpid()}"

    async def cell(call):
        await world.harness.call_tool(
            call.execution_id,
            name="bash",
            arguments={
                "command": f"sleep {marker} >/dev/null 2>&1 & echo started",
                "description": "sleep",
            },
            number=1,
        )
        return ToolOutcome(text="started")

    world = await make_world().start(permission_mode="danger-full-access")
    await world.ask(await world.root(), world.runs(cell))
    pid = world.harness.pid
    assert mark_processes(f"sleep {marker}")

    await world.harness.close()
    await world.harness.close()

    assert not psutil.pid_exists(pid)
    assert mark_processes(f"sleep {marker}") == []
    assert not [e for e in world.events if isinstance(e, HarnessLost)]


async def test_a_close_during_the_start_leaves_nothing(make_world):
    world = make_world()
    starting = asyncio.create_task(world.start())
    while not hasattr(world, "harness") or world.harness.pid is None:
        await asyncio.sleep(0)
    await world.harness.close()

    with pytest.raises(HarnessError) as refused:
        await asyncio.wait_for(starting, WAIT_S)
    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert mark_processes(str(world.directory)) == []
    assert world.events == []


async def test_a_start_that_is_cancelled_leaves_nothing(make_world):
    world = make_world()
    starting = asyncio.create_task(world.start())
    while not hasattr(world, "harness") or world.harness.pid is None:
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait([starting], timeout=WAIT_S)

    assert starting.cancelled()
    assert mark_processes(str(world.directory)) == []


async def test_what_dsh_runs_does_not_get_the_token_of_the_link(make_world):
    results = []

    async def cell(call):
        command = {"command": "env", "description": "look"}
        results.append(
            await world.harness.call_tool(
                call.execution_id, name="bash", arguments=command, number=1
            )
        )
        return ToolOutcome(text="seen")

    world = await make_world().start(permission_mode="danger-full-access")
    await world.ask(await world.root(), world.runs(cell))

    environment = results[0].content[0]["text"]
    assert "PATH=" in environment
    assert "RLM_BRIDGE_TOKEN" not in environment
    assert "sk-" not in environment


async def test_close_deletes_the_credentials(make_world):
    world = await make_world().start()
    path = world.directory / "dsh" / ".credentials.yaml"
    assert path.exists()

    await world.harness.close()

    assert not path.exists()


async def test_close_cancels_what_is_under_way(make_world):
    seen = []

    async def cell(call):
        async with asyncio.timeout(WAIT_S):
            await call.cancelled.wait()
        seen.append(call.tool)
        return ToolOutcome(text="ended", is_error=True)

    world = await make_world().start()
    root = await world.root()
    await world.harness.send(root, world.runs(cell))
    await world.until(lambda: world.calls)
    await world.harness.close()

    assert seen == ["ipython"]


async def test_after_close_calls_say_that_the_harness_is_gone(make_world):
    world = await make_world().start()
    root = await world.root()
    await world.harness.close()
    with pytest.raises(HarnessError) as refused:
        await world.harness.send(root, "x")

    assert refused.value.code is ErrorCode.HARNESS_LOST


# -- being lost --------------------------------------------------------------------


async def test_an_idle_dsh_that_is_killed_is_known_to_be_lost(make_world):
    world = await make_world().start()
    root = await world.root()

    os.kill(world.harness.pid, signal.SIGKILL)
    async with asyncio.timeout(LOST_S):
        await world.until(lambda: [e for e in world.events if type(e) is HarnessLost])

    (lost,) = [e for e in world.events if type(e) is HarnessLost]
    assert world.events[-1] is lost
    assert "SIGKILL" in lost.message
    with pytest.raises(HarnessError) as refused:
        await world.harness.is_quiet(root)
    assert refused.value.code is ErrorCode.HARNESS_LOST


async def test_a_dsh_that_is_killed_in_a_turn_fails_every_open_call(make_world):
    inside = []
    marker = f"44{os.getpid()}"

    async def cell(call):
        nested = world.harness.call_tool(
            call.execution_id,
            name="bash",
            arguments={"command": f"sleep {marker}", "description": "sleep"},
            number=1,
        )
        try:
            await nested
        except HarnessError as error:
            inside.append((error.code, call.cancelled.is_set()))
        return ToolOutcome(text="late")

    world = await make_world().start(permission_mode="danger-full-access")
    root = await world.root()
    await world.harness.send(root, world.runs(cell))
    await world.until(lambda: mark_processes(f"sleep {marker}"))

    os.kill(world.harness.pid, signal.SIGKILL)
    async with asyncio.timeout(LOST_S):
        await world.until(lambda: inside)

    assert inside == [(ErrorCode.HARNESS_LOST, True)]


async def test_closing_a_lost_harness_is_quick_and_clean(make_world):
    world = await make_world().start()
    os.kill(world.harness.pid, signal.SIGKILL)
    await world.until(lambda: world.events)

    await asyncio.wait_for(world.harness.close(), LOST_S)

    assert mark_processes(str(world.directory)) == []


async def test_a_message_over_the_limit_is_refused_and_the_link_lives(make_world):
    world = await make_world().start(max_line_bytes=256 * 1024)
    root = await world.root()
    with pytest.raises(HarnessError) as refused:
        await world.harness.send(root, "x" * 300_000)

    assert refused.value.code is ErrorCode.PAYLOAD_TOO_LARGE
    assert await world.harness.is_quiet(root)


async def test_an_answer_over_the_limit_fails_its_call_and_the_link_lives(make_world):
    codes = []

    async def cell(call):
        try:
            await world.harness.call_tool(
                call.execution_id,
                name="bash",
                arguments={"command": "seq 1 6000", "description": "count"},
                number=1,
            )
        except HarnessError as error:
            codes.append(error.code)
        return ToolOutcome(text="tried")

    world = await make_world().start(
        max_line_bytes=16 * 1024, permission_mode="danger-full-access"
    )
    ended = await world.ask(await world.root(), world.runs(cell))

    assert codes == [ErrorCode.PAYLOAD_TOO_LARGE]
    assert ended.reason == "completed"


async def test_a_line_over_the_limit_ends_the_link_and_dsh(make_world):
    world = await make_world().start(max_line_bytes=64 * 1024)
    pid = world.harness.pid

    # Past the check of our own end: the plugin's end must not grow either.
    world.harness._link._writer.write(b"x" * 200_000)
    await world.until(lambda: [e for e in world.events if type(e) is HarnessLost])

    await gone(pid, within_s=WAIT_S)


async def test_the_plugin_refuses_a_method_that_it_does_not_have(make_world):
    world = await make_world().start()
    with pytest.raises(HarnessError) as refused:
        await world.harness._call("no/such-method")

    assert refused.value.code is ErrorCode.UNSUPPORTED_REQUEST


async def test_a_malformed_line_does_not_end_the_link(make_world):
    world = await make_world().start()

    world.harness._link._writer.write(b'{"jsonrpc": \n[]\nnull\n{"id": 7}\n\xff\n')

    assert await world.harness.is_quiet("nobody")


async def test_a_malformed_event_does_not_end_the_link(make_world):
    world = await make_world().start()
    root = await world.root()

    for event in ({"kind": "status"}, {"kind": "mail", "mail": 7}, {"kind": []}):
        world.harness._link._take(
            json.dumps({"method": "event", "params": event}).encode()
        )
    ended = await world.ask(root, world.says(lambda t: Reply(text="still here")))

    assert ended.reason == "completed"
    assert not [e for e in world.events if isinstance(e, HarnessLost)]


async def test_dsh_does_not_outlive_a_bridge_that_is_killed(tmp_path):
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from host_bridge.harness.dsh.adapter import DshHarness, DshSettings
from host_bridge.harness.port import Registration, Route

async def main():
    home = Path({str(tmp_path)!r})
    harness = DshHarness(DshSettings(
        home=home / "dsh", workspace=home,
        default_route=Route(provider="deepseek-official", model="deepseek-v4-flash")))
    await harness.start(Registration(
        tools=[], sections=[], on_tool_call=None, on_event=lambda event: None))
    print(harness.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
    bridge = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE
    )
    pid = int(await asyncio.wait_for(bridge.stdout.readline(), WAIT_S * 2))
    bridge.kill()
    await bridge.wait()

    await gone(pid)


async def test_many_sessions_end_within_the_bounds_of_a_close(make_world):
    world = await make_world().start()
    root = await world.root(muted=True)
    prompt = world.says(lambda t: Reply(text="late", delay_s=60))
    for number in range(8):
        await world.harness.start_child(
            ChildRequest(
                parent_id=root, prompt=prompt, label=f"kid-{number}", max_depth=1
            )
        )

    await asyncio.wait_for(world.harness.close(), WAIT_S)

    assert not psutil.pid_exists(world.harness.pid)
