"""Stopping a cell: it is aborted, the namespace stays, the host's work ends."""

import asyncio

import pytest
import pytest_asyncio

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.posix,
    pytest.mark.asyncio(loop_scope="module"),
]

# A cell without an await can not tell the host that it runs: a thread does.
SAY = (
    "import asyncio, threading, time\n"
    "_t = threading.Thread(target=lambda: asyncio.run(host_request('running')))\n"
    "_t.start()\n"
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel(lab):
    # No cell of these tests needs the end of its grace.
    return await lab.kernel(interrupt_grace_s=6.0)


async def stopped(lab, kernel, code):
    """Run *code*, stop it as soon as it says that it runs; its result."""
    before = len(lab.host.of("running"))
    stop = asyncio.Event()
    cell = asyncio.create_task(kernel.execute(code, cancelled=stop))
    await lab.host.until(lambda: len(lab.host.of("running")) > before)
    stop.set()
    async with asyncio.timeout(12):
        return await cell


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(SAY + "time.sleep(60)", id="sleep"),
        pytest.param(SAY + "while True: pass", id="busy loop"),
        pytest.param(SAY + "threading.Event().wait(60)", id="wait"),
        pytest.param(
            SAY + "import subprocess\nsubprocess.run(['sleep', '60'])", id="process"
        ),
        pytest.param(
            "await host_request('running')\nawait asyncio.sleep(60)", id="await sleep"
        ),
        pytest.param(
            "await asyncio.gather(host_request('running'), asyncio.sleep(60))",
            id="gather",
        ),
        pytest.param(
            "async with asyncio.TaskGroup() as g:\n"
            "    g.create_task(host_request('running'))\n"
            "    g.create_task(asyncio.sleep(60))",
            id="task group",
        ),
        pytest.param("await host_request('running', {'gate': 'never'})", id="request"),
        pytest.param(
            "await asyncio.sleep(0)\n" + SAY + "time.sleep(60)", id="sleep after await"
        ),
        pytest.param(
            "await asyncio.sleep(0)\n" + SAY + "while True: pass", id="loop after await"
        ),
        pytest.param(
            "def work():\n"
            "    while True: sum(range(1000))\n"
            "await host_request('running')\nwork()",
            id="function after await",
        ),
        pytest.param(
            "import time\n"
            "async def other():\n"
            "    await host_request('running')\n"
            "    time.sleep(60)\n"
            "await asyncio.gather(other(), asyncio.sleep(60))",
            id="sleep in another task",
        ),
        pytest.param(
            "import subprocess\n"
            "await host_request('running')\nsubprocess.run(['sleep', '60'])",
            id="process after await",
        ),
        pytest.param(
            SAY + "get_ipython().run_cell_magic('bash', '', 'sleep 60')", id="bash"
        ),
        pytest.param(SAY + "!sleep 60", id="line of shell"),
    ],
)
async def test_a_stopped_cell_is_aborted_and_the_namespace_stays(lab, kernel, code):
    await kernel.execute("kept = 'here'")

    result = await stopped(lab, kernel, code)

    assert result.status == "aborted", result
    assert result.kernel_restarted is False
    assert (await kernel.execute("kept")).result == "'here'"


@pytest.mark.parametrize("event", ["pre_run_cell", "post_execute", "post_run_cell"])
@pytest.mark.parametrize("last", ["'done'", "await asyncio.sleep(0)"])
async def test_a_callback_around_a_cell_is_stopped_too(lab, kernel, event, last):
    """As when a figure is drawn after its cell."""
    before = event.startswith("pre")
    await kernel.execute(
        "import asyncio\n"
        "def draw(*_):\n"
        "    global armed\n"
        "    if armed:\n"
        "        armed = False\n"
        + "".join(f"        {line}\n" for line in SAY.splitlines())
        + "        while True: pass\n"
        f"get_ipython().events.register('{event}', draw)\n"
        f"armed, kept = {before}, 'here'"
    )

    result = await stopped(lab, kernel, f"armed = {not before}\n{last}")
    left = await kernel.execute(
        f"get_ipython().events.unregister('{event}', draw)\nkept"
    )

    assert (result.status, result.kernel_restarted) == ("aborted", False)
    assert left.result == "'here'"


async def test_a_stop_ends_what_a_shell_runs_for_a_cell(lab, kernel):
    """The shell takes the interrupt, so that the cell itself goes on to its end."""
    result = await stopped(lab, kernel, SAY + "import os\nos.system('sleep 60')")

    assert result.status in ("ok", "aborted")
    assert result.kernel_restarted is False


async def test_what_was_printed_before_the_stop_is_kept(lab, kernel):
    result = await stopped(lab, kernel, "print('before')\n" + SAY + "time.sleep(60)")

    assert (result.status, result.stdout) == ("aborted", "before\n")


async def test_finally_blocks_run(lab, kernel):
    await stopped(
        lab,
        kernel,
        "try:\n"
        "    await host_request('running', {'gate': 'never'})\n"
        "finally:\n"
        "    cleaned = True",
    )

    assert (await kernel.execute("cleaned")).result == "True"


async def test_stopping_an_awaited_request_cancels_the_hosts_work(lab, kernel):
    before = len(lab.host.cancelled)

    await stopped(
        lab,
        kernel,
        "await asyncio.gather(*(host_request('running', {'gate': 'never'}) "
        "for _ in range(3)))",
    )
    await lab.host.until(lambda: len(lab.host.cancelled) >= before + 3)

    assert (await kernel.execute("await host_request('after')")).status == "ok"


