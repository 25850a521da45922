"""The host's end of a kernel: each id once, answers kept as long as needed."""

import asyncio
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from host_bridge.kernels.attachment import Asker, Attachment, Timing
from host_bridge.kernels.channels import Message
from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import (
    PROTOCOL_VERSION,
    AttachReply,
    Cancel,
    ErrorReply,
    OkReply,
    Request,
)
from kernel_ext.wire.strict import MAX_PAYLOAD_BYTES

WAIT_S = 5.0


@dataclass
class Bench:
    """An attachment between a fake kernel and a fake dispatcher."""

    max_answers: int = 1024
    generation: str = "g"
    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    askers: list[Asker] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    gates: dict[int, asyncio.Event] = field(default_factory=dict)
    on_hello: Any = None

    def __post_init__(self) -> None:
        self.attachment = Attachment(
            agent_id="agent",
            generation=self.generation,
            send=self._send,
            dispatch=self._dispatch,
            open_cell=lambda message_id: None,
            timing=Timing(first_s=0.01, beat_s=0.05),
            max_answers=self.max_answers,
        )

    async def _send(self, kind: str, content: dict[str, Any]) -> None:
        self.sent.append((kind, content))
        if kind == "host_attach_request" and self.on_hello is not None:
            self.on_hello(content)

    async def _dispatch(self, request: Request, asker: Asker) -> OkReply | ErrorReply:
        self.askers.append(asker)
        try:
            if gate := self.gates.get(request.id):
                await gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            raise
        if request.type == "cancels itself":
            raise asyncio.CancelledError
        self.done.append(request.id)
        return OkReply(id=request.id, result={"n": len(self.done)})

    # -- what the kernel does -------------------------------------------------------

    async def data(self, data: Any, *, comm_id: Any = None) -> None:
        content = {"comm_id": comm_id or self.attachment.comm_id, "data": data}
        await self.attachment.on_comm(Message("comm_msg", content, "cell"))

    async def ask(self, *numbers: int, settle: bool = True, **fields: Any) -> None:
        for number in numbers:
            request = Request(
                **{"id": number, "type": "t", "generation": "g", **fields}
            )
            await self.data(asdict(request))
        if settle:
            await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def cancel(self, *numbers: int) -> None:
        await self.data(asdict(Cancel(ids=[*numbers], generation="g")))

    async def beat(self) -> None:
        await self.attachment._hello(6.0)

    async def reply(self, *pending: int, next_id: int, **fields: Any) -> None:
        reply = {
            "status": "ok",
            "generation": "g",
            "pid": 1,
            "pending": [*pending],
            "next_id": next_id,
            **fields,
        }
        content = asdict(AttachReply(**reply))
        self.attachment.on_control(Message("host_attach_reply", content, ""))
        await self.settle()

    def answers(self, number: int | None = None) -> list[dict[str, Any]]:
        found = [content["data"] for kind, content in self.sent if kind == "comm_msg"]
        return [a for a in found if number is None or a["id"] == number]

    def codes(self) -> list[str | None]:
        return [answer.get("code") for answer in self.answers()]


@pytest.fixture
async def bench():
    return Bench()


async def test_a_request_is_answered_once_on_control(bench):
    await bench.ask(1)

    assert bench.answers() == [{"id": 1, "result": {"n": 1}, "status": "ok"}]
    assert bench.askers[0].agent_id == "agent"
    assert bench.askers[0].generation == "g"


async def test_a_duplicate_in_work_runs_once(bench):
    bench.gates[1] = asyncio.Event()
    await bench.ask(1, 1, 1)

    bench.gates[1].set()
    await bench.settle()

    assert bench.done == [1]
    assert len(bench.answers()) == 1


async def test_an_answered_id_is_answered_again_without_the_work(bench):
    await bench.ask(1)
    await bench.ask(1)

    assert bench.done == [1]
    assert bench.answers(1) == [bench.answers(1)[0]] * 2


