"""Requests from a real kernel, wherever in it they come from."""

import ast
import asyncio

import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture
def run(kernel, waits):
    """Run a cell; the value of its last expression."""

    async def run(code, execution_id="call-1"):
        result = await waits.within(kernel.execute(code, execution_id=execution_id))
        assert result.status == "ok", result.error
        return ast.literal_eval(result.result) if result.result else None

    return run


async def test_a_cell_awaits_the_answer(run):
    assert await run("await host_request('t', {'a': [1, 'ü']})") == {
        "echo": {"a": [1, "ü"]}
    }


async def test_an_error_is_raised_with_its_code_and_its_bare_text(run):
    code = (
        "try:\n"
        "    await host_request('fail')\n"
        "except RuntimeError as error:\n"
        "    caught = error\n"
        "(str(caught), caught.code, caught.request_type, isinstance(caught, HostError))"
    )

    assert await run(code) == ("as you wish", "HOST_REQUEST_FAILED", "fail", True)


async def test_an_error_that_is_not_caught_fails_the_cell(kernel):
    result = await kernel.execute("await rlm.run('p')\nawait host_request('fail')")
    failed = await kernel.execute("await host_request('fail')")

    assert (failed.status, failed.error.name) == ("error", "HostError")
    assert failed.error.message == "as you wish"
    assert result.status == "error"


async def test_a_thousand_requests_of_one_gather_are_answered(run):
    code = (
        "r = await asyncio.gather(*(host_request('t', {'n': n}) for n in range(1000)))\n"
        "[x['echo']['n'] for x in r] == [*range(1000)]"
    )

    assert await run(code) is True


async def test_a_cell_is_in_scope_while_it_runs(run):
    assert await run("await host_request('scope')", "call-7") == {"cell": "call-7"}


async def test_a_task_that_outlives_its_cell_is_served_but_out_of_scope(run):
    await run(
        "import asyncio\n"
        "go = asyncio.Event()\n"
        "async def late():\n"
        "    inside = await host_request('scope')\n"
        "    started.set_result(None)\n"
        "    await go.wait()\n"
        "    return inside, await host_request('scope')\n"
        "started = asyncio.get_running_loop().create_future()\n"
        "task = asyncio.create_task(late())\n"
        "await started",
        "call-a",
    )

    found = await run("go.set(); await task", "call-b")

    assert found == ({"cell": "call-a"}, {"cell": None})


async def test_a_thread_is_charged_to_the_cell_that_started_it(run):
    await run(
        "import threading, queue\n"
        "todo, found = queue.Queue(), queue.Queue()\n"
        "def work():\n"
        "    for _ in range(2):\n"
        "        todo.get()\n"
        "        found.put(asyncio.run(host_request('scope')))\n"
        "thread = threading.Thread(target=work, daemon=True); thread.start()",
        "call-a",
    )
    later = await run("todo.put(1); todo.put(1); (found.get(), found.get())", "call-b")

    assert later == ({"cell": None}, {"cell": None})


async def test_a_thread_that_its_cell_waits_for_is_in_scope(run):
    code = (
        "import threading\n"
        "found = []\n"
        "t = threading.Thread(target=lambda: found.append(asyncio.run("
        "host_request('scope'))))\n"
        "t.start(); t.join(); found"
    )

    assert await run(code, "call-t") == [{"cell": "call-t"}]


@pytest.mark.parametrize(
    "submit",
    [
        pytest.param("pool.submit(ask).result()", id="submit"),
        pytest.param("next(iter(pool.map(lambda _: ask(), [1])))", id="map"),
        pytest.param(
            "await asyncio.get_running_loop().run_in_executor(pool, ask)", id="loop"
        ),
        pytest.param("await asyncio.to_thread(ask)", id="to_thread"),
    ],
)
async def test_a_pool_is_charged_to_the_cell_that_hands_work_to_it(run, submit):
    await run(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "def ask(): return asyncio.run(host_request('scope'))\n"
        f"{submit}",
        "call-a",
    )

    assert await run(submit, "call-b") == {"cell": "call-b"}
    await run("pool.shutdown()")


async def test_a_timer_and_a_subclass_of_thread_are_in_scope(run):
    code = (
        "import threading\n"
        "found = []\n"
        "class Mine(threading.Thread):\n"
        "    def run(self): found.append(asyncio.run(host_request('scope')))\n"
        "a = Mine(); a.start(); a.join()\n"
        "b = threading.Timer(0, lambda: found.append(asyncio.run(host_request('scope'))))\n"
        "b.start(); b.join(); found"
    )

    assert await run(code, "call-s") == [{"cell": "call-s"}] * 2


