"""The one error boundary: exact validation, currentness, no exception's text."""

import asyncio
import dataclasses
import logging
from typing import Any

import pytest

from host_bridge.errors import RequestError
from host_bridge.kernels.attachment import Asker
from host_bridge.requests.dispatcher import Dispatcher
from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import Request
from kernel_ext.wire.messages import REQUEST_TYPES


class Currentness:
    """Says "current" so many times."""

    def __init__(self, times: int = 1000) -> None:
        self._left = times

    def __call__(self) -> bool:
        self._left -= 1
        return self._left >= 0


def asker(is_current: Any = None) -> Asker:
    return Asker(
        agent_id="agent",
        generation="g",
        cell=None,
        is_current=is_current or Currentness(),
    )


def request(request_type: str = "rlm.report", **payload: Any) -> Request:
    return Request(id=7, type=request_type, generation="g", payload=payload)


class Handlers:
    """One handler for every request type."""

    def __init__(self, result: Any = None) -> None:
        self.seen: list[Any] = []
        self.result = {} if result is None else result

    async def __call__(self, payload: Any, context: Any) -> Any:
        self.seen.append((payload, context))
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def dispatcher(handler: Any) -> Dispatcher:
    return Dispatcher(dict.fromkeys(REQUEST_TYPES, handler))


VALID = {
    "rlm.run": {"prompt": "p"},
    "rlm.list_subagents": {},
    "rlm.report": {"rlm_child_id": "c"},
    "rlm.find_models": {},
    "rlm.delete_subagent": {"target": "t"},
    "agent_message.send": {"message": "m", "receiver_role": "parent"},
    "dsh_tools.list": {},
    "dsh_tools.call": {"name": "n", "arguments": {}},
}


def test_the_table_of_this_test_is_whole():
    assert VALID.keys() == REQUEST_TYPES.keys()


@pytest.mark.parametrize("request_type", [*VALID])
async def test_a_valid_request_reaches_its_handler_as_a_dataclass(request_type):
    handlers = Handlers({"done": True})

    reply = await dispatcher(handlers).dispatch(
        request(request_type, **VALID[request_type]), asker()
    )

    assert (reply.id, reply.status, reply.result) == (7, "ok", {"done": True})
    payload, context = handlers.seen[0]
    assert isinstance(payload, REQUEST_TYPES[request_type][0])
    assert (context.agent_id, context.request_id) == ("agent", "g:7")


@pytest.mark.parametrize("request_type", [*VALID])
async def test_an_extra_field_is_refused(request_type, token):
    handlers = Handlers()

    reply = await dispatcher(handlers).dispatch(
        request(request_type, **VALID[request_type], extra=token), asker()
    )

    assert reply.code == "INVALID_ARGUMENT"
    assert "extra" in reply.error
    assert token not in reply.error
    assert handlers.seen == []


@pytest.mark.parametrize(
    ("request_type", "field"),
    [(kind, field) for kind, payload in VALID.items() for field in payload],
)
async def test_a_missing_field_is_refused(request_type, field):
    payload = {k: v for k, v in VALID[request_type].items() if k != field}

    reply = await dispatcher(Handlers()).dispatch(
        request(request_type, **payload), asker()
    )

    assert reply.code == "INVALID_ARGUMENT"
    assert field in reply.error


@pytest.mark.parametrize(
    ("request_type", "changed"),
    [
        ("rlm.run", {"prompt": 1}),
        ("rlm.run", {"prompt": None}),
        ("rlm.run", {"prompt": ["secret"]}),
        ("rlm.run", {"kwargs": None}),
        ("rlm.run", {"kwargs": "secret"}),
        ("rlm.run", {"kwargs": {"name": 1}}),
        ("rlm.run", {"kwargs": {"model": ["secret"]}}),
        ("rlm.run", {"kwargs": {"thinking": 3}}),
        ("rlm.report", {"rlm_child_id": 5}),
        ("rlm.report", {"timeout_s": "5"}),
        ("rlm.report", {"timeout_s": True}),
        ("rlm.find_models", {"limit": "8"}),
        ("rlm.find_models", {"limit": 8.5}),
        ("rlm.find_models", {"query": None}),
        ("rlm.delete_subagent", {"target": {"secret": 1}}),
        ("agent_message.send", {"message": 1}),
        ("agent_message.send", {"receiver_role": "secret"}),
        ("agent_message.send", {"receiver_name": 4}),
        ("dsh_tools.call", {"name": 1}),
        ("dsh_tools.call", {"arguments": "secret"}),
        ("dsh_tools.call", {"arguments": None}),
    ],
    ids=str,
)
async def test_a_field_of_another_type_is_refused_without_its_value(
    request_type, changed
):
    handlers = Handlers()

    reply = await dispatcher(handlers).dispatch(
        request(request_type, **{**VALID[request_type], **changed}), asker()
    )

    assert reply.code == "INVALID_ARGUMENT"
    assert "secret" not in reply.error
    assert handlers.seen == []


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), 2**53 + 1, "a\ud800", {1: 2}],
    ids=["nan", "infinity", "integer", "surrogate", "key"],
)
async def test_what_is_not_strict_json_is_refused(value):
    reply = await dispatcher(Handlers()).dispatch(
        request("dsh_tools.call", name="n", arguments={"x": value}), asker()
    )

    assert reply.code == "INVALID_ARGUMENT"


