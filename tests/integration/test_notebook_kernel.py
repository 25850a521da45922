"""The kernel RLM in a stock front end: requests, interrupts, restarts, deaths."""

import queue
import signal
import sys

import pytest

from host_bridge.processes import mark_of

pytestmark = [pytest.mark.kernel, pytest.mark.posix]

needs_harness = pytest.mark.dsh

SECRETS = ("DEEPSEEK_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "HTTPS_PROXY")


def below(front_end):
    """Marks of the wrapper and of everything that it started."""
    processes = [front_end.wrapper, *front_end.wrapper.children(recursive=True)]
    return [mark for process in processes if (mark := mark_of(process.pid))]


@needs_harness
def test_a_child_reports_to_the_persons_cell(scripted, admit_child):
    admitted = scripted.run(admit_child + "child.name, child.model")
    reported = scripted.run("await child.report(timeout_s=30)")
    listed = scripted.run("[(r.name, r.status) for r in await rlm.list_subagents()]")

    assert admitted.status == "ok"
    assert reported.result == "'21'"
    assert "('rlm-1', " in listed.result


@needs_harness
def test_the_end_of_a_notebook_leaves_nothing(scripted, place, admit_child):
    scripted.run(admit_child + "await child.report(timeout_s=30)")
    assert len(scripted.harness()) == 1

    scripted.close()

    assert place.is_clean()
    assert place.sessions() == set()
    assert not (place.directory / "run/k.json").exists()


@needs_harness
def test_concurrent_first_requests_start_one_harness(scripted):
    outcome = scripted.run(
        "import asyncio\n"
        'prompt = \'```python\\nawait agent_message.send("1", receiver_role="parent")\\n```\'\n'
        "hs = await asyncio.gather(*(rlm(prompt) for _ in range(5)))\n"
        "sorted(h.name for h in hs)"
    )

    assert outcome.result == "['rlm-1', 'rlm-2', 'rlm-3', 'rlm-4', 'rlm-5']"
    assert len(scripted.harness()) == 1
    assert len(scripted.place.harness_homes()) == 1


@needs_harness
def test_a_harness_that_died_unseen_is_replaced_and_its_children_are_lost(
    scripted, admit_child
):
    scripted.run(admit_child + "first = child; await child.report(timeout_s=30)")
    scripted.run(
        'lost = await rlm("""```python\nimport time; time.sleep(600)\n```""", name="lost")'
    )
    (harness,) = scripted.harness()

    harness.kill()
    harness.wait(5)

    told = scripted.run("await lost.report(timeout_s=30)")
    kept = scripted.run("await first.report(timeout_s=30)")
    again = scripted.run(admit_child + "await child.report(timeout_s=30)")
    assert (told.status, told.error) == ("error", "HostError")
    assert scripted.run("import rlm as r; 1").status == "ok"
    assert "lost" in told.message
    assert kept.result == "'21'"
    assert again.result == "'21'"
    assert len(scripted.harness()) == 1


@needs_harness
def test_a_harness_that_dies_under_a_waiting_cell_ends_the_wait_with_a_code(scripted):
    scripted.run(
        'child = await rlm("""```python\nimport time; time.sleep(600)\n```""")'
    )
    waiting = scripted.client.execute(
        "try:\n    await child.report()\nexcept Exception as e:\n    print(e.code)"
    )

    scripted.harness()[0].kill()

    assert scripted.wait(waiting).stdout == "HARNESS_LOST\n"


@needs_harness
def test_a_kernel_that_ends_while_the_harness_starts_leaves_nothing(
    scripted, place, until
):
    scripted.client.execute(
        "import asyncio, os\n"
        "first = asyncio.ensure_future(rlm('hello'))\n"
        f"while not os.path.exists({str(place.home / 'dsh')!r}):\n"
        "    await asyncio.sleep(0.01)\n"
        "os._exit(3)"
    )

    assert scripted.status() == 3
    assert place.is_clean()
    assert place.sessions() == set()


def test_no_model_is_told_with_both_remedies_and_the_kernel_works_on(open_front_end):
    front_end = open_front_end()

    told = front_end.run("await rlm('hello')")
    code = front_end.run("import sys; sys.last_value.code")
    works = front_end.run("6 * 7")

    assert (told.status, told.error) == ("error", "HostError")
    assert "DEEPSEEK_API_KEY" in told.message
    assert "--scripted" in told.message
    assert len(told.message.splitlines()) == 1
    assert code.result == "'MODEL_NOT_CONFIGURED'"
    assert works.result == "42"
    assert front_end.harness() == []


def test_no_credential_of_the_front_end_reaches_the_kernel_or_stays_in_the_bridge(
    open_front_end,
):
    values = {name: f"hidden-{name.lower()}" for name in SECRETS}
    front_end = open_front_end(**values)

    found = front_end.run(f"import os; sorted(set(os.environ) & set({SECRETS!r}))")
    bridge = front_end.place.environments()

    assert found.result == "[]"
    assert "hidden-deepseek_api_key" not in bridge
    assert "RLM_GENERATION=" in bridge


def test_the_kernel_answers_what_a_stock_kernel_answers(scripted):
    client = scripted.client
    scripted.run("measurements = [1, 2]")

    completed = scripted.reply(client.complete("measurem"))
    inspected = scripted.reply(client.inspect("measurements"))
    whole = scripted.reply(client.is_complete("for x in y:"))
    history = scripted.reply(client.history(hist_access_type="tail", n=1))
    comms = scripted.reply(client.comm_info())

    assert [scripted.run("1").count for _ in range(3)] == [2, 3, 4]
    assert "measurements" in completed["matches"]
    assert inspected["found"] is True
    assert whole["status"] == "incomplete"
    assert history["history"][-1][2] == "measurements = [1, 2]"
    assert comms["status"] == "ok"


BLOCKED = {
    "sleep": "import time; time.sleep(600)",
    "busy": "while True: pass",
    "await": "import asyncio; await asyncio.sleep(600)",
    "subprocess": "import subprocess; subprocess.run(['sleep', '600'])",
    "system": "import os; os.system('sleep 600')",
    "bash": "%%bash\nsleep 600",
}


def test_an_interrupt_by_message_ends_whatever_a_cell_waits_for(scripted):
    for name, code in BLOCKED.items():
        begun = "get_ipython().kernel.iopub_socket; print('begun', flush=True)\n"
        cell = code if code.startswith("%%") else begun + code
        message = scripted.client.execute(cell)
        _until_it_runs(scripted, message, told=not code.startswith("%%"))

        outcome = _interrupted(scripted, message)

        assert outcome.status in ("error", "ok"), name
        assert scripted.run("6 * 7").result == "42", name


def _interrupted(front_end, message_id):
    """Interrupt as a person does: once more when nothing happens.

    One that comes while C code starts a process is lost, in a stock kernel too.
    """
    for within_s in (3, 5):
        front_end.manager.interrupt_kernel()
        try:
            return front_end.wait(message_id, within_s=within_s)
        except queue.Empty:
            continue
    pytest.fail("two interrupts did not end the cell")


def _until_it_runs(front_end, message_id, *, told):
    wanted = ("stream",) if told else ("execute_input",)
    while True:
        message = front_end.client.get_iopub_msg(timeout=20)
        if message["parent_header"].get("msg_id") != message_id:
            continue
        if message["msg_type"] in wanted:
            return


@needs_harness
def test_an_interrupt_ends_the_wait_for_a_report_and_the_child_can_be_heard_later(
    scripted,
):
    scripted.run(
        "import asyncio, pathlib\n"
        'child = await rlm("""```python\n'
        "import asyncio, pathlib\n"
        f"while not pathlib.Path({str(scripted.place.cwd / 'go')!r}).exists():\n"
        "    await asyncio.sleep(0.02)\n"
        'await agent_message.send("21", receiver_role="parent")\n```""")'
    )
    message = scripted.client.execute(
        "print('begun', flush=True)\nawait child.report()"
    )
    _until_it_runs(scripted, message, told=True)

    scripted.manager.interrupt_kernel()

    assert scripted.wait(message, within_s=5).status == "error"
    (scripted.place.cwd / "go").touch()
    assert scripted.run("await child.report(timeout_s=30)").result == "'21'"


@needs_harness
def test_a_restart_is_a_new_generation_whose_requests_are_answered(
    scripted, place, admit_child
):
    generation = "import os; os.environ['RLM_GENERATION']"
    before = scripted.run(generation).result
    scripted.run(admit_child + "await child.report(timeout_s=30)")
    old = below(scripted)

    scripted.manager.restart_kernel()
    scripted.join()

    after = scripted.run(generation)
    assert (after.status, after.count) == ("ok", 1)
    assert after.result != before
    assert scripted.run("'child' in globals()").result == "False"
    assert not any(mark.is_alive for mark in old)
    reported = scripted.run(admit_child + "await child.report(timeout_s=30)")
    assert reported.result == "'21'"
    assert len(place.harness_homes()) == 1


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("exit()", 0),
    ],
    ids=["7", "killed", "exit"],
)
def test_the_wrapper_ends_as_its_kernel_ended(scripted, place, code, status):
    scripted.client.execute(code)

    assert scripted.status() == status
    assert place.processes() == []
    assert place.sessions() == set()