async def test_a_thread_of_a_thread_is_charged_to_the_first_cell(run):
    code = (
        "import threading\n"
        "found = []\n"
        "def inner(): found.append(asyncio.run(host_request('scope')))\n"
        "def outer():\n"
        "    t = threading.Thread(target=inner); t.start(); t.join()\n"
        "t = threading.Thread(target=outer); t.start(); t.join(); found"
    )

    assert await run(code, "call-n") == [{"cell": "call-n"}]


async def test_a_thread_of_nobody_belongs_to_no_cell(run):
    code = (
        "import _thread, queue\n"
        "found = queue.Queue()\n"
        "_thread.start_new_thread(lambda: found.put(asyncio.run(host_request('scope'))), ())\n"
        "found.get(timeout=10)"
    )

    assert await run(code, "call-x") == {"cell": None}


async def test_threads_and_tasks_ask_at_the_same_time(run):
    code = (
        "import threading\n"
        "found = []\n"
        "async def many(k):\n"
        "    r = await asyncio.gather(*(host_request('t', {'k': k, 'n': n})\n"
        "                               for n in range(50)))\n"
        "    found.append([x['echo'] for x in r] == [{'k': k, 'n': n} for n in range(50)])\n"
        "threads = [threading.Thread(target=lambda k=k: asyncio.run(many(k)))\n"
        "           for k in range(8)]\n"
        "for t in threads: t.start()\n"
        "await asyncio.gather(*(many(k) for k in range(8, 12)))\n"
        "await asyncio.to_thread(lambda: [t.join() for t in threads])\n"
        "found"
    )

    assert await run(code) == [True] * 12


async def test_the_ids_of_a_kernel_count_up_without_gaps(lab, waits):
    kernel = await lab.kernel()

    await waits.within(
        kernel.execute(
            "await asyncio.gather(*(host_request('ids') for _ in range(300)))"
        )
    )

    mine = [
        request.id
        for request, asker in lab.host.asked
        if asker.agent_id == kernel.spec.agent_id
    ]
    assert sorted(mine) == [*range(1, 301)]


async def test_a_request_carries_who_asks_and_no_more(lab, kernel, waits):
    await waits.within(kernel.execute("await host_request('who')"))

    _, asker = lab.host.asked[-1]
    assert asker.agent_id == kernel.spec.agent_id
    assert asker.generation == (await env(kernel, "RLM_GENERATION"))
    assert asker.is_current()


async def env(kernel, name):
    result = await kernel.execute(f"import os; os.environ[{name!r}]")
    return ast.literal_eval(result.result)


async def test_two_thousand_cancelled_requests_leave_nothing_in_work(kernel, waits):
    code = (
        "tasks = [asyncio.ensure_future(host_request('gone', {'gate': 'never'}))\n"
        "         for _ in range(2000)]\n"
        "await asyncio.sleep(0)\n"
        "for t in tasks: t.cancel()\n"
        "r = await asyncio.gather(*tasks, return_exceptions=True)\n"
        "all(isinstance(x, asyncio.CancelledError) for x in r)"
    )

    result = await waits.within(kernel.execute(code))
    after = await waits.within(kernel.execute("await host_request('t', {'n': 1})"))

    assert (result.result, after.status) == ("True", "ok")
    assert kernel._attachment._working == {}
    async with asyncio.timeout(5):
        while len(kernel._attachment._answers) > 1024:
            await kernel.execute("1")


async def test_a_cancelled_request_makes_room_for_the_next(lab, waits):
    kernel = await lab.kernel()
    code = (
        "held = [asyncio.ensure_future(host_request('held', {'gate': 'never'}))\n"
        "        for _ in range(256)]\n"
        "await asyncio.sleep(0)\n"
        "extra = asyncio.ensure_future(host_request('extra'))\n"
        "done, _ = await asyncio.wait({extra}, timeout=0.2)\n"
        "was_held = not done\n"
        "held[7].cancel()\n"
        "(was_held, 'echo' in await extra, [t.cancel() for t in held][0])"
    )

    result = await waits.within(kernel.execute(code))

    assert result.result == "(True, True, True)"


async def test_the_child_of_a_fork_is_not_served_twice(kernel, waits):
    result = await waits.within(
        kernel.execute(
            "import os\n"
            "pid = os.fork()\n"
            "if pid == 0: os._exit(0)\n"
            "os.waitpid(pid, 0)[1]"
        )
    )

    assert result.result == "0"
    assert (
        await waits.within(kernel.execute("await host_request('t')"))
    ).status == "ok"


async def test_a_request_that_is_on_its_way_when_the_cell_ends_is_served(
    lab, kernel, waits
):
    await waits.within(
        kernel.execute(
            "late = asyncio.ensure_future(host_request('late', {'gate': 'l'}))"
        )
    )
    await lab.host.until(lambda: bool(lab.host.of("late")))
    lab.host.gate("l").set()

    result = await waits.within(kernel.execute("'echo' in await late"))

    assert result.result == "True"
    assert asyncio.get_running_loop().is_running()
