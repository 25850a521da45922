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
from .paths import StateRoot
from .processes import ProcessMark
from .requests.dispatcher import Dispatcher

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
            *_homes(state),
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
    nearest = next(p for p in (state.directory, *state.directory.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        return Finding(
            topic="state root",
            level="fault",
            text=f"{text} can not be written",
            command="export RLM_KERNEL_HOME=a directory of your own",
        )
    return Finding(topic="state root", level="ok", text=text)


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
    """Sessions whose bridge is gone while a process or sockets of it remain."""
    alive, sockets = [], []
    for record in sorted(state.sessions.glob("*/runtime.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            data = json.loads(record.read_text(encoding="utf-8"))
            owner = ProcessMark.from_json(data["bridge"])
            if owner.is_alive:
                continue
            if data["kernel"] and ProcessMark.from_json(data["kernel"]).is_alive:
                alive.append(str(data["kernel"]["pid"]))
            if Path(data["sockets"]).exists():
                sockets.append(data["sockets"])
    findings = []
    if alive:
        findings.append(
            Finding(
                topic="leftovers",
                level="note",
                text=f"{len(alive)} kernels outlived their bridge",
                command=f"kill {' '.join(alive)}",
            )
        )
    if sockets:
        findings.append(
            Finding(
                topic="leftovers",
                level="note",
                text=f"{len(sockets)} socket directories of ended bridges",
                command=f"rm -r {shlex.join(sockets)}",
            )
        )
    return findings or [Finding(topic="leftovers", level="ok", text="none")]


def _homes(state: StateRoot) -> list[Finding]:
    """Homes of a harness whose bridge is gone: a key can be in them."""
    left = []
    for record in sorted(state.dsh.glob("*/owner.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            owner = ProcessMark.from_json(json.loads(record.read_text("utf-8")))
            if not owner.is_alive:
                left.append(str(record.parent))
    if not left:
        return []
    text = f"{len(left)} homes of ended harnesses; a key can be in them"
    return [
        Finding(
            topic="leftovers",
            level="note",
            text=text,
            command=f"rm -r {shlex.join(left)}",
        )
    ]


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
