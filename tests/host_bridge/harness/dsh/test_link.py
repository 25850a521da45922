"""The JSON-RPC peer, against another one and against raw bytes."""

import asyncio
import json
import socket

import pytest

from host_bridge.errors import HarnessError, RequestError
from host_bridge.harness.dsh.link import Link, end_connection
from host_bridge.harness.dsh.message import encode_message
from kernel_ext.wire.codes import ErrorCode

WAIT_S = 5.0
LIMIT = 64 * 1024


class End:
    """One end of a pair: a link, and what it was told."""

    def __init__(self):
        self.told = []
        self.lost = []
        self.handlers = {"echo": self.echo}

    async def echo(self, params, cancelled):
        return dict(params)

    async def serve(self, method, params, cancelled):
        return await self.handlers[method](params, cancelled)

    def attach(self, reader, writer):
        self.link = Link(
            reader,
            writer,
            serve=self.serve,
            on_notify=lambda method, params: self.told.append((method, params)),
            on_lost=self.lost.append,
            max_line_bytes=LIMIT,
        )
        self.link.start()
        return self


@pytest.fixture
async def sockets():
    """Two ends of a connection, each as reader and writer."""
    ends = [
        await asyncio.open_connection(sock=end, limit=LIMIT)
        for end in socket.socketpair()
    ]
    yield ends
    for _, writer in ends:
        writer.transport.abort()
        await end_connection(writer)


@pytest.fixture
async def pair(sockets):
    """Two links that talk to each other."""
    ours, theirs = (End().attach(*end) for end in sockets)
    yield ours, theirs
    await ours.link.close()
    await theirs.link.close()


@pytest.fixture
async def raw(sockets):
    """A link, and the bare reader and writer of its peer."""
    end = End().attach(*sockets[0])
    yield end, *sockets[1]
    await end.link.close()


async def line_of(reader):
    return json.loads(await asyncio.wait_for(reader.readline(), WAIT_S))


def put(writer, message):
    writer.write(json.dumps(message).encode() + b"\n")


# -- calls -------------------------------------------------------------------------


async def test_a_call_is_answered(pair):
    ours, _ = pair

    assert await ours.link.request("echo", {"n": 1}) == {"n": 1}


async def test_both_ends_may_call_at_the_same_time(pair):
    answers = await asyncio.gather(
        *(end.link.request("echo", {"n": n}) for n in range(100) for end in pair)
    )

    assert [answer["n"] for answer in answers] == [n for n in range(100) for _ in pair]


async def test_an_answer_may_overtake_another(pair):
    ours, theirs = pair
    free = asyncio.Event()

    async def slow(params, cancelled):
        await free.wait()
        return "slow"

    theirs.handlers["slow"] = slow
    first = asyncio.create_task(ours.link.request("slow", {}))
    assert await ours.link.request("echo", {}) == {}
    free.set()

    assert await asyncio.wait_for(first, WAIT_S) == "slow"


async def test_notifications_come_in_their_order_and_before_the_answer(pair):
    ours, theirs = pair

    async def chatty(params, cancelled):
        for number in range(50):
            line = theirs.link._encode({"method": "news", "params": {"n": number}})
            await theirs.link._write(line)
        return "said"

    theirs.handlers["chatty"] = chatty
    await ours.link.request("chatty", {})

    assert [params["n"] for _, params in ours.told] == list(range(50))


async def test_a_coded_refusal_keeps_a_code_that_the_plugin_may_use(pair):
    ours, theirs = pair

    async def refuse(params, cancelled):
        raise RequestError(ErrorCode.AGENT_NOT_LIVE, "no such agent")

    theirs.handlers["refuse"] = refuse
    with pytest.raises(HarnessError) as refused:
        await ours.link.request("refuse", {})

    assert refused.value.code is ErrorCode.AGENT_NOT_LIVE
    assert str(refused.value) == "no such agent"


async def test_any_other_code_becomes_a_failed_operation(pair):
    ours, theirs = pair

    async def refuse(params, cancelled):
        raise RequestError(ErrorCode.DUPLICATE_LABEL, "taken")

    theirs.handlers["refuse"] = refuse
    with pytest.raises(HarnessError) as refused:
        await ours.link.request("refuse", {})

    assert refused.value.code is ErrorCode.HOST_REQUEST_FAILED


async def test_a_fault_of_a_handler_answers_without_its_details(pair):
    ours, theirs = pair

    async def fail(params, cancelled):
        msg = "a secret detail"
        raise KeyError(msg)

    theirs.handlers["fail"] = fail
    with pytest.raises(HarnessError) as refused:
        await ours.link.request("fail", {})

    assert refused.value.code is ErrorCode.HOST_REQUEST_FAILED
    assert "secret" not in str(refused.value)
    assert await ours.link.request("echo", {}) == {}


