"""Looks at this machine: each finding is a fact, and a command where one helps."""

import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import HostBridgeError
from .kernels.kernel import Kernel, KernelSettings, KernelSpec
from .paths import StateRoot, socket_directories
from .processes import ProcessMark, mark_of
from .requests.dispatcher import Dispatcher
from .resources import owner_of

__all__ = ("Finding", "examine")

_WHEELS = (
    ("ipykernel", "pip install rlm-kernel"),
    ("ipython", "pip install rlm-kernel"),
    ("pyzmq", "pip install rlm-kernel"),
    ("jupyter-client", 'pip install "rlm-kernel[host]"'),
    ("pydantic", 'pip install "rlm-kernel[host]"'),
)

_HARNESS_WHEEL = "deepseek-harness-runtime-bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    level: Literal["ok", "note", "fault"]
    text: str
    command: str | None = None


StartHarness = Callable[[Path], Awaitable[str]]
"""Starts the harness in a home, ends it, and says which it was."""


async def examine(
    *, deep: bool, start_harness: StartHarness | None = None
) -> list[Finding]:
    """Look at Python, wheels, state root, leftovers; run one real cell.

    Everything that is written goes to a temporary directory that is removed.

    Args:
        deep: Start the harness as well.
        start_harness: How; needed for *deep*.
    """
    state = StateRoot.find()
    with tempfile.TemporaryDirectory(prefix="rlm-doctor-") as scratch:
        findings = [
            _python(),
            *_wheels(),
            _harness(),
            _state_root(state),
            await _kernel(Path(scratch)),
            *_leftovers(state),
        ]
        if deep and start_harness is not None:
            findings.append(await _start_harness(start_harness, Path(scratch)))
    findings.append(_key())
    return findings


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    return Finding(topic="Python", level="ok", text=text)


def _wheels() -> list[Finding]:
    found, missing = [], []
    for name, command in _WHEELS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(
                Finding(
                    topic="wheels",
                    level="fault",
                    text=f"{name} is not installed",
                    command=command,
                )
            )
    return [*missing, Finding(topic="wheels", level="ok", text=", ".join(found))]


def _harness() -> Finding:
    try:
        version = importlib.metadata.version(_HARNESS_WHEEL)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            topic="harness",
            level="note",
            text="DeepSeek Harness is not installed: exec works, demo and run do not",
            command='pip install "rlm-kernel[dsh]"',
        )
    return Finding(
        topic="harness",
        level="ok",
        text=f"DeepSeek Harness {version} (started only with --deep)",
    )


def _state_root(state: StateRoot) -> Finding:
    text = f"{state.directory} ({state.reason})"
    if not _can_be_written(state.directory):
        return Finding(
            topic="state root",
            level="fault",
            text=f"{text} can not be written",
            command='export RLM_KERNEL_HOME="$HOME/rlm-kernel"',
        )
    return Finding(topic="state root", level="ok", text=text)


def _can_be_written(directory: Path) -> bool:
    """Whether *directory*, or its nearest parent that exists, takes files of ours."""
    for path in (directory, *directory.parents):
        try:
            if path.exists():
                return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
        except OSError:  # a parent that may not be entered
            return False
    return False


async def _kernel(scratch: Path) -> Finding:
    """Start a kernel, run one cell, end it."""
    state = StateRoot(scratch, "doctor")
    spec = KernelSpec(
        agent_id="doctor", depth=0, cwd=scratch, paths=state.session("doctor")
    )
    try:
        kernel = await Kernel.start(
            spec,
            KernelSettings(),
            generation="doctor",
            number=1,
            dispatch=Dispatcher({}).dispatch,
        )
        try:
            result = await kernel.execute("6 * 7")
        finally:
            await kernel.stop()
    except HostBridgeError as error:
        return Finding(
            topic="kernel",
            level="fault",
            text=str(error),
            command=error.next_step or "pip install --force-reinstall rlm-kernel",
        )
    level: Literal["ok", "fault"] = "ok" if result.result == "42" else "fault"
    return Finding(
        topic="kernel", level=level, text=f"ran a cell: 6 * 7 is {result.result}"
    )


def _leftovers(state: StateRoot) -> list[Finding]:
    """What bridges have left that were killed: kernels, sockets, harness homes."""
    left = [
        ("kernels outlived their bridge", "kill", _kernels_left(state)),
        ("socket directories of ended bridges", "rm -r", _sockets_left()),
        ("homes of ended harnesses; a key can be in them", "rm -r", _homes_left(state)),
    ]
    return [
        Finding(
            topic="leftovers",
            level="note",
            text=f"{len(names)} {text}",
            command=f"{command} {shlex.join(names)}",
        )
        for text, command, names in left
        if names
    ] or [Finding(topic="leftovers", level="ok", text="none")]


def _kernels_left(state: StateRoot) -> list[str]:
    alive = []
    for record in sorted(state.sessions.glob("*/runtime.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(record.read_text(encoding="utf-8"))
            kernel = ProcessMark.from_json(data["kernel"])
            if kernel.is_alive and not ProcessMark.from_json(data["bridge"]).is_alive:
                alive.append(str(kernel.pid))
    return alive


def _sockets_left() -> list[str]:
    left = []
    for pid, directory in socket_directories():
        with contextlib.suppress(OSError):
            owner = mark_of(pid)
            # A process that began after the directory only has the maker's number.
            if owner is None or owner.started_at > directory.stat().st_mtime + 1:
                left.append(str(directory))
    return left


def _homes_left(state: StateRoot) -> list[str]:
    owners = {home: owner_of(home) for home in sorted(state.dsh.glob("*"))}
    return [str(home) for home, owner in owners.items() if owner and not owner.is_alive]


async def _start_harness(start: StartHarness, scratch: Path) -> Finding:
    try:
        version = await start(scratch / "home")
    except HostBridgeError as error:
        return Finding(
            topic="harness",
            level="fault",
            text=str(error),
            command=error.next_step or 'pip install "rlm-kernel[dsh]"',
        )
    return Finding(topic="harness", level="ok", text=f"{version} started and ended")


def _key() -> Finding:
    names = [n for n in ("DEEPSEEK_API_KEY", "OPENAI_API_KEY") if os.environ.get(n)]
    text = (
        f"found in {', '.join(names)}"
        if names
        else "none; demo and --scripted need none"
    )
    return Finding(topic="key", level="ok", text=text)
