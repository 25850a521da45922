"""Every message of the wire: it survives the way, and nothing else gets through."""

import dataclasses
import inspect
import json
import math
from types import NoneType
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kernel_ext.wire import envelope, messages
from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import (
    AttachReply,
    AttachRequest,
    Cancel,
    ErrorReply,
    OkReply,
    Request,
)
from kernel_ext.wire.messages import (
    REQUEST_TYPES,
    CallToolRequest,
    CallToolResult,
    DeleteSubagentRequest,
    FindModelsRequest,
    ListSubagentsRequest,
    ListSubagentsResult,
    ListToolsRequest,
    ListToolsResult,
    ReportRequest,
    ReportResult,
    RunOptions,
    RunRequest,
    RunResult,
    SendMessageRequest,
    SendMessageResult,
    SubagentRow,
)
from kernel_ext.wire.strict import MAX_DEPTH, PayloadError, check_json, encoded

ROW = SubagentRow(
    rlm_child_id="c-1",
    active_session_id=None,
    session_id="c-1",
    session_name="reader",
    session_dir="/sessions/c-1",
    status="running",
)
EXAMPLES = [
    Request(id=7, type="rlm.run", generation="g", payload={"prompt": "é\U0001f600"}),
    Cancel(ids=[7, 8], generation="g"),
    OkReply(id=7, result={"name": "reader"}),
    ErrorReply(id=7, code=ErrorCode.TIMEOUT, error="reader has not reported yet"),
    AttachRequest(comm_id="c", generation="g", lease_s=6.0, working=[7]),
    AttachReply(status="ok", generation="g", pid=1, pending=[7], next_id=9),
    RunOptions(name="reader", model="local/small"),
    RunRequest(prompt="read", kwargs=RunOptions(name="reader")),
    RunResult(rlm_child_id="c-1", name="reader", session_dir="/s", model="local/small"),
    ListSubagentsRequest(),
    ROW,
    ListSubagentsResult(subagents=[ROW]),
    ReportRequest(rlm_child_id="c-1", timeout_s=1.5),
    ReportResult(text="", source="closing"),
    FindModelsRequest(query="small", limit=3),
    DeleteSubagentRequest(target="reader"),
    SendMessageRequest(message="done", receiver_role="parent"),
    SendMessageResult(message_id="m-1", receiver_role="parent"),
    ListToolsRequest(),
    ListToolsResult(tools=[{"name": "bash"}]),
    CallToolRequest(name="bash", arguments={"command": "true"}),
    CallToolResult(value={"code": 0}, content=[{"type": "text", "text": "x"}]),
]
ENVELOPE = [type(example) for example in EXAMPLES[:6]]
RECEIVED = [*ENVELOPE, RunOptions, *(payload for payload, _ in REQUEST_TYPES.values())]
"""What a side reads from the other one: refused unless it is exact."""


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def example_of(message: type[Any]) -> dict[str, Any]:
    (example,) = [item for item in EXAMPLES if type(item) is message]
    return dataclasses.asdict(example)


def validate(message: type[Any], data: dict[str, Any]) -> Any:
    """What the host does with bytes of a kernel."""
    return TypeAdapter(message).validate_json(json.dumps(data))


def kinds_of(hint: Any) -> set[Any]:
    """The plain types that a field takes, ``None`` and literals included."""
    parts = get_args(hint) if not isinstance(hint, type) else ()
    return set(parts) or {hint}


def wrong_values() -> list[Any]:
    """(message, field, value that is nearly right)."""
    cases = []
    for message in RECEIVED:
        for name, hint in get_type_hints(message).items():
            if name.startswith("__"):
                continue
            kinds = kinds_of(hint)
            wrong: list[Any] = []
            if int in kinds:
                wrong += ["3", True, 3.5]
            if float in kinds:
                wrong += ["1.5", True]
            if str in kinds:
                wrong += [3, True, ["text"]]
            if hint == list[int]:
                wrong += [["3"], [True], "3", {"0": 3}]
            if hint == dict[str, Any]:
                wrong += [[], "{}"]
            if NoneType not in kinds:
                wrong.append(None)
            cases += [
                pytest.param(
                    message, name, value, id=f"{message.__name__}.{name}={value!r}"
                )
                for value in wrong
            ]
    return cases


def test_every_message_has_an_example():
    defined = {
        item
        for module in (envelope, messages)
        for item in vars(module).values()
        if inspect.isclass(item) and item.__module__ == module.__name__
    }

    assert {type(example) for example in EXAMPLES} == defined


def test_every_request_type_is_listed_once():
    names = [
        value
        for name, value in vars(messages).items()
        if name.isupper() and isinstance(value, str)
    ]

    assert sorted(REQUEST_TYPES) == sorted(names)


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_message_survives_the_way(example):
    data = dataclasses.asdict(example)

    check_json(data)
    assert validate(type(example), data) == example


@pytest.mark.parametrize("message", RECEIVED, ids=name_of)
def test_an_unknown_field_is_refused(message):
    with pytest.raises(ValidationError):
        validate(message, {**example_of(message), "temperature": 1})


@pytest.mark.parametrize(("message", "field", "value"), wrong_values())
def test_a_value_of_another_type_is_refused(message, field, value):
    with pytest.raises(ValidationError):
        validate(message, {**example_of(message), field: value})


