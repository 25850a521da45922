"""A real kernel: cells, their results, and what is left at the end."""

import asyncio
import json
import os

import pytest

from host_bridge.errors import KernelError
from host_bridge.paths import socket_directories

pytestmark = [pytest.mark.kernel, pytest.mark.asyncio(loop_scope="module")]


async def test_a_variable_stays_for_the_next_cell(kernel):
    await kernel.execute("x = 41")

    result = await kernel.execute("x + 1")

    assert (result.status, result.result) == ("ok", "42")
    assert (result.generation, result.kernel_restarted) == (1, False)


async def test_another_kernel_has_a_namespace_of_its_own(lab, kernel):
    await kernel.execute("only_here = 1")
    other = await lab.kernel()

    result = await other.execute("'only_here' in globals()")

    assert result.result == "False"


async def test_an_exception_is_an_error_with_its_name_text_and_traceback(kernel):
    result = await kernel.execute("print('before')\nraise ValueError('bad value')")

    assert (result.status, result.stdout) == ("error", "before\n")
    assert (result.error.name, result.error.message) == ("ValueError", "bad value")
    assert "ValueError" in "".join(result.error.traceback)
    assert result.kernel_restarted is False


@pytest.mark.parametrize(
    ("code", "name"),
    [
        pytest.param(
            "raise ExceptionGroup('g', [ValueError('a')])", "ExceptionGroup", id="group"
        ),
        pytest.param(
            "import asyncio\n"
            "async def fail(): raise ValueError('a')\n"
            "async with asyncio.TaskGroup() as group: group.create_task(fail())",
            "ExceptionGroup",
            id="task group",
        ),
        pytest.param("%nosuch", "UsageError", id="unknown line magic"),
        pytest.param("%%nosuch\nx", "UsageError", id="unknown cell magic"),
        pytest.param("1 +", "SyntaxError", id="syntax"),
        pytest.param("raise SystemError('x')", "SystemError", id="system error"),
        pytest.param("raise BaseException('x')", "BaseException", id="base exception"),
        pytest.param(
            "raise KeyboardInterrupt", "KeyboardInterrupt", id="own interrupt"
        ),
        pytest.param(
            "import asyncio\nraise asyncio.CancelledError",
            "CancelledError",
            id="cancel",
        ),
        pytest.param(
            "class Bad(Exception):\n"
            "    def __str__(self): raise RuntimeError('no')\n"
            "raise Bad",
            "RuntimeError",
            id="exception without a text",
        ),
    ],
)
async def test_whatever_fails_a_cell_is_an_error(kernel, waits, code, name):
    result = await waits.within(kernel.execute(code))

    assert result.status == "error"
    assert result.error.name == name
    assert (await kernel.execute("1 + 1")).result == "2"


async def test_unicode_travels_in_every_field(kernel):
    result = await kernel.execute(
        "import sys\n"
        "größe = 'naïve 😀 漢字 \\u202e'\n"
        "print(größe); print(größe, file=sys.stderr); größe"
    )

    assert result.stdout == "naïve 😀 漢字 \u202e\n"
    assert result.stderr == "naïve 😀 漢字 \u202e\n"
    assert result.result == repr("naïve 😀 漢字 \u202e")


async def test_a_lone_surrogate_does_no_harm(kernel, waits):
    result = await waits.within(kernel.execute("print('a\\ud800b')\n'x\\udfff'"))

    json.dumps(result.stdout).encode()
    result.stdout.encode()
    assert (await waits.within(kernel.execute("2"))).result == "2"


async def test_cells_run_one_at_a_time_in_the_order_of_the_calls(kernel, waits):
    await kernel.execute("import asyncio\nlog, busy = [], False")
    cell = (
        "assert not busy\nbusy = True\nlog.append({})\n"
        "await asyncio.sleep(0.01)\nbusy = False"
    )

    results = await waits.within(
        asyncio.gather(*(kernel.execute(cell.format(n)) for n in range(10)))
    )

    assert [result.status for result in results] == ["ok"] * 10
    assert (await kernel.execute("log")).result == str([*range(10)])


async def test_a_failed_cell_does_not_abort_the_next(kernel, waits):
    failed, after = await waits.within(
        asyncio.gather(kernel.execute("1 / 0"), kernel.execute("'runs'"))
    )

    assert (failed.status, after.status) == ("error", "ok")
    assert after.result == "'runs'"


async def test_distinct_kernels_run_at_the_same_time(lab, kernel, waits):
    other = await lab.kernel()

    cells = [
        asyncio.create_task(
            one.execute("(await host_request('meet', {'gate': 'both'}))['echo']")
        )
        for one in (kernel, other)
    ]
    await lab.host.until(lambda: len(lab.host.of("meet")) == 2)
    lab.host.gate("both").set()
    results = await waits.within(asyncio.gather(*cells))

    assert [result.status for result in results] == ["ok", "ok"]


async def test_a_cell_works_in_the_agents_directory(lab, kernel):
    result = await kernel.execute("import os; os.getcwd()")

    assert result.result == repr(str(kernel.spec.cwd))


