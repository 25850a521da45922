"""Conformance: children, reports and messages from real kernels (groups 26-29, 33)."""

import ast
import asyncio

import pytest
import pytest_asyncio

from host_bridge.events import CellRan
from host_bridge.harness.port import AssistantText, ChildEnded, MailRead
from host_bridge.harness.script import Reply, ToolUse

pytestmark = [pytest.mark.kernel, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(open_stage):
    async with open_stage() as stage:
        yield stage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def root(stage):
    return await stage.root()


@pytest.fixture
def run(stage, root):
    async def run(code):
        result = await stage.cell(root, code)
        assert result.status == "ok", result.error
        return ast.literal_eval(result.result) if result.result else None

    return run


def fenced(code):
    return f"Do this.\n```python\n{code}\n```\n"


async def test_a_call_returns_an_admission_handle_and_not_the_answer(run, stage):
    found = await run(
        "h = await rlm('reply with READY', name='ready')\n"
        "(type(h).__name__, h.name, h.model, h.session_dir.is_absolute(),\n"
        " isinstance(h.rlm_child_id, str), 'READY' in repr(h))"
    )

    assert found == ("RLMSpawnHandle", "ready", "scripted/generic", True, True, False)


async def test_run_and_the_call_are_the_same(run):
    assert await run("(await rlm.run('x', name='by run')).name") == "by run"


async def test_the_handle_comes_while_the_childs_model_is_blocked(run, stage):
    prompt = stage.plays(
        "<blocked>", lambda transcript: Reply(text="late", delay_s=300)
    )

    child_id = await run(f"blocked = await rlm({prompt!r}); blocked.rlm_child_id")

    assert not [e for e in stage.of(AssistantText) if e.agent_id == child_id]
    rows = await run(
        "[r.status for r in await rlm.list_subagents() "
        "if r.rlm_child_id == blocked.rlm_child_id]"
    )
    assert rows == ["running"]
    await stage.bridge.harness.cancel(child_id)


async def test_five_children_of_one_gather_report(run, stage):
    tasks = [
        stage.plays(
            f"<square {n}>",
            lambda transcript, n=n: (
                Reply(text="closed")
                if transcript.tool_results
                else Reply(
                    tool_uses=(
                        ToolUse(
                            name="ipython",
                            arguments={
                                "code": f"await agent_message.send('{n * 11}', "
                                "receiver_role='parent')"
                            },
                        ),
                    )
                )
            ),
        )
        for n in range(1, 6)
    ]

    found = await run(
        f"hs = await asyncio.gather(*(rlm(p) for p in {tasks!r}))\n"
        "reports = await asyncio.gather(*(h.report(timeout_s=15) for h in hs))\n"
        "(reports, len({h.rlm_child_id for h in hs}), len({h.name for h in hs}))"
    )

    assert found == (["11", "22", "33", "44", "55"], 5, 5)


async def test_a_child_works_in_a_kernel_of_its_own(run):
    code = "import os\nprint('rooted' in globals(), os.environ['RLM_DEPTH'])"

    found = await run(
        f"rooted = 1\nh = await rlm({fenced(code)!r})\nawait h.report(timeout_s=15)"
    )

    assert found.strip() == "False 1"


async def test_a_child_at_the_depth_limit_can_not_recurse(run):
    code = (
        "try:\n"
        "    await rlm('deeper')\n"
        "except HostError as error:\n"
        "    print(error.code, '|', error)"
    )

    found = await run(f"h = await rlm({fenced(code)!r})\nawait h.report(timeout_s=15)")

    assert found.strip() == (
        "DEPTH_LIMIT | RLM recursion depth limit reached (RLM_DEPTH=1, RLM_MAX_DEPTH=1)"
    )


async def test_the_depth_in_the_environment_decides_nothing(run):
    code = (
        "import os\n"
        "os.environ['RLM_DEPTH'] = '-5'; os.environ['RLM_MAX_DEPTH'] = '99'\n"
        "try:\n"
        "    await rlm('deeper')\n"
        "except HostError as error:\n"
        "    print(error.code)"
    )

    found = await run(f"h = await rlm({fenced(code)!r})\nawait h.report(timeout_s=15)")

    assert found.strip() == "DEPTH_LIMIT"


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("rlm(3)", ("TypeError", "prompt must be str, got int")),
        (
            "rlm('p', temperature=1)",
            ("HostError", "Unsupported rlm.run kwargs: temperature"),
        ),
        ("rlm('p', b=1, a=2)", ("HostError", "Unsupported rlm.run kwargs: a, b")),
        ("rlm.find_models(3)", ("TypeError", "query must be str, got int")),
        (
            "rlm.find_models('q', limit='8')",
            ("TypeError", "limit must be int, got str"),
        ),
        ("rlm.delete_subagent('  ')", ("ValueError", "target must not be empty")),
        (
            "rlm.delete_subagent(3)",
            ("TypeError", "target must be str or RLMSubagent, got int"),
        ),
        (
            "agent_message.send(3, receiver_role='parent')",
            ("TypeError", "message must be str, got int"),
        ),
        (
            "agent_message.send('m', 'x', receiver_role='parent')",
            (
                "TypeError",
                (
                    "positional agent_message.send targets are not supported; "
                    "use receiver_role and receiver_name"
                ),
            ),
        ),
        (
            "agent_message.send('m', receiver_role='boss')",
            ("ValueError", 'receiver_role must be "parent", "sibling", or "child"'),
        ),
        (
            "agent_message.send('m', receiver_role='parent', receiver_name='x')",
            ("ValueError", "receiver_name must be omitted for parent messages"),
        ),
        (
            "agent_message.send('m', receiver_role='child')",
            ("ValueError", "receiver_name is required for sibling and child messages"),
        ),
        ("dsh_tools.call('', {})", ("TypeError", "name must be a non-empty str")),
        ("dsh_tools.call('x', [])", ("TypeError", "arguments must be a dict")),
        (
            "host_request('nope')",
            ("HostError", 'host request type "nope" is not available in this session'),
        ),
    ],
)
async def test_a_refusal_has_primes_words(run, call, error):
    found = await run(
        "try:\n"
        f"    await {call}\n"
        "except Exception as caught:\n"
        "    found = (type(caught).__name__, str(caught))\n"
        "found"
    )

    assert found == error


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("rlm('p', model='missing/local')", "MODEL_UNAVAILABLE"),
        ("rlm('p', thinking='low')", "UNSUPPORTED_REASONING_EFFORT"),
        ("rlm.find_models()", "UNSUPPORTED_MODEL_SEARCH"),
        ("rlm.delete_subagent('x')", "UNSUPPORTED_DELETION"),
        (
            "agent_message.send('m', receiver_role='sibling', receiver_name='s')",
            "UNSUPPORTED_RELATIONSHIP",
        ),
        ("agent_message.send('m', receiver_role='parent')", "UNSUPPORTED_RELATIONSHIP"),
        ("dsh_tools.call('x', {})", "REQUEST_SCOPE_CLOSED"),
        ("host_request('rlm.run', {'prompt': 'p', 'type': 'x'})", "INVALID_ARGUMENT"),
        ("rlm('p', name='x' * 65)", "INVALID_ARGUMENT"),
        ("rlm('')", "INVALID_ARGUMENT"),
        ("rlm('x' * 10_000_000)", "PAYLOAD_TOO_LARGE"),
    ],
)
async def test_a_refusal_has_its_code(run, call, code):
    found = await run(
        "try:\n"
        f"    await {call}\n"
        "except HostError as caught:\n"
        "    found = caught.code\n"
        "found"
    )

    assert found == code


