"""Conformance: kernels, requests and disposal (groups 8, 10, 11, 18, 23, 24, 25)."""

import ast
import asyncio
import json
from dataclasses import asdict

import pytest

from host_bridge.kernels.channels import Message
from kernel_ext.wire.envelope import Request

pytestmark = [pytest.mark.kernel, pytest.mark.asyncio(loop_scope="module")]


# -- group 10: one namespace, isolation, caps, no artifacts ------------------------


async def test_a_namespace_is_kept_and_another_is_isolated(lab, kernel):
    other = await lab.kernel()

    await kernel.execute("x = 41")

    assert (await kernel.execute("x + 1")).result == "42"
    assert (await other.execute("'x' in globals()")).result == "False"


async def test_a_value_error_is_an_error_with_its_name(kernel):
    result = await kernel.execute("raise ValueError('bad value')")

    assert (result.status, result.error.name) == ("error", "ValueError")


async def test_an_output_cap_of_seven_bytes(lab):
    kernel = await lab.kernel(max_output_bytes=7)

    result = await kernel.execute(
        "import sys\n"
        "sys.stdout.write('12345'); sys.stdout.flush()\n"
        "sys.stderr.write('6789'); sys.stderr.flush()\n"
        "'result'"
    )

    assert result.stdout == "12345"
    assert result.stderr == "67\n[... output truncated at 7 bytes ...]"
    assert result.result is None


async def test_an_error_cap_of_thirty_two_bytes(lab):
    kernel = await lab.kernel(max_output_bytes=32)

    result = await kernel.execute("raise ValueError('y' * 5_000_000)")

    assert result.error.name == "ValueError"
    assert result.error.message == (
        "y" * 32 + "\n[... output truncated at 32 bytes ...]"
    )
    assert result.error.traceback == ()


async def test_a_cap_of_five_bytes_keeps_whole_characters(lab):
    kernel = await lab.kernel(max_output_bytes=5)

    result = await kernel.execute("print('a😀z')")

    assert result.stdout == "a😀\n[... output truncated at 5 bytes ...]"


async def test_at_the_end_the_connection_directory_is_gone(lab, waits):
    kernel = await lab.kernel()
    directory = kernel.connection_file.parent

    await waits.within(kernel.stop())

    assert not directory.exists()


# -- group 8: keys and addresses -----------------------------------------------------


async def test_keys_are_unique_and_the_address_is_this_machine(lab, kernel):
    others = [await lab.kernel() for _ in range(2)]
    files = [json.loads(k.connection_file.read_text()) for k in (kernel, *others)]

    assert len({file["key"] for file in files}) == 3
    assert len({file["ip"] for file in files}) == 3
    assert all(
        file["transport"] == "ipc" or file["ip"] == "127.0.0.1" for file in files
    )


# -- groups 18 and 23: abort, parallel requests, idle pump, disposal -----------------


async def test_a_sleep_is_aborted_and_the_next_cell_works(kernel, waits):
    stop = asyncio.Event()
    cell = asyncio.create_task(
        kernel.execute(
            "import time\nopen('sleeping', 'w').close()\ntime.sleep(30)", cancelled=stop
        )
    )
    async with asyncio.timeout(10):
        while not (kernel.spec.cwd / "sleeping").exists():
            await asyncio.sleep(0.01)

    stop.set()
    result = await waits.within(cell)

    assert result.status == "aborted"
    assert (await kernel.execute("7")).result == "7"


async def test_parallel_requests_are_independent(lab, kernel, waits):
    cell = asyncio.create_task(
        kernel.execute(
            "slow = asyncio.ensure_future(host_request('s', {'gate': 'slow'}))\n"
            "quick = await asyncio.gather(*(host_request('q', {'n': n}) for n in range(9)))\n"
            "first = not slow.done()\n"
            "await host_request('quick is done')\n"
            "(first, [q['echo']['n'] for q in quick], 'echo' in await slow)"
        )
    )
    await lab.host.until(lambda: bool(lab.host.of("quick is done")))
    lab.host.gate("slow").set()

    result = await waits.within(cell)

    assert ast.literal_eval(result.result) == (True, [*range(9)], True)


