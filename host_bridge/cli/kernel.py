"""The kernelspec's argv: start the kernel at once, then become its bridge."""

import argparse
import os
import secrets
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

    from ..paths import StateRoot

__all__ = ("main",)


def main() -> None:
    """Run a front end's kernel; end as it ends."""
    parser = argparse.ArgumentParser(prog="python -m host_bridge.cli.kernel")
    parser.add_argument("-f", dest="connection_file", type=Path, required=True)
    arguments = parser.parse_args()
    if os.name == "posix":
        # Interrupts come as messages; a stray signal is the kernel's business.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    from ..errors import HostBridgeError
    from ..frontend import end_like
    from .boundary import EXIT_UNUSABLE, show_error

    try:
        status = _run(arguments.connection_file)
    except HostBridgeError as error:
        # The front end shows what we write, and an exit before any answer.
        show_error(error)
        status = EXIT_UNUSABLE
    end_like(status)


def _run(connection_file: Path) -> int:
    import asyncio

    from ..credentials import close_to_other_processes
    from ..frontend import launch_kernel
    from ..kernels.environment import KernelVariables, kernel_environment
    from ..kernels.kernel import KernelSettings
    from ..paths import StateRoot

    # Before the kernel is there to look.
    close_to_other_processes()
    state = StateRoot.find()
    session = f"notebook-{secrets.token_hex(6)}"
    paths = state.session(session).make()
    variables = KernelVariables(
        session_dir=paths.directory,
        ipython_dir=None,
        generation=f"1-{secrets.token_hex(8)}",
        depth=0,
        max_depth=KernelSettings().max_depth,
    )
    # Before the heavy imports: the kernel starts while the bridge loads.
    process = launch_kernel(
        connection_file, kernel_environment(variables), environ=os.environ
    )
    # Whenever we are to end, the kernel goes first and we follow in good order.
    for name in ("SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, lambda *_: process.terminate())
    try:
        return asyncio.run(
            _serve(process, connection_file, state, session, variables.generation)
        )
    finally:
        if process.poll() is None:
            process.kill()
        paths.remove_if_empty()


async def _serve(
    process: "subprocess.Popen[bytes]",
    connection_file: Path,
    state: "StateRoot",
    session: str,
    generation: str,
) -> int:
    from ..app import NotebookBridge
    from ..frontend import FrontEndKernel
    from ..model import ModelChoice

    bridge = NotebookBridge(
        state, session, cwd=Path.cwd(), choice=ModelChoice.from_environment()
    )
    kernel = FrontEndKernel(
        process,
        connection_file,
        agent_id=session,
        generation=generation,
        dispatch=bridge.dispatch,
    )
    try:
        return await kernel.run()
    finally:
        await bridge.close()


if __name__ == "__main__":
    main()
