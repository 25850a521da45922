"""The managed kernel application: ``python -m kernel_ext -f CONNECTION_FILE``."""

import json
import os
import signal
import sys
from pathlib import Path

from ipykernel.kernelapp import IPKernelApp
from traitlets import List, Unicode

__all__ = ("ManagedKernelApp", "main")


class ManagedKernelApp(IPKernelApp):
    """An ipykernel application with the kernel side loaded and no water marks."""

    name = Unicode("rlm-kernel")
    extra_extensions = List(Unicode(), default_value=["kernel_ext"])

    def init_sockets(self) -> None:
        """Open the sockets, then lift the limit that would drop a request."""
        super().init_sockets()
        # 1,000 queued messages is the default; the next one is lost without a
        # word (reference performance.md 3.4). Peers join later, so it holds.
        self.iopub_thread.socket.sndhwm = 0

    def init_kernel(self) -> None:
        """Make the kernel; where a bridge leads its group, interrupt the group.

        ipykernel signals only itself then, and a child that a cell waits for
        would run on. The bridge ignores the signal.
        """
        super().init_kernel()
        if os.name == "posix" and os.getpgrp() == os.getppid():
            self.kernel._send_interrupt_children = lambda: os.killpg(
                os.getpgrp(), signal.SIGINT
            )

    def init_connection_file(self) -> None:
        """Read the connection file; refuse one without a key (design 3.12)."""
        super().init_connection_file()
        # Asked of the file: a session without a key makes one up.
        path = self.abs_connection_file
        if not Path(path).exists() or not json.loads(Path(path).read_bytes()).get("key"):
            msg = "the connection file has no key: refusing to run"
            raise SystemExit(msg)


def main() -> None:
    """Run the kernel until it is shut down or its owner ends."""
    _die_with_owner()
    ManagedKernelApp.launch_instance()


def _die_with_owner() -> None:
    """End with the bridge, even while C code holds the interpreter's lock.

    ipykernel polls its parent from a Python thread; that is the only guard on
    other systems than Linux.
    """
    owner = int(os.environ.get("JPY_PARENT_PID") or 0)
    if sys.platform != "linux" or owner <= 0:
        return
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != owner:  # it ended before the call above
        raise SystemExit(1)


if __name__ == "__main__":
    main()
