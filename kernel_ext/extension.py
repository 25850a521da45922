"""Installs the kernel side into a shell: proxies, aliases, control handlers."""

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from . import origin
from .client import CLIENT_ATTRIBUTE, HostClient
from .control import ControlDispatch
from .errors import HostError
from .proxies.agent_message import AgentMessage
from .proxies.dsh_tools import DshTools
from .proxies.rlm import Rlm

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ("install", "remove")

_ATTRIBUTE = "_rlm_kernel_ext"


@dataclass(slots=True)
class _Installed:
    """What `install` did, for `remove`."""

    control: ControlDispatch
    listener: Callable[[], None]
    names: dict[str, Any]
    aliases: tuple[str, ...]


class _ProxyModule(ModuleType):
    """A module that is its proxy: ``import rlm; await rlm("…")`` works."""

    def __init__(self, name: str, proxy: Any) -> None:
        super().__init__(name, type(proxy).__doc__)
        self.__dict__[name] = proxy
        self._proxy = proxy

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._proxy(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)


def install(shell: "InteractiveShell") -> None:
    """Bring the proxies into *shell* and attach to its kernel's control channel.

    In a managed kernel ``from rlm import rlm``, ``import agent_message`` and
    ``import dsh_tools`` work as well (design 3.8). Elsewhere nothing is put
    under those names, and one line says what is missing.

    Raises:
        RuntimeError: *shell* is no Jupyter kernel's.
    """
    kernel = getattr(shell, "kernel", None)
    if kernel is None:
        msg = "kernel_ext needs a Jupyter kernel; in plain IPython there is no host"
        raise RuntimeError(msg)
    if getattr(kernel, _ATTRIBUTE, None) is not None:
        return
    generation = os.environ.get("RLM_GENERATION", "")

    def publish(comm_id: str, data: dict[str, Any], parent: dict[str, Any]) -> None:
        kernel.session.send(
            kernel.iopub_socket,
            "comm_msg",
            {"comm_id": comm_id, "data": data},
            parent=parent,
            ident=b"comm-" + comm_id.encode(),
        )

    # Kept across a reload: the host knows the requests of this process by their
    # ids, and would take a second number 1 for the first.
    client: HostClient | None = getattr(kernel, CLIENT_ATTRIBUTE, None)
    if client is None:
        client = HostClient(publish, generation=generation)
        setattr(kernel, CLIENT_ATTRIBUTE, client)
    control = ControlDispatch(kernel, client)
    control.install()
    proxies = {
        "rlm": Rlm(client),
        "agent_message": AgentMessage(client),
        "dsh_tools": DshTools(client),
    }
    names = {**proxies, "host_request": client.request, "HostError": HostError}
    if generation:  # the specification's bootstrap, section 9
        names["asyncio"] = asyncio
    # Not user_ns alone: hidden names stay out of %who and of "what changed".
    shell.push(names, interactive=False)
    aliases = tuple(proxies) if generation else ()
    for name in aliases:
        sys.modules[name] = _ProxyModule(name, proxies[name])
    installed = _Installed(control, origin.track(shell), names, aliases)
    setattr(kernel, _ATTRIBUTE, installed)
    if not generation:
        _say_what_is_missing()


def remove(shell: "InteractiveShell") -> None:
    """Undo `install`; names that the person has rebound are left alone."""
    kernel = getattr(shell, "kernel", None)
    installed: _Installed | None = getattr(kernel, _ATTRIBUTE, None)
    if installed is None:
        return
    installed.control.remove()
    origin.forget(shell, installed.listener)
    shell.drop_by_id(installed.names)
    for name in installed.aliases:
        sys.modules.pop(name, None)
    setattr(kernel, _ATTRIBUTE, None)


def _say_what_is_missing() -> None:
    sys.stdout.write(
        "kernel_ext: rlm, agent_message, dsh_tools and host_request are here.\n"
        "This kernel was not started by rlm-kernel: until a host bridge attaches,\n"
        "each request ends with HOST_UNAVAILABLE after 5 s, and `import rlm` is not\n"
        "set up. Choose the kernel RLM (rlm-kernel install) to have both.\n"
    )
