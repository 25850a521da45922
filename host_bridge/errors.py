"""Errors of the host bridge: one class per cause a caller treats differently.

    HostBridgeError              .code, .next_step
    ├ RequestError               a request that is refused or failed; goes to the kernel
    ├ KernelError                a kernel that can not start, or is gone
    ├ HarnessError               the harness refused, failed or is gone
    └ SetupError                 this machine or this command line; only at start

The message of each is fit to be shown: no secret, no contents, no path outside
the caller's own.
"""

from kernel_ext.wire.codes import ErrorCode

__all__ = (
    "HarnessError",
    "HostBridgeError",
    "KernelError",
    "RequestError",
    "SetupError",
)


class HostBridgeError(Exception):
    """Something that has a code, a text to show, and perhaps a next step.

    Attributes:
        code: What a caller may branch on.
        next_step: The command that leads on, or None.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, next_step: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.next_step = next_step


class RequestError(HostBridgeError):
    """A host request that is refused or failed."""


class KernelError(HostBridgeError):
    """A kernel that can not be started, reached, or used any more."""


class HarnessError(HostBridgeError):
    """The harness refused an operation, failed it, or is gone."""


class SetupError(HostBridgeError):
    """Something about this machine, its files or the command line is unusable."""
