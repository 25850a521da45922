"""Frames that are not a kernel's own: none is taken, the loop lives on."""

import asyncio
import json

import pytest
import zmq
from jupyter_client.session import Session

from host_bridge.errors import KernelError
from host_bridge.kernels.channels import Channels

pytestmark = pytest.mark.posix

KEY = "k" * 64
PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")


class FakeKernel:
    """Binds the sockets of a kernel, and sends whatever it is given."""

    def __init__(self, directory):
        self.connection_file = directory / "kernel.json"
        address = directory / "k"
        connection = {
            "transport": "ipc",
            "ip": str(address),
            "key": KEY,
            "signature_scheme": "hmac-sha256",
            **{name: number for number, name in enumerate(PORTS, 1)},
        }
        self.connection_file.write_text(json.dumps(connection))
        self.session = Session(key=KEY.encode())
        self._context = zmq.Context()
        self.iopub = self._context.socket(zmq.XPUB)
        self.iopub.bind(f"ipc://{address}-2")
        self.control = self._context.socket(zmq.ROUTER)
        self.control.bind(f"ipc://{address}-4")

    def frames(self, kind, content, *, session=None):
        session = session or self.session
        return [b"topic", *session.serialize(session.msg(kind, content))]

    def close(self):
        self._context.destroy(0)


@pytest.fixture
def fake_kernel(short_path):
    kernel = FakeKernel(short_path)
    yield kernel
    kernel.close()


@pytest.fixture
def channels(fake_kernel):
    channels = Channels(fake_kernel.connection_file, with_output=True)
    # Its subscription is through once the kernel's socket has it.
    assert fake_kernel.iopub.poll(5000)
    fake_kernel.iopub.recv()
    yield channels
    channels.close()


def garbage(kernel):
    """Thirty frames of which a kernel with our key has sent none."""
    good = kernel.frames("stream", {"name": "stdout", "text": "stolen"})
    delimiter, signature, *parts = good[1:]
    unsigned = Session(key=b"")
    stranger = Session(key=b"x" * 64)
    deep = b"[" * 100_000 + b"]" * 100_000

    def signed(*body):
        return [b"topic", delimiter, kernel.session.sign([*body]), *body]

    yield []
    yield [b""]
    yield [b"topic"]
    yield [delimiter]
    yield [b"topic", delimiter]
    yield [b"topic", delimiter, signature]
    yield [b"topic", delimiter, b"", *parts]
    yield [b"topic", delimiter, b"0" * 64, *parts]
    yield [b"topic", delimiter, signature[::-1], *parts]
    yield [b"topic", delimiter, signature[:-1], *parts]
    yield [b"topic", delimiter, signature.upper(), *parts]
    yield [b"topic", delimiter, b"\xff" * 64, *parts]
    yield [b"topic", delimiter, signature, *parts[:3]]
    yield [b"topic", delimiter, signature, *parts[:2]]
    yield [b"topic", delimiter, signature, parts[0], *parts]
    yield [b"topic", delimiter, signature, *parts[::-1]]
    yield [b"topic", delimiter, signature, *parts[:3], parts[3].replace(b"st", b"ST")]
    yield [b"topic", b"<IDS|MSG", signature, *parts]
    yield kernel.frames("stream", {"text": "x"}, session=unsigned)
    yield kernel.frames("stream", {"text": "x"}, session=stranger)
    yield signed(b"", b"", b"", b"")
    yield signed(b"{}", b"{}", b"{}", b"{}")
    yield signed(b"null", b"null", b"null", b"null")
    yield signed(b"[]", b"[]", b"[]", b"[]")
    yield signed(b'{"msg_type": "x"}', b"{}", b"{}", b"[1]")
    yield signed(b"\xff\xfe", b"{}", b"{}", b"{}")
    yield signed(parts[0], b"{}", b"{}", b"{not json")
    yield signed(parts[0], b"{}", b"{}", deep)
    yield signed(parts[0], b"[1]", b"{}", b"{}")
    yield signed(parts[0], b"{}", b"{}", b'"text"')


async def test_of_thirty_bad_frames_none_is_taken_and_the_next_good_one_is(
    fake_kernel, channels
):
    sent = [frames for frames in garbage(fake_kernel) if frames]
    for frames in sent:
        fake_kernel.iopub.send_multipart(frames)
    fake_kernel.iopub.send_multipart(fake_kernel.frames("status", {"n": 1}))

    async with asyncio.timeout(10):
        taken = await anext(channels.receive("iopub"))

    assert (taken.type, taken.content) == ("status", {"n": 1})
    assert channels.refused == len(sent) == 29


async def test_a_replayed_message_is_taken_once(fake_kernel, channels):
    frames = fake_kernel.frames("status", {"n": 1})
    for _ in range(3):
        fake_kernel.iopub.send_multipart(frames)
    fake_kernel.iopub.send_multipart(fake_kernel.frames("status", {"n": 2}))
    incoming = channels.receive("iopub")

    async with asyncio.timeout(10):
        taken = [await anext(incoming), await anext(incoming)]
    await incoming.aclose()

    assert [message.content["n"] for message in taken] == [1, 2]
    assert channels.refused == 2


@pytest.mark.parametrize("key", ["", None], ids=["empty", "missing"])
async def test_a_connection_without_a_key_is_refused(fake_kernel, key):
    connection = json.loads(fake_kernel.connection_file.read_text())
    if key is None:
        del connection["key"]
    else:
        connection["key"] = key
    fake_kernel.connection_file.write_text(json.dumps(connection))

    with pytest.raises(KernelError) as caught:
        Channels(fake_kernel.connection_file, with_output=True)

    assert caught.value.code == "KERNEL_START_FAILED"


async def test_without_output_only_comms_travel(fake_kernel):
    channels = Channels(fake_kernel.connection_file, with_output=False)
    try:
        topics = []
        while b"\x01comm-" not in topics:
            assert fake_kernel.iopub.poll(5000)
            topics.append(fake_kernel.iopub.recv())
        while fake_kernel.iopub.poll(100):
            topics.append(fake_kernel.iopub.recv())
    finally:
        channels.close()

    assert topics[-1] == b"\x01comm-" or topics.count(b"\x00") == topics.count(b"\x01")


async def test_two_channels_of_one_kernel_have_sessions_of_their_own(fake_kernel):
    one = Channels(fake_kernel.connection_file, with_output=True)
    two = Channels(fake_kernel.connection_file, with_output=True)
    try:
        assert one._session.session != two._session.session
    finally:
        one.close()
        two.close()


async def test_closing_twice_is_fine(channels):
    channels.close()
    channels.close()


async def test_a_kernel_that_did_not_see_the_subscription_is_shown_another(
    fake_kernel, channels
):
    """It has the subscription, but it was looking elsewhere when that came."""
    welcomed = asyncio.Event()
    waiting = asyncio.create_task(channels.until_subscribed(welcomed))

    assert await asyncio.to_thread(fake_kernel.iopub.poll, 5000)
    welcomed.set()
    async with asyncio.timeout(5):
        await waiting

    assert fake_kernel.iopub.recv().startswith(b"\x01")
