"""Conformance: starting a kernel (groups 1 to 4, 9, 19)."""

import asyncio
import json

import pytest

from host_bridge.errors import KernelError

pytestmark = [pytest.mark.kernel, pytest.mark.asyncio(loop_scope="module")]


async def test_a_first_caller_that_was_aborted_does_not_poison_the_start(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    first = asyncio.create_task(registry.kernel(spec))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    kernel = await waits.within(registry.kernel(spec))

    assert (await kernel.execute("1")).result == "1"


async def test_a_kernel_that_ends_before_it_is_ready_tells_its_last_words(
    lab, waits, tmp_path, monkeypatch
):
    profile = lab.spec()
    profile.paths.make()
    # A start-up file of the session's own IPython directory that ends the kernel.
    startup = profile.paths.ipython / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "00-end.py").write_text(
        "import os, sys\nsys.__stderr__.write('the last words')\n"
        "sys.__stderr__.flush()\nos._exit(9)\n"
    )

    with pytest.raises(KernelError) as caught:
        await waits.within(lab.registry().kernel(profile))

    assert caught.value.code == "KERNEL_START_FAILED"
    assert "status 9" in str(caught.value)


async def test_a_stop_in_a_cold_start_leaves_no_process(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    for _ in range(3):
        starting = asyncio.create_task(registry.kernel(spec))
        spec.paths.runtime.unlink(missing_ok=True)
        async with asyncio.timeout(10):
            while not spec.paths.runtime.exists():
                await asyncio.sleep(0)
        pid = json.loads(spec.paths.runtime.read_text())["kernel"]["pid"]

        await waits.within(registry.dispose(spec.agent_id))
        await asyncio.gather(starting, return_exceptions=True)

        assert await waits.gone(pid, bound_s=2)
    kernel = await waits.within(registry.kernel(spec))
    assert (await kernel.execute("1")).result == "1"


async def test_interrupts_of_an_idle_kernel_harm_nothing(lab, waits, raw_client):
    kernel = await lab.kernel()
    await kernel.execute("kept = 1")
    client = raw_client(kernel.connection_file)
    for _ in range(10):
        client.control.send_multipart(client.frames("interrupt_request", {}))
        assert await asyncio.to_thread(client.control.poll, 5000)
        client.control.recv_multipart()

    result = await waits.within(kernel.execute("kept"))

    assert (result.status, result.result) == ("ok", "1")


async def test_a_stop_in_the_same_tick_as_the_call_harms_nothing(lab, waits):
    kernel = await lab.kernel()
    await kernel.execute("kept = 1")
    for _ in range(10):
        stop = asyncio.Event()
        cell = asyncio.create_task(kernel.execute("kept", cancelled=stop))
        stop.set()
        assert (await waits.within(cell)).status == "aborted"

    assert (await waits.within(kernel.execute("kept"))).result == "1"
