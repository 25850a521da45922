"""DSH's own protocol on its standard streams."""

import asyncio
import json
import socket

import pytest

from host_bridge.errors import HarnessError
from host_bridge.harness.dsh.link import end_connection
from host_bridge.harness.dsh.stdio import StdioClient
from kernel_ext.wire.codes import ErrorCode

WAIT_S = 5.0


@pytest.fixture
async def peer():
    """A client that is pumping, and the bare reader and writer of its runtime."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    other_reader, other_writer = await asyncio.open_connection(sock=theirs)
    client = StdioClient(reader, writer)
    pump = asyncio.create_task(client.pump())
    yield client, other_reader, other_writer
    await end_connection(other_writer)
    await asyncio.wait_for(pump, WAIT_S)
    await end_connection(writer)


async def asked(reader):
    return json.loads(await asyncio.wait_for(reader.readline(), WAIT_S))


async def test_a_call_is_answered_among_notifications_and_noise(peer):
    client, reader, writer = peer
    call = asyncio.create_task(client.call("initialize", {"cwd": "/"}))
    message = await asked(reader)

    writer.write(b'{"jsonrpc":"2.0","method":"session.event","params":{}}\n')
    writer.write(b"noise\n[]\nnull\n\xff\n" + b'{"id": [1], "result": {}}\n')
    writer.write(b"x" * (3 * 2**20) + b"\n")
    writer.write(json.dumps({"id": message["id"], "result": {"a": 1}}).encode() + b"\n")

    assert message["method"] == "initialize"
    assert await asyncio.wait_for(call, WAIT_S) == {"a": 1}


async def test_a_refusal_has_the_runtimes_text(peer):
    client, reader, writer = peer
    call = asyncio.create_task(client.call("shutdown"))
    message = await asked(reader)

    error = {"id": message["id"], "error": {"code": 1, "message": "no adapter"}}
    writer.write(json.dumps(error).encode() + b"\n")

    with pytest.raises(HarnessError, match="no adapter") as refused:
        await asyncio.wait_for(call, WAIT_S)
    assert refused.value.code is ErrorCode.HOST_REQUEST_FAILED


async def test_the_end_of_output_fails_open_and_later_calls(peer):
    client, reader, writer = peer
    call = asyncio.create_task(client.call("initialize", {}))
    await asked(reader)
    await end_connection(writer)

    with pytest.raises(HarnessError) as refused:
        await asyncio.wait_for(call, WAIT_S)
    assert refused.value.code is ErrorCode.HARNESS_LOST
    with pytest.raises(HarnessError) as refused:
        await client.call("shutdown")
    assert refused.value.code is ErrorCode.HARNESS_LOST