async def test_handles_and_rows_may_be_given_where_a_child_is_meant(run):
    found = await run(
        "h = await rlm('p')\n"
        "row = [r for r in await rlm.list_subagents()\n"
        "       if r.rlm_child_id == h.rlm_child_id][0]\n"
        "codes = []\n"
        "for target in (h, row, h.name):\n"
        "    try: await rlm.delete_subagent(target)\n"
        "    except HostError as e: codes.append(e.code)\n"
        "(codes, row.name == row.session_name == h.name, row.session_dir == h.session_dir)"
    )

    assert found == (["UNSUPPORTED_DELETION"] * 3, True, True)


async def test_a_duplicate_name_is_refused_also_at_the_same_time(run):
    found = await run(
        "r = await asyncio.gather(*(rlm('p', name='twin') for _ in range(4)),\n"
        "                         return_exceptions=True)\n"
        "sorted(getattr(x, 'code', 'ok') for x in r)"
    )

    assert found == ["DUPLICATE_LABEL"] * 3 + ["ok"]


async def test_a_child_is_admitted_from_a_task_after_its_cell(run):
    await run(
        "async def later():\n"
        "    await gate.wait()\n"
        "    return await rlm('p', name='late one')\n"
        "gate = asyncio.Event(); task = asyncio.create_task(later())"
    )

    assert await run("gate.set(); (await task).name") == "late one"


async def test_a_child_is_admitted_from_a_thread(run):
    found = await run(
        "import threading\n"
        "names = []\n"
        "t = threading.Thread(target=lambda: names.append(\n"
        "    asyncio.run(rlm('p', name='from a thread')).name))\n"
        "t.start(); t.join(); names"
    )

    assert found == ["from a thread"]


async def test_a_report_that_is_late_is_a_timeout_that_names_the_child(run, stage):
    prompt = stage.plays("<slow>", lambda transcript: Reply(text="late", delay_s=300))

    found = await run(
        f"h = await rlm({prompt!r}, name='snail')\n"
        "try: await h.report(timeout_s=0.05)\n"
        "except HostError as e: found = (e.code, '\"snail\"' in str(e))\n"
        "(found, h.rlm_child_id)"
    )

    assert found[0] == ("TIMEOUT", True)
    await stage.bridge.harness.cancel(found[1])


async def test_cells_of_the_children_overlap_and_the_parents_do_not(run, stage):
    """Three children meet in their cells: each waits for the other two."""
    code = (
        "import os, pathlib, asyncio\n"
        "here = pathlib.Path('meet'); here.mkdir(exist_ok=True)\n"
        "(here / os.environ['RLM_GENERATION']).touch()\n"
        "while len(list(here.iterdir())) < 3: await asyncio.sleep(0.02)\n"
        "print('met')"
    )

    found = await run(
        f"hs = [await rlm({fenced(code)!r}) for _ in range(3)]\n"
        "[(await h.report(timeout_s=18)).strip() for h in hs]"
    )

    assert found == ["met"] * 3


async def test_every_cell_of_a_model_was_told(stage):
    assert {event.result.status for event in stage.of(CellRan)} == {"ok"}
    assert stage.of(ChildEnded)
    assert any(m.settled for e in stage.of(MailRead) for m in e.mail)
    assert asyncio.get_running_loop().is_running()
