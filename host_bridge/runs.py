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
    AgentStatusChanged,
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
        self._unanswered: dict[str, ModelRequestFailed] = {}
        self._failure: HarnessError | None = None
        self._stopped = False
        self._has_task = False
        self._must_cancel = False
        self._changed = asyncio.Event()

    def on_event(self, event: HarnessEvent | BridgeEvent) -> None:
        """Take one event."""
        self._changed.set()
        match event:
            case AssistantText(agent_id=agent_id, text=text):
                self._unanswered.pop(agent_id, None)
                if agent_id == self._root_id:
                    self._answer = text
            case AgentStatusChanged(agent_id=self._root_id, status="running"):
                # A turn that begins after all was cancelled is cancelled too.
                self._must_cancel = self._stopped
            case TurnEnded(agent_id=self._root_id):
                self._turns += 1
                if event.reason == "error" and not self._stopped:
                    self._fail(_refusal(event, self._unanswered.get(event.agent_id)))
            case ModelRequestFailed():
                self._unanswered[event.agent_id] = event
                if event.may_pass and event.attempt > self._limits.max_retries:
                    self._fail(_busy(event))
            case HarnessLost(message=message):
                self._fail(
                    HarnessError(
                        ErrorCode.HARNESS_LOST,
                        f"the harness ended in the middle of the run: {message}",
                        next_step="rlm-kernel doctor --deep",
                    )
                )

    async def drive(self, task: str) -> RunOutcome:
        """Give the root its task and wait for the end of everything it began.

        Raises:
            HarnessError: MODEL_REFUSED, MODEL_BUSY, HARNESS_LOST, or TIMEOUT
                with the names of the children that did not end.
        """
        try:
            if self._stopped:
                return self._outcome()
            await self._harness.send(self._root_id, task)
            self._has_task = True
            self._must_cancel = self._stopped
            while not await self._is_over():
                await self._next_change()
        except HarnessError as error:
            # What the harness told of its end says more than the call that met it.
            raise self._failure or error from None
        return self._outcome()

    async def stop(self) -> None:
        """Abort the root and all that it began; `drive` then returns.

        Before `drive`, or while it begins: the root gets no turn of its own.
        """
        self._stopped = True
        self._changed.set()
        if self._has_task:
            await self._cancel_all()

    async def _is_over(self) -> bool:
        # What comes while the harness is asked must be looked at once more.
        self._changed.clear()
        if self._failure is not None or self._must_cancel:
            self._must_cancel = False
            await self._cancel_all()
        if self._failure is not None:
            raise self._failure
        if self._turns == 0 or self._agents.get(self._root_id).is_running:
            return False
        if self._stopped:
            return True
        if self._agents.unsettled(self._root_id):
            return False
        # Asked of the harness itself: mail on its way wakes the root again.
        quiet = await self._harness.is_quiet(self._root_id)
        return quiet and not self._changed.is_set()

    async def _next_change(self) -> None:
        waiting = self._agents.unsettled(self._root_id)
        root_runs = self._turns == 0 or self._agents.get(self._root_id).is_running
        limit_s = None if root_runs else self._limits.silence_s
        try:
            async with asyncio.timeout(limit_s):
                await self._changed.wait()
        except TimeoutError:
            labels = ", ".join(agent.label for agent in waiting) or "the root"
            self._fail(
                HarnessError(
                    ErrorCode.TIMEOUT,
                    f"nothing was heard for {limit_s:g} s from: {labels}",
                    next_step="run again with fewer or smaller children",
                )
            )

    def _fail(self, failure: HarnessError) -> None:
        """Keep the first failure: what follows from it says less."""
        self._failure = self._failure or failure
        self._changed.set()

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


def _refusal(event: TurnEnded, failed: ModelRequestFailed | None) -> HarnessError:
    if failed is not None and failed.may_pass:
        return _busy(failed)
    status = failed.status if failed else None
    reason, remedy = _REFUSALS.get(
        status or 0, ("the model request failed", "rlm-kernel run --help")
    )
    told = " ".join((event.error or event.code or "no text").split())
    return HarnessError(
        ErrorCode.MODEL_REFUSED,
        f"{reason}. It said: {told[:_MAX_TOLD_CHARS]}",
        next_step=remedy,
    )


def _busy(event: ModelRequestFailed) -> HarnessError:
    answered = "no answer" if event.status is None else f"status {event.status}"
    return HarnessError(
        ErrorCode.MODEL_BUSY,
        f"the model server stayed busy through {event.attempt} requests "
        f"(last: {answered}).",
        next_step="the same command again later, or with a higher --retries",
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
