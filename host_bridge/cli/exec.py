"""``rlm-kernel exec``: one cell in a managed kernel, under the scripted harness."""

import asyncio
import sys
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kernel_ext.wire.codes import ErrorCode

from ..errors import SetupError
from .boundary import (
    EXIT_ERROR,
    EXIT_STOPPED,
    here,
    note,
    print_json,
    run_command,
    say,
)
from .interrupts import stop_requests, undisturbed

if TYPE_CHECKING:
    from ..kernels.execution import ExecutionResult

__all__ = ("exec_cell",)


def exec_cell(
    code: Annotated[
        str | None, typer.Argument(help="The cell; - or nothing reads it from stdin.")
    ] = None,
    session: Annotated[
        str | None,
        typer.Option(help="Session id; its files stay. Without one they are removed."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON.")
    ] = False,
) -> None:
    """Run one cell in a managed kernel. Exit 0 ok, 1 error, 130 stopped."""
    result = run_command(_execute(code, session), as_json=as_json)
    if as_json:
        print_json(asdict(result))
    else:
        _show(result)
    if result.status != "ok":
        raise typer.Exit(EXIT_ERROR if result.status == "error" else EXIT_STOPPED)


async def _execute(code: str | None, session: str | None) -> "ExecutionResult":
    from ..app import scripted_bridge
    from ..harness.script import run_fenced_python
    from ..paths import StateRoot

    cell, cwd = _read(code), here()
    state = StateRoot.find()
    paths = state.session(
        f"exec-{uuid.uuid4().hex[:12]}" if session is None else session
    )
    bridge = scripted_bridge(state, run_fenced_python)
    cancelled = asyncio.Event()
    try:
        with stop_requests(cancelled.set):
            await bridge.start()
            person = await bridge.create_root(paths.directory.name, cwd=cwd, muted=True)
            kernel = await bridge.kernel_of(person)
            return await kernel.execute(cell, cancelled=cancelled)
    finally:
        with undisturbed():
            await bridge.close()
            if session is None:
                paths.remove_if_empty()


def _read(code: str | None) -> str:
    if code is not None and code != "-":
        return code
    if sys.stdin is None or (code is None and sys.stdin.isatty()):
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            "there is no cell to run.",
            next_step='rlm-kernel exec "6*7"',
        )
    return sys.stdin.read()


def _show(result: "ExecutionResult") -> None:
    say(result.stdout, end="")
    if result.result is not None:
        say(result.result)
    note(result.stderr, end="")
    if result.status == "aborted":
        note("Stopped.")
    elif result.error is not None:
        text = "\n".join(result.error.traceback)
        note(text or f"{result.error.name}: {result.error.message}")
