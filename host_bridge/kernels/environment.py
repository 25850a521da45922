"""The environment of a kernel: a fixed set, an allowlist, and ours. Nothing else."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernel_ext.wire.codes import ErrorCode

from ..errors import SetupError

__all__ = ("SYSTEM_VARIABLES", "KernelVariables", "kernel_environment")

SYSTEM_VARIABLES = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LANGUAGE",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    # Windows: without these a process finds neither its libraries nor its user
    "SYSTEMROOT",
    "COMSPEC",
    "PATHEXT",
    "TEMP",
    "TMP",
    "USERPROFILE",
    "APPDATA",
    "LOCALAPPDATA",
)
"""Passed on where the bridge has them. None of them holds a credential."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariables:
    """What a kernel is told about itself (specification 9).

    *ipython_dir* None leaves IPython's own files where the person has them: in a
    notebook their profile and history belong to them.
    """

    session_dir: Path
    ipython_dir: Path | None
    generation: str
    depth: int
    max_depth: int

    def as_environment(self) -> dict[str, str]:
        """The variables by name; they inform, the host checks again."""
        own = {} if self.ipython_dir is None else {"IPYTHONDIR": str(self.ipython_dir)}
        return own | {
            "RLM_SESSION_DIR": str(self.session_dir),
            "RLM_GENERATION": self.generation,
            "RLM_DEPTH": str(self.depth),
            "RLM_MAX_DEPTH": str(self.max_depth),
            "JPY_PARENT_PID": str(os.getpid()),
        }


def kernel_environment(
    variables: KernelVariables,
    *,
    allowlist: Iterable[str] = (),
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Build the whole environment of a kernel.

    Args:
        variables: What the kernel is told about itself.
        allowlist: More names to pass on; empty by default.
        environ: Where the values come from.

    Raises:
        SetupError: CONFIG_INVALID when the allowlist names one of ours.
    """
    ours = variables.as_environment()
    names = list(allowlist)
    if taken := sorted(
        name for name in names if name in ours or name.startswith("RLM_")
    ):
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            f"env_allowlist names variables that the bridge sets: {', '.join(taken)}",
        )
    passed = {
        name: environ[name] for name in (*SYSTEM_VARIABLES, *names) if name in environ
    }
    return {**passed, **ours}
