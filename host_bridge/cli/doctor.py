"""``rlm-kernel doctor``: what this machine has, and the command for what it lacks."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from .boundary import EXIT_ERROR, print_json, run_command, say

if TYPE_CHECKING:
    from ..doctor import Finding

__all__ = ("run_doctor",)

_MARKS = {"ok": "ok", "note": " !", "fault": " x"}


def run_doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Start the harness too, in a temporary home.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine; changes nothing, uses no network and no key."""

    async def work() -> "list[Finding]":
        from ..app import try_harness
        from ..doctor import examine

        return await examine(deep=deep, start_harness=try_harness)

    findings = run_command(work(), as_json=as_json)
    sound = all(finding.level != "fault" for finding in findings)
    if as_json:
        rows = [asdict(finding) for finding in findings]
        print_json({"status": "ok" if sound else "fault", "findings": rows})
    else:
        for finding in findings:
            say(f"{_MARKS[finding.level]}  {finding.topic:<12} {finding.text}")
            if finding.command:
                say(f"    {'':<12} -> {finding.command}")
        say("Next: rlm-kernel demo" if sound else "Next: the command after each x")
    if not sound:
        raise typer.Exit(EXIT_ERROR)
