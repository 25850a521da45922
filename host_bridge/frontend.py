"""A kernel that a Jupyter front end owns: we are its parent and one more client.

The front end starts the kernelspec's argv, which is the bridge; the bridge starts
the kernel in its own process group, on the front end's connection file, and joins
it (reference notebook.md). It ends when the kernel ends, in the same way.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .kernels.attachment import Attachment, Dispatch
from .kernels.channels import Channels
from .processes import mark_of

__all__ = ("FrontEndKernel", "end_like", "launch_kernel")

_LOOK_S = 0.5
"""How often the front end is looked for; a process that is no child tells no end."""

_PASSED_ON = (
    "JPY_SESSION_NAME",
    "JUPYTER_RUNTIME_DIR",
    "JUPYTER_DATA_DIR",
    "JUPYTER_CONFIG_DIR",
    "IPYTHONDIR",
    "MPLBACKEND",
    "MPLCONFIGDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "SHELL",
    "TERM",
    "JPY_INTERRUPT_EVENT",
)
"""What a front end's kernel finds besides the fixed set; no name of a credential."""


def launch_kernel(
    connection_file: Path, environment: Mapping[str, str], *, environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start the kernel: same process group, so that one signal reaches both.

    Args:
        connection_file: The front end's.
        environment: The kernel's variables, as `kernel_environment` made them.
        environ: The front end's, for what its kernels need besides.
    """
    passed = {name: environ[name] for name in _PASSED_ON if name in environ}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "kernel_ext", "-f", str(connection_file)],
        env={**environment, **passed},
        stdin=subprocess.DEVNULL,
    )


class FrontEndKernel:
    """Answers the requests of a front end's kernel until that kernel ends.

    Args:
        process: From `launch_kernel`.
        connection_file: The front end's; read now, as its ports change.
        agent_id: The person's root agent.
        generation: What the kernel was told it is.
        dispatch: Answers requests.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        connection_file: Path,
        *,
        agent_id: str,
        generation: str,
        dispatch: Dispatch,
    ) -> None:
        self._process = process
        # Output goes to the front end; taking it here too would double its way.
        self._channels = Channels(connection_file, with_output=False)
        self._attachment = Attachment(
            agent_id=agent_id,
            generation=generation,
            send=lambda kind, content: self._channels.send("control", kind, content),
            dispatch=dispatch,
            # The front end runs the cells: no harness call is open in any of them.
            open_cell=lambda message_id: None,
        )
        self._welcomed = asyncio.Event()

    async def run(self, *, grace_s: float = 1.0) -> int:
        """Serve until the kernel ends, or until the front end is gone or says so.

        Args:
            grace_s: How long the kernel may take once it is asked to end.

        Returns:
            The kernel's exit status; negative for a signal.
        """
        ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        stop = asyncio.Event()
        serving = [
            asyncio.create_task(work)
            for work in (
                self._watch_control(),
                self._watch_iopub(),
                self._beat(),
                _watch_parent(stop),
            )
        ]
        stopping = asyncio.create_task(stop.wait())
        with _end_signals(stop):
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await self._end_kernel(ended, grace_s)
        for task in (*serving, stopping):
            task.cancel()
        await self._attachment.close(drain_s=grace_s)
        self._channels.close()
        return await ended

    async def _end_kernel(self, ended: "asyncio.Task[int]", grace_s: float) -> None:
        self._process.terminate()
        done, _ = await asyncio.wait({ended}, timeout=grace_s)
        if not done:
            self._process.kill()

    async def _beat(self) -> None:
        # A request sent before our subscription is through would be lost; an
        # older kernel sends no welcome.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._welcomed.wait(), 2.0)
        await self._attachment.beat()

    async def _watch_control(self) -> None:
        async for message in self._channels.receive("control"):
            self._attachment.on_control(message)

    async def _watch_iopub(self) -> None:
        async for message in self._channels.receive("iopub"):
            if message.type == "iopub_welcome":
                self._welcomed.set()
            else:
                await self._attachment.on_comm(message)


def end_like(returncode: int) -> None:
    """End this process as the kernel ended, so that the front end sees it."""
    if returncode < 0 and os.name == "posix":
        number = -returncode
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(returncode & 0xFF)


async def _watch_parent(stop: asyncio.Event) -> None:
    """Set *stop* when the front end is gone: the kernel watches only us."""
    parent = int(os.environ.get("JPY_PARENT_PID") or 0)
    if parent <= 1 or os.name != "posix":
        return
    # It may start us through a process that does not stay: its own end counts,
    # and our parent's only where the front end can not be seen from here.
    front_end, first = mark_of(parent), os.getppid()
    while front_end.is_alive if front_end else os.getppid() == first:  # noqa: ASYNC110  # no event tells it
        await asyncio.sleep(_LOOK_S)
    stop.set()


@contextlib.contextmanager
def _end_signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    names = ("SIGTERM", "SIGHUP")
    before = {}
    for name in names:
        if number := getattr(signal, name, None):
            before[number] = signal.signal(
                number, lambda *_: loop.call_soon_threadsafe(stop.set)
            )
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