@needs_harness
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_wrapper_is_the_end_of_kernel_and_harness(
    scripted, place, until, admit_child, number
):
    scripted.run(admit_child + "await child.report(timeout_s=30)")
    ours = below(scripted)

    scripted.wrapper.send_signal(number)

    # In order the harness may take its time; a killed wrapper takes all along.
    bound_s = {"within_s": 2} if number == signal.SIGKILL else {}
    until(lambda: not any(mark.is_alive for mark in ours[1:]), **bound_s)
    scripted.status()
    if number == signal.SIGTERM:
        assert place.is_clean()
        assert place.sessions() == set()


FRONT_END = """
import sys
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
specs = KernelSpecManager(kernel_dirs=[sys.argv[1]])
manager = KernelManager(kernel_name="rlm", kernel_spec_manager=specs, connection_file=sys.argv[2])
manager.start_kernel()
client = manager.client()
client.start_channels()
client.wait_for_ready(timeout=40)
client.execute_interactive(sys.argv[3], timeout=40)
print(flush=True)
print("ready", flush=True)
sys.stdin.read()
"""


@needs_harness
def test_a_killed_front_end_takes_wrapper_kernel_and_harness_along(
    place, until, admit_child
):
    assert place.run("install", "--scripted").status == 0
    (place.directory / "run").mkdir()
    front_end = place.start_program(
        [
            *(sys.executable, "-c", FRONT_END),
            str(place.directory / "jupyter/kernels"),
            str(place.directory / "run/k.json"),
            admit_child + "await child.report(timeout_s=30)",
        ],
        stdin=-1,
    )
    line = ""
    while line != "ready\n":
        line = front_end.process.stdout.readline()
        assert line
    ours = [mark for p in front_end.below() if (mark := mark_of(p.pid))]
    assert len(ours) >= 3, "wrapper, kernel, harness"

    front_end.kill()

    until(lambda: not any(mark.is_alive for mark in ours), within_s=2.5)
    front_end.ended()
    assert place.is_clean()
    assert place.sessions() == set()


@pytest.mark.parametrize(
    "options",
    [{"transport": "ipc"}, {"transport_encryption": "required"}],
    ids=["ipc", "curve"],
)
@needs_harness
def test_the_kernel_takes_the_transport_that_the_front_end_chose(
    open_front_end, admit_child, options
):
    front_end = open_front_end("--scripted", options=options)

    reported = front_end.run(admit_child + "await child.report(timeout_s=30)")

    assert reported.result == "'21'"


def test_modules_beside_the_notebook_do_not_shadow_the_bridges_own(
    place, open_front_end
):
    front_end = open_front_end("--scripted")
    for name in ("json", "zmq", "psutil", "secrets"):
        (place.cwd / f"{name}.py").write_text("raise RuntimeError('shadowed')\n")

    front_end.manager.restart_kernel()

    assert front_end.join().run("6 * 7").result == "42"