async def test_a_result_that_is_no_json_answers_all_the_same(pair):
    ours, theirs = pair

    async def odd(params, cancelled):
        return {"n": float("nan")}

    theirs.handlers["odd"] = odd
    with pytest.raises(HarnessError) as refused:
        await ours.link.request("odd", {})

    assert refused.value.code is ErrorCode.HOST_REQUEST_FAILED


# -- cancelling --------------------------------------------------------------------


async def test_giving_up_a_call_cancels_it_at_the_other_end(pair):
    ours, theirs = pair
    begun, seen = asyncio.Event(), asyncio.Event()

    async def slow(params, cancelled):
        begun.set()
        await cancelled.wait()
        seen.set()
        return "late"

    theirs.handlers["slow"] = slow
    call = asyncio.create_task(ours.link.request("slow", {}))
    await asyncio.wait_for(begun.wait(), WAIT_S)
    call.cancel()

    await asyncio.wait_for(seen.wait(), WAIT_S)
    assert await ours.link.request("echo", {"after": True}) == {"after": True}


async def test_a_call_that_takes_too_long_is_cancelled(pair):
    ours, theirs = pair
    seen = asyncio.Event()

    async def slow(params, cancelled):
        await cancelled.wait()
        seen.set()

    theirs.handlers["slow"] = slow
    with pytest.raises(HarnessError) as refused:
        await ours.link.request("slow", {}, timeout_s=0.01)

    assert refused.value.code is ErrorCode.TIMEOUT
    await asyncio.wait_for(seen.wait(), WAIT_S)


class Deed:
    """A call that changes something, whatever becomes of its asker."""

    def __init__(self, theirs, *, settles=True):
        self.begun, self.may_end = asyncio.Event(), asyncio.Event()
        self.undone = []
        self._settles = settles
        theirs.handlers["do"] = self.do

    async def do(self, params, cancelled):
        self.begun.set()
        await (cancelled if self._settles else self.may_end).wait()
        return "done"

    async def undo(self, result):
        self.undone.append(result)


async def test_what_a_given_up_call_has_done_is_undone_first(pair):
    ours, theirs = pair
    deed = Deed(theirs)
    call = asyncio.create_task(ours.link.request("do", {}, undo=deed.undo))
    await asyncio.wait_for(deed.begun.wait(), WAIT_S)
    call.cancel()
    await asyncio.wait([call], timeout=WAIT_S)

    assert call.cancelled()
    assert deed.undone == ["done"]


async def test_what_a_late_call_has_done_is_undone_first(pair):
    ours, theirs = pair
    deed = Deed(theirs)
    with pytest.raises(HarnessError) as refused:
        await ours.link.request("do", {}, timeout_s=0.01, undo=deed.undo)

    assert refused.value.code is ErrorCode.TIMEOUT
    assert deed.undone == ["done"]


async def test_nothing_is_undone_of_a_call_that_was_cancelled_in_time(pair):
    ours, theirs = pair
    deed = Deed(theirs)

    async def refuse(params, cancelled):
        await cancelled.wait()
        raise RequestError(ErrorCode.CANCELLED, "nothing was done")

    theirs.handlers["do"] = refuse
    call = asyncio.create_task(ours.link.request("do", {}, undo=deed.undo))
    while not theirs.link._work:
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call], timeout=WAIT_S)

    assert call.cancelled()
    assert deed.undone == []


@pytest.mark.parametrize("twice", [False, True], ids=["bound", "cancelled-twice"])
async def test_who_gives_up_waits_not_for_ever_and_it_is_still_undone(
    pair, monkeypatch, twice
):
    if not twice:
        monkeypatch.setattr("host_bridge.harness.dsh.link._UNDO_S", 0.01)
    ours, theirs = pair
    deed = Deed(theirs, settles=False)
    call = asyncio.create_task(ours.link.request("do", {}, undo=deed.undo))
    await asyncio.wait_for(deed.begun.wait(), WAIT_S)
    call.cancel()
    while twice and not ours.link._work:
        await asyncio.sleep(0)
    if twice:
        call.cancel()
    await asyncio.wait([call], timeout=WAIT_S)
    before = list(deed.undone)
    deed.may_end.set()
    while ours.link._work:
        await asyncio.sleep(0)

    assert call.cancelled()
    assert (before, deed.undone) == ([], ["done"])


