"""``rlm-kernel demo``: the main job on real input, offline."""

import contextlib
import json
import uuid
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .boundary import EXIT_ERROR, EXIT_STOPPED, print_json, run_command, say

if TYPE_CHECKING:
    from ..paths import SessionPaths

__all__ = ("run_demo",)


def run_demo(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print counts and times as JSON.")
    ] = False,
) -> None:
    """Make a licence inventory with three children: no key, no network.

    The harness and the kernels are real; a loopback server plays the model.
    """
    facts = run_command(_demo(quiet=as_json), as_json=as_json)
    if as_json:
        print_json(facts)
    if facts["stopped"]:
        raise typer.Exit(EXIT_STOPPED)
    if not facts["sum_matched"] or facts["processes_left"]:
        raise typer.Exit(EXIT_ERROR)


async def _demo(*, quiet: bool) -> dict[str, Any]:
    from ..app import scripted_model_bridge
    from ..demo.job import TASK, licence_script
    from ..paths import StateRoot
    from ..resources import ResourceWatch
    from .driving import drive
    from .progress import Progress

    write = (lambda line: None) if quiet else say
    write("A licence inventory of this Python environment, with a scripted model.")
    state = StateRoot.find()
    session = f"demo-{uuid.uuid4().hex[:12]}"
    bridge = await scripted_model_bridge(state, session, licence_script)
    progress = Progress(bridge.agents, write)
    async with ResourceWatch() as watch:
        outcome = await drive(bridge, session, TASK, progress)
    answer_s = progress.first_s["answer"]
    left = watch.still_running()
    found = _read_inventory(state.session(session))
    if not outcome.stopped:
        write(f"\n{outcome.answer}\n")
    write(
        f"{progress.children} children, {progress.reports} reports, {answer_s:.1f} s, "
        f"{watch.peak_mb} MB at most, {left} processes left."
    )
    write("Next: rlm-kernel install --scripted   (the kernel RLM in Jupyter)")
    return {
        "harness": bridge.harness.version,
        "cells": progress.cells,
        "children": progress.children,
        "reports": progress.reports,
        "distributions": found.get("distributions", 0),
        "sum_matched": found.get("sum_matched", False),
        "licences": found.get("licences", {}),
        "stopped": outcome.stopped,
        "times_s": {
            **progress.first_s,
            "all_closed": round(progress.elapsed_s, 3),
        },
        "peak_memory_mb": watch.peak_mb,
        "processes_left": left,
        "exports": str(state.session(session).exports),
    }


def _read_inventory(paths: "SessionPaths") -> dict[str, Any]:
    """What the root's last cell wrote; empty when the run did not come so far."""
    from ..demo.job import INVENTORY_FILE

    found: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((paths.exports / INVENTORY_FILE).read_text(encoding="utf-8"))
    return found
