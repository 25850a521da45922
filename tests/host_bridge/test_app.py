"""The object graph of a bridge: roots, kernels of agents, and its end."""

import ast
import asyncio

import pytest

from host_bridge.app import NotebookBridge, scripted_bridge
from host_bridge.bridge import Bridge
from host_bridge.errors import HarnessError, KernelError
from host_bridge.harness.port import AgentDisposed
from host_bridge.harness.script import run_fenced_python
from host_bridge.harness.scripted import ScriptedHarness
from host_bridge.kernels.attachment import Asker
from host_bridge.kernels.kernel import KernelSettings
from host_bridge.model import ModelChoice
from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import Request


@pytest.fixture
async def bridge(state):
    bridge = scripted_bridge(state, run_fenced_python)
    await bridge.start()
    yield bridge
    await bridge.close()


async def test_every_request_type_has_a_handler(bridge):
    from kernel_ext.wire.messages import REQUEST_TYPES

    assert bridge.handlers.keys() == REQUEST_TYPES.keys()


async def test_a_root_is_known_with_depth_zero(bridge, tmp_path):
    info = await bridge.create_root("r", cwd=tmp_path)

    assert bridge.agents.get("r").info == info
    assert (info.depth, info.parent_id) == (0, None)
    spec = bridge.spec_of(info)
    assert (spec.cwd, spec.depth) == (tmp_path, 0)
    assert spec.paths.directory.name == "r"


async def test_without_a_model_there_is_no_root(open_stage):
    async with open_stage(models=()) as stage:
        with pytest.raises(HarnessError) as caught:
            await stage.root()

    assert caught.value.code == "MODEL_UNAVAILABLE"


async def test_listeners_hear_events_after_the_agents_have_them(bridge, tmp_path):
    seen = []
    bridge.listen(lambda event: seen.append("r" in {a.info.id for a in _known(bridge)}))

    await bridge.create_root("r", cwd=tmp_path)

    assert seen[0] is True


def _known(bridge):
    return bridge.agents._agents.values()


@pytest.mark.kernel
async def test_an_agent_keeps_its_kernel(bridge, tmp_path, waits):
    info = await bridge.create_root("r", cwd=tmp_path)

    one = await waits.within(bridge.kernel_of(info))
    two = await waits.within(bridge.kernel_of(info))

    assert one is two


@pytest.mark.kernel
async def test_closing_ends_kernels_and_the_turns_that_use_them(state, tmp_path, waits):
    bridge = scripted_bridge(
        state, run_fenced_python, kernels=KernelSettings(shutdown_grace_s=2.0)
    )
    await bridge.start()
    info = await bridge.create_root("r", cwd=tmp_path)
    kernel = await waits.within(bridge.kernel_of(info))
    await bridge.harness.send(
        "r", "```python\nopen('began', 'w').close()\nawait asyncio.sleep(300)\n```"
    )
    async with asyncio.timeout(10):
        while not (tmp_path / "began").exists():
            await asyncio.sleep(0.02)

    await waits.within(bridge.close())

    assert await waits.gone(kernel.pid, bound_s=1)
    assert bridge.kernels.live() == []
    with pytest.raises(KernelError):
        await waits.within(bridge.kernel_of(info))


@pytest.mark.kernel
async def test_two_sessions_of_one_bridge_share_nothing(open_stage, visit, waits):
    code = (
        "import os\n"
        "shared = globals().get('shared', set()); shared.add(os.getpid())\n"
        "r = await rlm('p', name=f'child of {os.getpid()}')\n"
        "{**{name: os.environ[name] for name in\n"
        "    ('RLM_SESSION_DIR', 'RLM_GENERATION', 'IPYTHONDIR')},\n"
        " 'children': [c.name for c in await rlm.list_subagents()],\n"
        " 'pids': sorted(shared), 'cwd': os.getcwd()}"
    )
    async with open_stage() as stage:
        kernels = []
        for name in ("one", "two"):
            cwd = stage.directory / name
            cwd.mkdir()
            root = await stage.bridge.create_root(name, cwd=cwd)
            kernels.append(await waits.within(stage.bridge.kernel_of(root)))
        found = [
            (await waits.within(visit(kernel.connection_file, code)))[0]
            for kernel in kernels
        ]
        # What the visitor left is there for the agent, and only there.
        seen = [
            (await waits.within(kernel.execute("sorted(shared)"))).result
            for kernel in kernels
        ]

    assert [visited["status"] for visited in found] == ["ok", "ok"]
    one, two = (ast.literal_eval(visited["value"]) for visited in found)
    assert [key for key in one if one[key] == two[key]] == []
    assert found[0]["key"] != found[1]["key"]
    assert seen == [str(one["pids"]), str(two["pids"])]
    assert one["pids"] == [kernels[0].pid]
    assert one["children"] == [f"child of {kernels[0].pid}"]
    assert two["RLM_SESSION_DIR"].endswith("/sessions/two")


@pytest.mark.kernel
async def test_the_kernel_of_an_agent_that_is_gone_is_ended(open_stage, waits):
    async with open_stage() as stage:
        root = await stage.root()
        kernel = await stage.bridge.kernel_of(root)

        stage.bridge._on_event(AgentDisposed(agent_id=root.id))

        assert await waits.gone(kernel.pid)
        assert stage.bridge.kernels.live() == []


async def test_a_step_of_closing_that_fails_keeps_no_other_from_it(open_stage):
    done = []

    class Broken(ScriptedHarness):
        async def close(self):
            await super().close()
            msg = "no"
            raise HarnessError(ErrorCode.HARNESS_LOST, msg)

    async def last():
        done.append("last")

    async with open_stage() as stage:
        bridge = Bridge(Broken(run_fenced_python), stage.bridge.settings, on_close=last)
        await bridge.start()
        with pytest.raises(HarnessError):
            await bridge.close()

    assert done == ["last"]


async def test_errors_reach_a_notebook_without_the_key(state, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEEK_API_KEY", "sk-0123456789abcdef")
    notebook = NotebookBridge(state, "n", cwd=tmp_path, choice=ModelChoice())

    async def refuse():
        raise HarnessError(ErrorCode.HARNESS_LOST, "it said sk-0123456789abcdef")

    monkeypatch.setattr(notebook, "_start", refuse)
    reply = await notebook.dispatch(
        Request(id=1, type="rlm.list_subagents", generation="g"),
        Asker(agent_id="n", generation="g", cell=None, is_current=lambda: True),
    )

    assert (reply.code, reply.error) == ("HARNESS_LOST", "it said [credential]")
