"""One kernel generation: start, cells in order, interrupt, death, stop."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_ext.wire.codes import ErrorCode

from ..errors import KernelError
from ..paths import SessionPaths
from .attachment import Attachment, Dispatch, Timing
from .channels import Channels
from .environment import KernelVariables, kernel_environment
from .execution import Cell, ExecutionResult, OutputBudget
from .interrupt import Interrupts
from .launch import KernelProcess, launch
from .turns import Turns

__all__ = ("Kernel", "KernelSettings", "KernelSpec")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """Bounds of a kernel (specification 15)."""

    startup_timeout_s: float = 30.0
    interrupt_grace_s: float = 2.0
    shutdown_grace_s: float = 5.0
    drain_s: float = 5.0
    max_output_bytes: int = 4 * 2**20
    max_concurrent_boots: int = 4
    max_depth: int = 1
    env_allowlist: tuple[str, ...] = ()
    timing: Timing = field(default_factory=Timing)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSpec:
    """Whose kernel it is, and where it works."""

    agent_id: str
    depth: int
    cwd: Path
    paths: SessionPaths


class Kernel:
    """A running kernel process. Made by `start` alone."""

    def __init__(
        self,
        spec: KernelSpec,
        settings: KernelSettings,
        process: KernelProcess,
        number: int,
        attachment_of: "Callable[[Kernel], Attachment]",
    ) -> None:
        self.spec = spec
        self.number = number
        self._settings = settings
        self._process = process
        self._channels = Channels(process.connection_file, with_output=True)
        self._attachment = attachment_of(self)
        self._welcomed = asyncio.Event()
        self._cell: Cell | None = None
        self._turns = Turns()
        self._interrupts = Interrupts(self.send_control)
        self._dead = asyncio.create_task(process.process.wait())
        self._dead.add_done_callback(lambda _: self._attachment.retire())
        self._is_stopping = False
        self._tasks = [
            asyncio.create_task(work)
            for work in (
                self._watch_shell(),
                self._watch_control(),
                self._watch_iopub(),
                self._clean_up(),
            )
        ]
        for task in self._tasks:
            task.add_done_callback(self._on_end_of_watch)

    @classmethod
    async def start(
        cls,
        spec: KernelSpec,
        settings: KernelSettings,
        *,
        generation: str,
        number: int,
        dispatch: Dispatch,
    ) -> "Kernel":
        """Start a kernel and attach to it.

        Args:
            spec: Whose kernel, and where.
            settings: Its bounds.
            generation: The name of this process on the wire, never used before.
            number: 1 for the agent's first kernel.
            dispatch: Answers the kernel's requests.

        Raises:
            KernelError: KERNEL_START_FAILED, with the process's own last words.
            SetupError: No usable place for its files.
        """
        paths = spec.paths.make()
        variables = KernelVariables(
            session_dir=paths.directory,
            ipython_dir=paths.ipython,
            generation=generation,
            depth=spec.depth,
            max_depth=settings.max_depth,
        )
        environment = kernel_environment(variables, allowlist=settings.env_allowlist)
        try:
            process = await launch(paths=paths, cwd=spec.cwd, environment=environment)
        except OSError as error:
            raise KernelError(
                ErrorCode.KERNEL_START_FAILED,
                f"the kernel process can not be started: {error.strerror}",
            ) from error

        def attachment_of(kernel: "Kernel") -> Attachment:
            return Attachment(
                agent_id=spec.agent_id,
                generation=generation,
                send=kernel.send_control,
                dispatch=dispatch,
                open_cell=kernel.open_cell,
                timing=settings.timing,
            )

        try:
            kernel = cls(spec, settings, process, number, attachment_of)
        except BaseException:
            await process.end(grace_s=0)
            raise
        try:
            await kernel._become_ready()
        except BaseException:
            await kernel.stop(grace_s=0)
            raise
        return kernel

    # -- facts -------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return self._process.pid

    @property
    def connection_file(self) -> Path:
        """By which any Jupyter client joins this kernel."""
        return self._process.connection_file

    @property
    def refused_messages(self) -> int:
        """How many frames were not the kernel's own."""
        return self._channels.refused

    # -- cells -------------------------------------------------------------------

    async def execute(
        self,
        code: str,
        *,
        cancelled: asyncio.Event | None = None,
        execution_id: str | None = None,
    ) -> ExecutionResult:
        """Run one cell after those before it.

        Args:
            code: The cell.
            cancelled: Set to interrupt it; the result is then ``aborted``.
            execution_id: The harness's open call, for nested tool calls.

        Returns:
            The result, also when the cell failed or the kernel died in it.

        Raises:
            KernelError: KERNEL_DIED; the kernel was gone before the cell began.
        """
        cell = Cell(OutputBudget(self._settings.max_output_bytes), execution_id)
        if not await self._turns.take(cancelled):
            return cell.not_started(generation=self.number)
        try:
            if self._is_stopping or not self.is_alive:
                raise KernelError(ErrorCode.KERNEL_DIED, self._how_it_died())
            if cancelled is not None and cancelled.is_set():
                return cell.not_started(generation=self.number)
            cell.begin()
            self._cell = cell
            return await self._run(cell, code, cancelled)
        finally:
            cell.is_open = False
            self._cell = None
            self._turns.release()

    async def _run(
        self, cell: Cell, code: str, cancelled: asyncio.Event | None
    ) -> ExecutionResult:
        cell.message_id = await self._channels.send(
            "shell",
            "execute_request",
            {
                "code": code,
                "silent": False,
                "store_history": True,
                "user_expressions": {},
                "allow_stdin": False,
                "stop_on_error": True,
            },
        )
        try:
            stopper = None if cancelled is None else cancelled.wait()
            if not await self._settled(cell, stopper):
                await self._interrupt(cell)
        except asyncio.CancelledError:
            # The caller is gone; the cell must not run on behind its back.
            await self._interrupt(cell)
            raise
        if cell.settled.is_set():
            return cell.result(generation=self.number)
        return self._lost(cell)

    async def _settled(self, cell: Cell, stopper: Awaitable[Any] | None) -> bool:
        """Wait for the cell or for the kernel's death; False when stopped first."""
        settled = asyncio.ensure_future(cell.settled.wait())
        waits: set[asyncio.Future[Any]] = {settled, self._dead}
        stop = None if stopper is None else asyncio.ensure_future(stopper)
        if stop is not None:
            waits.add(stop)
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self._dead.done() and not settled.done():
                # Its last messages may be on the way still.
                await asyncio.wait({settled}, timeout=0.1)
            return settled.done() or self._dead.done()
        finally:
            settled.cancel()
            if stop is not None:
                stop.cancel()

    async def _interrupt(self, cell: Cell) -> None:
        """Interrupt, again after half the grace, then end the process."""
        cell.interrupted = True
        half_s = self._settings.interrupt_grace_s / 2
        for _ in range(2):
            if not self.is_alive:
                return
            await self._interrupts.send()
            if await self._settled(cell, asyncio.sleep(half_s)):
                if self.is_alive:
                    await self._interrupts.until_taken()
                return
        await self._process.end(grace_s=0)

    def _lost(self, cell: Cell) -> ExecutionResult:
        if cell.interrupted:
            return cell.ended(
                "aborted",
                ErrorCode.KERNEL_UNRESPONSIVE,
                "the cell did not stop when interrupted, so its kernel was ended; "
                "variables are lost, the next call gets a new kernel",
                generation=self.number,
            )
        return cell.ended(
            "error",
            ErrorCode.KERNEL_DIED,
            f"{self._how_it_died()}; variables are lost, the next call gets a new "
            "kernel, nothing is run again",
            generation=self.number,
        )

    def _how_it_died(self) -> str:
        code = self._process.returncode
        if code is None:
            return "the kernel is being ended"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the kernel died: {signal.Signals(-code).name}"
        return f"the kernel ended with status {code}"

    # -- what travels --------------------------------------------------------------

    async def send_control(self, message_type: str, content: dict[str, Any]) -> None:
        """Send one message on the control channel."""
        await self._channels.send("control", message_type, content)

    def open_cell(self, message_id: str) -> Cell | None:
        """The running cell when *message_id* asked for it, else None."""
        cell = self._cell
        return cell if cell is not None and cell.message_id == message_id else None

    async def _watch_shell(self) -> None:
        async for message in self._channels.receive("shell"):
            if message.type == "execute_reply" and (
                cell := self.open_cell(message.parent_id)
            ):
                cell.on_reply(message)

    async def _watch_control(self) -> None:
        async for message in self._channels.receive("control"):
            self._attachment.on_control(message)
            cell = self._cell
            if self._interrupts.on_control(message) and cell is not None:
                cell.was_stopped = cell.interrupted and not cell.settled.is_set()

    async def _watch_iopub(self) -> None:
        async for message in self._channels.receive("iopub"):
            if message.type == "iopub_welcome":
                self._welcomed.set()
            elif message.type.startswith("comm_"):
                await self._attachment.on_comm(message)
            elif cell := self.open_cell(message.parent_id):
                cell.on_output(message)

    async def _clean_up(self) -> None:
        """End what a kernel that died by itself has left behind."""
        await asyncio.wait({self._dead})
        if not self._is_stopping:
            await self._process.end(grace_s=0)

    def _on_end_of_watch(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        # Deaf to the kernel, the next cell would wait for ever.
        _log.error("a watch of a kernel failed; it is ended", exc_info=error)
        if self.is_alive:
            self._process.process.kill()

    # -- start and stop ----------------------------------------------------------------

    async def _become_ready(self) -> None:
        try:
            async with asyncio.timeout(self._settings.startup_timeout_s):
                # A request sent before our subscription is through would be lost.
                await self._or_death(self._channels.until_subscribed(self._welcomed))
                self._tasks.append(asyncio.create_task(self._attachment.beat()))
                await self._or_death(self._attachment.answered.wait())
                if self._attachment.refusal is not None:
                    raise KernelError(
                        ErrorCode.KERNEL_START_FAILED,
                        f"the kernel refuses its host: {self._attachment.refusal}",
                        next_step="install kernel and host from one release",
                    )
        except TimeoutError:
            raise KernelError(
                ErrorCode.KERNEL_START_FAILED,
                f"the kernel was not ready after {self._settings.startup_timeout_s:g} s",
            ) from None

    async def _or_death(self, wanted: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(wanted)
        try:
            await asyncio.wait({task, self._dead}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                last_words = self._process.stderr_tail or "it wrote nothing to stderr"
                raise KernelError(
                    ErrorCode.KERNEL_START_FAILED,
                    f"{self._how_it_died()} before it was ready: {last_words}",
                )
        finally:
            task.cancel()

    async def stop(self, *, grace_s: float | None = None) -> None:
        """End requests, then the kernel, then whatever it started.

        Args:
            grace_s: How long the kernel may take; None: as configured.
        """
        grace_s = self._settings.shutdown_grace_s if grace_s is None else grace_s
        self._is_stopping = True
        if self.is_alive:
            if self._cell is not None:
                # A kernel ends between cells only.
                self._cell.interrupted = True
                await self._interrupts.send()
            await self._attachment.close(drain_s=self._settings.drain_s)
            if grace_s > 0:
                await self.send_control("shutdown_request", {"restart": False})
        await self._process.end(grace_s=grace_s)
        for task in (*self._tasks, self._dead):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._channels.close()