async def test_files_in_the_working_directory_shadow_nothing_at_start(lab, waits):
    spec = lab.spec()
    (spec.cwd / "random.py").write_text("raise SystemExit('shadowed')")
    (spec.cwd / "kernel_ext").mkdir()
    (spec.cwd / "kernel_ext" / "__init__.py").write_text("raise SystemExit('shadowed')")

    kernel = await waits.within(lab.registry().kernel(spec))

    assert (await kernel.execute("1")).result == "1"
    assert (await kernel.execute("import random; random.randint(3, 3)")).result == "3"


async def test_the_connection_is_private_and_has_a_key_of_32_random_bytes(lab, kernel):
    connection = json.loads(kernel.connection_file.read_text())
    other = await lab.kernel()

    assert len(bytes.fromhex(connection["key"])) == 32
    assert json.loads(other.connection_file.read_text())["key"] != connection["key"]
    assert connection["signature_scheme"] == "hmac-sha256"


@pytest.mark.posix
async def test_only_the_owner_reaches_the_connection(kernel):
    directory = kernel.connection_file.parent
    connection = json.loads(kernel.connection_file.read_text())

    assert connection["transport"] == "ipc"
    assert kernel.connection_file.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.stat().st_uid == os.geteuid()


async def test_a_session_keeps_its_own_files_and_no_history(kernel):
    result = await kernel.execute(
        "ip = get_ipython(); (ip.ipython_dir, ip.history_manager.enabled)"
    )

    assert result.result == repr((str(kernel.spec.paths.ipython), False))
    assert not [*kernel.spec.paths.directory.rglob("history.sqlite*")]
    for directory in (kernel.spec.paths.directory, kernel.spec.paths.exports):
        assert directory.stat().st_mode & 0o777 == 0o700


async def test_no_queue_has_a_water_mark(kernel):
    result = await kernel.execute("get_ipython().kernel.iopub_thread.socket.sndhwm")

    assert result.result == "0"
    for socket in kernel._channels._sockets.values():
        assert (socket.sndhwm, socket.rcvhwm) == (0, 0)


async def test_a_burst_of_messages_loses_none(kernel, waits):
    """Far more than the thousand that a queue has by default."""
    code = (
        "k = get_ipython().kernel\n"
        "parent = k.get_parent('shell')\n"
        "for n in range(20_000):\n"
        "    k.session.send(k.iopub_socket, 'stream',\n"
        "                   {'name': 'stdout', 'text': f'{n}\\n'}, parent=parent)"
    )

    result = await waits.within(kernel.execute(code))

    assert result.stdout.split() == [str(n) for n in range(20_000)]


async def test_a_flood_of_output_loses_nothing(kernel, waits):
    result = await waits.within(
        kernel.execute(
            "import sys\n"
            "for n in range(3000):\n"
            "    sys.stdout.write(f'{n}\\n'); sys.stdout.flush()"
        )
    )

    assert result.stdout.split() == [str(n) for n in range(3000)]


async def test_imports_of_prime_work_in_a_managed_kernel(kernel):
    result = await kernel.execute(
        "import importlib\n"
        "from rlm import rlm as inner\n"
        "import rlm, agent_message, dsh_tools\n"
        "(inner is rlm.rlm, callable(rlm), rlm.run == inner.run,\n"
        " callable(agent_message.send), callable(dsh_tools.call), asyncio.sleep(0).close())"
    )

    assert result.result == "(True, True, True, True, True, None)"


async def test_our_names_are_no_variables_of_the_person(kernel):
    result = await kernel.execute("%who_ls")

    assert not {"rlm", "agent_message", "dsh_tools", "host_request", "asyncio"} & set(
        eval(result.result)
    ) - {"rlm", "agent_message", "dsh_tools", "asyncio"}


async def test_reloading_the_extension_keeps_requests_apart(lab, kernel, waits):
    await kernel.execute("await host_request('before', {'n': 1})")

    reloaded = await waits.within(
        kernel.execute("%unload_ext kernel_ext\n%load_ext kernel_ext")
    )
    results = [
        await waits.within(kernel.execute(f"await host_request('after', {{'n': {n}}})"))
        for n in range(3)
    ]

    assert reloaded.status == "ok"
    assert [r.result for r in results] == [
        f"{{'echo': {{'n': {n}}}}}" for n in range(3)
    ]


async def test_input_and_breakpoints_fail_at_once(kernel, waits):
    result = await waits.within(kernel.execute("input('?')"))

    assert (result.status, result.error.name) == ("error", "StdinNotImplementedError")


async def test_bash_is_pythons_neighbour(kernel, waits):
    result = await waits.within(kernel.execute("%%bash\necho $((40 + 2))"))

    assert (result.status, result.stdout) == ("ok", "42\n")


async def test_a_stopped_kernel_leaves_no_process_and_no_file(lab, waits):
    registry = lab.registry()
    kernel = await waits.within(registry.kernel(lab.spec()))
    await kernel.execute("1")
    directory, pid = kernel.connection_file.parent, kernel.pid

    await waits.within(registry.dispose(kernel.spec.agent_id))

    assert not directory.exists()
    assert await waits.gone(pid, bound_s=1)
    assert registry.live() == []


