"""The kernel side of rlm-kernel: an IPython extension and a kernel application.

``%load_ext kernel_ext`` brings ``rlm``, ``agent_message``, ``dsh_tools`` and
``host_request`` into the namespace. ``python -m kernel_ext -f FILE`` is a kernel
in which that has happened, and which a host bridge owns.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ("load_ipython_extension", "unload_ipython_extension")


def load_ipython_extension(shell: "InteractiveShell") -> None:
    """Install the proxies into *shell* (called by ``%load_ext``)."""
    from . import extension

    extension.install(shell)


def unload_ipython_extension(shell: "InteractiveShell") -> None:
    """Take the proxies out of *shell* again (called by ``%unload_ext``)."""
    from . import extension

    extension.remove(shell)
