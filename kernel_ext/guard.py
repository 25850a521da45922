"""Ties a kernel to its bridge, and what its cells have started to the kernel.

While the bridge lives it ends a dead kernel's processes itself. When both are
killed nobody is left to do it but a guard, a process beside the kernel that sleeps
until the kernel's end (reference rlm.md U4). This module is used before anything
else is imported: a guard is a fork, and costs what the process has become by then.
"""

import ctypes
import os
import select
import signal
import sys
import time

__all__ = ("die_with_owner", "start_guard")

_PR_SET_PDEATHSIG = 1
_PASSES = 5


def die_with_owner() -> None:
    """End with the bridge, even while C code holds the interpreter's lock.

    ipykernel polls its parent from a Python thread; that is the only way on other
    systems than Linux.

    Raises:
        SystemExit: The bridge has ended already.
    """
    owner = int(os.environ.get("JPY_PARENT_PID") or 0)
    if sys.platform != "linux" or owner <= 0:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != owner:  # it ended before the call above
        raise SystemExit(1)


def start_guard() -> None:
    """Leave a guard behind; Linux only.

    Only for a kernel that leads a session: what a person's notebook has started is
    the person's. The guard is no child of the kernel, so that no cell meets it.
    """
    generation = os.environ.get("RLM_GENERATION", "")
    if sys.platform != "linux" or not generation or os.getsid(0) != os.getpid():
        return
    kernel = os.pidfd_open(os.getpid())
    between = os.fork()
    if between == 0:
        os.setsid()
        if os.fork() == 0:
            _guard(kernel, f"RLM_GENERATION={generation}".encode())
        os._exit(0)
    os.waitpid(between, 0)
    os.close(kernel)


def _guard(kernel: int, mark: bytes) -> None:
    # No signal of a terminal or of a group is meant for us.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    _close_files(but=kernel)
    select.select([kernel], [], [])
    # One more may be started while the others are ended.
    for _ in range(_PASSES):
        if _end_carriers(mark) == 0:
            break
        time.sleep(0.02)
    os._exit(0)


def _close_files(*, but: int) -> None:
    """Hold open no pipe that others wait for the end of."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    os.closerange(3, but)
    os.closerange(but + 1, 256)


def _end_carriers(mark: bytes) -> int:
    """Kill every process with *mark* in its environment; how many there were."""
    found = 0
    for name in os.listdir("/proc"):  # noqa: PTH208  # no pathlib in this process
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:  # noqa: PTH123
                carries = mark in file.read().split(b"\0")
            if carries:
                os.kill(int(name), signal.SIGKILL)
                found += 1
        except OSError:  # it has ended, or is another user's
            continue
    return found