async def test_an_undo_that_is_refused_does_not_hide_the_cancellation(pair):
    ours, theirs = pair
    deed = Deed(theirs)

    async def fail(result):
        raise HarnessError(ErrorCode.HOST_REQUEST_FAILED, "it stays")

    call = asyncio.create_task(ours.link.request("do", {}, undo=fail))
    await asyncio.wait_for(deed.begun.wait(), WAIT_S)
    call.cancel()
    await asyncio.wait([call], timeout=WAIT_S)

    assert call.cancelled()


async def test_a_lost_link_ends_the_wait_of_who_has_given_up(raw):
    end, reader, writer = raw
    call = asyncio.create_task(end.link.request("do", {}, undo=end.lost.append))
    await line_of(reader)
    call.cancel()
    await line_of(reader)
    writer.close()
    await asyncio.wait([call], timeout=WAIT_S)

    assert call.cancelled()
    assert len(end.lost) == 1


async def test_a_cancelled_call_of_the_peer_still_settles(raw):
    end, reader, writer = raw

    async def stubborn(params, cancelled):
        await cancelled.wait()
        return "settled"

    end.handlers["stubborn"] = stubborn
    put(writer, {"id": "n1", "method": "stubborn", "params": {}})
    put(writer, {"method": "$/cancel", "params": {"id": "n1"}})

    assert (await line_of(reader))["result"] == "settled"


# -- what is wrong with a line -----------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"not json\n",
        b"[1, 2]\n",
        b"null\n",
        b"\xff\xfe\n",
        b"[" * 20_000 + b"\n",
        b'{"id": [1], "result": 1}\n',
        b'{"id": {"a": 1}, "method": "echo"}\n',
        b'{"id": "b99", "result": 1}\n',
        b'{"method": "$/cancel", "params": {"id": [1]}}\n',
        b'{"method": "$/cancel"}\n',
        b'{"method": 7}\n',
        b'{"method": "news", "params": {"n": NaN}}\n',
        b'{"method": "news", "params": {"text": "\\ud800"}}\n',
    ],
)
async def test_an_odd_line_does_not_end_the_link(raw, line):
    end, reader, writer = raw

    writer.write(line)
    put(writer, {"id": 1, "method": "echo", "params": {"n": 1}})

    answer = await line_of(reader)
    while answer["id"] != 1:
        answer = await line_of(reader)
    assert answer["result"] == {"n": 1}
    assert end.lost == []
    assert ("news", {"n": 1}) not in end.told


async def test_a_notification_that_can_not_be_taken_does_not_end_the_link(raw, caplog):
    end, reader, writer = raw
    end.told = None  # whatever comes now fails in `on_notify`

    put(writer, {"method": "event", "params": {"kind": "status"}})
    put(writer, {"id": 1, "method": "echo", "params": {"n": 1}})

    assert (await line_of(reader))["result"] == {"n": 1}
    assert end.lost == []
    assert "event of kind status" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), 2**60, "lone \ud800 surrogate"])
async def test_an_answer_that_is_not_strict_fails_its_call(raw, value):
    end, reader, writer = raw
    call = asyncio.create_task(end.link.request("ask", {}))
    asked = await line_of(reader)

    put(writer, {"id": asked["id"], "result": value})

    with pytest.raises(HarnessError) as refused:
        await asyncio.wait_for(call, WAIT_S)
    assert refused.value.code is ErrorCode.HOST_REQUEST_FAILED


async def test_a_call_that_is_not_strict_is_refused(raw):
    _, reader, writer = raw

    put(writer, {"id": "n1", "method": "echo", "params": {"n": 2**60}})

    assert (await line_of(reader))["error"]["data"]["code"] == "INVALID_REQUEST"


async def test_an_id_in_work_is_not_taken_twice(raw):
    end, reader, writer = raw

    async def stubborn(params, cancelled):
        await cancelled.wait()

    end.handlers["stubborn"] = stubborn
    for _ in range(2):
        put(writer, {"id": "n1", "method": "stubborn", "params": {}})

    assert (await line_of(reader))["error"]["data"]["code"] == "DUPLICATE_REQUEST"


async def test_open_calls_of_the_peer_are_bounded(raw):
    end, reader, writer = raw

    async def stubborn(params, cancelled):
        await cancelled.wait()

    end.handlers["stubborn"] = stubborn
    for number in range(1025):
        put(writer, {"id": number, "method": "stubborn", "params": {}})

    answer = await line_of(reader)
    assert answer["id"] == 1024
    assert answer["error"]["data"]["code"] == "TOO_MANY_REQUESTS"


