"""The one writer of files the bridge owns (design 3.11)."""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from kernel_ext.wire.codes import ErrorCode

from .errors import SetupError

__all__ = ("make_private_directory", "publish")


def make_private_directory(path: Path) -> Path:
    """Make *path* and its missing parents, each for the owner alone (0700).

    Args:
        path: An absolute path. An existing directory must belong to this user;
            one that others may enter is closed to them.

    Returns:
        *path*.

    Raises:
        SetupError: STATE_ROOT_UNUSABLE; it can not be made, or is not ours.
    """
    try:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for directory in reversed(missing):
            # Another process may make the same directory at the same time.
            with contextlib.suppress(FileExistsError):
                directory.mkdir(mode=0o700)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise _unusable(path, "it is not a directory")
        if os.name == "posix":
            if found.st_uid != os.geteuid():
                raise _unusable(path, "it belongs to another user")
            if found.st_mode & 0o077:
                path.chmod(0o700)
    except OSError as error:
        raise _unusable(path, error.strerror or "it can not be made") from error
    return path


def publish(path: Path, data: bytes) -> None:
    """Put *data* at *path* whole or not at all, readable by the owner alone (0600).

    The bytes are on the disk before the name shows them.

    Raises:
        SetupError: STATE_ROOT_UNUSABLE; the old content, if any, is untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_directory(path.parent)
    except OSError as error:
        raise _unusable(path.parent, error.strerror or "writing failed") from error


def _sync_directory(path: Path) -> None:
    if os.name != "posix":  # Windows has no handle of a directory to sync
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unusable(path: Path, reason: str) -> SetupError:
    return SetupError(
        ErrorCode.STATE_ROOT_UNUSABLE,
        f"{path} can not be used: {reason}.",
        next_step="set RLM_KERNEL_HOME to a directory of your own",
    )
