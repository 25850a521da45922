"""Writes the kernelspec ``rlm``, by which every Jupyter front end finds us."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager

from kernel_ext.wire.codes import ErrorCode

from .errors import SetupError
from .model import ModelChoice

__all__ = ("KERNEL_NAME", "install", "kernelspec")

KERNEL_NAME = "rlm"


def kernelspec(choice: ModelChoice) -> dict[str, Any]:
    """The content of ``kernel.json``: its argv is the bridge, not the kernel.

    Args:
        choice: The model for the children; stored in the spec, without a key.
    """
    return {
        "argv": [
            sys.executable,
            "-m",
            "host_bridge.cli.kernel",
            "-f",
            "{connection_file}",
        ],
        "display_name": "RLM (scripted)" if choice.scripted else "RLM",
        "language": "python",
        # A signal would reach the bridge alone, and can not end an await.
        "interrupt_mode": "message",
        "metadata": {"supported_encryption": "curve", "debugger": True},
        # The notebook's directory must not shadow the bridge's modules.
        "env": {"PYTHONSAFEPATH": "1", **choice.as_environment()},
    }


def install(choice: ModelChoice, *, prefix: str | None = None) -> Path:
    """Install or replace the kernelspec ``rlm``.

    Args:
        choice: The model for the children.
        prefix: A Python environment; None installs for this user.

    Returns:
        The directory of the spec.

    Raises:
        SetupError: STATE_ROOT_UNUSABLE; the place can not be written.
    """
    content = json.dumps(kernelspec(choice), indent=1)
    with tempfile.TemporaryDirectory() as directory:
        # Copied with its mode: the temporary directory itself is for us alone.
        source = Path(directory) / KERNEL_NAME
        source.mkdir()
        (source / "kernel.json").write_text(content, encoding="utf-8")
        try:
            written = KernelSpecManager().install_kernel_spec(
                str(source), KERNEL_NAME, user=prefix is None, prefix=prefix
            )
        except OSError as error:
            raise SetupError(
                ErrorCode.STATE_ROOT_UNUSABLE,
                f"the kernelspec can not be written: {error.strerror or error}.",
                next_step=f"rlm-kernel install{'' if prefix else ' --sys-prefix'}",
            ) from error
    return Path(written)
