"""How a command ends: its exit status, its error lines, its JSON."""

import json
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import typer

from ..errors import HostBridgeError

__all__ = (
    "EXIT_ERROR",
    "EXIT_STOPPED",
    "EXIT_UNUSABLE",
    "print_json",
    "run_command",
    "say",
)

T = TypeVar("T")

EXIT_ERROR = 1
"""It ran, and what it ran failed."""

EXIT_UNUSABLE = 2
"""It could not be done: options, machine, harness or model server."""

EXIT_STOPPED = 130
"""The person stopped it."""


def say(text: str) -> None:
    """Write one line for people to stdout, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_json(data: dict[str, Any]) -> None:
    """Write one JSON object for programs to stdout."""
    say(json.dumps(data, ensure_ascii=False))


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
        _show(error, as_json=as_json)
        raise typer.Exit(EXIT_UNUSABLE) from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(EXIT_STOPPED) from None


def _show(error: HostBridgeError, *, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "status": "error",
                "code": str(error.code),
                "error": str(error),
                "next": error.next_step,
            }
        )
        return
    sys.stderr.write(f"{error.code}: {error}\n")
    if error.next_step:
        sys.stderr.write(f"Next: {error.next_step}\n")
