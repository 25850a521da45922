"""One DSH process: started with what we chose, watched, and ended with all it began."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping

from kernel_ext.wire.codes import ErrorCode

from ...durable import make_private_directory, publish
from ...errors import HarnessError
from ...processes import descendants, end_processes
from .launch import DshSettings, build_environment, build_patch, find_command
from .stdio import StdioClient

__all__ = ("Runtime",)

_STDERR_BYTES = 64 * 1024
_SHOWN_LINES = 4
_SHOWN_CHARS = 600
_LAST_WORDS_S = 1.0
_SHUTDOWN_S = 8.0
"""For a shutdown in order: open turns end, and sessions are written."""
_EXIT_S = 2.0
_TERMINATE_S = 2.0
_KILL_S = 2.0
_LOOK_S = 0.01


class Runtime:
    """The process; `on_exit` is told once when it ends without `stop`."""

    def __init__(
        self,
        settings: DshSettings,
        bridge: Mapping[str, str],
        *,
        on_exit: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._bridge = bridge
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._client: StdioClient | None = None
        self._stderr = bytearray()
        self._tasks: list[asyncio.Task[None]] = []
        self._is_up = False
        self._stopping = False
        self._group_ended = False

    @property
    def pid(self) -> int | None:
        """The process, once it is started."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the process; `initialize` tells when it is up.

        Raises:
            HarnessError: HARNESS_UNAVAILABLE.
            SetupError: Its home can not be used.
        """
        command = await asyncio.to_thread(find_command)
        home = make_private_directory(self._settings.home)
        make_private_directory(self._settings.scratch)
        patch = home / "rlm-kernel.patch.yml"
        publish(patch, build_patch(self._settings))
        if self._settings.credentials is not None:
            publish(home / ".credentials.yaml", self._settings.credentials)
        try:
            process = await asyncio.create_subprocess_exec(
                *(*command, "--profile", "sdk", "--patch", str(patch)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=self._settings.workspace,
                env=build_environment(self._settings, self._bridge),
                # Ctrl-C in a terminal is for us: we end the turn first, then DSH.
                start_new_session=True,
            )
        except OSError as error:
            raise HarnessError(
                ErrorCode.HARNESS_UNAVAILABLE,
                f"DeepSeek Harness can not be started: {error.strerror}",
            ) from error
        if process.stdin is None or process.stdout is None or process.stderr is None:
            msg = "the process was made without pipes"
            raise RuntimeError(msg)
        self._process = process
        self._client = StdioClient(process.stdout, process.stdin)
        self._tasks = [
            asyncio.create_task(self._client.pump()),
            asyncio.create_task(self._keep_stderr(process.stderr)),
            asyncio.create_task(self._watch(process)),
        ]

    async def initialize(self) -> None:
        """Wait until DSH has loaded everything, our plugin included.

        Raises:
            HarnessError: HARNESS_UNAVAILABLE, with DSH's own last words.
        """
        route = self._settings.default_route
        params = {
            "cwd": str(self._settings.workspace),
            "provider": route.provider,
            "model": route.model,
        }
        try:
            await self._started_client().call("initialize", params)
            self._is_up = True
        except HarnessError as error:
            if error.code is ErrorCode.HARNESS_LOST:
                # Its last words may still be on the way.
                await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)
            raise HarnessError(
                ErrorCode.HARNESS_UNAVAILABLE,
                "DeepSeek Harness did not start: "
                f"{self._settings.redact(str(error))}{self.last_words()}",
            ) from error

    def _started_client(self) -> StdioClient:
        if self._client is None:
            raise HarnessError(ErrorCode.HARNESS_UNAVAILABLE, "DSH is not started")
        return self._client

    def last_words(self) -> str:
        """The end of DSH's error output, short and without the credentials."""
        text = self._settings.redact(self._stderr.decode(errors="replace"))
        lines = text.strip().splitlines()[-_SHOWN_LINES:]
        shown = "\n".join(lines)[-_SHOWN_CHARS:]
        return f"\n{shown}" if shown else ""

    # -- ending -------------------------------------------------------------------

    async def stop(self) -> None:
        """End the process in order, then by force, with everything it started.

        Safe to call again. A process that a tool has detached on purpose, into a
        session of its own and away from its parent, is the person's and stays.
        """
        self._stopping = True
        process = self._process
        if process is None:
            return
        begun = await asyncio.to_thread(descendants, process.pid)
        # What is not up yet has nothing to put in order, and does not listen.
        if process.returncode is None and self._is_up:
            await self._shut_down(process)
        if process.returncode is None and self._is_up:
            process.terminate()
            await _ended(process, within_s=_TERMINATE_S)
        self._end_group(process)
        await _ended(process, within_s=_KILL_S)
        # What left the process group is found by the tree of before.
        await end_processes(begun, grace_s=0)
        # A process that stays may hold the pipes open for ever.
        _, open_pipes = await asyncio.wait(self._tasks, timeout=_LAST_WORDS_S)
        for task in open_pipes:
            task.cancel()
        if self._settings.credentials is not None:
            (self._settings.home / ".credentials.yaml").unlink(missing_ok=True)

    async def _shut_down(self, process: asyncio.subprocess.Process) -> None:
        # It may be gone, refuse, or not answer: what follows ends it all the same.
        with contextlib.suppress(HarnessError, TimeoutError):
            async with asyncio.timeout(_SHUTDOWN_S):
                await self._started_client().call("shutdown")
        if process.stdin is not None:
            process.stdin.close()
        await _ended(process, within_s=_EXIT_S)

    def _end_group(self, process: asyncio.subprocess.Process) -> None:
        if self._group_ended:  # by now its id may be somebody else's
            return
        self._group_ended = True
        if sys.platform == "win32":
            if process.returncode is None:
                process.kill()
            return
        # The process leads a session of its own, so its id is that of the group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    # -- watching -----------------------------------------------------------------

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self._end_group(process)
        if not self._stopping:
            self._on_exit(f"DeepSeek Harness ended ({_describe(status)})")

    async def _keep_stderr(self, reader: asyncio.StreamReader) -> None:
        while chunk := await reader.read(4096):
            self._stderr += chunk
            del self._stderr[:-_STDERR_BYTES]


async def _ended(process: asyncio.subprocess.Process, *, within_s: float) -> None:
    """Wait for the end of the process, but not longer than *within_s*.

    `Process.wait` would also wait for its pipes, and others may hold those.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while process.returncode is None:  # noqa: ASYNC110  # asyncio has no event for it
                await asyncio.sleep(_LOOK_S)


def _describe(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
