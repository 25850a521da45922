"""What happens in a bridge beside the harness's own events, for who watches."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from .harness.port import (
    AssistantText,
    ChildEnded,
    HarnessEvent,
    HarnessLost,
    MailRead,
    ModelRequestFailed,
    TurnEnded,
)
from .kernels.execution import ExecutionResult

__all__ = ("BridgeEvent", "CellRan", "ChildAdmitted", "ReportSent", "redacted")


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRan:
    """A model's cell has ended."""

    agent_id: str
    result: ExecutionResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAdmitted:
    """A cell asked for a child, and the harness has it."""

    agent_id: str
    parent_id: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSent:
    """A child's message has reached its parent's inbox."""

    agent_id: str
    label: str


BridgeEvent = CellRan | ChildAdmitted | ReportSent


def redacted(event: HarnessEvent, redact: Callable[[str], str]) -> HarnessEvent:
    """*event* with every text of a model or of the harness passed through *redact*."""
    match event:
        case AssistantText(text=text):
            return replace(event, text=redact(text))
        case TurnEnded(error=str(error)):
            return replace(event, error=redact(error))
        case ChildEnded(text=str(text)):
            return replace(event, text=redact(text))
        case ModelRequestFailed(message=message) | HarnessLost(message=message):
            return replace(event, message=redact(message))
        case MailRead(mail=mail):
            clean = tuple(replace(m, text=redact(m.text)) for m in mail)
            return replace(event, mail=clean)
    return event
