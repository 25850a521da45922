"""`dsh_tools`: the harness's tools from a cell (specification section 11.6)."""

from typing import Any

from kernel_ext.client import HostClient
from kernel_ext.wire import messages

__all__ = ("DshTools",)


class DshTools:
    """``await dsh_tools.call("tool_name", {"argument": "value"})``.

    Calls go through the harness's own pipeline: its restrictions, guards and
    policy hold. They need the ipython call that they come from to be open.
    """

    def __init__(self, client: HostClient) -> None:
        self._client = client

    async def list(self) -> list[dict[str, Any]]:
        """The schemas of the tools that this agent may use.

        Raises:
            HostError: No host, or the harness is gone.
        """
        __tracebackhide__ = True
        answer = await self._client.request(messages.DSH_TOOLS_LIST)
        return list(answer["tools"])

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Run a harness tool, nested in the open ipython call.

        Args:
            name: The tool, as `list` names it.
            arguments: Its arguments, JSON only.

        Returns:
            ``value``, the tool's structured result, and ``content``, the blocks
            that a model reads.

        Raises:
            TypeError: *name* is no non-empty ``str``, or *arguments* no ``dict``.
            HostError: REQUEST_SCOPE_CLOSED after the call; TOOL_FAILED when the
                tool failed, with the tool's own code before its text.
        """
        __tracebackhide__ = True
        if not isinstance(name, str) or not name:
            msg = "name must be a non-empty str"
            raise TypeError(msg)
        if not isinstance(arguments, dict):
            msg = "arguments must be a dict"
            raise TypeError(msg)
        return await self._client.request(
            messages.DSH_TOOLS_CALL, {"name": name, "arguments": arguments}
        )