async def test_an_answer_is_kept_until_the_kernel_names_its_id_no_more(bench):
    await bench.ask(1, 2)

    await bench.reply(1, next_id=3)
    await bench.ask(1)
    await bench.ask(2)

    assert bench.done == [1, 2]
    assert [a["status"] for a in bench.answers(1)] == ["ok", "ok"]
    assert [a.get("code") for a in bench.answers(2)] == [None, "DUPLICATE_REQUEST"]


async def test_an_older_duplicate_is_refused_with_room_for_four_answers():
    bench = Bench(max_answers=4)
    await bench.ask(*range(1, 9))
    await bench.reply(next_id=9)

    await bench.ask(*range(1, 9))

    assert bench.done == [*range(1, 9)]
    assert bench.codes()[8:] == ["DUPLICATE_REQUEST"] * 8


async def test_a_duplicate_is_refused_also_while_an_older_request_is_pending():
    bench = Bench(max_answers=4)
    bench.gates[1] = asyncio.Event()
    await bench.ask(*range(1, 7))
    await bench.reply(1, next_id=7)

    await bench.ask(5)

    assert bench.done == [2, 3, 4, 5, 6]
    assert bench.codes()[-1] == "DUPLICATE_REQUEST"
    bench.gates[1].set()
    await bench.settle()
    assert bench.answers(1)[0]["status"] == "ok"


async def test_an_answer_that_got_lost_is_sent_again(bench):
    await bench.ask(1)
    await bench.beat()

    await bench.reply(1, next_id=2)

    assert bench.done == [1]
    assert len(bench.answers(1)) == 2


async def test_an_answer_that_may_be_on_its_way_is_not_sent_again(bench):
    await bench.beat()
    await bench.ask(1)

    await bench.reply(1, next_id=2)

    assert len(bench.answers(1)) == 1


async def test_a_handler_that_cancels_itself_leaves_nobody_waiting(bench):
    await bench.ask(1, type="cancels itself")
    await bench.beat()

    await bench.reply(1, next_id=2)

    assert bench.codes() == ["CANCELLED"]


@pytest.mark.parametrize("number", [0, -1, -(2**60)])
async def test_an_id_that_no_kernel_gives_is_not_run(bench, number):
    await bench.ask(number)

    assert bench.done == []
    assert bench.codes() == ["DUPLICATE_REQUEST"]


async def test_another_generations_request_is_refused(bench):
    await bench.ask(1, generation="other")
    await bench.ask(2, generation="")

    assert bench.done == []
    assert bench.codes() == ["STALE_GENERATION", "STALE_GENERATION"]


async def test_another_generations_cancel_cancels_nothing(bench):
    bench.gates[1] = asyncio.Event()
    await bench.ask(1)

    await bench.data(asdict(Cancel(ids=[1], generation="other")))
    await bench.settle()

    assert bench.cancelled == []
    bench.gates[1].set()


GOOD = {"id": 3, "type": "t", "generation": "g", "payload": {}, "kind": "request"}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({**GOOD, "extra": 1}, id="extra field"),
        pytest.param({k: v for k, v in GOOD.items() if k != "type"}, id="no type"),
        pytest.param(
            {k: v for k, v in GOOD.items() if k != "generation"}, id="no generation"
        ),
        pytest.param({**GOOD, "type": 1}, id="number for a type"),
        pytest.param({**GOOD, "payload": []}, id="list for a payload"),
        pytest.param({**GOOD, "payload": None}, id="no payload"),
        pytest.param({**GOOD, "kind": "other"}, id="other kind"),
        pytest.param({**GOOD, "payload": {"x": "\ud800"}}, id="lone surrogate"),
    ],
)
async def test_what_is_no_request_is_refused_under_its_id(bench, data):
    await bench.data(data)
    await bench.settle()

    assert bench.done == []
    assert [(a["id"], a["code"]) for a in bench.answers()] == [(3, "INVALID_REQUEST")]


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(None, id="none"),
        pytest.param([], id="list"),
        pytest.param("text", id="text"),
        pytest.param(10**5000, id="huge integer"),
        pytest.param({"id": 10**5000}, id="huge id"),
        pytest.param({"id": True}, id="truth for an id"),
        pytest.param({"id": 1.5}, id="fraction for an id"),
        pytest.param({"id": "1"}, id="text for an id"),
        pytest.param({"id": None}, id="no id"),
        pytest.param({**GOOD, "id": "3"}, id="request with text for an id"),
        pytest.param(_nested(100_000), id="nested"),
        pytest.param({**GOOD, "payload": {"x": _nested(900)}}, id="nested payload"),
        pytest.param({"kind": "cancel", "ids": ["x"], "generation": "g"}, id="cancel"),
        pytest.param({"kind": "cancel", "ids": 1, "generation": "g"}, id="cancel 1"),
        pytest.param({"kind": "cancel", "ids": [10**400]}, id="cancel of a huge id"),
        pytest.param(float("nan"), id="nan"),
    ],
)
async def test_garbage_is_survived(bench, data):
    await bench.data(data)
    await bench.settle()

    await bench.ask(1)
    assert 1 in bench.done


