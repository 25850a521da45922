"""The kernel's end of a request: window, asking again, leases, refusals."""

import asyncio
import copy
import dataclasses
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kernel_ext.client import HostClient, Limits
from kernel_ext.errors import HostError
from kernel_ext.proxies.rlm import RLMSpawnHandle
from kernel_ext.wire.envelope import AttachReply, AttachRequest
from kernel_ext.wire.strict import MAX_PAYLOAD_BYTES

WAIT_S = 5.0


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Wire:
    """What the client has published."""

    sent: list[tuple[str, dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    def __call__(
        self, comm_id: str, data: dict[str, Any], parent: dict[str, Any]
    ) -> None:
        self.sent.append((comm_id, data, parent))

    def ids(self, kind: str = "request") -> list[int]:
        found: list[int] = []
        for _, data, _ in self.sent:
            if data["kind"] == kind:
                found += [data["id"]] if kind == "request" else data["ids"]
        return found


@dataclass
class Bench:
    """A client with a clock in the test's hands, and the requests that run."""

    limits: Limits = field(default_factory=Limits)
    generation: str = "g"
    clock: Clock = field(default_factory=Clock)
    wire: Wire = field(default_factory=Wire)
    tasks: list["asyncio.Task[dict[str, Any]]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.client = HostClient(
            self.wire,
            generation=self.generation,
            limits=self.limits,
            clock=self.clock,
        )

    def attach(self, *working: int, **fields: Any) -> AttachReply:
        message = {
            "comm_id": "comm",
            "generation": "g",
            "lease_s": 6.0,
            "working": list(working),
            **fields,
        }
        return self.client.attach(AttachRequest(**message))

    async def ask(
        self, request_type: str = "t", payload: Any = None, *, count: int = 1
    ) -> "asyncio.Task[dict[str, Any]]":
        """Start *count* requests, and let them come as far as they can."""
        new = [
            asyncio.create_task(self.client.request(request_type, payload))
            for _ in range(count)
        ]
        self.tasks += new
        await asyncio.sleep(0)
        return new[0]

    def answer(self, number: int, **result: Any) -> None:
        self.client.answer({"id": number, "status": "ok", "result": result})

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for timer in self.client._watches.values():
            timer.cancel()


@pytest.fixture
async def make_bench() -> Iterator[Any]:
    made: list[Bench] = []

    def make(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for bench in made:
        await bench.close()


@pytest.fixture
def bench(make_bench):
    return make_bench()


async def result_of(task: "asyncio.Task[Any]") -> Any:
    async with asyncio.timeout(WAIT_S):
        return await task


async def error_of(task: "asyncio.Task[Any]") -> HostError:
    with pytest.raises(HostError) as caught:
        await result_of(task)
    return caught.value


async def test_a_request_returns_the_fields_of_its_answer(bench):
    bench.attach()
    task = await bench.ask("rlm.run", {"a": [1, None, "ü"]})

    bench.answer(1, found="x", status="mine")

    assert await result_of(task) == {"found": "x", "status": "mine"}
    comm_id, data, _ = bench.wire.sent[0]
    assert comm_id == "comm"
    assert data == {
        "kind": "request",
        "id": 1,
        "type": "rlm.run",
        "generation": "g",
        "payload": {"a": [1, None, "ü"]},
    }


async def test_an_error_answer_is_raised_with_its_code_and_its_bare_text(bench):
    bench.attach()
    task = await bench.ask("rlm.run")

    bench.client.answer(
        {"id": 1, "status": "error", "code": "DEPTH_LIMIT", "error": "too deep"}
    )
    error = await error_of(task)

    assert isinstance(error, RuntimeError)
    assert (str(error), error.code, error.request_type) == (
        "too deep",
        "DEPTH_LIMIT",
        "rlm.run",
    )


async def test_the_wire_holds_a_window_and_the_rest_waits(make_bench):
    bench = make_bench(limits=Limits(on_wire=3))
    bench.attach()

    await bench.ask(count=10)

    assert bench.wire.ids() == [1, 2, 3]
    bench.answer(2)
    assert bench.wire.ids() == [1, 2, 3, 4]


async def test_ids_have_no_gaps_when_waiting_requests_are_taken_back(make_bench):
    bench = make_bench(limits=Limits(on_wire=1))
    bench.attach()
    await bench.ask(count=5)

    for task in bench.tasks[1:4]:
        task.cancel()
    await asyncio.gather(*bench.tasks[1:4], return_exceptions=True)
    bench.answer(1)

    assert bench.wire.ids() == [1, 2]
    assert bench.wire.ids("cancel") == []


async def test_one_request_more_than_may_wait_is_refused(make_bench):
    bench = make_bench(limits=Limits(on_wire=1, waiting=2))
    bench.attach()
    await bench.ask(count=3)

    refused = await bench.ask("one.more")

    error = await error_of(refused)
    assert (error.code, error.request_type) == ("TOO_MANY_REQUESTS", "one.more")
    bench.answer(1)
    await bench.ask()
    assert bench.wire.ids() == [1, 2]


async def test_a_refused_request_leaves_the_count_of_waiting_ones_right(make_bench):
    bench = make_bench(limits=Limits(on_wire=1, waiting=1))
    bench.attach()
    await bench.ask(count=2)

    for _ in range(3):
        assert (await error_of(await bench.ask())).code == "TOO_MANY_REQUESTS"


async def test_requests_that_were_taken_back_are_not_kept(make_bench):
    bench = make_bench(limits=Limits(on_wire=1))
    bench.attach()
    await bench.ask(count=2)

    for _ in range(1000):
        task = await bench.ask()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert len(bench.client._table.waiting) < 100


async def test_a_lost_message_is_asked_for_again_under_its_id(bench):
    bench.attach()
    await bench.ask("t", {"n": 1})
    bench.clock.now += 1.0

    bench.attach()

    assert bench.wire.ids() == [1, 1]
    assert bench.wire.sent[0][1] == bench.wire.sent[1][1]


async def test_what_the_host_has_in_work_is_not_asked_again(bench):
    bench.attach()
    await bench.ask(count=3)
    bench.clock.now += 1.0

    bench.attach(1, 3)

    assert bench.wire.ids() == [1, 2, 3, 2]


async def test_what_was_sent_just_now_is_not_asked_again(bench):
    bench.attach()
    await bench.ask()

    bench.attach()

    assert bench.wire.ids() == [1]


async def test_a_goodbye_asks_nothing_again(bench):
    bench.attach()
    await bench.ask()
    bench.clock.now += 1.0

    bench.attach(lease_s=0.0)

    assert bench.wire.ids() == [1]
    assert not bench.client.attached


@pytest.mark.parametrize("number", [1, 7], ids=["second answer", "never asked"])
async def test_a_late_answer_is_dropped(bench, number):
    bench.attach()
    task = await bench.ask()
    bench.answer(1, n=1)

    bench.answer(number, n=2)

    assert await result_of(task) == {"n": 1}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({}, id="empty"),
        pytest.param({"id": 1}, id="no status"),
        pytest.param({"id": 1, "status": "ok"}, id="no result"),
        pytest.param({"id": 1, "status": "ok", "result": [1]}, id="list for a result"),
        pytest.param({"id": 1, "status": "error"}, id="no code"),
        pytest.param({"id": 1, "status": "maybe", "result": {}}, id="other status"),
        pytest.param({"id": [1], "status": "ok", "result": {}}, id="unhashable id"),
        pytest.param(None, id="none"),
        pytest.param([1], id="list"),
    ],
)
async def test_what_is_no_answer_settles_nothing(bench, data):
    bench.attach()
    task = await bench.ask()

    with pytest.raises((ValueError, TypeError, KeyError)):
        bench.client.answer(data)

    bench.answer(1, fine=True)
    assert await result_of(task) == {"fine": True}


async def test_the_reply_to_a_beat_names_what_is_waited_for(bench):
    bench.attach()
    await bench.ask(count=3)
    bench.answer(2)

    reply = bench.attach(1, 3)

    assert (reply.status, reply.pending, reply.next_id) == ("ok", [1, 3], 4)


async def test_a_host_of_another_generation_is_refused_and_asked_nothing(bench):
    await bench.ask()

    reply = bench.attach(generation="other")

    assert (reply.status, reply.code) == ("error", "STALE_GENERATION")
    assert bench.wire.sent == []
    assert not bench.client.attached


async def test_a_kernel_of_no_bridge_takes_any_host_and_speaks_its_generation(
    make_bench,
):
    bench = make_bench(generation="")
    await bench.ask()

    reply = bench.attach(generation="of the host")

    assert reply.status == "ok"
    assert bench.wire.sent[0][1]["generation"] == "of the host"


async def test_without_a_host_a_request_fails_after_the_wait(make_bench):
    bench = make_bench(limits=Limits(attach_wait_s=0.05))
    task = await bench.ask("t")
    bench.clock.now += 1.0

    error = await error_of(task)

    assert (error.code, error.request_type) == ("HOST_UNAVAILABLE", "t")
    assert bench.wire.sent == []
    assert (bench.client._table.waiting_count, bench.client._watches) == (0, {})


async def test_after_a_lease_has_run_out_its_requests_fail(make_bench):
    bench = make_bench(limits=Limits(attach_wait_s=0.05, on_wire=1))
    bench.attach(lease_s=6.0)
    await bench.ask(count=3)
    bench.clock.now += 6.0 + 0.06

    errors = [await error_of(task) for task in bench.tasks]

    assert {error.code for error in errors} == {"HOST_UNAVAILABLE"}
    assert bench.attach().pending == []


async def test_while_a_lease_runs_no_request_fails(make_bench):
    bench = make_bench(limits=Limits(attach_wait_s=0.02))
    bench.attach(lease_s=60.0)
    task = await bench.ask()
    bench.clock.now += 59.0

    done, _ = await asyncio.wait({task}, timeout=0.2)

    assert done == set()


async def test_a_goodbye_ends_requests_after_the_wait(make_bench):
    bench = make_bench(limits=Limits(attach_wait_s=0.05))
    bench.attach(lease_s=60.0)
    task = await bench.ask()
    bench.attach(lease_s=0.0)
    bench.clock.now += 0.06

    assert (await error_of(task)).code == "HOST_UNAVAILABLE"


async def test_a_host_that_comes_in_time_gets_what_has_waited(bench):
    task = await bench.ask()
    assert bench.wire.sent == []

    bench.attach()
    bench.answer(1, n=1)

    assert await result_of(task) == {"n": 1}


async def test_an_await_that_is_cancelled_takes_its_request_back(bench):
    bench.attach()
    task = await bench.ask()

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert bench.wire.ids("cancel") == [1]
    assert bench.attach().pending == []


async def test_a_request_that_never_went_out_is_not_taken_back(bench):
    task = await bench.ask()

    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    bench.attach()

    assert bench.wire.sent == []


async def test_an_answer_ends_the_right_to_cancel(bench):
    bench.attach()
    task = await bench.ask()

    bench.answer(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)

    assert bench.wire.ids("cancel") == []


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param({"x": float("nan")}, id="nan"),
        pytest.param({"x": float("-inf")}, id="infinity"),
        pytest.param({"x": 2**53 + 1}, id="integer beyond 2**53"),
        pytest.param({"x": -(2**53) - 1}, id="negative integer beyond 2**53"),
        pytest.param({"x": "a\ud800"}, id="lone surrogate"),
        pytest.param({"a\udfff": 1}, id="lone surrogate in a key"),
        pytest.param({1: 2}, id="key that is no text"),
        pytest.param({"x": {1, 2}}, id="set"),
        pytest.param({"x": b"bytes"}, id="bytes"),
        pytest.param({"x": object()}, id="object"),
        pytest.param({"x": [[[object]]]}, id="deep inside"),
    ],
)
async def test_what_is_not_strict_json_is_refused_here(bench, payload):
    bench.attach()

    with pytest.raises(HostError) as caught:
        await bench.client.request("t", payload)

    assert (caught.value.code, caught.value.request_type) == ("INVALID_ARGUMENT", "t")
    assert bench.wire.sent == []


