"""The command line: its verbs, and what it says without one.

The modules of the verbs import the bridge inside their functions: help, a typo
and the first lines must not wait for half of it.
"""

import typer
from typer.core import TyperGroup

from .boundary import say
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

app = typer.Typer(
    cls=TyperGroup,
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
