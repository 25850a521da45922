"""``rlm-kernel install``: the kernel RLM for JupyterLab, notebooks and consoles."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from .boundary import print_json, run_command, say

__all__ = ("install_kernel",)


def install_kernel(
    scripted: Annotated[
        bool, typer.Option("--scripted", help="Children use the scripted model.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="The children's model, provider/model.")
    ] = None,
    base_url: Annotated[
        str | None, typer.Option(help="An OpenAI-compatible server for them.")
    ] = None,
    key_env: Annotated[
        str | None,
        typer.Option(help="The variable with the key, where Jupyter starts."),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="A 0600 file with the key instead.")
    ] = None,
    sys_prefix: Annotated[
        bool, typer.Option(help="Into this Python environment, not for the user.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Write the kernelspec rlm. A key is never stored in it."""

    async def work() -> Path:
        from ..kernelspec import install
        from ..model import ModelChoice

        choice = ModelChoice(
            model=model,
            base_url=base_url,
            key_variable=key_env,
            key_file=key_file.absolute() if key_file else None,
            scripted=scripted,
        )
        choice.check()
        return install(choice, prefix=sys.prefix if sys_prefix else None)

    directory = run_command(work(), as_json=as_json)
    if as_json:
        print_json({"status": "ok", "kernelspec": str(directory)})
        return
    say(f"The kernel RLM is installed: {directory}")
    say("Next: jupyter lab   (choose the kernel RLM)")
