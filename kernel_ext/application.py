"""The managed kernel: an ipykernel that drops nothing and stops when it is told."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp
from ipykernel.kernelbase import Kernel
from IPython.core.events import EventManager
from traitlets import List, Type, Unicode

__all__ = ("ManagedKernel", "ManagedKernelApp")


class ManagedKernel(IPythonKernel):
    """An IPython kernel that stops a cell wherever it is, and ends when asked to."""

    def pre_handler_hook(self) -> None:
        """Let an interrupt reach a cell's code, and nothing else.

        One that comes with the end of a cell would meet ipykernel itself: the
        reply is then never sent, and the cell never ends for who waits for it.
        """

        def interrupt(number: int, frame: FrameType | None) -> None:
            if _is_in_a_hook(frame) or _is_in_a_cell(frame):
                raise KeyboardInterrupt

        self.saved_sigint_handler = signal.signal(signal.SIGINT, interrupt)

    @contextlib.contextmanager
    def _cancel_on_sigint(self, future: "asyncio.Future[Any]") -> Iterator[None]:
        """Interrupt an async cell, also one that computes after an ``await``.

        ipykernel cancels the cell's task, which acts at its next await only: a
        cell that has awaited ``rlm()`` and then computes would run on, and lose
        its kernel (reference rlm.md 2.4, L27).
        """
        loop = asyncio.get_running_loop()

        def interrupt(number: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(future.cancel)
            if _is_in_a_hook(frame):
                raise KeyboardInterrupt
            if _is_in_a_cell(frame):
                # An interrupt that leaves another task would end the loop.
                if asyncio.current_task(loop) is future:
                    raise KeyboardInterrupt
                raise asyncio.CancelledError

        before = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _process_children(self) -> list[Any]:
        """The kernel's live children; at its end it waits for these.

        ipykernel counts those that have ended and that no cell has waited for,
        and waits up to 14 s for them.
        """
        if hasattr(os, "WNOHANG"):
            for child in super()._process_children():
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)
        return list(super()._process_children())


def _is_in_a_cell(frame: FrameType | None) -> bool:
    """Whether code of a cell is on the stack that ends in *frame*."""
    mark = f"{os.sep}ipykernel_{os.getpid()}{os.sep}"  # where cells have their names
    while frame is not None:
        if mark in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def _is_in_a_hook(frame: FrameType | None) -> bool:
    """Whether IPython calls a callback there, such as the drawing of figures.

    It catches what the callback raises, where it may itself not be interrupted.
    """
    frame = None if frame is None else frame.f_back
    while frame is not None:
        if frame.f_code is EventManager.trigger.__code__:
            return True
        frame = frame.f_back
    return False


class ManagedKernelApp(IPKernelApp):
    """An ipykernel application with the kernel side loaded and no water marks."""

    name = Unicode("rlm-kernel")
    kernel_class = Type(ManagedKernel, klass=Kernel)
    extra_extensions = List(Unicode(), default_value=["kernel_ext"])

    def _bind_socket(self, s: Any, port: int) -> int:
        """Bind a socket that drops nothing.

        1,000 queued messages is the default; the next one is lost without a word
        (reference performance.md 3.4). Set later, it would not hold: who connects
        gets the limits that the socket had when it was bound.
        """
        s.sndhwm = s.rcvhwm = 0
        return int(super()._bind_socket(s, port))

    def init_kernel(self) -> None:
        """Make the kernel; where a bridge leads its group, interrupt the group.

        ipykernel signals only itself then, and a child that a cell waits for
        would run on. The bridge ignores the signal.
        """
        super().init_kernel()
        if os.name == "posix" and os.getpgrp() == os.getppid():
            self.kernel._send_interrupt_children = lambda: os.killpg(
                os.getpgrp(), signal.SIGINT
            )

    def init_connection_file(self) -> None:
        """Read the connection file; refuse one without a key (design 3.12)."""
        super().init_connection_file()
        # Asked of the file: a session without a key makes one up.
        path = self.abs_connection_file
        if not Path(path).exists() or not json.loads(Path(path).read_bytes()).get(
            "key"
        ):
            msg = "the connection file has no key: refusing to run"
            raise SystemExit(msg)