@pytest.mark.parametrize("message", RECEIVED, ids=name_of)
def test_a_missing_field_is_refused_unless_it_has_a_default(message):
    whole = example_of(message)
    for field in dataclasses.fields(message):
        data = {name: value for name, value in whole.items() if name != field.name}
        required = (
            field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        )
        if required:
            with pytest.raises(ValidationError):
                validate(message, data)
        else:
            validate(message, data)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature": 0.5},
        {"name": "reader", "tools": []},
        {"name": 3},
        {"model": ["local/small"]},
        {"thinking": {"effort": "low"}},
        None,
        [],
    ],
    ids=str,
)
def test_an_option_of_a_child_is_known_and_right_or_refused(kwargs):
    with pytest.raises(ValidationError):
        validate(RunRequest, {"prompt": "read", "kwargs": kwargs})


@pytest.mark.parametrize("text", ["", "null", "[]", '"x"', "{", '{"id": 1}x', "\x00"])
def test_text_that_is_no_message_is_refused(text):
    with pytest.raises(ValidationError):
        TypeAdapter(Request).validate_json(text)


@pytest.mark.parametrize("role", ["Parent", "root", "", "parent "])
def test_a_role_outside_the_tree_is_refused(role):
    with pytest.raises(ValidationError):
        validate(SendMessageRequest, {"message": "x", "receiver_role": role})


def test_no_message_names_a_sender():
    names = {field.name for field in dataclasses.fields(SendMessageRequest)}

    assert names == {"message", "receiver_role", "receiver_name"}


@pytest.mark.parametrize("code", list(ErrorCode), ids=str)
def test_a_code_is_upper_snake_and_says_when(code):
    assert code.value == code.name == code.upper()
    assert str(code) == code.value
    assert code.__doc__
    assert code.__doc__.endswith(".")


def test_an_unknown_code_is_refused():
    with pytest.raises(ValidationError):
        validate(ErrorReply, {"id": 1, "code": "NO_SUCH_CODE", "error": "x"})


# What a payload may hold: the same for every parser on the way (design 3.14).

INTEGERS = st.integers(min_value=-(2**53), max_value=2**53)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
LEAVES = (
    st.none()
    | st.booleans()
    | INTEGERS
    | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False)
)
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4)
    ),
    max_leaves=20,
)
POISONS = [
    math.nan,
    math.inf,
    -math.inf,
    2**53 + 1,
    -(2**53) - 1,
    "\ud800",
    "a\udfffb",
    {"\udc00": 1},
    {1: "x"},
    {None: "x"},
    {True: "x"},
    {b"k": "x"},
    b"bytes",
    {"a", "set"},
    1j,
    object(),
    ...,
]

checked = settings(deadline=None, max_examples=200)


def nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"k": value}
    return value


@checked
@given(JSON)
def test_what_json_keeps_is_accepted(value):
    check_json(value)

    assert json.loads(json.dumps(value, allow_nan=False)) == value


@checked
@given(JSON)
def test_it_is_written_as_compact_utf8(value):
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    assert encoded(value) == text.encode("utf-8")


@checked
@given(JSON)
def test_pydantic_reads_what_was_accepted_alike(value):
    check_json({"v": value})
    request = Request(id=1, type="x", generation="g", payload={"v": value})

    assert validate(Request, dataclasses.asdict(request)) == request


@pytest.mark.parametrize("poison", POISONS, ids=repr)
def test_what_parsers_disagree_about_is_refused(poison):
    with pytest.raises(PayloadError):
        check_json(poison)


@checked
@given(
    st.sampled_from(POISONS),
    st.lists(JSON, max_size=3),
    st.lists(JSON, max_size=3),
    st.lists(st.booleans(), max_size=8),
)
def test_it_is_refused_wherever_it_stands(poison, before, after, way):
    value: Any = [*before, poison, *after]
    for as_list in way:
        value = [value] if as_list else {"k": value}

    with pytest.raises(PayloadError):
        check_json(value)


@checked
@given(st.integers())
def test_integers_are_within_what_a_double_holds(value):
    if abs(value) <= 2**53:
        check_json(value)
    else:
        with pytest.raises(PayloadError):
            check_json(value)


@checked
@given(st.text(st.characters(categories=["Cs"]), min_size=1), TEXTS)
def test_a_lone_surrogate_is_refused_in_any_text(surrogates, text):
    with pytest.raises(PayloadError):
        check_json({"k": text + surrogates})


@pytest.mark.parametrize(
    "value", [2**53, -(2**53), 0.1, -0.0, 1e308, "\U0001f600", "\x00"]
)
def test_the_edge_is_inside(value):
    check_json(value)


def test_depth_is_bounded():
    check_json(nested(MAX_DEPTH))

    with pytest.raises(PayloadError):
        check_json(nested(MAX_DEPTH + 1))


def test_a_value_that_holds_itself_is_refused():
    value: list[Any] = []
    value.append(value)

    with pytest.raises(PayloadError):
        check_json(value)


def test_a_hundred_thousand_levels_are_refused_without_a_crash():
    with pytest.raises(PayloadError):
        check_json(nested(100_000))


def test_a_refusal_names_the_place_and_no_contents():
    with pytest.raises(PayloadError) as refused:
        check_json({"rows": [{"text": "private \ud800"}]})

    assert "payload.rows[0].text" in str(refused.value)
    assert "private" not in str(refused.value)
