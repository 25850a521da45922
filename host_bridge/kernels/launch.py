"""Starts a kernel process on sockets that only this user can reach."""

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from jupyter_client.connect import write_connection_file

from ..durable import publish
from ..paths import SessionPaths, new_socket_directory
from ..processes import (
    ProcessMark,
    carriers,
    descendants,
    end_processes,
    mark_of,
)

__all__ = ("KernelProcess", "launch")

_STDERR_TAIL_BYTES = 64 * 1024

_AGENT_OPTIONS = (
    "--HistoryManager.enabled=False",
    "--InteractiveShell.colors=nocolor",
    "--IPKernelApp.log_level=ERROR",
)
"""An agent's kernel keeps no history database and prints no colours."""


@dataclass(slots=True, eq=False)
class KernelProcess:
    """A kernel process that we started, and its private directory of sockets."""

    process: asyncio.subprocess.Process
    directory: Path
    connection_file: Path
    generation: str
    _stderr: bytearray = field(default_factory=bytearray)
    _drain: "asyncio.Task[None] | None" = None

    @property
    def pid(self) -> int:
        """The kernel's process id."""
        return self.process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status; negative for a signal, None while it runs."""
        return self.process.returncode

    @property
    def stderr_tail(self) -> str:
        """The last that the process wrote to its own stderr."""
        return self._stderr.decode(errors="replace").strip()

    async def end(self, *, grace_s: float) -> None:
        """End the kernel and everything it started, then remove its sockets.

        Safe to call again, also at the same time.

        Args:
            grace_s: How long the kernel may take to end by itself, as it was
                asked to; its descendants get none.
        """
        marks = self._descendants()
        if grace_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
        if self.returncode is None:
            marks += self._descendants()
            # Our own child is asyncio's to reap, the rest is not.
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
        await self.process.wait()
        # What it has left behind has other parents by now. Asked until nothing
        # new turns up: a process may start one more while it is ended.
        for _ in range(3):
            await end_processes(marks, grace_s=0)
            marks = await asyncio.to_thread(carriers, "RLM_GENERATION", self.generation)
            if not marks:
                break
        if self._drain is not None:
            self._drain.cancel()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _descendants(self) -> list[ProcessMark]:
        # Once it is reaped, its pid may be another's.
        return descendants(self.pid) if self.returncode is None else []

    async def drain_stderr(self) -> None:
        """Keep the tail of stderr, so that the pipe never blocks the kernel."""
        stream = self.process.stderr
        while stream is not None and (chunk := await stream.read(4096)):
            self._stderr += chunk
            del self._stderr[:-_STDERR_TAIL_BYTES]


async def launch(
    *,
    paths: SessionPaths,
    cwd: Path,
    environment: Mapping[str, str],
    python: str = sys.executable,
) -> KernelProcess:
    """Start a kernel; it is not ready yet.

    Args:
        paths: The session that it belongs to.
        cwd: The agent's working directory.
        environment: All of the kernel's environment.
        python: The interpreter, one in which ``kernel_ext`` is installed.

    Raises:
        SetupError: STATE_ROOT_UNUSABLE; no place for its sockets.
        OSError: The interpreter or the directory does not exist.
    """
    directory = new_socket_directory()
    try:
        connection_file = _write_connection(directory)
        process = await asyncio.create_subprocess_exec(
            python,
            "-P",  # the agent's directory must not shadow modules at start
            "-m",
            "kernel_ext",
            "-f",
            str(connection_file),
            *_AGENT_OPTIONS,
            env=dict(environment),
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise
    launched = KernelProcess(
        process, directory, connection_file, environment["RLM_GENERATION"]
    )
    launched._drain = asyncio.create_task(launched.drain_stderr())
    try:
        _record(paths, launched)
    except BaseException:
        await launched.end(grace_s=0)
        raise
    return launched


def _write_connection(directory: Path) -> Path:
    path = directory / "kernel.json"
    options: dict[str, object] = {"key": secrets.token_hex(32).encode()}
    if sys.platform == "win32":  # no unix sockets in ZeroMQ there
        public, secret = zmq.curve_keypair()
        options |= {
            "ip": "127.0.0.1",
            "curve_publickey": public,
            "curve_secretkey": secret,
        }
    else:
        ports = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
        options |= {"transport": "ipc", "ip": str(directory / "k")}
        options |= {name: number for number, name in enumerate(ports, 1)}
    write_connection_file(str(path), kernel_name="rlm", **options)  # type: ignore[arg-type]  # one dict for both transports
    return path


def _record(paths: SessionPaths, launched: KernelProcess) -> None:
    """Note who runs for whom, so that `doctor` finds what a killed bridge left."""
    kernel, bridge = mark_of(launched.pid), mark_of(os.getpid())
    record = {
        "bridge": bridge.as_json() if bridge else None,
        "kernel": kernel.as_json() if kernel else None,
    }
    publish(paths.runtime, json.dumps(record).encode())
