"""How a command ends: its exit status, its error lines, its JSON."""

import io
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TextIO, TypeVar

import typer

from kernel_ext.wire.codes import ErrorCode

from ..errors import HostBridgeError, SetupError

__all__ = (
    "EXIT_ERROR",
    "EXIT_STOPPED",
    "EXIT_UNUSABLE",
    "here",
    "note",
    "print_json",
    "run_command",
    "show_error",
    "say",
)

T = TypeVar("T")

EXIT_ERROR = 1
"""It ran, and what it ran failed."""

EXIT_UNUSABLE = 2
"""It could not be done: options, machine, harness or model server."""

EXIT_STOPPED = 130
"""The person stopped it."""

_DEFAULT_STEPS = {
    ErrorCode.CONFIG_INVALID: "rlm-kernel --help",
    ErrorCode.KERNEL_START_FAILED: "rlm-kernel doctor",
    ErrorCode.STATE_ROOT_UNUSABLE: "rlm-kernel doctor",
}
"""What leads on where the error itself does not say it."""


def say(text: str, *, end: str = "\n") -> None:
    """Write one line for people to stdout, at once."""
    if error := _failure_to_write(sys.stdout, text + end):
        sys.stdout = _nowhere()
        if not isinstance(error, BrokenPipeError):
            note(f"The output can not be written: {error.strerror}")


def note(text: str, *, end: str = "\n") -> None:
    """Write one line about what goes on to stderr, at once."""
    if _failure_to_write(sys.stderr, text + end):
        sys.stderr = _nowhere()


def _failure_to_write(stream: TextIO | None, text: str) -> OSError | None:
    """Write what the stream's encoding can carry; return what stood in the way.

    Lines are written in the middle of other work, which has to go on.
    """
    if stream is None:  # it was closed before we were started
        return None
    encoding = stream.encoding or "utf-8"
    try:
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        return error
    return None


def _nowhere() -> TextIO:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="replace")


def print_json(data: dict[str, Any]) -> None:
    """Write one JSON object for programs to stdout."""
    say(json.dumps(data, ensure_ascii=False))


def here() -> Path:
    """The directory that the command was started in.

    Raises:
        SetupError: CONFIG_INVALID; it does not exist any more.
    """
    try:
        return Path.cwd()
    except OSError as error:
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            "the current directory can not be used; is it there still?",
            next_step="cd",
        ) from error


def run_command(work: Coroutine[Any, Any, T], *, as_json: bool) -> T:
    """Run a command's coroutine; turn our errors into lines and a status.

    Raises:
        typer.Exit: EXIT_UNUSABLE after one of our errors, EXIT_STOPPED after an
            interrupt that nothing else took.
    """
    import asyncio

    try:
        return asyncio.run(work)
    except HostBridgeError as error:
        show_error(error, as_json=as_json)
        raise typer.Exit(EXIT_UNUSABLE) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(EXIT_STOPPED) from None


def show_error(error: HostBridgeError, *, as_json: bool = False) -> None:
    """Write code, text and next step: to stderr, or as JSON to stdout."""
    next_step = error.next_step or _DEFAULT_STEPS.get(
        error.code, "rlm-kernel doctor --deep"
    )
    if as_json:
        print_json(
            {
                "status": "error",
                "code": str(error.code),
                "error": str(error),
                "next": next_step,
            }
        )
        return
    note(f"{error.code}: {error}\nNext: {next_step}")
