"""One task, driven to its end by a root agent and all its children.

A run is over when the root is idle with an empty inbox, every admitted child has
ended, and the root has read of each of these endings. Idleness alone is true for
some milliseconds in the middle of a run.
"""

import asyncio
from dataclasses import dataclass

from kernel_ext.wire.codes import ErrorCode

from .agents import AgentTree
from .errors import HarnessError
from .events import BridgeEvent
from .harness.port import (
    AssistantText,
    Harness,
    HarnessEvent,
    HarnessLost,
    ModelRequestFailed,
    TurnEnded,
)

__all__ = ("Run", "RunLimits", "RunOutcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """When a run gives up.

    *max_retries* of one model request that meets a busy server; *silence_s*
    without any event while only children are waited for.
    """

    max_retries: int = 4
    silence_s: float = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended well, or was stopped.

    *silent* names the children that never sent a report.
    """

    answer: str
    stopped: bool
    silent: tuple[str, ...]


class Run:
    """Drives one root. Its `on_event` must get every event of the harness.

    Args:
        harness: Has the root already.
        agents: Gets the same events, before `on_event` does.
        root_id: The root.
        limits: When to give up.
    """

    def __init__(
        self,
        harness: Harness,
        agents: AgentTree,
        root_id: str,
        *,
        limits: RunLimits | None = None,
    ) -> None:
        self._harness = harness
        self._agents = agents
        self._root_id = root_id
        self._limits = limits or RunLimits()
        self._answer = ""
        self._turns = 0
        self._last_status: int | None = None
        self._failure: HarnessError | None = None
        self._stopped = False

    def on_event(self, event: HarnessEvent | BridgeEvent) -> None:
        """Take one event."""
        match event:
            case AssistantText(agent_id=self._root_id, text=text):
                self._answer = text
            case TurnEnded(agent_id=self._root_id):
                self._turns += 1
                if event.reason == "error" and self._failure is None:
                    self._failure = self._refusal(event)
            case ModelRequestFailed():
                self._last_status = event.status
                if event.may_pass and event.attempt > self._limits.max_retries:
                    self._failure = HarnessError(
                        ErrorCode.MODEL_BUSY,
                        f"the model server stayed busy through {event.attempt} requests "
                        f"(last: {event.status or 'no answer'}).",
                        next_step="try again later",
                    )
            case HarnessLost(message=message):
                self._failure = HarnessError(
                    ErrorCode.HARNESS_LOST,
                    f"the harness ended in the middle of the run: {message}",
                    next_step="rlm-kernel doctor --deep",
                )

    async def drive(self, task: str) -> RunOutcome:
        """Give the root its task and wait for the end of everything it began.

        Raises:
            HarnessError: MODEL_REFUSED, MODEL_BUSY, HARNESS_LOST, or TIMEOUT
                with the names of the children that did not end.
        """
        await self._harness.send(self._root_id, task)
        while not await self._is_over():
            await self._next_change()
            if self._failure is not None:
                await self._cancel_all()
                raise self._failure
        return self._outcome()

    async def stop(self) -> None:
        """Abort the root and all that it began; `drive` then returns."""
        self._stopped = True
        await self._cancel_all()

    async def _is_over(self) -> bool:
        if not self._looks_over():
            return False
        # Asked of the harness itself: mail on its way wakes the root again.
        quiet = await self._harness.is_quiet(self._root_id)
        return quiet and self._looks_over()

    def _looks_over(self) -> bool:
        if self._turns == 0 or self._agents.get(self._root_id).is_running:
            return False
        return self._stopped or not self._agents.unsettled(self._root_id)

    async def _next_change(self) -> None:
        waiting = self._agents.unsettled(self._root_id)
        only_children = waiting and not self._agents.get(self._root_id).is_running
        limit_s = self._limits.silence_s if only_children else None
        try:
            async with asyncio.timeout(limit_s):
                await self._agents.change()
        except TimeoutError:
            labels = ", ".join(agent.label for agent in waiting)
            self._failure = HarnessError(
                ErrorCode.TIMEOUT,
                f"nothing was heard for {limit_s:g} s from: {labels}",
                next_step="run again with fewer or smaller children",
            )

    async def _cancel_all(self) -> None:
        running = [
            a.info.id for a in self._agents.descendants(self._root_id) if a.is_running
        ]
        for agent_id in (self._root_id, *running):
            try:
                await self._harness.cancel(agent_id)
            except HarnessError:  # it ended by itself meanwhile
                continue

    def _outcome(self) -> RunOutcome:
        children = self._agents.descendants(self._root_id)
        return RunOutcome(
            answer=self._answer,
            stopped=self._stopped,
            silent=tuple(a.label for a in children if a.admitted and not a.reports),
        )

    def _refusal(self, event: TurnEnded) -> HarnessError | None:
        if self._stopped:
            return None
        reason, remedy = _REFUSALS.get(
            self._last_status or 0, ("the model request failed", "check the options")
        )
        told = (event.error or event.code or "no text")[:_MAX_TOLD_CHARS]
        return HarnessError(
            ErrorCode.MODEL_REFUSED,
            f"{reason}.\nIt said: {told}",
            next_step=remedy,
        )


_MAX_TOLD_CHARS = 300

_REFUSALS = {
    400: ("the model server refused the request (400)", "check --model and --base-url"),
    401: ("the model server refused the key (401)", "check --key-env or --key-file"),
    403: ("the model server refused the key (403)", "check --key-env or --key-file"),
    404: (
        "the model server does not know this model or address (404)",
        "check --model and --base-url",
    ),
}
"""What a status means to a person, and where to look."""
