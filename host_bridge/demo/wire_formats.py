"""The two wire formats of the scripted model: OpenAI's and Anthropic's, as SSE."""

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

from ..harness.script import Reply, Transcript, Turn

__all__ = (
    "read_anthropic",
    "read_openai",
    "stream_anthropic",
    "stream_openai",
)

_SESSION_HEADER = "x-deepseek-harness-session-id"
_PIECE_CHARS = 1024
_ids = itertools.count(1)


def read_openai(body: Mapping[str, Any], headers: Mapping[str, str]) -> Transcript:
    """A chat completion request."""
    system: list[str] = []
    turns: list[Turn] = []
    for message in body.get("messages", ()):
        text = _text(message.get("content"))
        if message["role"] in ("system", "developer"):
            system.append(text)
            continue
        if text or not message.get("tool_calls"):
            turns.append(Turn(message["role"], text))
        calls = message.get("tool_calls") or ()
        turns.extend(Turn("call", call["function"]["name"]) for call in calls)
    return Transcript(
        system="\n".join(system),
        turns=turns,
        tools=frozenset(tool["function"]["name"] for tool in body.get("tools") or ()),
        session_id=headers.get(_SESSION_HEADER),
    )


def read_anthropic(body: Mapping[str, Any], headers: Mapping[str, str]) -> Transcript:
    """A messages request."""
    turns: list[Turn] = []
    for message in body.get("messages", ()):
        content = message["content"]
        blocks = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content
        )
        for block in blocks:
            match block["type"]:
                case "text":
                    turns.append(Turn(message["role"], block["text"]))
                case "tool_use":
                    turns.append(Turn("call", block["name"]))
                case "tool_result":
                    turns.append(Turn("tool", _text(block.get("content"))))
    return Transcript(
        system=_text(body.get("system")),
        turns=turns,
        tools=frozenset(tool["name"] for tool in body.get("tools") or ()),
        session_id=headers.get(_SESSION_HEADER),
    )


def stream_openai(reply: Reply, model: str) -> Iterator[bytes]:
    """The events of a chat completion."""
    head = {"id": f"cc-{next(_ids)}", "object": "chat.completion.chunk", "model": model}

    def chunk(delta: Mapping[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        usage = {} if finish is None else {"usage": _OPENAI_USAGE}
        return _event({**head, "created": 0, "choices": [choice], **usage})

    yield chunk({"role": "assistant", "content": ""})
    for piece in _pieces(reply.text):
        yield chunk({"content": piece})
    for index, use in enumerate(reply.tool_uses):
        call = {
            "index": index,
            "id": f"call_{next(_ids)}",
            "type": "function",
            "function": {"name": use.name, "arguments": json.dumps(use.arguments)},
        }
        yield chunk({"tool_calls": [call]})
    yield chunk({}, "tool_calls" if reply.tool_uses else "stop")
    yield b"data: [DONE]\n\n"


def stream_anthropic(reply: Reply, model: str) -> Iterator[bytes]:
    """The events of a message."""
    message: dict[str, Any] = {
        "id": f"msg_{next(_ids)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 100, "output_tokens": 1},
    }
    yield _named("message_start", message=message)
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if reply.text:
        deltas = [{"type": "text_delta", "text": p} for p in _pieces(reply.text)]
        blocks.append(({"type": "text", "text": ""}, deltas))
    for use in reply.tool_uses:
        block = {"type": "tool_use", "id": f"toolu_{next(_ids)}", "name": use.name}
        arguments = json.dumps(use.arguments)
        delta = {"type": "input_json_delta", "partial_json": arguments}
        blocks.append(({**block, "input": {}}, [delta]))
    for index, (block, deltas) in enumerate(blocks):
        yield _named("content_block_start", index=index, content_block=block)
        for delta in deltas:
            yield _named("content_block_delta", index=index, delta=delta)
        yield _named("content_block_stop", index=index)
    reason = "tool_use" if reply.tool_uses else "end_turn"
    yield _named(
        "message_delta",
        delta={"stop_reason": reason, "stop_sequence": None},
        usage={"output_tokens": 10},
    )
    yield _named("message_stop")


_OPENAI_USAGE = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}


def _named(name: str, **data: Any) -> bytes:
    return f"event: {name}\n".encode() + _event({"type": name, **data})


def _event(data: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def _pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), _PIECE_CHARS):
        yield text[start : start + _PIECE_CHARS]


def _text(content: Any) -> str:
    """The text of a content field: a string, or blocks of which some are text."""
    if isinstance(content, str):
        return content
    return "\n".join(block.get("text", "") for block in content or ())
