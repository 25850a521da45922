"""`agent_message`: messages along the agent tree (specification section 11.5)."""

from typing import Any, get_args, get_type_hints

from kernel_ext.client import HostClient
from kernel_ext.wire import messages

__all__ = ("AgentMessage",)

_ROLES = get_args(get_type_hints(messages.SendMessageRequest)["receiver_role"])


class AgentMessage:
    """``await agent_message.send("text", receiver_role="parent")``."""

    def __init__(self, client: HostClient) -> None:
        self._client = client

    async def send(
        self,
        message: str,
        *positional: Any,
        receiver_role: str,
        receiver_name: str | None = None,
    ) -> dict[str, Any]:
        """Send *message*; the sender is this kernel's agent and nobody else.

        Args:
            message: The text.
            *positional: Refused; name the receiver by keyword.
            receiver_role: ``parent``; ``sibling`` and ``child`` are refused by
                this host.
            receiver_name: The label of a sibling or child; none for the parent.

        Returns:
            The receipt: ``message_id`` and ``receiver_role``.

        Raises:
            TypeError: The message is no ``str``, or a target is positional.
            ValueError: The role is unknown, or does not go with the name.
            HostError: UNSUPPORTED_RELATIONSHIP, or no host.
        """
        __tracebackhide__ = True
        if positional:
            msg = (
                "positional agent_message.send targets are not supported; "
                "use receiver_role and receiver_name"
            )
            raise TypeError(msg)
        if not isinstance(message, str):
            msg = f"message must be str, got {type(message).__name__}"
            raise TypeError(msg)
        if receiver_role not in _ROLES:
            msg = 'receiver_role must be "parent", "sibling", or "child"'
            raise ValueError(msg)
        if receiver_role == "parent" and receiver_name is not None:
            msg = "receiver_name must be omitted for parent messages"
            raise ValueError(msg)
        if receiver_role != "parent" and not receiver_name:
            msg = "receiver_name is required for sibling and child messages"
            raise ValueError(msg)
        payload = {"message": message, "receiver_role": receiver_role}
        if receiver_name is not None:
            payload["receiver_name"] = receiver_name
        return await self._client.request(messages.AGENT_MESSAGE_SEND, payload)
