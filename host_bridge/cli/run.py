"""``rlm-kernel run``: a task for a model, on the real harness."""

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernel_ext.wire.codes import ErrorCode

from ..errors import HostBridgeError, SetupError
from .boundary import EXIT_STOPPED, note, print_json, run_command, say

if TYPE_CHECKING:
    from ..model import ModelChoice

__all__ = ("run_task",)


def run_task(
    task: Annotated[str, typer.Argument(help="What the model is to do.")],
    model: Annotated[
        str | None,
        typer.Option(help="provider/model; with --base-url the server's own name."),
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server.")
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(
            help="The variable with the key: DEEPSEEK_API_KEY, OPENAI_API_KEY."
        ),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="A 0600 file with the key instead.")
    ] = None,
    scripted: Annotated[
        bool, typer.Option("--scripted", help="The scripted model: no key, no network.")
    ] = False,
    session: Annotated[
        str | None, typer.Option(help="Session id; its directory stays.")
    ] = None,
    retries: Annotated[
        int,
        typer.Option(min=0, help="How often to ask a busy server again."),
    ] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Give a model a task in a kernel of its own, with children where it wants them.

    The answer goes to stdout, what goes on to stderr. Exit 0 done, 2 not possible,
    130 stopped.
    """
    from ..model import ModelChoice

    choice = ModelChoice(
        model=model,
        base_url=base_url,
        key_variable=key_env,
        key_file=key_file,
        scripted=scripted,
    )
    work = _run(task, choice, session, max_retries=retries, quiet=as_json)
    facts = run_command(work, as_json=as_json)
    if as_json:
        print_json(facts)
    if facts["stopped"]:
        raise typer.Exit(EXIT_STOPPED)


async def _run(
    task: str,
    choice: "ModelChoice",
    session: str | None,
    *,
    max_retries: int,
    quiet: bool,
) -> dict[str, Any]:
    from ..app import dsh_bridge, scripted_model_bridge
    from ..paths import StateRoot
    from ..runs import RunLimits
    from .driving import drive
    from .progress import Progress

    if not task.strip():
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            "the task is empty.",
            next_step="rlm-kernel run --help",
        )
    name = f"run-{uuid.uuid4().hex[:12]}" if session is None else session
    state = StateRoot.find()
    paths = state.session(name)
    if choice.scripted:
        bridge = await scripted_model_bridge(state, name)
    else:
        bridge = dsh_bridge(state, name, choice.setup())

    def write(line: str) -> None:
        if not quiet:
            note(bridge.redact(line))

    progress = Progress(bridge.agents, write, max_retries=max_retries)
    limits = RunLimits(max_retries=max_retries)
    try:
        outcome = await drive(bridge, name, task, progress, limits=limits)
    except HostBridgeError as error:
        # What a server or the harness says may hold the key that it was given.
        error.args = (bridge.redact(str(error)),)
        raise
    finally:
        has_files = session is not None or not paths.remove_if_empty()
    if outcome.silent:
        write(f"No report came from: {', '.join(outcome.silent)}")
    if not quiet:
        say(outcome.answer if not outcome.stopped else "Stopped.")
    write(
        f"Next: ls {paths.exports}   (what the cells wrote)"
        if has_files
        else "Next: rlm-kernel install   (sit at the kernel yourself, in Jupyter)"
    )
    return {
        "status": "stopped" if outcome.stopped else "ok",
        "answer": outcome.answer,
        "stopped": outcome.stopped,
        "session": name,
        "exports": str(paths.exports) if has_files else None,
        "cells": progress.cells,
        "children": progress.children,
        "reports": progress.reports,
        "silent_children": list(outcome.silent),
        "seconds": round(progress.elapsed_s, 3),
    }
