"""One kernel for each agent: started once, replaced, and none after the end."""

import asyncio
import json

import pytest

from host_bridge.errors import KernelError
from host_bridge.kernels.kernel import Kernel

pytestmark = [pytest.mark.kernel, pytest.mark.asyncio(loop_scope="module")]


async def test_concurrent_first_calls_share_one_start(lab, waits):
    registry, spec = lab.registry(), lab.spec()

    kernels = await waits.within(
        asyncio.gather(*(registry.kernel(spec) for _ in range(5)))
    )

    assert len({id(kernel) for kernel in kernels}) == 1
    assert registry.live() == [kernels[0]]
    assert kernels[0].number == 1


async def test_a_caller_that_gives_up_leaves_the_others_their_kernel(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    first = asyncio.create_task(registry.kernel(spec))
    second = asyncio.create_task(registry.kernel(spec))
    await asyncio.sleep(0)

    first.cancel()
    await asyncio.gather(first, return_exceptions=True)

    assert (await (await waits.within(second)).execute("1")).result == "1"


async def test_a_failed_start_is_told_to_all_and_tried_again(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    spec.cwd.rmdir()

    failures = await waits.within(
        asyncio.gather(
            *(registry.kernel(spec) for _ in range(3)), return_exceptions=True
        )
    )
    spec.cwd.mkdir()
    kernel = await waits.within(registry.kernel(spec))

    assert [f.code for f in failures] == ["KERNEL_START_FAILED"] * 3
    assert (await kernel.execute("2")).result == "2"


async def test_each_generation_has_a_key_a_directory_and_a_name_of_its_own(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    seen = []
    for _ in range(2):
        kernel = await waits.within(registry.kernel(spec))
        connection = json.loads(kernel.connection_file.read_text())
        name = (await kernel.execute("import os; os.environ['RLM_GENERATION']")).result
        seen.append((connection["key"], connection["ip"], name))
        await waits.within(kernel.execute("os._exit(0)"))

    first, second = seen
    assert all(a != b for a, b in zip(first, second, strict=True))


async def test_a_kernel_that_died_while_idle_is_replaced(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    kernel = await waits.within(registry.kernel(spec))
    kernel._process.process.kill()
    assert await waits.gone(kernel.pid)
    await waits.within(kernel._process.process.wait())

    with pytest.raises(KernelError) as caught:
        await waits.within(kernel.execute("1"))
    successor = await waits.within(registry.kernel(spec))

    assert caught.value.code == "KERNEL_DIED"
    assert (await successor.execute("1")).generation == 2
    assert len(registry.live()) == 1


async def test_disposing_a_starting_kernel_ends_it_and_tells_who_waits(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    waiting = asyncio.create_task(registry.kernel(spec))
    await asyncio.sleep(0)
    # Far enough to have a process, not far enough to be ready.
    while not spec.paths.runtime.exists():
        await asyncio.sleep(0)
    pid = json.loads(spec.paths.runtime.read_text())["kernel"]["pid"]

    await waits.within(registry.dispose(spec.agent_id))

    with pytest.raises(KernelError) as caught:
        await waits.within(waiting)
    assert caught.value.code == "KERNEL_START_FAILED"
    assert await waits.gone(pid, bound_s=2)
    assert registry.live() == []


async def test_disposing_before_the_process_exists_starts_none(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    waiting = asyncio.create_task(registry.kernel(spec))
    await asyncio.sleep(0)

    await waits.within(registry.dispose(spec.agent_id))

    with pytest.raises(KernelError):
        await waits.within(waiting)
    assert not spec.paths.runtime.exists()


async def test_disposing_what_is_not_there_is_fine(lab, waits):
    await waits.within(lab.registry().dispose("nobody"))


async def test_the_next_kernel_waits_for_the_end_of_the_one_before(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    first = await waits.within(registry.kernel(spec))

    disposing = asyncio.create_task(registry.dispose(spec.agent_id))
    await asyncio.sleep(0)
    second = await waits.within(registry.kernel(spec))

    assert not first.is_alive
    assert not first.connection_file.exists()
    assert second.number == 2
    await waits.within(disposing)
    assert second.is_alive


async def test_a_closed_registry_starts_no_kernel(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    kernel = await waits.within(registry.kernel(spec))
    running = asyncio.create_task(
        kernel.execute("await host_request('hold', {'gate': 'never'})")
    )
    queued = [asyncio.create_task(kernel.execute(f"ran_{n} = 1")) for n in range(3)]
    await lab.host.until(lambda: bool(lab.host.of("hold")))

    await waits.within(registry.close())
    results = await waits.within(
        asyncio.gather(running, *queued, return_exceptions=True)
    )
    with pytest.raises(KernelError) as caught:
        await waits.within(registry.kernel(spec))

    assert results[0].status == "aborted"
    assert [r.code for r in results[1:]] == ["KERNEL_DIED"] * 3
    assert caught.value.code == "KERNEL_START_FAILED"
    assert registry.live() == []


async def test_closing_twice_is_fine(lab, waits):
    registry = lab.registry()
    await waits.within(registry.kernel(lab.spec()))

    await waits.within(asyncio.gather(registry.close(), registry.close()))
    await waits.within(registry.close())

    assert registry.live() == []


async def test_many_kernels_start_and_stop_together(lab, waits):
    registry = lab.registry()
    specs = [lab.spec() for _ in range(4)]

    kernels = await waits.within(
        asyncio.gather(*(registry.kernel(spec) for spec in specs))
    )
    results = await waits.within(
        asyncio.gather(*(k.execute(f"{n}") for n, k in enumerate(kernels)))
    )
    await waits.within(registry.close())

    assert [r.result for r in results] == ["0", "1", "2", "3"]
    assert await waits.gone(*(k.pid for k in kernels), bound_s=1)


async def test_no_more_kernels_boot_at_once_than_may(lab, monkeypatch):
    booting, most = 0, 0
    start = Kernel.start

    async def counted(*args, **options):
        nonlocal booting, most
        booting += 1
        most = max(most, booting)
        try:
            return await start(*args, **options)
        finally:
            booting -= 1

    monkeypatch.setattr(Kernel, "start", counted)
    registry = lab.registry(max_concurrent_boots=2)
    kernels = await asyncio.gather(*(registry.kernel(lab.spec()) for _ in range(5)))

    assert len({kernel.pid for kernel in kernels}) == 5
    assert most == 2