@pytest.mark.parametrize("comm_id", [None, 3, "another", {}, [1]], ids=repr)
async def test_another_comm_is_none_of_ours(bench, comm_id):
    content = {"comm_id": comm_id, "data": GOOD}
    await bench.attachment.on_comm(Message("comm_msg", content, ""))
    await bench.attachment.on_comm(Message("comm_open", {}, ""))
    await bench.attachment.on_comm(
        Message("comm_close", {"comm_id": bench.attachment.comm_id}, "")
    )
    await bench.settle()

    assert (bench.done, bench.sent) == ([], [])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param({}, id="empty"),
        pytest.param({"status": "ok"}, id="half"),
        pytest.param({"pending": _nested(100_000)}, id="nested"),
        pytest.param({"next_id": 10**5000}, id="huge"),
    ],
)
async def test_a_garbled_reply_to_a_beat_changes_nothing(bench, content):
    bench.gates[1] = asyncio.Event()
    await bench.ask(1)

    bench.attachment.on_control(Message("host_attach_reply", content, ""))
    bench.attachment.on_control(Message("interrupt_reply", content, ""))
    await bench.settle()

    assert bench.cancelled == []
    assert not bench.attachment.answered.is_set()
    bench.gates[1].set()


async def test_a_refusal_by_the_kernel_is_no_attachment(bench):
    await bench.reply(next_id=1, status="error", generation="other")

    assert bench.attachment.refusal == ErrorCode.STALE_GENERATION


async def test_a_kernel_of_another_protocol_is_no_attachment(bench):
    await bench.reply(next_id=1, protocol=PROTOCOL_VERSION + 1)

    assert bench.attachment.refusal == ErrorCode.PROTOCOL_MISMATCH


async def test_a_kernel_that_takes_its_host_refuses_nothing(bench):
    await bench.reply(next_id=1)

    assert bench.attachment.answered.is_set()
    assert bench.attachment.refusal is None


async def test_a_cancel_ends_the_work(bench):
    bench.gates[1] = asyncio.Event()
    await bench.ask(1)

    await bench.cancel(1, 99)
    await bench.settle()
    await bench.ask(1)

    assert (bench.cancelled, bench.done) == ([1], [])


async def test_a_cancel_right_behind_its_request_leaves_nothing(bench):
    await bench.ask(1, settle=False)
    await bench.cancel(1)
    await bench.settle()

    assert bench.done == []
    assert bench.attachment._working == {}
    await bench.ask(1)
    assert bench.done == []


async def test_work_that_the_kernel_waits_for_no_more_is_cancelled(bench):
    bench.gates |= {1: asyncio.Event(), 2: asyncio.Event()}
    await bench.ask(1, 2)

    await bench.reply(2, next_id=3)

    assert bench.cancelled == [1]
    bench.gates[2].set()


async def test_a_request_younger_than_the_reply_is_not_taken_for_one_taken_back(bench):
    bench.gates[5] = asyncio.Event()
    await bench.ask(5)

    await bench.reply(next_id=5)

    assert bench.cancelled == []
    bench.gates[5].set()


