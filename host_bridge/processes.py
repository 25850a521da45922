"""Processes we started: who they are, and how their trees are ended."""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import psutil

__all__ = ("ProcessMark", "carriers", "descendants", "end_processes", "mark_of")

_KILL_WAIT_S = 2.0
_POLL_S = 0.01


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


def carriers(name: str, value: str) -> list[ProcessMark]:
    """Every live process that was started with *name*=*value* in its environment.

    Finds what has left the tree of the process that started it: children of one
    that was killed, and those that a shell put into the background. A process
    that was given an empty environment is not found.
    """
    found = []
    for process in psutil.process_iter():
        # Other people's processes, and those that end meanwhile, are not ours.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value and (mark := mark_of(process.pid)):
                found.append(mark)
    return found


async def end_processes(marks: Iterable[ProcessMark], *, grace_s: float) -> None:
    """Ask these processes to end, then end them; waits for it.

    Args:
        marks: Processes that we or ours started.
        grace_s: Seconds between asking and killing; 0 kills at once.
    """
    living = {mark for mark in marks if mark.is_alive}
    if grace_s > 0:
        for mark in living:
            _signal(mark, "terminate")
        living = await _still_alive(living, grace_s)
    for mark in living:
        _signal(mark, "kill")
    await _still_alive(living, _KILL_WAIT_S)


def _signal(mark: ProcessMark, method: Literal["terminate", "kill"]) -> None:
    if process := mark.process():
        with contextlib.suppress(psutil.Error):
            getattr(process, method)()


async def _still_alive(marks: set[ProcessMark], limit_s: float) -> set[ProcessMark]:
    """Those that have not ended within *limit_s*.

    One that nobody has reaped yet has ended: that is its parent's affair, and in
    a container without an init it may take for ever.
    """
    end = time.monotonic() + limit_s
    while (living := {m for m in marks if m.is_alive}) and time.monotonic() < end:  # noqa: ASYNC110  # no event tells of another's child
        await asyncio.sleep(_POLL_S)
    return living
