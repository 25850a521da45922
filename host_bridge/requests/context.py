"""Who is asking, and whether the answer still matters (specification 10)."""

import inspect
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import TypeVar

from kernel_ext.wire.codes import ErrorCode

from ..errors import RequestError
from ..kernels.attachment import Asker
from ..kernels.execution import Cell

__all__ = ("RequestContext",)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request in the hands of a handler.

    Attributes:
        request_id: Unique among all kernels of this bridge.
        agent_id: The agent whose kernel asks; the only authority there is.
    """

    request_id: str
    agent_id: str
    _asker: Asker

    @property
    def cell(self) -> Cell | None:
        """The open cell that asks; None once that cell has ended."""
        cell = self._asker.cell
        return cell if cell is not None and cell.is_open else None

    def check(self) -> None:
        """Refuse to go on for a kernel that has been replaced.

        Raises:
            RequestError: STALE_GENERATION.
        """
        if not self._asker.is_current():
            raise RequestError(
                ErrorCode.STALE_GENERATION, "the kernel that asked is gone"
            )

    async def step(self, work: Awaitable[T]) -> T:
        """Await *work*, with `check` before and after it.

        For every await of a handler but the one that commits: what the harness
        has done is recorded, whatever has become of the kernel that asked.
        """
        try:
            self.check()
        except RequestError:
            if inspect.iscoroutine(work):
                work.close()  # it is not run, and that is meant
            raise
        result = await work
        self.check()
        return result
