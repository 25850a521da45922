"""Where things live: the state root, a session's directory, the socket directory."""

import contextlib
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from kernel_ext.wire.codes import ErrorCode

from .durable import make_private_directory
from .errors import SetupError

__all__ = (
    "SessionPaths",
    "StateRoot",
    "check_session_id",
    "new_socket_directory",
    "socket_directories",
)

_SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_MAX_SOCKET_PATH_BYTES = 103
"""What macOS allows for a unix socket's path, less its NUL; Linux allows 107."""

_LAST_RESORT = "/tmp"  # noqa: S108  # a 0700 directory of this user is made in it, and its owner is checked


def check_session_id(session_id: str) -> str:
    """Return *session_id*, which becomes a directory's name.

    Raises:
        SetupError: CONFIG_INVALID; it could leave its directory, or is too long.
    """
    if not _SESSION_ID.fullmatch(session_id):
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            "a session id is 1 to 200 of A-Z a-z 0-9 . _ - and begins with a letter "
            "or a digit",
        )
    return session_id


@dataclass(frozen=True, slots=True)
class SessionPaths:
    """One session's directory and what stands in it (specification 12.1)."""

    directory: Path

    @property
    def exports(self) -> Path:
        """Files that cells hand to each other and to people."""
        return self.directory / "exports"

    @property
    def runtime(self) -> Path:
        """Which processes and socket directory the session uses now."""
        return self.directory / "runtime.json"

    @property
    def ipython(self) -> Path:
        """IPython's own files; a person's start-up files stay out of a session."""
        return self.directory / "ipython"

    def make(self) -> "SessionPaths":
        """Make the directories, private to this user.

        Raises:
            SetupError: STATE_ROOT_UNUSABLE.
        """
        sessions = self.directory.parent
        for directory in (sessions, self.directory, self.exports, self.ipython):
            make_private_directory(directory)
        return self

    def remove_if_empty(self) -> bool:
        """Remove the session unless its cells left files in it.

        Only what we made is removed; whether the rest is empty, the system decides.

        Returns:
            Whether it is gone.
        """
        with contextlib.suppress(OSError):
            self.exports.rmdir()
            shutil.rmtree(self.ipython, ignore_errors=True)
            self.runtime.unlink(missing_ok=True)
            self.directory.rmdir()
        return not self.directory.exists()


@dataclass(frozen=True, slots=True)
class StateRoot:
    """The one root of everything that outlives a process.

    Attributes:
        directory: Absolute.
        reason: Why this one, for people.
    """

    directory: Path
    reason: str

    @classmethod
    def find(cls, environ: Mapping[str, str] = os.environ) -> "StateRoot":
        """``RLM_KERNEL_HOME``, else this user's data directory."""
        if chosen := environ.get("RLM_KERNEL_HOME", "").strip():
            path = Path(chosen).expanduser()
            return cls(path.absolute(), "RLM_KERNEL_HOME")
        path = platformdirs.user_data_path("rlm-kernel", appauthor=False)
        return cls(path, "the user's data directory")

    def session(self, session_id: str) -> SessionPaths:
        """The paths of one session; nothing is made yet.

        Raises:
            SetupError: CONFIG_INVALID for an unusable id.
        """
        return SessionPaths(self.directory / "sessions" / check_session_id(session_id))

    @property
    def sessions(self) -> Path:
        """The directory of all sessions."""
        return self.directory / "sessions"

    @property
    def dsh(self) -> Path:
        """Private homes of the harness."""
        return self.directory / "dsh"


def _socket_bases(environ: Mapping[str, str]) -> list[Path]:
    user = os.geteuid() if sys.platform != "win32" else 0
    places = (environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), _LAST_RESORT)
    # A place of the system's is used as it is, never made by us.
    found = [Path(place) for place in places if place and Path(place).is_absolute()]
    return [place / f"rlm-kernel-{user}" for place in dict.fromkeys(found)]


def socket_directories(
    environ: Mapping[str, str] = os.environ,
) -> Iterator[tuple[int, Path]]:
    """Every socket directory of this user, with the process that made it."""
    for base in _socket_bases(environ):
        for directory in sorted(base.glob("*-*")):
            with contextlib.suppress(ValueError):
                yield int(directory.name.partition("-")[0], 16), directory


def new_socket_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Make a short directory for unix sockets, for this user alone (0700).

    A socket's path has about 100 bytes, and a temporary directory or a state
    root can have more: the first of a few bases that leaves room is used.

    Raises:
        SetupError: STATE_ROOT_UNUSABLE; no base is usable. The text names them.
    """
    tried = []
    for base in _socket_bases(environ):
        directory = base / f"{os.getpid():x}-{secrets.token_hex(4)}"
        if len(os.fsencode(directory / "bridge.sock")) > _MAX_SOCKET_PATH_BYTES:
            tried.append(f"{base} (too long)")
            continue
        if not base.parent.is_dir():
            tried.append(f"{base.parent} (not there)")
            continue
        try:
            make_private_directory(base)
            return make_private_directory(directory)
        except SetupError as error:
            tried.append(str(error))
    raise SetupError(
        ErrorCode.STATE_ROOT_UNUSABLE,
        f"no directory is usable for sockets: {'; '.join(tried)}",
        next_step="set XDG_RUNTIME_DIR to a short directory of your own",
    )
