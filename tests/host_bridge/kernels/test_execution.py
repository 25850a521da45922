"""What a cell's messages come to: one budget, two sources of the status."""

import pytest

from host_bridge.kernels.channels import Message
from host_bridge.kernels.execution import Cell, OutputBudget

MARK = "\n[... output truncated at {} bytes ...]"


def cell(max_bytes: int = 1000) -> Cell:
    return Cell(OutputBudget(max_bytes))


def stream(text: str, name: str = "stdout") -> Message:
    return Message("stream", {"name": name, "text": text}, "")


def value(text: str) -> Message:
    return Message("execute_result", {"data": {"text/plain": text}}, "")


def failure(name: str, text: str, *lines: str) -> Message:
    content = {"ename": name, "evalue": text, "traceback": [*lines]}
    return Message("error", content, "")


IDLE = Message("status", {"execution_state": "idle"}, "")
REPLY = Message("execute_reply", {"status": "ok"}, "")


def test_one_budget_is_for_all_that_a_cell_says():
    ours = cell(7)
    for message in (stream("12345"), stream("6789", "stderr"), value("'abc'")):
        ours.on_output(message)

    result = ours.result(generation=1)

    assert result.stdout == "12345"
    assert result.stderr == "67" + MARK.format(7)
    assert result.result is None


@pytest.mark.parametrize(
    ("text", "max_bytes", "kept"),
    [
        pytest.param("a😀z", 6, "a😀z", id="fits"),
        pytest.param("a😀z", 5, "a😀" + MARK.format(5), id="after a whole character"),
        pytest.param("a😀z", 4, "a" + MARK.format(4), id="never half a character"),
        pytest.param("a😀z", 1, "a" + MARK.format(1), id="before it"),
        pytest.param("a", 0, MARK.format(0), id="nothing at all"),
        pytest.param("", 0, "", id="nothing to cut"),
        pytest.param("\ud800", 6, "\\ud800", id="lone surrogate is shown"),
    ],
)
def test_a_cut_is_between_characters_and_is_said(text, max_bytes, kept):
    assert OutputBudget(max_bytes).take(text) == kept


def test_the_mark_of_a_cut_comes_once():
    budget = OutputBudget(3)

    texts = [budget.take("abcd"), budget.take("e"), budget.take("f")]

    assert texts == ["abc" + MARK.format(3), "", ""]


def test_an_error_is_cut_like_any_output():
    ours = cell(32)
    ours.on_output(failure("E" * 1000, "m" * 100, "line one", "line two"))

    error = ours.result(generation=1).error

    assert error.name == "E" * 256
    assert error.message == "m" * 32 + MARK.format(32)
    assert error.traceback == ()


def test_a_cell_is_over_after_the_reply_and_idle():
    one, other = cell(), cell()

    one.on_reply(REPLY)
    other.on_output(IDLE)
    assert not one.settled.is_set()
    assert not other.settled.is_set()
    one.on_output(IDLE)
    other.on_reply(REPLY)

    assert one.settled.is_set()
    assert other.settled.is_set()


def test_an_error_that_stands_in_the_reply_alone_is_an_error():
    ours = cell()
    content = {"status": "error", "ename": "UsageError", "evalue": "x", "traceback": []}
    ours.on_reply(Message("execute_reply", content, ""))

    result = ours.result(generation=1)

    assert (result.status, result.error.name) == ("error", "UsageError")


def test_a_reply_that_was_aborted_is_aborted():
    ours = cell()
    ours.on_reply(Message("execute_reply", {"status": "aborted"}, ""))

    assert ours.result(generation=1).status == "aborted"


@pytest.mark.parametrize("name", ["KeyboardInterrupt", "CancelledError"])
def test_an_interrupt_is_aborted_only_when_it_was_ours(name):
    ours, own = cell(), cell()
    ours.interrupted = True
    for one in (ours, own):
        one.on_output(failure(name, ""))

    assert ours.result(generation=1).status == "aborted"
    assert own.result(generation=1).status == "error"


def test_another_error_of_an_interrupted_cell_is_an_error():
    ours = cell()
    ours.interrupted = True
    ours.on_output(failure("ValueError", "in a finally"))

    assert ours.result(generation=1).status == "error"


@pytest.mark.parametrize(
    "message",
    [
        Message("stream", {}, ""),
        Message("stream", {"name": ["stdout"], "text": "x"}, ""),
        Message("stream", {"name": "stdout", "text": None}, ""),
        Message("stream", {"name": "log", "text": "x"}, ""),
        Message("execute_result", {"data": None}, ""),
        Message("execute_result", {"data": {"text/plain": 3}}, ""),
        Message("status", {"execution_state": []}, ""),
        Message("display_data", {"data": {"text/plain": "x"}}, ""),
    ],
    ids=lambda message: f"{message.type} {message.content}",
)
def test_what_is_no_output_of_a_cell_adds_nothing(message):
    ours = cell()

    ours.on_output(message)

    result = ours.result(generation=1)
    assert (result.status, result.stdout, result.result) == ("ok", "", None)


@pytest.mark.parametrize("traceback", [None, 7, "text", {"a": 1}])
def test_an_error_without_a_traceback_is_an_error(traceback):
    ours = cell()

    ours.on_output(Message("error", {"traceback": traceback}, ""))

    assert ours.result(generation=1).error.traceback == ()


def test_a_lost_kernel_keeps_what_was_printed():
    ours = cell()
    ours.on_output(stream("before"))

    result = ours.ended("error", "KERNEL_DIED", "killed", generation=3)

    assert (result.status, result.stdout) == ("error", "before")
    assert (result.kernel_restarted, result.generation) == (True, 3)


def test_nested_calls_are_numbered_from_one():
    ours = cell()

    assert [ours.next_nested_number() for _ in range(3)] == [1, 2, 3]
