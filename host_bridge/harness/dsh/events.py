"""From the plugin's words to the port's."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from ..port import (
    AgentCreated,
    AgentDisposed,
    AgentInfo,
    AgentStatusChanged,
    AssistantText,
    ChildEnded,
    HarnessEvent,
    Mail,
    MailRead,
    ModelRequestFailed,
    TurnEnded,
)

__all__ = ("read_agent", "read_event")


def read_agent(data: Mapping[str, Any]) -> AgentInfo:
    """An agent as the plugin describes it."""
    return AgentInfo(
        id=data["id"],
        parent_id=data["parentId"],
        depth=data["depth"],
        cwd=data["cwd"],
        status=data["status"],
    )


def read_event(data: Mapping[str, Any]) -> HarnessEvent | None:
    """An event as the plugin tells it; None for a kind that is not known here."""
    read = _READERS.get(data.get("kind", ""))
    return None if read is None else read(data)


def _read_mail(data: Mapping[str, Any]) -> MailRead:
    mail = tuple(
        Mail(
            message_id=message["id"],
            sender_id=message["senderId"],
            text=message["text"],
            settled=message["settled"],
        )
        for message in data["mail"]
    )
    return MailRead(agent_id=data["agentId"], mail=mail)


def _read_request_failure(data: Mapping[str, Any]) -> ModelRequestFailed:
    status = data["status"]
    if status is None and (found := _LEADING_STATUS.match(data["message"])):
        # The OpenAI-compatible route of DSH tells the status in its text alone.
        status = int(found[1])
    return ModelRequestFailed(
        agent_id=data["agentId"],
        status=status,
        attempt=data["attempt"],
        message=data["message"],
    )


_LEADING_STATUS = re.compile(r"([45]\d\d)\b")

_READERS: Mapping[str, Callable[[Mapping[str, Any]], HarnessEvent]] = {
    "created": lambda data: AgentCreated(agent=read_agent(data["agent"])),
    "disposed": lambda data: AgentDisposed(agent_id=data["agentId"]),
    "status": lambda data: AgentStatusChanged(
        agent_id=data["agentId"], status=data["status"]
    ),
    "child-ended": lambda data: ChildEnded(
        agent_id=data["agentId"],
        parent_id=data["parentId"],
        stop_reason=data["stopReason"],
        text=data["text"],
    ),
    "mail": _read_mail,
    "text": lambda data: AssistantText(agent_id=data["agentId"], text=data["text"]),
    "turn": lambda data: TurnEnded(
        agent_id=data["agentId"],
        reason=data["reason"],
        error=data["error"],
        code=data["code"],
    ),
    "request-failed": _read_request_failure,
}
