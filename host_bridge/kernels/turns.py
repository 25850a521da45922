"""Cells in the order of their calls; one that is stopped in the queue leaves it."""

import asyncio

__all__ = ("Turns",)


class Turns:
    """A first-come lock whose waiting can be given up by an event."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, stop: asyncio.Event | None) -> bool:
        """Wait for the turn; False when *stop* was set first.

        Who has taken it gives it back with `release`.
        """
        turn = asyncio.create_task(self._lock.acquire())
        waits: set[asyncio.Task[bool]] = {turn}
        if stop is not None:
            waits.add(asyncio.create_task(stop.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if turn.done():
                self._lock.release()
            raise
        finally:
            for task in waits:
                task.cancel()  # no effect on a turn that was taken
        return turn.done()

    def release(self) -> None:
        """Give the turn to the next."""
        self._lock.release()