async def test_a_payload_that_holds_itself_is_refused(bench):
    payload: dict[str, Any] = {}
    payload["self"] = payload

    with pytest.raises(HostError) as caught:
        await bench.client.request("t", payload)

    assert caught.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        pytest.param("x" * (MAX_PAYLOAD_BYTES - 8), True, id="the largest"),
        pytest.param("x" * (MAX_PAYLOAD_BYTES - 7), False, id="a byte more"),
        pytest.param("x" * 10_000_000, False, id="10 MB"),
        pytest.param("ü" * (MAX_PAYLOAD_BYTES // 2), False, id="bytes, not characters"),
    ],
)
async def test_a_payload_has_a_largest_size(bench, text, fits):
    bench.attach()
    task = await bench.ask("t", {"x": text})

    if fits:
        assert bench.wire.ids() == [1]
    else:
        assert (await error_of(task)).code == "PAYLOAD_TOO_LARGE"
        assert bench.wire.sent == []


@pytest.mark.parametrize(
    ("request_type", "payload"),
    [
        pytest.param("", {}, id="empty type"),
        pytest.param(None, {}, id="no type"),
        pytest.param(3, {}, id="number for a type"),
        pytest.param("t", [1], id="list"),
        pytest.param("t", "text", id="text"),
        pytest.param("t", 0, id="zero"),
        pytest.param("t", False, id="false"),
    ],
)
async def test_what_is_no_request_is_a_type_error(bench, request_type, payload):
    bench.attach()

    with pytest.raises(TypeError):
        await bench.client.request(request_type, payload)

    assert bench.wire.sent == []


