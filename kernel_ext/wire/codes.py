"""Stable error codes: what a caller may branch on, one sentence each."""

from enum import StrEnum

__all__ = ("ErrorCode",)


class ErrorCode(StrEnum):
    """Every code that a request, a cell or a command can end with.

    A code never changes its meaning; texts may. Each member's docstring says
    when it is used.
    """

    def __new__(cls, value: str, doc: str) -> "ErrorCode":
        """Make a member that is its code as text and carries its docstring."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.__doc__ = doc
        return member

    # What the caller sent
    INVALID_REQUEST = (
        "INVALID_REQUEST",
        "The envelope is not a request of this protocol.",
    )
    INVALID_ARGUMENT = (
        "INVALID_ARGUMENT",
        "A field is unknown, missing, or not of its type.",
    )
    PAYLOAD_TOO_LARGE = (
        "PAYLOAD_TOO_LARGE",
        "The payload exceeds the stated size; pass a file.",
    )
    TOO_MANY_REQUESTS = (
        "TOO_MANY_REQUESTS",
        "More requests wait than the kernel may hold.",
    )
    DUPLICATE_REQUEST = (
        "DUPLICATE_REQUEST",
        "This id was executed before; it is not run again.",
    )
    UNSUPPORTED_REQUEST = "UNSUPPORTED_REQUEST", "The host has no handler of this type."

    # Who is asking, and when
    STALE_GENERATION = (
        "STALE_GENERATION",
        "A newer kernel has replaced the one that asked.",
    )
    PROTOCOL_MISMATCH = "PROTOCOL_MISMATCH", "Kernel and host speak different versions."
    CANCELLED = "CANCELLED", "The request was cancelled before it was done."
    TIMEOUT = "TIMEOUT", "The time that the caller allowed has passed."
    REQUEST_SCOPE_CLOSED = (
        "REQUEST_SCOPE_CLOSED",
        "The call needs its originating ipython call to be open still.",
    )

    # Children
    DEPTH_LIMIT = "DEPTH_LIMIT", "The child would be deeper than the configured limit."
    DUPLICATE_LABEL = "DUPLICATE_LABEL", "A child of this parent has that name already."
    MODEL_UNAVAILABLE = "MODEL_UNAVAILABLE", "The requested model is not advertised."
    CHILD_NOT_FOUND = "CHILD_NOT_FOUND", "The caller has no such direct child."
    CHILD_FAILED = (
        "CHILD_FAILED",
        "The child ended without a report and without a text.",
    )
    UNSUPPORTED_RELATIONSHIP = (
        "UNSUPPORTED_RELATIONSHIP",
        "Messages of this direction are not offered.",
    )
    UNSUPPORTED_DELETION = "UNSUPPORTED_DELETION", "Children can not be deleted here."
    UNSUPPORTED_MODEL_SEARCH = (
        "UNSUPPORTED_MODEL_SEARCH",
        "Models can not be searched here.",
    )
    UNSUPPORTED_REASONING_EFFORT = (
        "UNSUPPORTED_REASONING_EFFORT",
        "The child can not be given this reasoning effort.",
    )

    # Tools and the harness
    TOOL_FAILED = "TOOL_FAILED", "The harness ran the tool and the tool failed."
    AGENT_NOT_LIVE = "AGENT_NOT_LIVE", "The harness has no live agent of this id."
    MODEL_NOT_CONFIGURED = (
        "MODEL_NOT_CONFIGURED",
        "No model is configured for children.",
    )
    MODEL_REFUSED = "MODEL_REFUSED", "The model server refused the request for good."
    MODEL_BUSY = "MODEL_BUSY", "The model server stayed busy beyond the limit."
    HARNESS_UNAVAILABLE = "HARNESS_UNAVAILABLE", "The harness can not be started here."
    HARNESS_LOST = "HARNESS_LOST", "The harness ended or closed its link."
    HOST_REQUEST_FAILED = (
        "HOST_REQUEST_FAILED",
        "The harness refused or failed the operation.",
    )

    # Kernel and host
    HOST_UNAVAILABLE = "HOST_UNAVAILABLE", "No host bridge is attached to this kernel."
    KERNEL_START_FAILED = (
        "KERNEL_START_FAILED",
        "The kernel process did not become ready.",
    )
    KERNEL_DIED = "KERNEL_DIED", "The kernel process ended while it was in use."
    KERNEL_UNRESPONSIVE = (
        "KERNEL_UNRESPONSIVE",
        "The kernel ignored an interrupt; it was ended.",
    )
    STATE_ROOT_UNUSABLE = (
        "STATE_ROOT_UNUSABLE",
        "The state root can not be used for writing.",
    )
    CONFIG_INVALID = "CONFIG_INVALID", "An option or a setting has an unusable value."
    INTERNAL = "INTERNAL", "A fault of ours; the reference leads to the log."
