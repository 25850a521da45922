"""Plain lines of what goes on in a run."""

import time
from collections.abc import Callable

from ..agents import AgentTree
from ..events import BridgeEvent, CellRan, ChildAdmitted, ReportSent
from ..harness.port import ChildEnded, HarnessEvent, ModelRequestFailed

__all__ = ("Progress",)


class Progress:
    """Writes one line for each thing a person would want to see.

    Args:
        agents: Knows the labels.
        write: Takes a line.
        max_retries: After so many a run gives up.

    Attributes:
        first_s: When ``harness_up``, ``first_cell``, ``first_report`` and the
            ``answer`` were seen, in seconds from the start.
    """

    def __init__(
        self,
        agents: AgentTree,
        write: Callable[[str], None],
        *,
        max_retries: int | None = None,
    ) -> None:
        self._agents = agents
        self._write = write
        self._max_retries = max_retries
        self._started = time.monotonic()
        self.first_s: dict[str, float] = {}
        self.cells = 0
        self.children = 0
        self.reports = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def harness_is_up(self) -> None:
        """Note that the harness is ready for a task."""
        self._note("harness_up")
        self.line("harness up")

    def has_answer(self) -> None:
        """Note that the run is over."""
        self._note("answer")

    def line(self, text: str) -> None:
        """Write *text* with the time before it."""
        self._write(f"{self.elapsed_s:6.1f} s  {text}")

    def on_event(self, event: HarnessEvent | BridgeEvent) -> None:
        """Count and show one event."""
        match event:
            case CellRan(agent_id=agent_id, result=result):
                self.cells += 1
                self._note("first_cell")
                first_line = (result.stdout.strip().splitlines() or [""])[0][:60]
                self.line(
                    f"{self._name(agent_id):<10} cell {result.status}, "
                    f"{result.duration_ms} ms  {first_line}"
                )
            case ChildAdmitted(agent_id=agent_id, label=label):
                self.children += 1
                self.line(f"{label:<10} admitted")
            case ReportSent(label=label):
                self.reports += 1
                self._note("first_report")
                self.line(f"{label:<10} reported")
            case ChildEnded(agent_id=agent_id, stop_reason=reason):
                self.line(f"{self._name(agent_id):<10} ended: {reason}")
            case ModelRequestFailed(may_pass=True):
                if self._max_retries is None or event.attempt <= self._max_retries:
                    status = event.status or "no answer"
                    self.line(f"model server busy ({status}), retry {event.attempt}")
            case _:
                return

    def _note(self, what: str) -> None:
        self.first_s.setdefault(what, round(self.elapsed_s, 3))

    def _name(self, agent_id: str) -> str:
        agent = self._agents.get(agent_id)
        return "root" if agent.info.parent_id is None else agent.label
