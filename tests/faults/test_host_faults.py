"""A host that pauses, dies, falls silent, or is not there at all."""

import ast
import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from host_bridge.kernels.attachment import Attachment
from host_bridge.kernels.channels import Channels

pytestmark = [pytest.mark.kernel, pytest.mark.posix]

BRIDGE = Path(__file__).with_name("bridge_process.py")


@dataclass
class BridgeProcess:
    """A bridge that may be paused and killed."""

    process: asyncio.subprocess.Process

    async def heard(self, bound_s: float = 20.0) -> dict[str, Any]:
        async with asyncio.timeout(bound_s):
            line = await self.process.stdout.readline()
        assert line, "the bridge ended without a word"
        return json.loads(line)

    async def allow(self) -> None:
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ends(self) -> int:
        async with asyncio.timeout(20):
            return await self.process.wait()


@pytest.fixture
async def start_bridge(short_path):
    made = []

    async def start(mode):
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(BRIDGE),
            mode,
            str(short_path),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        made.append(process)
        return BridgeProcess(process)

    yield start
    for process in made:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        process._transport.close()


async def test_two_thousand_requests_outlive_a_pause_of_the_host(start_bridge):
    bridge = await start_bridge("flood")
    assert await bridge.heard() == {"asked": 256}

    bridge.signal(signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(bridge.process.stdout.read(1), 3)
    bridge.signal(signal.SIGCONT)
    await bridge.allow()

    assert await bridge.heard() == {"status": "ok", "result": "True", "runs": 2000}
    assert await bridge.ends() == 0


async def test_a_killed_bridge_takes_its_kernels_along_busy_or_not(
    start_bridge, short_path, waits
):
    bridge = await start_bridge("live")
    found = await bridge.heard()
    async with asyncio.timeout(10):
        while not (short_path / "busy").exists():
            await asyncio.sleep(0.02)

    bridge.signal(signal.SIGKILL)

    assert await waits.gone(*found["pids"], bound_s=2)
    _end(found["strays"])


async def test_a_bridge_that_ends_leaves_nothing(start_bridge, short_path, waits):
    bridge = await start_bridge("live")
    found = await bridge.heard()

    await bridge.allow()

    assert await bridge.ends() == 0
    assert await waits.gone(*found["pids"], *found["strays"], bound_s=1)


def _end(pids):
    """What a cell started is nobody's after a kill: the test ends it."""
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


HOLD = (
    "try:\n"
    "    await host_request('hold')\n"
    "except HostError as error:\n"
    "    found = (error.code, error.request_type)\n"
    "found"
)


@pytest.mark.timeout(60)
async def test_a_host_that_falls_silent_ends_requests_within_lease_and_wait(
    start_bridge, visit, waits
):
    bridge = await start_bridge("hold")
    found = await bridge.heard()
    visiting = asyncio.create_task(visit(found["connection_file"], HOLD, "1 + 1"))
    assert await bridge.heard() == {"asked": "hold"}

    bridge.signal(signal.SIGSTOP)
    # 6 s of lease and 5 s of waiting, and the way of the visitor.
    first, second = await waits.within(visiting, bound_s=6 + 5 + 2)
    bridge.signal(signal.SIGCONT)
    await bridge.allow()

    assert first["value"] == "('HOST_UNAVAILABLE', 'hold')"
    assert second["value"] == "2"
    assert await bridge.ends() == 0


# -- a kernel that no bridge started ------------------------------------------------------


@pytest.fixture
async def stock_kernel(short_path):
    """A stock ipykernel's connection file."""
    connection = {
        "transport": "ipc",
        "ip": str(short_path / "k"),
        "key": "a" * 64,
        "signature_scheme": "hmac-sha256",
        "shell_port": 1,
        "iopub_port": 2,
        "stdin_port": 3,
        "control_port": 4,
        "hb_port": 5,
    }
    file = short_path / "stock.json"
    file.write_text(json.dumps(connection))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "ipykernel_launcher",
        "-f",
        str(file),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PATH": os.environ["PATH"], "IPYTHONDIR": str(short_path / "ipython")},
    )
    yield file
    process.kill()
    await process.wait()
    process._transport.close()


@contextlib.asynccontextmanager
async def attached_host(file, dispatch):
    channels = Channels(file, with_output=False)
    attachment = Attachment(
        agent_id="a",
        generation="of this host",
        send=lambda kind, content: channels.send("control", kind, content),
        dispatch=dispatch,
        open_cell=lambda message_id: None,
    )

    async def listen_control():
        async for message in channels.receive("control"):
            attachment.on_control(message)

    async def listen_iopub():
        async for message in channels.receive("iopub"):
            await attachment.on_comm(message)

    tasks = [
        asyncio.create_task(work)
        for work in (listen_control(), listen_iopub(), attachment.beat())
    ]
    try:
        async with asyncio.timeout(10):
            await attachment.answered.wait()
        yield attachment
    finally:
        await attachment.close(drain_s=1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channels.close()


ASK = (
    "try:\n"
    "    found = (await host_request('t', {'n': 1}))['n']\n"
    "except HostError as error:\n"
    "    found = error.code\n"
    "found"
)


async def test_a_stock_kernel_loads_the_extension_and_says_what_is_missing(
    stock_kernel, visit, waits
):
    loaded, asked, no_alias, names, unloaded, gone, again = await waits.within(
        visit(
            stock_kernel,
            "%load_ext kernel_ext",
            ASK,
            "import rlm",
            "callable(rlm), callable(agent_message.send), callable(dsh_tools.call)",
            "%unload_ext kernel_ext",
            "[n for n in ('rlm', 'agent_message', 'dsh_tools', 'host_request')"
            " if n in globals()]",
            "%load_ext kernel_ext",
        )
    )

    assert "until a host bridge attaches" in loaded["stdout"]
    assert "HOST_UNAVAILABLE" in loaded["stdout"]
    assert asked["value"] == "'HOST_UNAVAILABLE'"
    assert no_alias["status"] == "error"
    assert names["value"] == "(True, True, True)"
    assert (unloaded["status"], gone["value"]) == ("ok", "[]")
    assert (again["status"], again["stdout"]) == ("ok", loaded["stdout"])


async def test_a_host_may_join_a_stock_kernel_and_leave_it(
    stock_kernel, visit, waits, as_ok
):
    await waits.within(visit(stock_kernel, "%load_ext kernel_ext"))
    async with attached_host(stock_kernel, as_ok):
        served = await waits.within(visit(stock_kernel, ASK, ASK))
    async with attached_host(stock_kernel, as_ok):
        served += await waits.within(visit(stock_kernel, ASK))
    (left,) = await waits.within(visit(stock_kernel, ASK))

    assert [ast.literal_eval(cell["value"]) for cell in served] == [1, 1, 1]
    assert left["value"] == "'HOST_UNAVAILABLE'"


@pytest.fixture
def as_ok():
    from kernel_ext.wire.envelope import OkReply

    async def dispatch(request, asker):
        return OkReply(id=request.id, result=dict(request.payload))

    return dispatch


def test_plain_ipython_is_told_that_it_has_no_kernel():
    import kernel_ext

    class Shell:
        pass

    with pytest.raises(RuntimeError, match="needs a Jupyter kernel"):
        kernel_ext.load_ipython_extension(Shell())
    kernel_ext.unload_ipython_extension(Shell())
