"""One live kernel for each agent: lazy, started once, replaced when it died."""

import asyncio
import contextlib
import secrets

from kernel_ext.wire.codes import ErrorCode

from ..errors import HostBridgeError, KernelError
from .attachment import Dispatch
from .kernel import Kernel, KernelSettings, KernelSpec

__all__ = ("KernelRegistry",)


class KernelRegistry:
    """The kernels of one bridge.

    Args:
        settings: Bounds of each.
        dispatch: Answers the kernels' requests.
    """

    def __init__(self, settings: KernelSettings, *, dispatch: Dispatch) -> None:
        self._settings = settings
        self._dispatch = dispatch
        self._starts: dict[str, asyncio.Task[Kernel]] = {}
        self._numbers: dict[str, int] = {}
        self._is_closed = False

    async def kernel(self, spec: KernelSpec) -> Kernel:
        """The agent's live kernel; concurrent first calls share one start.

        Raises:
            KernelError: It can not be started; the next call tries again. After
                `close` none is started.
        """
        if self._is_closed:
            raise KernelError(ErrorCode.KERNEL_START_FAILED, "the bridge is closing")
        task = self._starts.get(spec.agent_id)
        if task is None or _is_over(task):
            task = asyncio.create_task(self._start(spec, before=task))
            self._starts[spec.agent_id] = task
        # A caller that gives up must not take the others' kernel with it.
        return await asyncio.shield(task)

    def live(self) -> list[Kernel]:
        """The kernels that run now."""
        done = (task for task in self._starts.values() if task.done())
        return [task.result() for task in done if not _is_over(task)]

    async def dispose(self, agent_id: str) -> None:
        """End an agent's kernel, if it has one."""
        task = self._starts.pop(agent_id, None)
        if task is None:
            return
        task.cancel()  # no effect on a start that is done
        await _stop(task)

    async def close(self) -> None:
        """End every kernel, all at the same time; none starts after."""
        self._is_closed = True
        await asyncio.gather(*(self.dispose(agent_id) for agent_id in [*self._starts]))

    async def _start(
        self, spec: KernelSpec, *, before: "asyncio.Task[Kernel] | None"
    ) -> Kernel:
        if before is not None:
            await _stop(before)
        number = self._numbers[spec.agent_id] = self._numbers.get(spec.agent_id, 0) + 1
        return await Kernel.start(
            spec,
            self._settings,
            generation=f"{number}-{secrets.token_hex(8)}",
            number=number,
            dispatch=self._dispatch,
        )


async def _stop(task: "asyncio.Task[Kernel]") -> None:
    with contextlib.suppress(HostBridgeError, asyncio.CancelledError):
        kernel = await task
        await kernel.stop()


def _is_over(task: "asyncio.Task[Kernel]") -> bool:
    """Whether this start failed, or its kernel has died."""
    if not task.done():
        return False
    return (
        task.cancelled() or task.exception() is not None or not task.result().is_alive
    )
