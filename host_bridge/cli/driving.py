"""Drives a run from a terminal: interrupts stop it, and what it cost is told."""

import asyncio
from typing import TYPE_CHECKING

from .boundary import here
from .interrupts import stop_requests, undisturbed
from .progress import Progress

if TYPE_CHECKING:
    from ..bridge import Bridge
    from ..runs import RunLimits, RunOutcome

__all__ = ("drive",)


async def drive(
    bridge: "Bridge",
    session: str,
    task: str,
    progress: Progress,
    *,
    limits: "RunLimits | None" = None,
) -> "RunOutcome":
    """Start *bridge*, give its root *task*, and wait for the end of everything.

    The first ctrl-C stops the run in good order; the second one cancels us. In
    any case the bridge is closed at the end.

    Raises:
        HarnessError: See `Run.drive`; or the harness can not be started.
    """
    from ..runs import Run

    stopping: list[asyncio.Task[None]] = []
    run = Run(bridge.harness, bridge.agents, session, limits=limits)
    bridge.listen(progress.on_event)
    bridge.listen(run.on_event)

    def stop() -> None:
        progress.line("stopping; once more to leave at once")
        stopping.append(asyncio.create_task(run.stop()))

    try:
        cwd = here()
        with stop_requests(stop):
            progress.line(f"starting {bridge.harness.version}")
            await bridge.start()
            progress.harness_is_up()
            await bridge.create_root(session, cwd=cwd)
            outcome = await run.drive(task)
            progress.has_answer()
            return outcome
    finally:
        with undisturbed():
            await bridge.close()
