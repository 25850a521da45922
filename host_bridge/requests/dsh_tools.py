"""`dsh_tools.*`: the harness's tools, nested in an open call (section 11.6)."""

from collections.abc import Mapping

from kernel_ext.wire import messages
from kernel_ext.wire.codes import ErrorCode

from ..errors import RequestError
from ..harness.port import Harness
from .context import RequestContext
from .dispatcher import Handler

__all__ = ("DshToolsRequests",)


class DshToolsRequests:
    """Handlers of the `dsh_tools` family; the harness's own policy decides.

    Args:
        harness: Has the tools.
        own_tools: Names of tools that run in the caller's own kernel.
    """

    def __init__(self, harness: Harness, *, own_tools: frozenset[str]) -> None:
        self._harness = harness
        self._own_tools = own_tools

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by request type."""
        return {
            messages.DSH_TOOLS_LIST: self.list_tools,
            messages.DSH_TOOLS_CALL: self.call,
        }

    async def list_tools(
        self, payload: messages.ListToolsRequest, context: RequestContext
    ) -> messages.ListToolsResult:
        """The schemas of the tools that the asking agent may use."""
        tools = await context.step(self._harness.list_tools(context.agent_id))
        return messages.ListToolsResult(tools=tools)

    async def call(
        self, payload: messages.CallToolRequest, context: RequestContext
    ) -> messages.CallToolResult:
        """Run a tool in the call that the asking cell belongs to."""
        cell = context.cell
        if cell is None or cell.execution_id is None:
            raise RequestError(
                ErrorCode.REQUEST_SCOPE_CLOSED,
                "tools are called from a cell while the model's ipython call that runs "
                "it is open; this one has ended, or no model runs it",
            )
        if payload.name in self._own_tools:
            # It would wait for the kernel that waits for it.
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT,
                f"a cell can not call {payload.name}: it runs in that kernel already",
            )
        result = await context.step(
            self._harness.call_tool(
                cell.execution_id,
                name=payload.name,
                arguments=payload.arguments,
                number=cell.next_nested_number(),
            )
        )
        if result.is_error:
            code = f"{result.code}: " if result.code else ""
            raise RequestError(
                ErrorCode.TOOL_FAILED, f"{code}{result.message or 'the tool failed'}"
            )
        return messages.CallToolResult(
            value=result.value, content=[dict(part) for part in result.content]
        )