async def test_the_beat_names_what_is_in_work_or_answered(bench):
    bench.gates[2] = asyncio.Event()
    await bench.ask(1, 2)

    await bench.beat()

    kind, content = bench.sent[-1]
    assert kind == "host_attach_request"
    assert sorted(content["working"]) == [1, 2]
    assert content["comm_id"] == bench.attachment.comm_id
    bench.gates[2].set()


async def test_closing_says_goodbye_and_cancels_what_is_open(bench):
    bench.gates |= {1: asyncio.Event(), 2: asyncio.Event()}
    await bench.ask(1, 2)

    async with asyncio.timeout(WAIT_S):
        await bench.attachment.close(drain_s=WAIT_S)

    assert sorted(bench.cancelled) == [1, 2]
    assert [content["lease_s"] for kind, content in bench.sent] == [0.0]
    assert bench.askers[0].is_current() is False


async def test_a_retired_generation_is_answered_nothing(bench):
    bench.gates[1] = asyncio.Event()
    await bench.ask(1)
    bench.attachment.retire()

    await bench.ask(2)
    bench.gates[1].set()
    await bench.settle()

    assert (bench.done, bench.answers()) == ([], [])


async def test_closing_waits_no_longer_than_it_may():
    bench = Bench()
    hold = asyncio.Event()

    async def stubborn(request: Request, asker: Asker) -> OkReply:
        while not hold.is_set():
            try:
                await hold.wait()
            except asyncio.CancelledError:
                continue
        return OkReply(id=request.id, result={})

    bench.attachment._dispatch = stubborn
    await bench.ask(1)

    async with asyncio.timeout(WAIT_S):
        await bench.attachment.close(drain_s=0.01)
    hold.set()
    await bench.settle()

    assert bench.answers() == []


async def test_a_request_may_be_as_large_as_the_kernel_counts_it(bench):
    text = "ü" * (MAX_PAYLOAD_BYTES // 2 - 100)
    await bench.ask(1, payload={"x": text})
    await bench.ask(2, payload={"x": [0] * (MAX_PAYLOAD_BYTES // 2 - 100)})

    assert bench.done == [1, 2]


async def test_a_request_that_is_larger_is_refused(bench):
    await bench.ask(1, payload={"x": "y" * 10_000_000})

    assert bench.done == []
    assert bench.codes() == ["PAYLOAD_TOO_LARGE"]


async def test_a_flood_of_requests_leaves_no_more_answers_than_it_may():
    bench = Bench(max_answers=64)
    most = 0
    beating = asyncio.create_task(bench.attachment.beat())
    try:
        for number in range(1, 10_001):
            bench.on_hello = lambda _, n=number: bench.attachment.on_control(
                Message(
                    "host_attach_reply",
                    asdict(
                        AttachReply(
                            status="ok", generation="g", pid=1, pending=[], next_id=n
                        )
                    ),
                    "",
                )
            )
            await bench.ask(number)
            most = max(most, len(bench.attachment._answers))
    finally:
        beating.cancel()

    assert len(bench.done) == 10_000
    assert most <= 64 + 8


async def test_the_beat_goes_on(bench):
    beats = asyncio.Event()

    def count(_: Any) -> None:
        if len(bench.sent) >= 4:
            beats.set()

    bench.on_hello = count
    beating = asyncio.create_task(bench.attachment.beat())
    try:
        async with asyncio.timeout(WAIT_S):
            await beats.wait()
    finally:
        beating.cancel()

    assert {content["lease_s"] for _, content in bench.sent} == {6.0}


async def test_after_the_goodbye_there_is_no_beat(bench):
    beating = asyncio.create_task(bench.attachment.beat())
    await bench.settle()

    await bench.attachment.close(drain_s=0)

    async with asyncio.timeout(WAIT_S):
        await beating
    assert [content["lease_s"] for _, content in bench.sent][-1] == 0.0
