"""The `ipython` tool: what a model reads, and what a failed call looks like."""

import asyncio
import json

import pytest
import pytest_asyncio

from host_bridge.harness.port import AgentInfo, ToolCall
from host_bridge.kernels.execution import CellError, ExecutionResult
from host_bridge.tools.ipython import GUIDANCE, SPEC, render


def result(**fields):
    return ExecutionResult(
        **{
            "status": "ok",
            "stdout": "",
            "stderr": "",
            "result": None,
            "duration_ms": 1,
            "generation": 1,
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        pytest.param({}, "(no output)", id="nothing"),
        pytest.param({"result": "42"}, "42", id="value"),
        pytest.param(
            {"stdout": "out\n", "stderr": "err\n", "result": "42"},
            "out\nerr\n42",
            id="in this order",
        ),
        pytest.param({"stdout": "a\n\n"}, "a", id="no empty lines at the end"),
        pytest.param(
            {"status": "error", "error": CellError(name="E", message="m")},
            "E: m",
            id="error without a traceback",
        ),
        pytest.param(
            {
                "status": "error",
                "stdout": "before\n",
                "error": CellError(name="E", message="m", traceback=("l1", "l2")),
            },
            "before\nl1\nl2",
            id="error with a traceback",
        ),
        pytest.param(
            {"status": "aborted", "stdout": "x\n"}, "x\n[stopped]", id="stopped"
        ),
        pytest.param(
            {"status": "aborted", "kernel_restarted": True},
            "[stopped, kernel ended]",
            id="stopped with its kernel",
        ),
    ],
)
def test_a_model_reads(fields, text):
    assert render(result(**fields)) == text


def test_the_schema_takes_code_and_nothing_else():
    assert SPEC.name == "ipython"
    assert SPEC.parameters["additionalProperties"] is False
    assert SPEC.parameters["required"] == ["code"]
    assert [*SPEC.parameters["properties"]] == ["code"]
    json.dumps(SPEC.parameters)


@pytest.mark.parametrize(
    "words",
    [
        "%%bash",
        "await rlm(",
        "admits a child agent",
        'receiver_role="parent"',
        "exit()",
        "input()",
        "!cmd &",
        "not a sandbox",
        ".code",
        "REQUEST_SCOPE_CLOSED",
        "new empty kernel",
        "own delegation tools",
    ],
)
def test_the_guidance_says(words):
    assert GUIDANCE.order == 150
    assert words in GUIDANCE.text


# -- in real kernels -----------------------------------------------------------------

in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(open_stage):
    async with open_stage(interrupt_grace_s=6.0) as stage:
        yield stage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def root(stage):
    return await stage.root()


@pytest.fixture
def call(stage, root, waits):
    async def call(code="", *, agent=root, arguments=None, cancelled=None):
        tool_call = ToolCall(
            execution_id="e",
            call_id="c",
            tool="ipython",
            arguments={"code": code} if arguments is None else arguments,
            agent=agent,
            cancelled=cancelled or asyncio.Event(),
        )
        return await waits.within(stage.bridge._ipython.run(tool_call))

    return call


@in_module_loop
@pytest.mark.kernel
async def test_a_call_has_a_text_and_every_field_as_its_value(call):
    outcome = await call("print('out'); 6 * 7")

    assert (outcome.text, outcome.is_error, outcome.code) == ("out\n42", False, None)
    value = dict(outcome.value)
    assert isinstance(value.pop("duration_ms"), int)
    assert value == {
        "status": "ok",
        "stdout": "out\n",
        "stderr": "",
        "result": "42",
        "generation": 1,
        "kernel_restarted": False,
        "error": None,
    }
    json.dumps(outcome.value)


@in_module_loop
@pytest.mark.kernel
async def test_a_failed_cell_is_a_failed_call(call):
    outcome = await call("1 / 0")

    assert (outcome.is_error, outcome.code) == (True, "ZeroDivisionError")
    assert outcome.value["error"]["name"] == "ZeroDivisionError"
    assert "division by zero" in outcome.text


@in_module_loop
@pytest.mark.kernel
async def test_a_stopped_call_is_a_failed_call(call):
    stop = asyncio.Event()
    stop.set()

    outcome = await call("1", cancelled=stop)

    assert outcome.is_error
    assert outcome.value["status"] == "aborted"
    assert "[stopped]" in outcome.text


@in_module_loop
@pytest.mark.parametrize(
    "arguments",
    [{}, {"code": 1}, {"code": None}, {"code": "1", "extra": 2}, {"cod": "1"}],
    ids=str,
)
async def test_anything_but_code_is_refused(call, arguments):
    outcome = await call(arguments=arguments)

    assert (outcome.is_error, outcome.code) == (True, "INVALID_ARGUMENT")


@in_module_loop
async def test_a_call_of_nobody_is_refused(call):
    outcome = await call("1", agent=None)

    assert (outcome.is_error, outcome.code) == (True, "INVALID_REQUEST")


@in_module_loop
@pytest.mark.kernel
async def test_after_a_death_the_next_call_says_that_its_kernel_is_new(call):
    await call("kept = 1")
    died = await call("import os; os._exit(1)")
    after = await call("'kept' in globals()")
    later = await call("1")

    assert (died.is_error, died.code) == (True, "KERNEL_DIED")
    assert "variables are lost" in died.text
    assert after.text.startswith("[new kernel, generation ")
    assert after.text.endswith("False")
    assert later.text == "1"


@in_module_loop
@pytest.mark.kernel
async def test_a_death_between_two_calls_is_told_too(stage, root, call, waits):
    await call("kept = 1")
    kernel = await stage.bridge.kernel_of(root)
    kernel._process.process.kill()
    await waits.within(kernel._process.process.wait())

    after = await call("'kept' in globals()")

    assert after.text.startswith("[new kernel, generation ")
    assert after.text.endswith("False")


@in_module_loop
async def test_a_kernel_that_can_not_start_is_a_failed_call(stage, call):
    nowhere = AgentInfo(id="lost", parent_id=None, depth=0, cwd="/nowhere/at/all")

    outcome = await call("1", agent=nowhere)

    assert (outcome.is_error, outcome.code) == (True, "KERNEL_START_FAILED")
