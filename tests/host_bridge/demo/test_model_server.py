"""The scripted model server, spoken to with bare HTTP."""

import asyncio
import json
from dataclasses import dataclass

import pytest

from host_bridge.demo.model_server import ModelServer
from host_bridge.harness.script import Reply, ToolUse, run_fenced_python

WAIT_S = 5.0
OPENAI = "/chat/completions"
ANTHROPIC = "/v1/messages"


@pytest.fixture
async def serve():
    """Servers of one test; all are closed at its end."""
    servers = []

    async def serve(script, **more):
        servers.append(ModelServer(script, **more))
        await servers[-1].start()
        return servers[-1]

    yield serve
    for server in servers:
        await server.close()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def events(self):
        """The data of each server-sent event."""
        lines = self.body.decode().split("\n")
        data = [line[6:] for line in lines if line.startswith("data: ")]
        return [json.loads(text) if text != "[DONE]" else text for text in data]

    @property
    def error(self):
        return json.loads(self.body)["error"]["message"]


async def connect(server):
    host, _, port = server.base_url.removeprefix("http://").partition(":")
    return await asyncio.open_connection(host, int(port))


async def exchange(server, raw):
    """Send bytes, and read the answer up to the end of the connection."""
    reader, writer = await connect(server)
    try:
        writer.write(raw)
        answer = await asyncio.wait_for(reader.read(), WAIT_S)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = (line.partition(": ") for line in lines)
    return Answer(int(first.split()[1]), {n: v for n, _, v in pairs}, body)


def request(path, body, *, method="POST", headers=()):
    data = json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Content-Length: {len(data)}", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + data


def ask(path, *prompts, **more):
    messages = [{"role": "user", "content": prompt} for prompt in prompts]
    return request(path, {"model": "m", "messages": messages}, **more)


def openai_text(answer):
    deltas = [e["choices"][0]["delta"] for e in answer.events if e != "[DONE]"]
    return "".join(delta.get("content", "") for delta in deltas)


def anthropic_text(answer):
    deltas = [e["delta"] for e in answer.events if e["type"] == "content_block_delta"]
    return "".join(delta.get("text", "") for delta in deltas)


async def test_the_server_listens_on_loopback_alone(serve):
    server = await serve(lambda t: Reply(text="x"))

    assert server.base_url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    "text", ["hello", "é\n" * 5000, ""], ids=["short", "long", "no"]
)
async def test_a_text_comes_whole_in_both_formats(serve, text):
    server = await serve(lambda t: Reply(text=text))

    openai = await exchange(server, ask(OPENAI, "hi"))
    anthropic = await exchange(server, ask(ANTHROPIC, "hi"))

    assert openai.headers["content-type"] == "text/event-stream"
    assert openai_text(openai) == text
    assert openai.events[-1] == "[DONE]"
    assert openai.events[-2]["choices"][0]["finish_reason"] == "stop"
    assert anthropic_text(anthropic) == text
    assert anthropic.events[-2]["delta"]["stop_reason"] == "end_turn"
    assert anthropic.events[-1]["type"] == "message_stop"


async def test_tool_uses_come_in_both_formats(serve):
    uses = tuple(ToolUse(name="ipython", arguments={"code": str(n)}) for n in range(2))
    server = await serve(lambda t: Reply(text="see", tool_uses=uses))

    openai = await exchange(server, ask(OPENAI, "hi"))
    anthropic = await exchange(server, ask(ANTHROPIC, "hi"))

    deltas = [e["choices"][0]["delta"] for e in openai.events[:-1]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [json.loads(c["function"]["arguments"]) for c in calls] == [
        {"code": "0"},
        {"code": "1"},
    ]
    assert [c["index"] for c in calls] == [0, 1]
    starts = [e for e in anthropic.events if e["type"] == "content_block_start"]
    assert [e["content_block"]["type"] for e in starts] == [
        "text",
        "tool_use",
        "tool_use",
    ]
    assert [e["index"] for e in starts] == [0, 1, 2]
    assert len({call["id"] for call in calls}) == 2


async def test_both_formats_are_read_into_the_same_transcript(serve):
    server = await serve(lambda t: Reply(text="x"))
    openai = {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "ipython", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "41"},
        ],
        "tools": [{"function": {"name": "ipython"}}],
    }
    anthropic = {
        "model": "m",
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": [{"type": "tool_use", "name": "ipython"}]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "content": [{"type": "text", "text": "41"}],
                    }
                ],
            },
        ],
        "tools": [{"name": "ipython"}],
    }
    header = ["X-DeepSeek-Harness-Session-Id: s-1"]

    await exchange(server, request(OPENAI, openai, headers=header))
    await exchange(server, request(ANTHROPIC, anthropic, headers=header))

    first, second = server.requests
    assert first == second
    assert first.system == "be brief"
    assert first.session_id == "s-1"
    assert [(turn.role, turn.text) for turn in first.turns] == [
        ("user", "go"),
        ("call", "ipython"),
        ("tool", "41"),
    ]
    assert first.tools == {"ipython"}


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500])
@pytest.mark.parametrize("path", [OPENAI, ANTHROPIC])
async def test_a_failure_has_its_status_headers_and_text(serve, status, path):
    reply = Reply(status=status, text="not now", headers={"retry-after": "7"})
    server = await serve(lambda t: reply)

    answer = await exchange(server, ask(path, "hi"))

    assert answer.status == status
    assert answer.headers["retry-after"] == "7"
    assert answer.error == "not now"