@pytest.mark.posix
async def test_an_idle_kernel_stops_by_itself_within_its_grace(lab, waits):
    kernel = await lab.kernel(shutdown_grace_s=10.0)
    await kernel.execute(
        "import atexit, subprocess\n"
        "atexit.register(open, 'ended', 'w')\n"
        "child = subprocess.Popen(['sleep', '300'])"
    )

    await waits.within(kernel.stop())

    assert (kernel.spec.cwd / "ended").exists()
    assert kernel._process.returncode == 0


@pytest.mark.posix
async def test_stopping_ends_every_process_that_a_cell_started(lab, waits):
    kernel = await lab.kernel()
    result = await kernel.execute(
        "import subprocess, sys\n"
        "plain = subprocess.Popen(['sleep', '300'])\n"
        "own = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "deaf = subprocess.Popen([sys.executable, '-c', "
        "'import signal, time; signal.signal(15, 1); signal.signal(1, 1); time.sleep(300)'])\n"
        "left = subprocess.run(['bash', '-c', 'sleep 300 >/dev/null 2>&1 & echo $!'],\n"
        "                      capture_output=True, text=True)\n"
        "gone = subprocess.run(['bash', '-c',\n"
        "    'setsid sleep 300 >/dev/null 2>&1 & echo $!'], capture_output=True, text=True)\n"
        "[plain.pid, own.pid, deaf.pid, int(left.stdout), int(gone.stdout)]"
    )
    pids = json.loads(result.result)

    await waits.within(kernel.stop())

    assert await waits.gone(kernel.pid, *pids, bound_s=2)


async def test_the_children_of_a_kernel_that_died_are_ended(lab, waits):
    kernel = await lab.kernel()
    result = await kernel.execute(
        "import subprocess\n"
        "own = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        "own.pid"
    )

    died = await waits.within(kernel.execute("import os; os._exit(3)"))

    assert died.error.name == "KERNEL_DIED"
    assert await waits.gone(int(result.result), bound_s=3)


async def test_stopping_a_busy_kernel_ends_its_cell(lab, waits):
    kernel = await lab.kernel(shutdown_grace_s=1.0)
    cell = asyncio.create_task(
        kernel.execute("await host_request('x', {'gate': 'no'})")
    )
    await lab.host.until(lambda: bool(lab.host.of("x")))

    await waits.within(kernel.stop())
    result = await waits.within(cell)

    assert result.status == "aborted"
    assert len(lab.host.cancelled) == 1


async def test_exit_in_a_cell_ends_the_kernel_and_hangs_nobody(lab, waits):
    registry, spec = lab.registry(), lab.spec()
    kernel = await waits.within(registry.kernel(spec))

    result = await waits.within(kernel.execute("exit()"))
    await waits.within(kernel._process.process.wait())
    after = await waits.within(registry.kernel(spec))

    assert result.status in ("ok", "error")
    assert after.number == 2


async def test_malformed_outputs_of_a_cell_do_not_deafen_the_bridge(kernel, waits):
    code = (
        "k = get_ipython().kernel\n"
        "parent = k.get_parent('shell')\n"
        "for kind, content in [\n"
        "    ('stream', {'name': ['stdout'], 'text': 3}), ('stream', {}),\n"
        "    ('execute_result', {'data': None}), ('execute_result', {}),\n"
        "    ('error', {'ename': 1, 'evalue': None, 'traceback': 7}),\n"
        "    ('error', {'traceback': None}), ('status', {'execution_state': [1]}),\n"
        "    ('comm_msg', {'comm_id': {}, 'data': None}), ('comm_open', {}),\n"
        "]:\n"
        "    k.session.send(k.iopub_socket, kind, content, parent=parent)\n"
    )

    await waits.within(kernel.execute(code))

    assert (await waits.within(kernel.execute("3"))).result == "3"


async def test_a_frame_nested_too_deep_does_not_deafen_the_bridge(kernel, waits):
    code = (
        "k = get_ipython().kernel\n"
        "s = k.session\n"
        "def publish(kind, text):\n"
        "    parts = [s.pack(s.msg_header(kind)), s.pack({}), s.pack({}), text]\n"
        "    k.iopub_socket.send_multipart([b'x', b'<IDS|MSG>', s.sign(parts), *parts])\n"
        "deep = b'[' * 200000 + b']' * 200000\n"
        "publish('comm_msg', b'{\"data\": ' + deep + b'}')\n"
        "publish('stream', deep)\n"
    )

    result = await waits.within(kernel.execute(code))

    assert result.status == "ok", result
    assert (await waits.within(kernel.execute("4"))).result == "4"


async def test_a_failed_start_leaves_nothing(lab, waits):
    spec = lab.spec()
    before = set(socket_directories())

    with pytest.raises(KernelError) as caught:
        await waits.within(lab.registry(startup_timeout_s=0.01).kernel(spec))

    assert caught.value.code == "KERNEL_START_FAILED"
    record = json.loads(spec.paths.runtime.read_text())
    assert await waits.gone(record["kernel"]["pid"], bound_s=2)
    assert set(socket_directories()) == before