async def test_unknown_options_of_a_child_are_named_sorted_in_primes_words():
    reply = await dispatcher(Handlers()).dispatch(
        request("rlm.run", prompt="p", kwargs={"b": 1, "name": "n", "a": 2}), asker()
    )

    assert (reply.code, reply.error) == (
        "INVALID_ARGUMENT",
        "Unsupported rlm.run kwargs: a, b",
    )


async def test_a_refusal_is_short_however_long_the_field_names_are():
    reply = await dispatcher(Handlers()).dispatch(
        request("rlm.run", prompt="p", kwargs={"k" * 1_000_000: 1}), asker()
    )

    assert reply.code == "INVALID_ARGUMENT"
    assert len(reply.error) < 5000


@pytest.mark.parametrize("request_type", ["nope", "rlm.run ", "", "x" * 100_000])
async def test_an_unknown_type_is_refused(request_type):
    reply = await dispatcher(Handlers()).dispatch(request(request_type), asker())

    assert reply.code == "UNSUPPORTED_REQUEST"
    assert reply.error == (
        f'host request type "{request_type[:80]}" is not available in this session'
    )


async def test_a_handler_that_fails_is_internal_with_a_reference_only(caplog, token):
    caplog.set_level(logging.ERROR)

    reply = await dispatcher(Handlers(ValueError(token))).dispatch(
        request(rlm_child_id="c"), asker()
    )

    assert reply.code == "INTERNAL"
    assert token not in reply.error
    reference = reply.error.rsplit(" ", 1)[1]
    assert reference in caplog.text


async def test_a_coded_error_goes_to_the_kernel_as_it_is():
    error = RequestError(ErrorCode.TIMEOUT, "too late")

    reply = await dispatcher(Handlers(error)).dispatch(
        request(rlm_child_id="c"), asker()
    )

    assert (reply.code, reply.error) == ("TIMEOUT", "too late")


@pytest.mark.parametrize(
    ("times", "ran"), [(0, 0), (1, 1)], ids=["before the work", "after the work"]
)
async def test_a_replaced_kernel_gets_nothing(times, ran):
    handlers = Handlers({"secret": 1})

    reply = await dispatcher(handlers).dispatch(
        request(rlm_child_id="c"), asker(Currentness(times))
    )

    assert reply.code == "STALE_GENERATION"
    assert len(handlers.seen) == ran


async def test_a_step_of_a_handler_is_checked_before_and_after():
    committed = []

    async def work() -> str:
        committed.append("worked")
        return "x"

    async def handler(payload: Any, context: Any) -> Any:
        await context.step(work())
        committed.append("committed")
        return {}

    reply = await dispatcher(handler).dispatch(
        request(rlm_child_id="c"), asker(Currentness(2))
    )

    assert reply.code == "STALE_GENERATION"
    assert committed == ["worked"]


async def test_a_step_that_is_refused_leaves_no_coroutine_behind():
    async def work() -> None:
        raise AssertionError

    async def handler(payload: Any, context: Any) -> Any:
        await context.step(work())

    reply = await dispatcher(handler).dispatch(
        request(rlm_child_id="c"), asker(Currentness(1))
    )

    assert reply.code == "STALE_GENERATION"


@pytest.mark.parametrize(
    "result",
    [{"x": {1}}, {"x": float("nan")}, {1: 2}, 5, None, object(), {"x": 2**60}],
    ids=str,
)
async def test_a_result_that_is_not_json_is_internal(result):
    async def handler(payload: Any, context: Any) -> Any:
        return result

    reply = await dispatcher(handler).dispatch(request(rlm_child_id="c"), asker())

    assert reply.code == "INTERNAL"


async def test_a_result_dataclass_becomes_fields():
    @dataclasses.dataclass
    class Result:
        a: int
        b: list[int]

    reply = await dispatcher(Handlers(Result(1, [2]))).dispatch(
        request(rlm_child_id="c"), asker()
    )

    assert reply.result == {"a": 1, "b": [2]}


async def test_a_cancelled_request_is_cancelled():
    started, never = asyncio.Event(), asyncio.Event()

    async def handler(payload: Any, context: Any) -> Any:
        started.set()
        await never.wait()

    task = asyncio.create_task(
        dispatcher(handler).dispatch(request(rlm_child_id="c"), asker())
    )
    await started.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_handler_of_no_request_type_is_a_fault_at_once():
    with pytest.raises(KeyError):
        Dispatcher({"no.such": Handlers()})