async def test_a_slow_answer_does_not_hold_up_others(serve):
    slow = asyncio.Event()

    def script(transcript):
        if transcript.prompts == ["slow"]:
            slow.set()
            return Reply(text="late", delay_s=60)
        return Reply(text="now")

    server = await serve(script)
    waiting = asyncio.create_task(exchange(server, ask(OPENAI, "slow")))
    await asyncio.wait_for(slow.wait(), WAIT_S)

    answer = await exchange(server, ask(OPENAI, "quick"))

    assert openai_text(answer) == "now"
    assert not waiting.done()
    await server.close()
    await asyncio.wait([waiting], timeout=WAIT_S)
    waiting.exception()


async def test_an_answer_may_be_late(serve):
    server = await serve(lambda t: Reply(text="late", delay_s=0.01))

    assert openai_text(await exchange(server, ask(OPENAI, "hi"))) == "late"


async def test_a_client_that_hangs_up_is_noticed(serve):
    asked = asyncio.Event()

    def script(transcript):
        asked.set()
        return Reply(text="late", delay_s=60)

    server = await serve(script)
    _, writer = await connect(server)
    writer.write(ask(OPENAI, "hi"))
    await asyncio.wait_for(asked.wait(), WAIT_S)
    writer.close()

    async with asyncio.timeout(WAIT_S):
        while server.abandoned == 0:
            await asyncio.sleep(0)
    assert server.count == 1


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (ask("/elsewhere", "hi"), 404),
        (request("/files", {}), 404),
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /chat/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /chat/completions HTTP/1.1\r\nContent-Length: 3\r\n\r\n{]}", 400),
        (b"POST /chat/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n[]", 400),
        (b"POST /v1/messages HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 400),
    ],
    ids=["other", "files", "get", "noise", "length", "json", "list", "huge", "head"],
)
async def test_what_is_no_model_request_is_refused(serve, raw, status):
    server = await serve(lambda t: Reply(text="x"))

    answer = await exchange(server, raw)

    assert answer.status == status
    assert server.count == 0


async def test_a_request_that_never_ends_is_refused(serve, monkeypatch):
    monkeypatch.setattr("host_bridge.demo.model_server._READ_S", 0.02)
    server = await serve(lambda t: Reply(text="x"))

    answer = await exchange(server, b"POST /chat/completions HTTP/1.1\r\n")

    assert answer.status == 408


async def test_the_list_of_models_is_empty_and_valid(serve):
    server = await serve(lambda t: Reply(text="x"))

    answer = await exchange(server, b"GET /v1/models HTTP/1.1\r\n\r\n")

    assert json.loads(answer.body) == {"object": "list", "data": []}


async def test_requests_are_shown_to_who_wants_them(serve):
    seen = []
    server = await serve(lambda t: Reply(text="x"), on_request=seen.append)

    await exchange(server, ask(OPENAI, "hi", headers=["Authorization: Bearer k"]))

    (found,) = seen
    assert found.path == OPENAI
    assert found.headers["authorization"] == "Bearer k"
    assert found.body["model"] == "m"


async def test_fenced_python_is_run_and_its_text_is_the_answer(serve):
    server = await serve(run_fenced_python)
    prompt = "please\n```python\nprint(41)\n```"

    first = await exchange(server, ask(OPENAI, prompt))

    (call,) = [
        call
        for event in first.events[:-1]
        for call in event["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert call["function"]["name"] == "ipython"
    assert json.loads(call["function"]["arguments"]) == {"code": "print(41)\n"}


async def test_close_may_be_called_twice(serve):
    server = await serve(lambda t: Reply(text="x"))

    await server.close()
    await server.close()

    with pytest.raises(ConnectionError):
        await connect(server)
