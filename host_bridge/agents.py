"""The agents of a bridge: who is whose child, labels, reports, settlement."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from kernel_ext.wire.codes import ErrorCode

from .errors import RequestError
from .events import BridgeEvent, ChildAdmitted, ReportSent
from .harness.port import (
    AgentCreated,
    AgentDisposed,
    AgentInfo,
    AgentStatusChanged,
    ChildEnded,
    HarnessEvent,
    HarnessLost,
    MailRead,
)

__all__ = ("Agent", "AgentTree", "Report")

_MAX_LABEL_CHARS = 64


@dataclass(frozen=True, slots=True)
class Report:
    """What a child told its parent; *source* closing: it only ended with it."""

    text: str
    source: Literal["message", "closing"]


@dataclass(slots=True, eq=False)
class Agent:
    """One agent as the bridge knows it.

    *admitted* tells children that a cell asked for from those that the harness
    made by itself (its own delegation tools). *is_lost*: the harness is gone, no
    event of this agent comes any more.
    """

    info: AgentInfo
    label: str
    admitted: bool = False
    is_running: bool = False
    is_live: bool = True
    is_lost: bool = False
    reports: list[str] = field(default_factory=list)
    endings: int = 0
    notices_read: int = 0
    stop_reason: str | None = None
    closing_text: str | None = None

    @property
    def has_settled(self) -> bool:
        """Whether nothing more comes from it by itself.

        Only an admitted child gives notices; it has settled when it has ended and
        its parent has read of every ending. One that is gone will not end.
        """
        if self.is_running:
            return False
        if not self.admitted or self.is_lost:
            return True
        if self.endings == 0:
            return not self.is_live
        return self.notices_read >= self.endings

    @property
    def status(self) -> Literal["running", "completed", "error"]:
        """The status that `rlm.list_subagents` shows (section 11.3)."""
        if self.is_running or (self.admitted and self.endings == 0 and self.is_live):
            return "running"
        failed = self.stop_reason == "error" or (self.admitted and self.endings == 0)
        return "error" if failed else "completed"


class AgentTree:
    """Fed with the harness's events; asked by requests and by runs.

    Args:
        tell: Hears of admissions and reports.
    """

    def __init__(self, tell: Callable[[BridgeEvent], None] | None = None) -> None:
        self._tell = tell or (lambda event: None)
        self._agents: dict[str, Agent] = {}
        self._labels: dict[str, set[str]] = {}
        self._changed = asyncio.Event()
        self._lost: str | None = None

    # -- facts -------------------------------------------------------------------

    def get(self, agent_id: str) -> Agent:
        """An agent by its id.

        Raises:
            RequestError: AGENT_NOT_LIVE for one that was never here.
        """
        agent = self._agents.get(agent_id)
        if agent is None:
            raise RequestError(ErrorCode.AGENT_NOT_LIVE, "this agent is not known here")
        return agent

    def everyone(self) -> list[Agent]:
        """Every agent that was ever here, in order of appearance."""
        return list(self._agents.values())

    def children(self, parent_id: str) -> list[Agent]:
        """Direct children in order of appearance."""
        return [a for a in self._agents.values() if a.info.parent_id == parent_id]

    def child(self, parent_id: str, child_id: str) -> Agent:
        """A direct child by its id.

        Raises:
            RequestError: CHILD_NOT_FOUND.
        """
        agent = self._agents.get(child_id)
        if agent is None or agent.info.parent_id != parent_id:
            raise RequestError(
                ErrorCode.CHILD_NOT_FOUND, "no direct child of this agent has that id"
            )
        return agent

    def descendants(self, root_id: str) -> list[Agent]:
        """Children, their children, and so on; parents first."""
        found = self.children(root_id)
        for agent in found:  # grows while it is read
            found.extend(self.children(agent.info.id))
        return found

    def unsettled(self, root_id: str) -> list[Agent]:
        """Agents below *root_id* that a run must wait for.

        "All idle" is not enough: between a child's end and the notice that wakes
        its parent nobody runs for some milliseconds.
        """
        return [
            agent
            for agent in self.descendants(root_id)
            if not agent.has_settled and not self._has_no_reader(agent)
        ]

    def _has_no_reader(self, agent: Agent) -> bool:
        """Whether it has ended, and its parent was disposed before it read of that."""
        parent = self._agents.get(agent.info.parent_id or "")
        is_gone = parent is not None and not parent.is_live
        return is_gone and agent.endings > 0 and not agent.is_running

    # -- changes --------------------------------------------------------------------

    def add_root(self, info: AgentInfo) -> Agent:
        """Note a root that the bridge made."""
        agent = self._agents.setdefault(info.id, Agent(info, label=info.id))
        self._touch()
        return agent

    def reserve_label(self, parent_id: str, name: str | None) -> str:
        """Take a label among the children of one parent; atomic, as it never waits.

        Args:
            parent_id: The parent.
            name: The wanted label; None makes ``rlm-1``, ``rlm-2`` and so on.

        Raises:
            RequestError: INVALID_ARGUMENT or DUPLICATE_LABEL.
        """
        taken = self._labels.setdefault(parent_id, set())
        if name is None:
            number = len(taken) + 1
            while f"rlm-{number}" in taken:
                number += 1
            label = f"rlm-{number}"
        else:
            label = name.strip()
            if not label or len(label) > _MAX_LABEL_CHARS or not label.isprintable():
                raise RequestError(
                    ErrorCode.INVALID_ARGUMENT,
                    f"name must have 1 to {_MAX_LABEL_CHARS} printable characters",
                )
            if label in taken:
                raise RequestError(
                    ErrorCode.DUPLICATE_LABEL,
                    f'Agent name "{label}" is unavailable: a child of this parent has it',
                )
        taken.add(label)
        return label

    def release_label(self, parent_id: str, label: str) -> None:
        """Give a label back: its child was never admitted."""
        self._labels.get(parent_id, set()).discard(label)

    def admit(self, info: AgentInfo, label: str) -> Agent:
        """Note a child that a cell asked for; its events may have come before."""
        agent = self._agents.setdefault(info.id, Agent(info, label=label))
        agent.label, agent.admitted = label, True
        if agent.endings == 0:
            agent.is_running = True
        self._touch()
        self._tell(
            ChildAdmitted(agent_id=info.id, parent_id=info.parent_id or "", label=label)
        )
        return agent

    def record_report(self, child_id: str, text: str) -> None:
        """Keep what a child sent to its parent."""
        child = self.get(child_id)
        child.reports.append(text)
        self._touch()
        self._tell(ReportSent(agent_id=child_id, label=child.label))

    def apply(self, event: HarnessEvent) -> None:
        """Take one event of the harness."""
        match event:
            case AgentCreated(agent=info):
                self._created(info)
            case AgentStatusChanged(agent_id=agent_id, status=status):
                if agent := self._agents.get(agent_id):
                    agent.is_running = status == "running"
            case AgentDisposed(agent_id=agent_id):
                if agent := self._agents.get(agent_id):
                    agent.is_live = agent.is_running = False
            case ChildEnded():
                self._ended(event)
            case MailRead(mail=mail):
                for message in mail:
                    sender = self._agents.get(message.sender_id or "")
                    if sender is not None and message.settled:
                        sender.notices_read += 1
            case HarnessLost(message=message):
                self._lost = message
                for agent in self._agents.values():
                    agent.is_live = agent.is_running = False
                    agent.is_lost = True
            case _:
                pass
        self._touch()

    def _created(self, info: AgentInfo) -> None:
        known = self._agents.setdefault(
            info.id, Agent(info, label=f"agent-{info.id[-8:]}")
        )
        known.is_live = True

    def _ended(self, event: ChildEnded) -> None:
        if agent := self._agents.get(event.agent_id):
            agent.endings += 1
            agent.is_running = False
            agent.stop_reason = event.stop_reason
            agent.closing_text = event.text

    # -- waiting ------------------------------------------------------------------------

    async def change(self) -> None:
        """Wait for the next change of anything here."""
        await self._changed.wait()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until *holds* is true; it is asked again after every change."""
        while not holds():
            await self.change()

    async def report(
        self, parent_id: str, child_id: str, *, timeout_s: float | None
    ) -> Report:
        """Wait for a child's first message, else for the text it closed with.

        Raises:
            RequestError: CHILD_NOT_FOUND, TIMEOUT, CHILD_FAILED, HARNESS_LOST.
        """
        child = self.child(parent_id, child_id)
        try:
            async with asyncio.timeout(timeout_s):
                await self.until(
                    lambda: (
                        bool(child.reports) or child.endings > 0 or not child.is_live
                    )
                )
        except TimeoutError:
            raise RequestError(
                ErrorCode.TIMEOUT,
                f'child "{child.label}" has not reported within {timeout_s:g} s',
            ) from None
        if child.reports:
            return Report(child.reports[0], "message")
        if child.closing_text:
            return Report(child.closing_text, "closing")
        if self._lost is not None and child.endings == 0:
            raise RequestError(
                ErrorCode.HARNESS_LOST,
                f'child "{child.label}" was running when the harness ended: {self._lost}',
            )
        raise RequestError(
            ErrorCode.CHILD_FAILED,
            f'child "{child.label}" ended without a report '
            f"({child.stop_reason or 'disposed'})",
        )

    def _touch(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
