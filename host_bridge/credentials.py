"""The one module that sees a key: reads it, erases it, writes DSH's file of it."""

import ctypes
import json
import os
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path

from kernel_ext.wire.codes import ErrorCode

from .errors import SetupError

__all__ = ("Credential", "close_to_other_processes", "read_credential")

_PR_SET_DUMPABLE = 4


@dataclass(frozen=True, slots=True)
class Credential:
    """A key under the name by which the harness asks for it. Shows no value."""

    name: str
    _value: str = field(repr=False)

    def as_dsh_file(self) -> bytes:
        """The content of DSH's credentials file; JSON is YAML too."""
        return json.dumps({"version": 1, "refs": {self.name: self._value}}).encode()


def read_credential(
    name: str, *, variable: str, file: Path | None = None
) -> Credential | None:
    """Take a key from *file*, else from the environment, which loses it.

    Args:
        name: What the harness calls it.
        variable: The environment variable. Its value is overwritten in this
            process's environment block and is not passed to any child.
        file: A file of this user's, unreadable by others (0600).

    Returns:
        The key; None where neither has one.

    Raises:
        SetupError: CONFIG_INVALID; the file is missing, empty or readable by others.
    """
    from_environment = os.environ.get(variable, "").strip()
    _erase(variable)
    value = _from_file(file) if file is not None else from_environment
    return Credential(name, value) if value else None


def close_to_other_processes() -> None:
    """Keep this process's memory and environment from other processes (Linux).

    One that runs as root reads them still.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def _from_file(file: Path) -> str:
    try:
        mode = file.stat().st_mode
        value = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(
            ErrorCode.CONFIG_INVALID, f"the key file {file} can not be read."
        ) from error
    if os.name == "posix" and mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            f"others can read the key file {file}.",
            next_step=f"chmod 600 {file}",
        )
    if not value:
        raise SetupError(ErrorCode.CONFIG_INVALID, f"the key file {file} is empty.")
    return value


def _erase(variable: str) -> None:
    """Overwrite a variable where the system shows it; ``pop`` alone does not."""
    value = os.environ.get(variable)
    if value is None:
        return
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.getenv.restype = ctypes.c_void_p
        address = library.getenv(os.fsencode(variable))
        if address:
            ctypes.memset(address, 0, len(os.fsencode(value)))
    os.environ.pop(variable, None)