async def test_a_cell_that_was_stopped_before_its_start_does_not_run(kernel):
    stop = asyncio.Event()
    stop.set()

    result = await kernel.execute("ran = True", cancelled=stop)

    assert (result.status, result.error.name) == ("aborted", "CANCELLED")
    assert (await kernel.execute("'ran' in globals()")).result == "False"


async def test_stopping_a_queued_cell_leaves_the_running_one_alone(lab, kernel):
    stop = asyncio.Event()
    first = asyncio.create_task(
        kernel.execute("await host_request('first', {'gate': 'first'}); 'done'")
    )
    second = asyncio.create_task(kernel.execute("queued = 1", cancelled=stop))
    await lab.host.until(lambda: bool(lab.host.of("first")))

    stop.set()
    lab.host.gate("first").set()

    assert (await first).status == "ok"
    assert (await second).status == "aborted"
    assert (await kernel.execute("'queued' in globals()")).result == "False"


async def test_stopping_a_queued_cell_returns_at_once(lab, kernel, waits):
    stop = asyncio.Event()
    first = asyncio.create_task(
        kernel.execute("await host_request('hold', {'gate': 'hold'})")
    )
    second = asyncio.create_task(kernel.execute("queued = 1", cancelled=stop))
    await lab.host.until(lambda: bool(lab.host.of("hold")))

    stop.set()
    result = await waits.within(second)
    lab.host.gate("hold").set()
    await first

    assert result.status == "aborted"


async def test_a_caller_that_is_cancelled_stops_its_cell(lab, kernel, waits):
    before = len(lab.host.of("running"))
    cell = asyncio.create_task(kernel.execute(SAY + "time.sleep(60)"))
    await lab.host.until(lambda: len(lab.host.of("running")) > before)

    cell.cancel()
    await asyncio.gather(cell, return_exceptions=True)

    assert cell.cancelled()
    assert (await waits.within(kernel.execute("5"))).result == "5"


async def test_a_stop_that_comes_with_the_end_of_the_cell_harms_nothing(kernel, waits):
    for number in range(100):
        stop = asyncio.Event()
        cell = asyncio.create_task(kernel.execute("1", cancelled=stop))
        # From before its start to about its end.
        await asyncio.sleep(number * 0.0002)
        stop.set()
        result = await waits.within(cell)
        assert result.status in ("ok", "aborted")
        assert result.kernel_restarted is False
        after = await waits.within(kernel.execute("sum(range(50_000)) and 6"))
        assert (after.status, after.result) == ("ok", "6")


async def test_a_cell_that_swallows_interrupts_loses_its_kernel(lab, waits):
    registry, spec = lab.registry(interrupt_grace_s=0.6), lab.spec()
    kernel = await waits.within(registry.kernel(spec))
    code = (
        "print('stubborn')\n" + SAY + "while True:\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        pass"
    )

    result = await stopped(lab, kernel, code)
    successor = await waits.within(registry.kernel(spec))
    after = await waits.within(successor.execute("'_t' in globals()"))

    assert (result.status, result.error.name) == ("aborted", "KERNEL_UNRESPONSIVE")
    assert (result.kernel_restarted, result.stdout) == (True, "stubborn\n")
    assert await waits.gone(kernel.pid, bound_s=2)
    assert (after.generation, after.result) == (2, "False")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        pytest.param("import os; os._exit(7)", "status 7", id="exit"),
        pytest.param("import os; os.kill(os.getpid(), 9)", "SIGKILL", id="kill"),
        pytest.param(
            "import os, signal; signal.signal(11, 0); os.kill(os.getpid(), 11)",
            "SIGSEGV",
            id="segmentation fault",
        ),
        pytest.param("import os; os.killpg(os.getpgid(0), 15)", "SIGTERM", id="group"),
    ],
)
async def test_a_kernel_that_dies_ends_the_call_and_the_next_has_a_new_one(
    lab, waits, code, how
):
    registry, spec = lab.registry(), lab.spec()
    kernel = await waits.within(registry.kernel(spec))
    await kernel.execute("lost = 1")

    result = await waits.within(
        kernel.execute(f"print('last words', flush=True)\n{code}")
    )
    successor = await waits.within(registry.kernel(spec))
    after = await waits.within(successor.execute("'lost' in globals()"))

    assert (result.status, result.error.name) == ("error", "KERNEL_DIED")
    assert how in result.error.message
    assert (result.generation, result.kernel_restarted) == (1, True)
    assert (after.status, after.generation, after.result) == ("ok", 2, "False")
    assert not kernel.connection_file.parent.exists()


async def test_the_requests_of_a_kernel_that_died_are_cancelled(lab, waits):
    kernel = await lab.kernel()
    before = len(lab.host.cancelled)

    await waits.within(
        kernel.execute(
            "import os\n"
            "t = asyncio.ensure_future(host_request('x', {'gate': 'never'}))\n"
            "await asyncio.sleep(0)\n"  # asked before, so it has arrived before
            "await host_request('y')\n"
            "os._exit(1)"
        )
    )

    await lab.host.until(lambda: len(lab.host.cancelled) > before)
