"""The `ipython` tool: a model's cell in its own kernel (specification 8.3)."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kernel_ext.wire.codes import ErrorCode

from ..errors import HostBridgeError, KernelError
from ..events import BridgeEvent, CellRan
from ..harness.port import AgentInfo, PromptSection, ToolCall, ToolOutcome, ToolSpec
from ..kernels.execution import ExecutionResult
from ..kernels.kernel import Kernel, KernelSpec
from ..kernels.registry import KernelRegistry

__all__ = ("GUIDANCE", "SPEC", "IpythonTool", "render")

SPEC = ToolSpec(
    name="ipython",
    description=(
        "Run Python in your own persistent IPython kernel. Variables, imports and "
        "definitions stay for later calls. Returns what the cell printed and the "
        "value of its last expression. Top-level await works."
    ),
    parameters={
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "code": {"type": "string", "description": "The cell to run."},
        },
        "required": ["code"],
    },
)

GUIDANCE = PromptSection(
    name="rlm-kernel:ipython",
    order=150,
    text="""\
# Your Python kernel (tool `ipython`)

You work in a persistent IPython kernel of your own. Keep data in variables and look
at slices of it; do not print what you do not need to read. Small steps, one tool call
each. Files for other agents go to `os.environ["RLM_SESSION_DIR"] + "/exports"`.

- A cell whose first line is `%%bash` runs in bash. `await` works at the top level.
- `input()`, `breakpoint()` and `exit()` do not work here, nor does `!cmd &`.
- A cell runs until it ends: no polling, no long sleeps. When it is stopped, variables
  stay; when its kernel dies, the result says so, the next call gets a new empty kernel,
  and nothing is run again. Processes that a cell started end with its kernel.
- Output beyond the limit is cut, and the result says where: print less, or save to a
  file and read parts of it.

## Children: `await rlm("prompt", name="label")`

`rlm()` admits a child agent and returns a handle at once: `rlm_child_id`, `name`,
`session_dir`, `model`. The handle is not the answer. The child has its own kernel and
sees none of your variables: write its data to a file and name the path in the prompt.
Options are `name` (unique among your children) and `model` (exactly `provider/model`;
leave it out to use yours). Start all independent children first, then end your turn:
what they send wakes you. `await rlm.list_subagents()` lists them;
`await handle.report(timeout_s=60)` waits for one child's report inside a cell.

If you are a child: your parent sees nothing of your work. Report with
`await agent_message.send("text", receiver_role="parent")` before you end; put large
results in a file and send the path.

Use `rlm` for work on data that lives in Python. Use the harness's own delegation tools
for work that needs none of it; such children are listed, but they have no label of yours.

## Harness tools: `await dsh_tools.call("tool", {"argument": "value"})`

`await dsh_tools.list()` gives the schemas. Calls work only while the `ipython` call
they come from is open; later they fail with REQUEST_SCOPE_CLOSED.

## Errors

A refused request raises `HostError`, a RuntimeError with `.code` and `.request_type`.
Branch on the code: DUPLICATE_LABEL (choose another name), MODEL_UNAVAILABLE (leave
`model` out), DEPTH_LIMIT (do the work yourself), TIMEOUT (ask again later).

## Trust

The kernel is not a sandbox. Python and bash in it run with the person's own rights and
pass by the harness's sandbox and tool policy; only `dsh_tools.call` goes through them.
""",
)


class IpythonTool:
    """Runs `ipython` calls in the kernels of their agents.

    Args:
        kernels: The kernels of this bridge.
        spec_of: Where an agent's kernel works.
        tell: Hears of each cell that ran.
    """

    def __init__(
        self,
        kernels: KernelRegistry,
        spec_of: Callable[[AgentInfo], KernelSpec],
        tell: Callable[[BridgeEvent], None],
    ) -> None:
        self._tell = tell
        self._kernels = kernels
        self._spec_of = spec_of
        self._generation_seen: dict[str, int] = {}

    async def run(self, call: ToolCall) -> ToolOutcome:
        """Run one call; failures of the program and of the kernel are outcomes."""
        if call.agent is None:
            return _refusal(ErrorCode.INVALID_REQUEST, "ipython needs an agent")
        code = call.arguments.get("code")
        if not isinstance(code, str) or set(call.arguments) != {"code"}:
            return _refusal(
                ErrorCode.INVALID_ARGUMENT, "ipython takes exactly one argument: code"
            )
        try:
            result = await self._execute(call, call.agent, code)
        except HostBridgeError as error:
            return _refusal(error.code, str(error))
        self._tell(CellRan(agent_id=call.agent.id, result=result))
        text = self._notice(call.agent.id, result) + render(result)
        value: dict[str, Any] = asdict(result)
        if result.status == "ok":
            return ToolOutcome(text=text, value=value)
        code_of_error = result.error.name if result.error else result.status
        return ToolOutcome(text=text, value=value, is_error=True, code=code_of_error)

    async def _execute(
        self, call: ToolCall, agent: AgentInfo, code: str
    ) -> ExecutionResult:
        spec = self._spec_of(agent)
        for last_try in (False, True):
            kernel = await self._kernel(spec, call.cancelled)
            try:
                return await kernel.execute(
                    code, cancelled=call.cancelled, execution_id=call.execution_id
                )
            except KernelError as error:
                # It died between our look and the cell; the cell has not begun.
                if last_try or error.code is not ErrorCode.KERNEL_DIED:
                    raise
        raise AssertionError

    async def _kernel(self, spec: KernelSpec, cancelled: asyncio.Event) -> Kernel:
        """The agent's kernel; a call that is cancelled does not wait for its boot.

        Raises:
            KernelError: CANCELLED, or it can not be started.
        """
        kernel = asyncio.ensure_future(self._kernels.kernel(spec))
        stop = asyncio.ensure_future(cancelled.wait())
        try:
            await asyncio.wait({kernel, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not kernel.done():
                raise KernelError(
                    ErrorCode.CANCELLED, "cancelled before the cell began"
                )
            return kernel.result()
        finally:
            kernel.cancel()  # the boot goes on for the next call
            stop.cancel()

    def _notice(self, agent_id: str, result: ExecutionResult) -> str:
        """Say it once when a call runs in another kernel than the one before."""
        seen = self._generation_seen.get(agent_id, result.generation)
        self._generation_seen[agent_id] = result.generation
        if seen == result.generation:
            return ""
        return (
            f"[new kernel, generation {result.generation}: the variables of earlier "
            "calls are gone]\n"
        )


def render(result: ExecutionResult) -> str:
    """What the model reads: stdout, stderr, then the value or the error."""
    parts = [result.stdout.rstrip("\n"), result.stderr.rstrip("\n")]
    if result.result is not None:
        parts.append(result.result)
    if result.error is not None:
        parts.append(
            "\n".join(result.error.traceback)
            or f"{result.error.name}: {result.error.message}"
        )
    if result.status == "aborted":
        parts.append(
            "[stopped]" if not result.kernel_restarted else "[stopped, kernel ended]"
        )
    text = "\n".join(part for part in parts if part)
    return text or "(no output)"


def _refusal(code: ErrorCode, text: str) -> ToolOutcome:
    return ToolOutcome(text=text, is_error=True, code=str(code))