async def test_a_request_of_an_idle_kernel_is_served(lab, kernel, waits):
    await kernel.execute(
        "async def later():\n"
        "    await asyncio.sleep(0.05)\n"
        "    await host_request('idle', {})\n"
        "task = asyncio.create_task(later())"
    )

    await lab.host.until(lambda: bool(lab.host.of("idle")))

    assert (
        await waits.within(kernel.execute("await task; task.done()"))
    ).result == "True"


async def test_disposal_cancels_requests_drains_them_and_ends_the_kernel(lab, waits):
    kernel = await lab.kernel()
    before = len(lab.host.cancelled)
    cell = asyncio.create_task(
        kernel.execute(
            "await asyncio.gather(*(host_request('d', {'gate': 'never'}) for _ in range(5)))"
        )
    )
    await lab.host.until(lambda: len(lab.host.of("d")) == 5)

    await waits.within(kernel.stop())

    assert len(lab.host.cancelled) == before + 5
    assert (await waits.within(cell)).status == "aborted"
    assert await waits.gone(kernel.pid, bound_s=1)


async def test_a_deliberately_late_answer_of_an_old_generation_reaches_nobody(
    lab, waits
):
    registry, spec = lab.registry(), lab.spec()
    old = await waits.within(registry.kernel(spec))
    cell = asyncio.create_task(
        old.execute("await host_request('old', {'gate': 'old'})")
    )
    await lab.host.until(lambda: bool(lab.host.of("old")))
    asker = next(a for r, a in lab.host.asked if r.type == "old")

    old._process.process.kill()
    assert (await waits.within(cell)).error.name == "KERNEL_DIED"
    new = await waits.within(registry.kernel(spec))
    lab.host.gate("old").set()

    assert asker.is_current() is False
    assert (await waits.within(new.execute("await host_request('new')"))).status == "ok"
    # The new kernel counts from one again, and is not taken for the old one.
    assert lab.host.of("new")[0].id == 1


# -- groups 24 and 25: errors, duplicates, generations, closed scope ----------------------


async def test_an_error_of_the_host_is_a_python_exception(kernel, waits):
    result = await waits.within(kernel.execute("await host_request('fail')"))

    assert (result.status, result.error.name) == ("error", "HostError")
    assert result.error.message == "as you wish"


@pytest.mark.parametrize("generation", ["own", "another"])
async def test_a_duplicate_id_runs_once_and_a_foreign_generation_never(
    lab, kernel, waits, generation
):
    """The wire is played by hand: what a kernel sends is sent once more."""
    kind = f"played {generation}"
    await waits.within(kernel.execute(f"await host_request({kind!r})"))
    request = lab.host.of(kind)[0]
    repeated = asdict(request)
    if generation == "another":
        repeated = asdict(
            Request(id=request.id + 10_000, type=kind, generation="of another kernel")
        )
    content = {"comm_id": kernel._attachment.comm_id, "data": repeated}

    for _ in range(3):
        await kernel._attachment.on_comm(Message("comm_msg", content, ""))
    await waits.within(kernel.execute("await host_request('after')"))

    assert len(lab.host.of(kind)) == 1


async def test_a_late_task_is_served_but_its_scope_is_closed(kernel, waits):
    await waits.within(
        kernel.execute(
            "async def late():\n"
            "    await gate.wait()\n"
            "    return await host_request('scope')\n"
            "gate = asyncio.Event(); task = asyncio.create_task(late())",
            execution_id="call-1",
        )
    )

    result = await waits.within(
        kernel.execute("gate.set(); await task", execution_id="call-2")
    )

    assert result.result == "{'cell': None}"
