"""Processes we started: who they are, and how their trees are ended."""

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psutil

__all__ = ("ProcessMark", "descendants", "end_processes", "mark_of")


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A process by pid *and* start time, so that a reused pid is another one."""

    pid: int
    started_at: float

    def as_json(self) -> dict[str, Any]:
        """The form that `from_json` reads."""
        return {"pid": self.pid, "started_at": self.started_at}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "ProcessMark":
        """Read what `as_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: *data* is something else.
        """
        return cls(int(data["pid"]), float(data["started_at"]))

    def process(self) -> psutil.Process | None:
        """The live process of this mark, or None."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            ended = process.status() == psutil.STATUS_ZOMBIE
            same = abs(process.create_time() - self.started_at) < 1.0
            return process if same and not ended else None
        return None

    @property
    def is_alive(self) -> bool:
        """Whether that very process runs."""
        return self.process() is not None


def mark_of(pid: int) -> ProcessMark | None:
    """The mark of a running process; None when it is gone."""
    with contextlib.suppress(psutil.Error):
        return ProcessMark(pid, psutil.Process(pid).create_time())
    return None


def descendants(pid: int) -> list[ProcessMark]:
    """Every live descendant of *pid*, those with a session of their own as well."""
    with contextlib.suppress(psutil.Error):
        found = psutil.Process(pid).children(recursive=True)
        marks = [mark_of(process.pid) for process in found]
        return [mark for mark in marks if mark is not None]
    return []


async def end_processes(marks: Iterable[ProcessMark], *, grace_s: float) -> None:
    """Ask these processes to end, then end them; waits for it.

    Args:
        marks: Processes that we or ours started.
        grace_s: Seconds between asking and killing; 0 kills at once.
    """
    living = [process for mark in marks if (process := mark.process())]
    if grace_s > 0:
        for process in living:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, living = await asyncio.to_thread(psutil.wait_procs, living, grace_s)
    for process in living:
        with contextlib.suppress(psutil.Error):
            process.kill()
    await asyncio.to_thread(psutil.wait_procs, living, 2.0)
