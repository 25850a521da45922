"""The object graph of a bridge: roots, kernels of agents, and its end."""

import asyncio

import pytest

from host_bridge.app import scripted_bridge
from host_bridge.errors import HarnessError, KernelError
from host_bridge.harness.script import run_fenced_python
from host_bridge.kernels.kernel import KernelSettings


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
async def test_two_sessions_of_one_bridge_share_nothing(
    open_stage, join_kernel, waits
):
    """An independent Jupyter client reaches each by its connection file."""
    async with open_stage() as stage:
        kernels = {}
        for name in ("one", "two"):
            root = await stage.root(name)
            kernels[name] = await waits.within(stage.bridge.kernel_of(root))
        found = {
            name: await asyncio.to_thread(_visit, join_kernel, kernel, name)
            for name, kernel in kernels.items()
        }
        # What the independent client left is there for the agent, and only there.
        seen = {
            name: (await waits.within(kernel.execute("sorted(shared)"))).result
            for name, kernel in kernels.items()
        }

    assert seen == {"one": "['one']", "two": "['two']"}
    one, two = found["one"], found["two"]
    assert one.keys() == two.keys()
    assert [key for key in one if one[key] == two[key]] == []
    for name, facts in found.items():
        assert f"/sessions/{name}" in facts["session_dir"]


def _visit(join_kernel, kernel, name):
    code = (
        "import os\n"
        "shared = globals().get('shared', set()); shared.add(%r)\n"
        "r = await rlm('p', name='child of %s')\n"
        "{'pid': os.getpid(), 'session_dir': os.environ['RLM_SESSION_DIR'],\n"
        " 'generation': os.environ['RLM_GENERATION'],\n"
        " 'ipython': os.environ['IPYTHONDIR'],\n"
        " 'children': [c.name for c in await rlm.list_subagents()],\n"
        " 'names': sorted(shared)}" % (name, name)
    )
    with join_kernel(kernel.connection_file) as client:
        client.wait_for_ready(timeout=15)
        outputs = []
        reply = client.execute_interactive(
            code, timeout=15, output_hook=outputs.append, allow_stdin=False
        )
        assert reply["content"]["status"] == "ok", reply["content"]
        values = [m for m in outputs if m["msg_type"] == "execute_result"]
        facts = eval(values[0]["content"]["data"]["text/plain"])
        facts["key"] = client.session.key
        return facts
