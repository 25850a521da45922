"""The door for the plugin: one peer, with the token, and nobody else."""

import asyncio
import json
import stat

import pytest

from host_bridge.errors import HarnessError
from host_bridge.harness.dsh.door import _CAPABILITIES, Door
from host_bridge.harness.dsh.link import end_connection
from host_bridge.paths import new_socket_directory
from kernel_ext.wire.codes import ErrorCode

WAIT_S = 5.0
LIMIT = 64 * 1024


@pytest.fixture(params=["unix", "tcp"])
async def door(request):
    directory = new_socket_directory() if request.param == "unix" else None
    door = Door(directory, max_line_bytes=LIMIT)
    await door.open()
    yield door
    await door.close()
    if directory is not None:
        directory.rmdir()


@pytest.fixture
async def visit(door):
    """Connect, say something, and close at the end."""
    writers = []

    async def visit(line=None):
        address = door.environment["RLM_BRIDGE_ADDRESS"]
        kind, _, where = address.partition(":")
        if kind == "unix":
            reader, writer = await asyncio.open_unix_connection(where)
        else:
            host, _, port = where.partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        writers.append(writer)
        if line is not None:
            writer.write(line)
        return reader, writer

    yield visit
    for writer in writers:
        await end_connection(writer)


def greeting(token, **more):
    message = {"id": "p1", "method": "hello", "params": {"token": token, **more}}
    return json.dumps(message).encode() + b"\n"


async def is_sent_away(reader):
    try:
        return await asyncio.wait_for(reader.read(), WAIT_S) == b""
    except ConnectionError:  # in the middle of what it said
        return True


async def test_the_peer_with_the_token_comes_in(door, visit):
    await visit(greeting(door.environment["RLM_BRIDGE_TOKEN"], protocol=1))

    found = await asyncio.wait_for(door.entered(), WAIT_S)

    assert found.call_id == "p1"
    assert door.has_entered


@pytest.mark.parametrize(
    "line",
    [
        greeting("wrong"),
        greeting("\ud800"),
        greeting(""),
        b'{"id": "p1", "method": "hello", "params": {}}\n',
        b'{"id": "p1", "method": "tool/execute", "params": {}}\n',
        b"not json\n",
        b"[" * 20_000 + b"\n",
        b"x" * (4 * LIMIT),
    ],
    ids=["wrong", "surrogate", "empty", "none", "other", "no-json", "deep", "long"],
)
async def test_a_stranger_is_sent_away_and_the_plugin_still_comes_in(door, visit, line):
    reader, _ = await visit(line)

    assert await is_sent_away(reader)
    assert not door.has_entered
    await visit(greeting(door.environment["RLM_BRIDGE_TOKEN"]))
    await asyncio.wait_for(door.entered(), WAIT_S)


async def greet(door, visit, **said):
    await visit(greeting(door.environment["RLM_BRIDGE_TOKEN"], **said))
    return await asyncio.wait_for(door.entered(), WAIT_S)


ABLE = dict.fromkeys(_CAPABILITIES, "some method")


@pytest.mark.parametrize("protocol", [None, 0, 2, "1", True, {"n": 1}, "x" * 500])
async def test_another_protocol_is_refused_by_name(door, visit, protocol):
    entered = await greet(door, visit, protocol=protocol, capabilities=ABLE)
    with pytest.raises(HarnessError) as refused:
        entered.check()

    assert refused.value.code is ErrorCode.PROTOCOL_MISMATCH
    assert repr(protocol)[:20] in str(refused.value)
    assert "speaks protocol 1" in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    "capabilities", [None, 7, {}, {"startChild": None}], ids=["none", "7", "{}", "null"]
)
async def test_a_missing_capability_is_refused_by_name(door, visit, capabilities):
    entered = await greet(door, visit, protocol=1, capabilities=capabilities)
    with pytest.raises(HarnessError) as refused:
        entered.check()

    assert refused.value.code is ErrorCode.HARNESS_UNAVAILABLE
    assert "startChild" in str(refused.value)


async def test_a_plugin_that_can_do_all_is_not_refused(door, visit):
    entered = await greet(door, visit, protocol=1, capabilities={**ABLE, "more": None})

    entered.check()


async def test_after_the_plugin_nobody_comes_in(door, visit):
    early, _ = await visit()
    await visit(greeting(door.environment["RLM_BRIDGE_TOKEN"]))
    await asyncio.wait_for(door.entered(), WAIT_S)

    with pytest.raises((ConnectionError, FileNotFoundError)):
        await visit(greeting(door.environment["RLM_BRIDGE_TOKEN"]))
    await door.close()
    assert await is_sent_away(early)


async def test_one_who_was_waiting_when_the_plugin_came_is_sent_away(door, visit):
    reader, writer = await visit()
    await visit(greeting(door.environment["RLM_BRIDGE_TOKEN"]))
    await asyncio.wait_for(door.entered(), WAIT_S)

    writer.write(greeting(door.environment["RLM_BRIDGE_TOKEN"]))

    assert await is_sent_away(reader)


async def test_one_who_says_nothing_is_sent_away(door, visit, monkeypatch):
    monkeypatch.setattr("host_bridge.harness.dsh.door._GREETING_S", 0.05)
    reader, _ = await visit()

    assert await is_sent_away(reader)


async def test_only_a_few_may_wait_at_the_door(door, visit):
    for _ in range(8):
        await visit()
    reader, _ = await visit(greeting(door.environment["RLM_BRIDGE_TOKEN"]))

    assert await is_sent_away(reader)


async def test_the_socket_is_for_the_owner_alone():
    directory = new_socket_directory()
    door = Door(directory, max_line_bytes=LIMIT)
    await door.open()
    path = directory / "bridge.sock"

    modes = [stat.S_IMODE(p.stat().st_mode) for p in (directory, path)]
    await door.close()
    await door.close()

    assert modes == [0o700, 0o600]
    assert not path.exists()
    directory.rmdir()


async def test_two_doors_have_two_tokens():
    doors = [Door(None, max_line_bytes=LIMIT) for _ in range(2)]

    tokens = {door.environment["RLM_BRIDGE_TOKEN"] for door in doors}

    assert len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)


async def test_a_door_that_is_not_open_lets_nobody_wait():
    with pytest.raises(RuntimeError):
        await Door(None, max_line_bytes=LIMIT).entered()
