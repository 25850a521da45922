"""What our processes use and own, and what of it is left at the end."""

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path
from types import TracebackType

import psutil

from kernel_ext.wire.codes import ErrorCode

from .durable import make_private_directory, publish
from .errors import SetupError
from .processes import ProcessMark, descendants, mark_of

__all__ = ("ResourceWatch", "claim_directory", "owner_of")

_OWNER = "owner.json"

_SAMPLE_S = 0.25


def claim_directory(directory: Path) -> Path:
    """Make a private directory that is this process's own, with nothing in it.

    What an ended process has left there is removed.

    Raises:
        SetupError: CONFIG_INVALID; a live process has it. STATE_ROOT_UNUSABLE.
    """
    owner, own = owner_of(directory), mark_of(os.getpid())
    if owner is not None and owner != own and owner.is_alive:
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            f'the session "{directory.name}" is in use by process {owner.pid}.',
            next_step="wait for it, or choose another --session",
        )
    if owner is not None:
        shutil.rmtree(directory, ignore_errors=True)
    make_private_directory(directory)
    if own is not None:
        publish(directory / _OWNER, json.dumps(own.as_json()).encode())
    return directory


def owner_of(directory: Path) -> ProcessMark | None:
    """The process that has claimed *directory*; None where nobody has."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return ProcessMark.from_json(
            json.loads((directory / _OWNER).read_text("utf-8"))
        )
    return None


class ResourceWatch:
    """Samples this process and its descendants while its block runs.

    Memory is proportional (PSS) where the system tells it, as kernels share
    pages; resident elsewhere.
    """

    def __init__(self) -> None:
        self.peak_mb = 0
        self._seen: set[ProcessMark] = set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ResourceWatch":
        """Begin to sample."""
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Sample once more and stop."""
        if self._task is not None:
            self._task.cancel()
        await asyncio.to_thread(self._sample)

    def still_running(self) -> int:
        """How many of the processes that were seen are alive now."""
        return sum(mark.is_alive for mark in self._seen)

    async def _watch(self) -> None:
        while True:
            await asyncio.to_thread(self._sample)
            await asyncio.sleep(_SAMPLE_S)

    def _sample(self) -> None:
        own = mark_of(os.getpid())
        below = descendants(os.getpid())
        self._seen.update(below)
        marks = [*([own] if own else []), *below]
        total = sum(_memory_bytes(mark) for mark in marks)
        self.peak_mb = max(self.peak_mb, round(total / 2**20))


def _memory_bytes(mark: ProcessMark) -> int:
    process = mark.process()
    if process is None:
        return 0
    with contextlib.suppress(psutil.Error, AttributeError):
        return int(process.memory_full_info().pss)
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0
