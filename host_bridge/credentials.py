"""The one module that sees a key: reads it, erases it, writes DSH's file of it."""

import ctypes
import json
import os
import shlex
import stat
import sys
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from kernel_ext.wire.codes import ErrorCode

from .errors import SetupError

__all__ = (
    "WELL_KNOWN_KEYS",
    "Credential",
    "close_to_other_processes",
    "forget_keys",
    "read_credential",
)

WELL_KNOWN_KEYS = ("DEEPSEEK_API_KEY", "OPENAI_API_KEY")
"""Variables by which people hand their keys to programs."""

_PR_SET_DUMPABLE = 4
_REDACTED = "[credential]"
_MIN_SECRET_CHARS = 6
"""What is shorter stands in ordinary words, and protects nothing."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A key under the name by which the harness asks for it. Shows no value."""

    name: str
    _value: str = field(repr=False)
    is_secret: bool = True

    @classmethod
    def placeholder(cls, name: str, value: str) -> "Credential":
        """What a harness gets that asks for a key where there is none."""
        return cls(name, value, is_secret=False)

    def redact(self, text: str) -> str:
        """*text* without the key, as it is or as JSON and URLs write it."""
        if not self.is_secret or len(self._value) < _MIN_SECRET_CHARS:
            return text
        forms = {self._value, json.dumps(self._value)[1:-1], quote(self._value, "")}
        for form in sorted(forms, key=len, reverse=True):
            text = text.replace(form, _REDACTED)
        return text

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
        SetupError: CONFIG_INVALID; the file is missing, empty or readable by others,
            or what stands there is no key.
    """
    from_environment = os.environ.get(variable, "").strip()
    _erase(variable)
    value = _from_file(file) if file is not None else from_environment
    if not value:
        return None
    if not value.isascii() or not value.isprintable() or " " in value:
        # No HTTP header can carry it, and it is most likely something else.
        place = f"the key file {file}" if file is not None else variable
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            f"{place} holds no key: a key is one word of ASCII.",
        )
    return Credential(name, value)


def forget_keys() -> None:
    """Overwrite the well-known keys in this process's environment block.

    For what needs none: `read_credential` does it for the one that it reads.
    """
    for variable in WELL_KNOWN_KEYS:
        _erase(variable)


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
            next_step=f"chmod 600 {shlex.quote(str(file))}",
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
