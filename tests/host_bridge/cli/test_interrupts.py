"""Signals of a command: the first asks to stop, the second ends."""

import asyncio
import signal

import pytest

from host_bridge.cli.interrupts import stop_requests, undisturbed

pytestmark = pytest.mark.posix


async def settle():
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_interrupt_asks_and_the_second_cancels():
    asked = []

    async def work():
        with stop_requests(lambda: asked.append(1)):
            signal.raise_signal(signal.SIGINT)
            await settle()
            assert asked == [1]
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.create_task(work()), 5)
    assert asked == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_that_ends_cancels_at_once(number):
    asked = []

    async def work():
        with stop_requests(lambda: asked.append(1)):
            signal.raise_signal(number)
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.create_task(work()), 5)
    assert asked == []


async def test_handlers_are_as_before_afterwards():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]

    with stop_requests(lambda: None), undisturbed():
        pass

    assert [signal.getsignal(number) for number in numbers] == before


async def test_nothing_breaks_into_the_end():
    with undisturbed():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.raise_signal(number)
        await settle()
