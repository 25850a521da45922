"""The command line: its verbs, and what it says without one.

The modules of the verbs import the bridge inside their functions: help, a typo
and the first lines must not wait for half of it.
"""

import difflib
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from .boundary import note, say
from .demo import run_demo
from .doctor import run_doctor
from .exec import exec_cell
from .install import install_kernel
from .run import run_task

__all__ = ("app",)

_WELCOME = """\
rlm-kernel: a language model works in a persistent IPython kernel, and
DeepSeek Harness runs its children. Three ways in:

  rlm-kernel demo                 see it work: no key, no network
  rlm-kernel run "task"           give a model a task
  rlm-kernel install              the kernel RLM in JupyterLab and notebooks

  rlm-kernel exec "6*7"           one cell in a managed kernel
  rlm-kernel doctor               check this machine; changes nothing

Next: rlm-kernel demo"""


class _Verbs(TyperGroup):
    """The verbs; a line that is not understood says what to type next."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line."""
        try:
            return super().main(*args, **options)
        except SystemExit as end:
            # A usage error has been shown: click's, or of typer's copy of click.
            if hasattr(end.__context__, "format_message"):
                note(f"Next: {self._next_step(end.__context__)}")
            raise

    def _next_step(self, error: Any) -> str:
        verb = getattr(getattr(error, "ctx", None), "info_name", None)
        if verb in self.commands:
            return f"rlm-kernel {verb} --help"
        words = [word for word in sys.argv[1:] if not word.startswith("-")]
        near = difflib.get_close_matches(words[0] if words else "", self.commands)
        return f"rlm-kernel {near[0] if near else '--help'}"


app = typer.Typer(
    cls=_Verbs,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("demo")(run_demo)
app.command("run")(run_task)
app.command("exec")(exec_cell)
app.command("install")(install_kernel)
app.command("doctor")(run_doctor)


@app.callback()
def _welcome(context: typer.Context) -> None:
    """A model in a persistent kernel; DeepSeek Harness runs its children."""
    if context.invoked_subcommand is None:
        say(_WELCOME)
