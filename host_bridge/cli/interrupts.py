"""ctrl-C: the first asks to stop, the second ends; SIGTERM ends at once."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ("stop_requests", "undisturbed")

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


@contextlib.contextmanager
def stop_requests(on_first: Callable[[], None]) -> Iterator[None]:
    """Take the process's interrupts while the body runs in the current task.

    Args:
        on_first: Called on the loop at the first ctrl-C. The second one, and
            SIGTERM and SIGHUP, cancel the current task; its ``finally`` blocks run.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    seen = 0

    def on_interrupt() -> None:
        nonlocal seen
        seen += 1
        if seen == 1:
            on_first()
        elif task is not None:
            task.cancel()

    def on_end() -> None:
        if task is not None:
            task.cancel()

    with contextlib.ExitStack() as stack:
        stack.enter_context(_signal(loop, signal.SIGINT, on_interrupt))
        stack.enter_context(_signal(loop, signal.SIGTERM, on_end))
        if sys.platform != "win32":
            stack.enter_context(_signal(loop, signal.SIGHUP, on_end))
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Let no interrupt break into the end: what it is to remove would stay."""
    with contextlib.ExitStack() as stack:
        for name in _NAMES:
            if number := getattr(signal, name, None):
                # Not SIG_IGN, which a process that is started now would inherit.
                before = signal.signal(number, lambda *_: None)
                stack.callback(signal.signal, number, before)
        yield


@contextlib.contextmanager
def _signal(
    loop: asyncio.AbstractEventLoop, number: signal.Signals, handler: Callable[[], None]
) -> Iterator[None]:
    def from_signal(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(handler)

    # Not loop.add_signal_handler: Windows has none.
    before = signal.signal(number, from_signal)
    try:
        yield
    finally:
        signal.signal(number, before)
