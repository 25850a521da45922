"""What the runtime is started with: settings, command, environment, patch rows."""

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_ext.wire.codes import ErrorCode

from ...errors import HarnessError
from ..port import Route

__all__ = (
    "CHILD_PROVIDER",
    "DshSettings",
    "build_environment",
    "build_patch",
    "find_command",
    "installed_version",
)

CHILD_PROVIDER = "rlm-spawn"
"""The subagent provider of our children; the built-in one may be configured away."""

_MAX_ACTIVE_CHILDREN = 256
"""Of one root. Line 0.2 stops at 8 by itself; line 0.1 has no limit and ignores it."""

_PLUGIN = Path(__file__).parent / "plugin" / "rlm_bridge.mjs"
_DISTRIBUTION = "deepseek-harness-runtime-bin"
_INSTALL = 'pip install "rlm-kernel[dsh]"'
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_PASSED_ON = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TZ"),
        *("LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "LC_MESSAGES"),
        # What Windows programs can not start without.
        *("SYSTEMROOT", "SYSTEMDRIVE", "WINDIR", "COMSPEC", "PATHEXT"),
        *("USERPROFILE", "APPDATA", "LOCALAPPDATA", "PROGRAMDATA", "PROGRAMFILES"),
        # The way to the model server, and whom to trust on it.
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NODE_USE_ENV_PROXY"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS", "NODE_USE_SYSTEM_CA"),
    }
)
"""Variables that DSH gets from us, by their upper-case names; no other is passed on."""

_UPLOADS = ("session-log-deepseek", "plugin-package-inventory-deepseek")
"""Rows that send the session's log and the list of plugins with each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DshSettings:
    """How to run one DSH.

    Attributes:
        home: Its private home; made, with mode 0700.
        workspace: Its working directory; exists. A ``.env`` in it is read by DSH.
        default_route: The route that DSH itself starts with.
        base_url: The server of the provider ``deepseek-official``; None: DSH's own.
        credentials: The text of its credentials file, if there is any credential.
        redact: Takes the credential out of what DSH says when it does not start.
        extra_patch_rows: Further rows, such as ``llm-pi-ai`` with its providers.
        permission_mode: None leaves DSH's own default.
        start_timeout_s: Until it must be up.
    """

    home: Path
    workspace: Path
    default_route: Route
    base_url: str | None = None
    credentials: bytes | None = field(default=None, repr=False)
    redact: Callable[[str], str] = str
    extra_patch_rows: Sequence[Mapping[str, Any]] = ()
    permission_mode: str | None = None
    start_timeout_s: float = 60.0

    @property
    def scratch(self) -> Path:
        """Its temporary directory, in its home."""
        return self.home / "tmp"


def find_command() -> tuple[str, ...]:
    """The command of the runtime that the wheel brings.

    Raises:
        HarnessError: HARNESS_UNAVAILABLE; not installed, or not for this platform.
    """
    try:
        from deepseek_harness_runtime import resolve_bundled_launch_args
    except ImportError as error:
        raise HarnessError(
            ErrorCode.HARNESS_UNAVAILABLE,
            "DeepSeek Harness is not installed in this environment",
            next_step=_INSTALL,
        ) from error
    try:
        return tuple(resolve_bundled_launch_args())
    except (OSError, ValueError) as error:
        raise HarnessError(
            ErrorCode.HARNESS_UNAVAILABLE,
            f"the installed DeepSeek Harness has no runtime for this platform "
            f"({sys.platform})",
            next_step=_INSTALL,
        ) from error


def installed_version() -> str:
    """The version of the installed runtime, for people."""
    try:
        version = importlib.metadata.version(_DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "DeepSeek Harness (not installed)"
    return f"DeepSeek Harness {version}"


def build_environment(
    settings: DshSettings,
    bridge: Mapping[str, str],
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The whole environment of DSH: chosen by us, and without a credential.

    Args:
        settings: Of this DSH.
        bridge: What the plugin needs to reach us.
        environ: The environment to choose from.
    """
    chosen = {n: v for n, v in environ.items() if n.upper() in _PASSED_ON}
    chosen |= {
        "DSH_HOME": str(settings.home),
        # What DSH puts aside of long results goes when its home goes.
        **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(settings.scratch)),
        "DSH_TELEMETRY_MODE": "DISABLED",
        **bridge,
    }
    # The demo's model server is on this machine: no proxy may stand between.
    direct = [environ.get("NO_PROXY", ""), environ.get("no_proxy", ""), *_LOOPBACK]
    names = [name.strip() for part in direct for name in part.split(",")]
    chosen["NO_PROXY"] = chosen["no_proxy"] = ",".join(
        dict.fromkeys(name for name in names if name)
    )
    if settings.base_url is not None:
        chosen["DEEPSEEK_BASE_URL"] = settings.base_url
    if settings.permission_mode is not None:
        chosen["DSH_PERMISSION_MODE"] = settings.permission_mode
    return chosen


def build_patch(settings: DshSettings) -> bytes:
    """The patch file of DSH: JSON, which is YAML as well."""
    inserted = [
        {
            "id": "rlm-kernel-spawn",
            "name": "@deepseek-ai/dsh-subagent-spawn-in-process",
            "config": {"providerName": CHILD_PROVIDER},
        },
        {
            "id": "rlm-kernel-bridge",
            "name": str(_PLUGIN),
            "config": {"provider": CHILD_PROVIDER},
        },
    ]
    rows: list[Mapping[str, Any]] = [
        *({"id": row, "disabled": True} for row in _UPLOADS),
        {"id": "subagent", "config": {"maxActiveSubagents": _MAX_ACTIVE_CHILDREN}},
        *settings.extra_patch_rows,
        {"insert": inserted},
    ]
    return json.dumps(rows, indent=1).encode()
