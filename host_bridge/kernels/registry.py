"""One live kernel for each agent: lazy, started once, replaced when it died."""

import asyncio
import secrets

from kernel_ext.wire.codes import ErrorCode

from ..errors import KernelError
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
        self._ends: dict[str, asyncio.Task[None]] = {}
        self._numbers: dict[str, int] = {}
        self._is_closed = False
        self._boots = asyncio.Semaphore(settings.max_concurrent_boots)

    async def kernel(self, spec: KernelSpec) -> Kernel:
        """The agent's live kernel; concurrent first calls share one start.

        Raises:
            KernelError: It can not be started, and the next call tries again; or
                the bridge is closing.
        """
        task = self._starts.get(spec.agent_id)
        if task is None or _is_over(task):
            if self._is_closed:
                raise KernelError(
                    ErrorCode.KERNEL_START_FAILED, "the bridge is closing"
                )
            if task is not None:
                self._end(spec.agent_id, task)
            task = asyncio.create_task(self._start(spec))
            self._starts[spec.agent_id] = task
        try:
            # A caller that gives up must not take the others' kernel with it.
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and not (caller and caller.cancelling()):
                raise KernelError(
                    ErrorCode.KERNEL_START_FAILED, "the kernel was ended at its start"
                ) from None
            raise

    def live(self) -> list[Kernel]:
        """The kernels that run now."""
        done = (task for task in self._starts.values() if task.done())
        return [task.result() for task in done if not _is_over(task)]

    async def dispose(self, agent_id: str) -> None:
        """End an agent's kernel, if it has one; its next call gets a new one."""
        if task := self._starts.pop(agent_id, None):
            self._end(agent_id, task)
        if ending := self._ends.get(agent_id):
            await asyncio.shield(ending)

    async def close(self) -> None:
        """End every kernel, all at the same time; none is started any more."""
        self._is_closed = True
        ended = await asyncio.gather(
            *(self.dispose(agent_id) for agent_id in {*self._starts, *self._ends}),
            return_exceptions=True,
        )
        for failure in ended:
            if failure is not None:
                raise failure

    def _end(self, agent_id: str, task: "asyncio.Task[Kernel]") -> None:
        """Stop what *task* starts or has started, after what was stopped before."""
        ending = asyncio.create_task(_stop(task, after=self._ends.get(agent_id)))
        self._ends[agent_id] = ending

        def forget(_: "asyncio.Task[None]") -> None:
            if self._ends.get(agent_id) is ending:
                del self._ends[agent_id]

        ending.add_done_callback(forget)

    async def _start(self, spec: KernelSpec) -> Kernel:
        # One agent has one kernel: never the old and the new one together.
        if before := self._ends.get(spec.agent_id):
            await asyncio.wait({before})
        number = self._numbers[spec.agent_id] = self._numbers.get(spec.agent_id, 0) + 1
        async with self._boots:
            return await Kernel.start(
                spec,
                self._settings,
                generation=f"{number}-{secrets.token_hex(8)}",
                number=number,
                dispatch=self._dispatch,
            )


async def _stop(
    task: "asyncio.Task[Kernel]", *, after: "asyncio.Task[None] | None"
) -> None:
    task.cancel()  # no effect on a start that is done
    await asyncio.wait({task} if after is None else {task, after})
    if not task.cancelled() and task.exception() is None:
        await task.result().stop()


def _is_over(task: "asyncio.Task[Kernel]") -> bool:
    """Whether this start failed, or its kernel has died."""
    if not task.done():
        return False
    return (
        task.cancelled() or task.exception() is not None or not task.result().is_alive
    )
