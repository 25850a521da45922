"""What happens in a bridge beside the harness's own events, for who watches."""

from dataclasses import dataclass

from .kernels.execution import ExecutionResult

__all__ = ("BridgeEvent", "CellRan", "ChildAdmitted", "ReportSent")


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
