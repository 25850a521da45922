"""``rlm-kernel run``: a task for a model, on the real harness."""

import sys
import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from .boundary import EXIT_STOPPED, print_json, run_command, say

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
    session: Annotated[str | None, typer.Option(help="Session id of the root.")] = None,
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
    session = session or f"run-{uuid.uuid4().hex[:12]}"
    facts = run_command(_run(task, choice, session, quiet=as_json), as_json=as_json)
    if as_json:
        print_json(facts)
    if facts["stopped"]:
        raise typer.Exit(EXIT_STOPPED)


async def _run(task: str, choice: Any, session: str, *, quiet: bool) -> dict[str, Any]:
    from ..app import dsh_bridge, scripted_model_bridge
    from ..paths import StateRoot
    from .driving import drive
    from .progress import Progress

    write = (lambda line: None) if quiet else _note
    state = StateRoot.find()
    if choice.scripted:
        bridge = await scripted_model_bridge(state, session)
    else:
        bridge = dsh_bridge(state, session, choice.setup())
    progress = Progress(bridge.agents, write)
    try:
        outcome = await drive(bridge, session, task, progress)
    finally:
        await bridge.close()
    if outcome.silent:
        write(f"No report came from: {', '.join(outcome.silent)}")
    if not quiet:
        say(outcome.answer if not outcome.stopped else "Stopped.")
    exports = state.session(session).exports
    write(f"Next: ls {exports}   (files that the cells left)")
    return {
        "status": "stopped" if outcome.stopped else "ok",
        "answer": outcome.answer,
        "stopped": outcome.stopped,
        "session": session,
        "exports": str(exports),
        "cells": progress.cells,
        "children": progress.children,
        "reports": progress.reports,
        "silent_children": list(outcome.silent),
        "seconds": round(progress.elapsed_s, 3),
    }


def _note(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
