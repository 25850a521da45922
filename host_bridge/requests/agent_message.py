"""`agent_message.send`: from a child to its parent (section 11.5)."""

from collections.abc import Mapping

from kernel_ext.wire import messages
from kernel_ext.wire.codes import ErrorCode

from ..agents import AgentTree
from ..errors import RequestError
from ..harness.port import Harness
from .context import RequestContext
from .dispatcher import Handler

__all__ = ("AgentMessageRequests",)

_MAX_MESSAGE_CHARS = 16_384


class AgentMessageRequests:
    """Handlers of the `agent_message` family. The sender is who asks, always."""

    def __init__(self, agents: AgentTree, harness: Harness) -> None:
        self._agents = agents
        self._harness = harness

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by request type."""
        return {messages.AGENT_MESSAGE_SEND: self.send}

    async def send(
        self, payload: messages.SendMessageRequest, context: RequestContext
    ) -> messages.SendMessageResult:
        """Deliver a message to the sender's direct parent, and keep it as a report."""
        if payload.receiver_role != "parent":
            raise RequestError(
                ErrorCode.UNSUPPORTED_RELATIONSHIP,
                f"messages to a {payload.receiver_role} are not offered by this version",
            )
        if payload.receiver_name is not None:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                "receiver_name must be omitted for parent messages",
            )
        if not payload.message.strip():
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "message must not be empty")
        if len(payload.message) > _MAX_MESSAGE_CHARS:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"a message may have {_MAX_MESSAGE_CHARS} characters; write more to a "
                "file in RLM_SESSION_DIR/exports and send the path",
            )
        if self._agents.get(context.agent_id).info.parent_id is None:
            raise RequestError(
                ErrorCode.UNSUPPORTED_RELATIONSHIP, "this agent has no parent"
            )
        context.check()
        message_id = await self._harness.report(context.agent_id, payload.message)
        # Delivered is delivered, whatever has become of the sender's kernel.
        self._agents.record_report(context.agent_id, payload.message)
        return messages.SendMessageResult(message_id=message_id, receiver_role="parent")
