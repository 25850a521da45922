"""What a request to the host can raise.

    RuntimeError
    └ HostError                  .code, .request_type

Prime's shim raises a bare ``RuntimeError`` with the host's text; `HostError` is
one, with the same text and with the code that a program can branch on.
"""

from .wire.codes import ErrorCode

__all__ = ("HostError",)


class HostError(RuntimeError):
    """The host refused or failed a request, or is not there.

    Attributes:
        code: The stable code, a ``str``.
        request_type: What was asked, ``rlm.run`` for example.
    """

    def __init__(
        self, code: ErrorCode | str, message: str, request_type: str = ""
    ) -> None:
        super().__init__(message)
        self.code = str(code)
        self.request_type = request_type