async def test_a_payload_is_taken_as_it_was_when_it_was_asked(make_bench):
    bench = make_bench(limits=Limits(on_wire=1))
    bench.attach()
    shared: dict[str, Any] = {}
    for number in range(3):
        shared["n"] = number
        await bench.ask("t", shared)

    bench.answer(1)
    bench.answer(2)

    assert [data["payload"]["n"] for _, data, _ in bench.wire.sent] == [0, 1, 2]


async def test_threads_ask_from_their_own_loops(bench):
    bench.attach()
    seen = threading.Semaphore(0)
    results: list[Any] = []

    def ask_in_thread() -> None:
        async def main() -> None:
            task = asyncio.ensure_future(bench.client.request("t"))
            await asyncio.sleep(0)
            seen.release()
            async with asyncio.timeout(WAIT_S):
                results.append(await task)

        asyncio.run(main())

    threads = [threading.Thread(target=ask_in_thread) for _ in range(8)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert await asyncio.to_thread(seen.acquire, timeout=WAIT_S)
    for number in range(1, 9):
        bench.answer(number, n=number)
    for thread in threads:
        await asyncio.to_thread(thread.join, WAIT_S)

    assert sorted(r["n"] for r in results) == [*range(1, 9)]
    assert sorted(bench.wire.ids()) == [*range(1, 9)]


async def test_an_answer_for_a_thread_that_has_ended_harms_nobody(bench):
    bench.attach()

    def ask_and_leave() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(bench.client.request("t"))
        loop.run_until_complete(asyncio.sleep(0))
        # A loop that ends without its tasks, as a careless thread leaves it.
        task._log_destroy_pending = False
        loop.close()

    thread = threading.Thread(target=ask_and_leave)
    thread.start()
    await asyncio.to_thread(thread.join, WAIT_S)

    bench.answer(1)
    task = await bench.ask()
    bench.answer(2, n=2)

    assert await result_of(task) == {"n": 2}
    assert all(not loop.is_closed() for loop in bench.client._watches)


async def test_two_thousand_requests_are_each_answered_once(bench):
    bench.attach()
    await bench.ask(count=2000)
    answered = 0
    while answered < 2000:
        batch = bench.wire.ids()[answered:]
        assert 0 < len(batch) <= 256
        for number in batch:
            bench.answer(number, n=number)
        answered += len(batch)

    async with asyncio.timeout(WAIT_S):
        results = await asyncio.gather(*bench.tasks)

    assert [r["n"] for r in results] == [*range(1, 2001)]
    assert bench.attach().pending == []


def test_a_handle_is_plain_data():
    handle = RLMSpawnHandle("id", "name", Path("/d"), "p/m")

    assert copy.deepcopy(handle) == handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert dataclasses.asdict(handle)["name"] == "name"


async def test_a_handle_outside_a_kernel_says_so():
    handle = RLMSpawnHandle("id", "name", Path("/d"), "p/m")

    with pytest.raises(RuntimeError, match="not loaded"):
        await handle.report()