async def test_open_calls_of_ours_are_bounded(raw):
    end, reader, _ = raw
    calls = [asyncio.create_task(end.link.request("ask", {})) for _ in range(1024)]
    for _ in calls:
        await line_of(reader)
    with pytest.raises(HarnessError) as refused:
        await end.link.request("ask", {})
    for call in calls:
        call.cancel()

    assert refused.value.code is ErrorCode.TOO_MANY_REQUESTS
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_line_that_never_ends_ends_the_link(raw):
    end, _, writer = raw
    call = asyncio.create_task(end.link.request("ask", {}))

    writer.write(b"x" * (4 * LIMIT))

    with pytest.raises(HarnessError) as refused:
        await asyncio.wait_for(call, WAIT_S)
    assert refused.value.code is ErrorCode.HARNESS_LOST
    assert len(end.lost) == 1


async def test_a_peer_that_reads_nothing_is_taken_for_dead(raw):
    end, *_ = raw
    calls = [
        asyncio.create_task(end.link.request("ask", {"x": "y" * (LIMIT - 200)}))
        for _ in range(200)
    ]

    done = await asyncio.wait_for(
        asyncio.gather(*calls, return_exceptions=True), WAIT_S
    )

    assert {error.code for error in done} == {ErrorCode.HARNESS_LOST}
    assert len(end.lost) == 1


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"text": "x" * LIMIT}, ErrorCode.PAYLOAD_TOO_LARGE),
        ({"n": float("inf")}, ErrorCode.INVALID_ARGUMENT),
        ({"n": {1, 2}}, ErrorCode.INVALID_ARGUMENT),
        ({"text": "\ud800"}, ErrorCode.INVALID_ARGUMENT),
    ],
    ids=["large", "infinite", "set", "surrogate"],
)
async def test_what_can_not_be_sent_is_refused_before_it_is(pair, params, code):
    ours, _ = pair
    with pytest.raises(HarnessError) as refused:
        await ours.link.request("echo", params)

    assert refused.value.code is code
    assert await ours.link.request("echo", {}) == {}


def test_a_message_is_one_line_of_utf8():
    line = encode_message({"text": "a\nb \u2028 é"}, max_bytes=1000)

    assert line.count(b"\n") == 1
    assert json.loads(line) == {"text": "a\nb \u2028 é"}


# -- ends --------------------------------------------------------------------------


async def test_a_lost_link_fails_every_open_call_and_cancels_the_peers(raw):
    end, reader, writer = raw
    cancelled = asyncio.Event()

    async def wait(params, cancel):
        await cancel.wait()
        cancelled.set()

    end.handlers["wait"] = wait
    put(writer, {"id": "n1", "method": "wait", "params": {}})
    calls = [asyncio.create_task(end.link.request("ask", {})) for _ in range(3)]
    await line_of(reader)
    writer.close()

    done = await asyncio.wait_for(
        asyncio.gather(*calls, return_exceptions=True), WAIT_S
    )
    assert {error.code for error in done} == {ErrorCode.HARNESS_LOST}
    await asyncio.wait_for(cancelled.wait(), WAIT_S)
    assert len(end.lost) == 1
    assert end.link.is_lost


async def test_a_call_on_a_lost_link_fails_at_once(raw):
    end, _, writer = raw
    writer.close()
    with pytest.raises(HarnessError):
        await end.link.request("ask", {}, timeout_s=WAIT_S)
    with pytest.raises(HarnessError) as refused:
        await end.link.request("ask", {})

    assert refused.value.code is ErrorCode.HARNESS_LOST


async def test_closing_tells_nobody_and_lets_calls_settle(pair):
    ours, theirs = pair
    settled = []

    async def slow(params, cancelled):
        await cancelled.wait()
        settled.append("settled")

    ours.handlers["slow"] = slow
    call = asyncio.create_task(theirs.link.request("slow", {}))
    while not ours.link._work:
        await asyncio.sleep(0)
    await ours.link.close()

    with pytest.raises(HarnessError):
        await asyncio.wait_for(call, WAIT_S)
    assert settled == ["settled"]
    assert ours.lost == []


async def test_closing_does_not_wait_for_ever_for_a_stubborn_call(pair, monkeypatch):
    monkeypatch.setattr("host_bridge.harness.dsh.link._SETTLE_S", 0.05)
    ours, theirs = pair

    async def stubborn(params, cancelled):
        await asyncio.Event().wait()

    ours.handlers["stubborn"] = stubborn
    call = asyncio.create_task(theirs.link.request("stubborn", {}))
    while not ours.link._work:
        await asyncio.sleep(0)

    await asyncio.wait_for(ours.link.close(), WAIT_S)

    with pytest.raises(HarnessError):
        await asyncio.wait_for(call, WAIT_S)
