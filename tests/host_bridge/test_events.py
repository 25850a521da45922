"""Events without the key that a model or a harness repeats."""

from dataclasses import fields
from typing import get_args

import pytest

from host_bridge.events import redacted
from host_bridge.harness import port
from host_bridge.harness.port import (
    AgentDisposed,
    AgentStatusChanged,
    AssistantText,
    ChildEnded,
    HarnessLost,
    Mail,
    MailRead,
    ModelRequestFailed,
    TurnEnded,
)

KEY = "sk-0123456789abcdef"

EVENTS = [
    AssistantText(agent_id="a", text=f"it is {KEY}"),
    TurnEnded(agent_id="a", reason="error", error=f"bad key {KEY}"),
    ChildEnded(agent_id="a", parent_id="b", stop_reason="completed", text=KEY),
    ModelRequestFailed(agent_id="a", status=401, attempt=1, message=f"<{KEY}>"),
    HarnessLost(message=f"last words {KEY}"),
    MailRead(agent_id="a", mail=(Mail(message_id="", sender_id=None, text=KEY),)),
]


def clean(text: str) -> str:
    return text.replace(KEY, "[credential]")


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_no_text_of_an_event_holds_the_key(event):
    found = redacted(event, clean)

    assert type(found) is type(event)
    assert "[credential]" in repr(found)
    assert KEY not in repr(found)


@pytest.mark.parametrize(
    "event",
    [
        TurnEnded(agent_id="a", reason="completed"),
        ChildEnded(agent_id="a", parent_id="b", stop_reason="completed", text=None),
        AgentStatusChanged(agent_id="a", status="idle"),
        AgentDisposed(agent_id="a"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_without_a_text_stays_as_it_is(event):
    assert redacted(event, clean) == event


def test_every_event_with_a_text_is_among_these():
    texts = {"text", "error", "message", "mail"}
    kinds = get_args(port.HarnessEvent)

    with_text = {k.__name__ for k in kinds if texts & {f.name for f in fields(k)}}

    assert with_text == {type(event).__name__ for event in EVENTS}
