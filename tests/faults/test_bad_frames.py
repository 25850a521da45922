"""Frames that are not the bridge's: a kernel executes none and lives on."""

import ast
import asyncio

import pytest
from jupyter_client.session import Session

pytestmark = [pytest.mark.kernel, pytest.mark.asyncio(loop_scope="module")]

DEEP = b"[" * 100_000 + b"]" * 100_000


def execute(session, n):
    content = {
        "code": f"open('executed-{n}', 'w').close()",
        "silent": False,
        "store_history": False,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
    }
    return session.serialize(session.msg("execute_request", content))


def bad_frames(client):
    """Thirty ways to ask for an execution or an answer without the right."""
    unsigned, stranger = Session(key=b""), Session(key=b"s" * 64)
    numbers = iter(range(1000))

    def good():
        return execute(client.session, next(numbers))

    def changed(index, value):
        frames = good()
        frames[index] = value(frames[index]) if callable(value) else value
        return frames

    yield []
    yield [b""]
    yield [b"<IDS|MSG>"]
    yield [b"<IDS|MSG>", b""]
    yield [b"no", b"delimiter", b"here"]
    yield [b"\xff" * 100]
    yield execute(unsigned, next(numbers))
    yield execute(stranger, next(numbers))
    yield changed(1, b"")
    yield changed(1, b"0" * 64)
    yield changed(1, lambda s: s[:-1])
    yield changed(1, lambda s: s[::-1])
    yield changed(1, lambda s: s.upper() if s.upper() != s else b"A" * 64)
    yield changed(1, b"\xff" * 64)
    yield changed(2, lambda h: h.replace(b"execute", b"EXECUTE"))
    yield changed(2, b"{}")
    yield changed(2, b"not json")
    yield changed(2, DEEP)
    yield changed(5, lambda c: c.replace(b"executed", b"Executed"))
    yield changed(5, b"")
    yield good()[:-1]
    yield good()[:-2]
    yield good()[:3]
    yield [*good()[:2], *reversed(good()[2:])]
    for body in (b"{}", b"null", b"[]", b"\xff", DEEP):
        parts = [body, b"{}", b"{}", b"{}"]
        yield [b"<IDS|MSG>", client.session.sign(parts), *parts]
    parts = [*good()[2:5], b"[1, 2"]
    yield [b"<IDS|MSG>", client.session.sign(parts), *parts]


async def test_of_thirty_bad_frames_on_each_channel_none_is_executed(
    kernel, raw_client, waits
):
    client = raw_client(kernel.connection_file)
    sent = 0
    for channel in (client.shell, client.control):
        for frames in bad_frames(client):
            if frames:
                channel.send_multipart(frames)
            sent += 1

    found = await waits.within(kernel.execute("import os; sorted(os.listdir())"))
    answered = await waits.within(kernel.execute("await host_request('t', {'n': 1})"))

    assert sent == 60
    assert [n for n in ast.literal_eval(found.result) if "xecuted" in n] == []
    assert answered.status == "ok"


async def test_a_replayed_request_is_executed_once(kernel, raw_client, waits):
    client = raw_client(kernel.connection_file)
    message = client.session.msg(
        "execute_request",
        {
            "code": "replayed = globals().get('replayed', 0) + 1",
            "silent": False,
            "store_history": False,
            "user_expressions": {},
            "allow_stdin": False,
            "stop_on_error": False,
        },
    )
    frames = client.session.serialize(message)
    for _ in range(5):
        client.shell.send_multipart(frames)
    assert await asyncio.to_thread(client.shell.poll, 5000)

    found = await waits.within(kernel.execute("replayed"))

    assert found.result == "1"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({}, id="empty"),
        pytest.param({"protocol": 2}, id="other version"),
        pytest.param({"comm_id": 3}, id="number for a comm"),
        pytest.param({"lease_s": "x"}, id="text for a lease"),
        pytest.param({"lease_s": -1}, id="negative lease"),
        pytest.param({"lease_s": 1e300}, id="endless lease"),
        pytest.param({"working": None}, id="no work"),
        pytest.param({"working": [[1]]}, id="lists for ids"),
        pytest.param({"extra": 1}, id="extra field"),
        pytest.param({"generation": "other"}, id="other generation"),
    ],
)
async def test_a_host_that_is_none_takes_nothing_over(
    lab, kernel, raw_client, waits, content
):
    client = raw_client(kernel.connection_file)
    valid = {
        "comm_id": "theirs",
        "generation": "other" if "generation" in content else "",
        "lease_s": 60.0,
        "working": [],
        "protocol": 1,
    }
    bad = {**valid, **content} if content else {}
    client.control.send_multipart(client.frames("host_attach_request", bad))

    result = await waits.within(kernel.execute("await host_request('t', {'n': 1})"))

    assert result.status == "ok"
    assert lab.host.asked[-1][0].type == "t"


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"id": 1},
        {"id": 10**6, "status": "ok", "result": {}},
        {"id": "x", "status": "ok", "result": {}},
        [],
        None,
    ],
    ids=str,
)
async def test_an_answer_to_nothing_is_dropped(kernel, raw_client, waits, data):
    client = raw_client(kernel.connection_file)
    client.control.send_multipart(
        client.frames("comm_msg", {"comm_id": "x", "data": data})
    )

    result = await waits.within(kernel.execute("await host_request('t', {'n': 2})"))

    assert result.status == "ok"


async def test_closing_the_comm_as_a_front_end_does_ends_no_request(
    lab, kernel, raw_client, waits
):
    """What JupyterLab does with a comm that it does not know."""
    client = raw_client(kernel.connection_file)
    cell = asyncio.create_task(
        kernel.execute("await host_request('open', {'gate': 'open'})")
    )
    await lab.host.until(lambda: bool(lab.host.of("open")))

    comm_id = kernel._attachment.comm_id
    for socket in (client.shell, client.control):
        socket.send_multipart(client.frames("comm_close", {"comm_id": comm_id}))
    client.control.send_multipart(client.frames("create_subshell_request", {}))
    lab.host.gate("open").set()

    assert (await waits.within(cell)).status == "ok"


async def test_our_control_messages_leave_a_busy_kernel_busy(kernel, waits):
    """Stock dispatch would say idle after each answer."""
    result = await waits.within(
        kernel.execute(
            "k = get_ipython().kernel\n"
            "states = []\n"
            "publish = k._publish_status\n"
            "k._publish_status = lambda s, c, parent=None: ("
            "states.append((s, c)), publish(s, c, parent=parent))[1]\n"
            "r = [await host_request('t', {'n': n}) for n in range(50)]\n"
            "del k._publish_status\n"
            "states"
        )
    )

    assert result.result == "[]"
