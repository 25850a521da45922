"""What tests share: private directories, kernels, bridges, raw Jupyter channels."""

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
import pytest_asyncio
import zmq
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.session import Session

from host_bridge.bridge import Bridge, BridgeSettings
from host_bridge.harness.port import AgentInfo, Route
from host_bridge.harness.script import Reply, Script, ToolUse, Transcript
from host_bridge.harness.scripted import ScriptedHarness
from host_bridge.kernels.attachment import Asker
from host_bridge.kernels.execution import ExecutionResult
from host_bridge.kernels.kernel import Kernel, KernelSettings, KernelSpec
from host_bridge.kernels.registry import KernelRegistry
from host_bridge.paths import StateRoot
from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import ErrorReply, OkReply, Request

T = TypeVar("T")

WAIT_S = 20.0
"""The bound of every wait that is expected to end much earlier."""

ROUTE = Route(provider="scripted", model="generic")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what this system can not do."""
    if os.name == "posix":
        return
    skip = pytest.mark.skip(reason="needs process groups, signals or unix sockets")
    for item in items:
        if item.get_closest_marker("posix"):
            item.add_marker(skip)


# -- directories and processes ----------------------------------------------------


@contextlib.contextmanager
def short_directory() -> Iterator[Path]:
    """A directory with a short path, as sockets need; gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="rk-")).resolve()
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A private directory of one test, with a short path."""
    with short_directory() as directory:
        yield directory


@pytest.fixture
def state(short_path: Path) -> StateRoot:
    """A private state root."""
    return StateRoot(short_path / "state", "the test's own")


def _live_children() -> list[psutil.Process]:
    live = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                live.append(process)
    return live


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """A module ends with no more processes below the tests than it began with."""
    before = set(_live_children())
    yield
    extra = [process for process in _live_children() if process not in before]
    _, left = psutil.wait_procs(extra, timeout=3)
    described = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            described.append((process.pid, process.cmdline()))
            process.kill()
    assert described == []


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        # Where nobody reaps orphans, they stay as zombies.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@dataclass
class Waits:
    """Bounded waits; a test that hangs says where."""

    bound_s: float = WAIT_S

    async def within(self, work: Awaitable[T], bound_s: float | None = None) -> T:
        """Await *work*, within the bound."""
        async with asyncio.timeout(bound_s or self.bound_s):
            return await work

    async def gone(self, *pids: int, bound_s: float | None = None) -> bool:
        """Whether these processes end within the bound."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound_s or self.bound_s):
                # The end of a stranger's process is no event; it is looked for.
                while any(_runs(pid) for pid in pids):
                    await asyncio.sleep(0.01)
        return not any(_runs(pid) for pid in pids)


@pytest.fixture(scope="session")
def waits() -> Waits:
    """Bounded waits."""
    return Waits()


# -- kernels on a dispatcher that a test controls -----------------------------------


@dataclass
class HostBook:
    """A dispatcher for tests: what was asked, and what is answered."""

    asked: list[tuple[Request, Asker]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def dispatch(self, request: Request, asker: Asker) -> OkReply | ErrorReply:
        """Echo; ``gate`` waits for its event, ``fail`` fails, ``scope`` tells it."""
        self.asked.append((request, asker))
        self._touch()
        try:
            if gate := request.payload.get("gate"):
                await self.gate(str(gate)).wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.id)
            self._touch()
            raise
        if request.type == "fail":
            return ErrorReply(
                id=request.id, code=ErrorCode.HOST_REQUEST_FAILED, error="as you wish"
            )
        if request.type == "scope":
            cell = asker.cell
            open_now = cell is not None and cell.is_open
            return OkReply(
                id=request.id,
                result={"cell": cell.execution_id if cell and open_now else None},
            )
        return OkReply(id=request.id, result={"echo": request.payload})

    def gate(self, name: str) -> asyncio.Event:
        """The event that requests with ``gate=name`` wait for."""
        return self.gates.setdefault(name, asyncio.Event())

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until *holds*; looked at after every request and cancel."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await self._changed.wait()

    def of(self, request_type: str) -> list[Request]:
        """The requests of one type."""
        return [request for request, _ in self.asked if request.type == request_type]

    def _touch(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class KernelLab:
    """Starts kernels; all of them are stopped at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.state = StateRoot(directory / "state", "the test's own")
        self.host = HostBook()
        self._registries: list[KernelRegistry] = []
        self._numbers = itertools.count(1)

    def spec(
        self, agent_id: str | None = None, *, cwd: Path | None = None
    ) -> KernelSpec:
        """A new agent's kernel, in a working directory of its own."""
        agent_id = agent_id or f"agent-{next(self._numbers)}"
        where = cwd or self.directory / f"cwd-{agent_id}"
        where.mkdir(exist_ok=True)
        return KernelSpec(
            agent_id=agent_id, depth=0, cwd=where, paths=self.state.session(agent_id)
        )

    def registry(self, **settings: Any) -> KernelRegistry:
        """A registry with these settings, on the test's dispatcher."""
        registry = KernelRegistry(
            KernelSettings(**settings), dispatch=self.host.dispatch
        )
        self._registries.append(registry)
        return registry

    async def kernel(self, **settings: Any) -> Kernel:
        """One kernel of an agent of its own."""
        async with asyncio.timeout(WAIT_S):
            return await self.registry(**settings).kernel(self.spec())

    async def close(self) -> None:
        """Stop every kernel."""
        await asyncio.gather(*(registry.close() for registry in self._registries))


@contextlib.asynccontextmanager
async def kernel_lab() -> AsyncIterator[KernelLab]:
    """A lab in a private directory."""
    with short_directory() as directory:
        lab = KernelLab(directory)
        try:
            yield lab
        finally:
            await lab.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[KernelLab]:
    """Starts the kernels of one module; its tests run on the module's loop."""
    async with kernel_lab() as lab:
        yield lab


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kernel(lab: KernelLab) -> Kernel:
    """A kernel that the tests of one module share."""
    return await lab.kernel()


# -- bridges on the harness in memory -------------------------------------------------


@dataclass
class Stage:
    """A bridge on the scripted harness, and the words of its agents.

    ``cell(code)`` is what a root runs; a child whose prompt has been given to
    ``plays`` follows that, any other runs the fenced Python of its prompt.
    """

    directory: Path
    bridge: Bridge
    parts: dict[str, Script]
    events: list[Any] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, event: Any) -> None:
        self.events.append(event)
        self._changed.set()
        self._changed = asyncio.Event()

    def of(self, kind: type) -> list[Any]:
        """The events of *kind*, oldest first."""
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, holds: Callable[[], Any]) -> Any:
        """Wait until *holds*; looked at after every event."""
        async with asyncio.timeout(WAIT_S):
            while not (found := holds()):
                await self._changed.wait()
        return found

    def plays(self, prompt: str, script: Script) -> str:
        """Give the agent whose first prompt is *prompt* a script of its own."""
        self.parts[prompt] = script
        return prompt

    async def root(self, name: str = "root", **options: Any) -> AgentInfo:
        """A root agent in the stage's directory."""
        return await self.bridge.create_root(name, cwd=self.directory, **options)

    async def cell(
        self, agent: AgentInfo, code: str, **options: Any
    ) -> ExecutionResult:
        """Run one cell in the agent's kernel, outside any model's call."""
        async with asyncio.timeout(WAIT_S):
            kernel = await self.bridge.kernel_of(agent)
            return await kernel.execute(code, **options)


def _fenced(transcript: Transcript) -> Reply:
    prompt = transcript.prompts[0] if transcript.prompts else ""
    if transcript.tool_results or "```" not in prompt:
        return Reply(text=(transcript.tool_results or ["done"])[-1])
    code = prompt.split("```python\n", 1)[1].split("```", 1)[0]
    return Reply(tool_uses=(ToolUse(name="ipython", arguments={"code": code}),))


@contextlib.asynccontextmanager
async def scripted_stage(
    *, models: tuple[Route, ...] = (ROUTE,), **settings: Any
) -> AsyncIterator[Stage]:
    """A started bridge in memory."""
    parts: dict[str, Script] = {}

    def script(transcript: Transcript) -> Reply:
        prompt = transcript.prompts[0] if transcript.prompts else ""
        return parts.get(prompt, _fenced)(transcript)

    with short_directory() as directory:
        bridge = Bridge(
            ScriptedHarness(script, models=models),
            BridgeSettings(
                state=StateRoot(directory / "state", "the test's own"),
                route=ROUTE,
                kernels=KernelSettings(**settings),
            ),
        )
        stage = Stage(directory, bridge, parts)
        bridge.listen(stage.hear)
        await bridge.start()
        try:
            yield stage
        finally:
            await bridge.close()


@pytest.fixture(scope="module")
def open_stage() -> Callable[..., contextlib.AbstractAsyncContextManager[Stage]]:
    """Makes stages, with the settings that a test needs."""
    return scripted_stage


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    """A bridge of one test."""
    async with scripted_stage() as stage:
        yield stage


# -- raw Jupyter -----------------------------------------------------------------------


class RawClient:
    """Sockets of a Jupyter client that may send anything at all."""

    def __init__(self, connection_file: Path, *, key: bytes | None = None) -> None:
        self._context = zmq.Context()
        self._client = BlockingKernelClient(context=self._context)
        self._client.load_connection_file(str(connection_file))
        self.session = Session(key=self._client.session.key if key is None else key)
        self.shell = self._client.connect_shell()
        self.control = self._client.connect_control()

    def frames(self, message_type: str, content: dict[str, Any]) -> list[bytes]:
        """A signed message of this client."""
        return self.session.serialize(self.session.msg(message_type, content))

    def close(self) -> None:
        self._client.stop_channels()
        self._context.destroy(0)


@pytest.fixture
def raw_client() -> Iterator[Callable[..., RawClient]]:
    """Joins kernels by their connection files, with sockets in the test's hands."""
    made: list[RawClient] = []

    def join(connection_file: Path, **options: Any) -> RawClient:
        made.append(RawClient(connection_file, **options))
        return made[-1]

    yield join
    for client in made:
        client.close()


VISITOR = """
import json, sys
from jupyter_client import BlockingKernelClient

client = BlockingKernelClient(connection_file=sys.argv[1])
client.load_connection_file()
client.start_channels()
client.wait_for_ready(timeout=15)
for code in sys.argv[2:]:
    outputs = []
    reply = client.execute_interactive(
        code, timeout=30, output_hook=outputs.append, allow_stdin=False
    )
    contents = [(m["msg_type"], m["content"]) for m in outputs]
    values = [c["data"]["text/plain"] for k, c in contents if k == "execute_result"]
    print(json.dumps({
        "status": reply["content"]["status"],
        "value": values[0] if values else None,
        "stdout": "".join(c["text"] for k, c in contents if k == "stream"),
        "key": client.session.key.decode(),
    }))
client.stop_channels()
"""


@pytest.fixture(scope="session")
def visit() -> Callable[..., Awaitable[list[dict[str, Any]]]]:
    """Runs cells by a stock client of jupyter_client, in a process of its own."""

    async def visit(connection_file: Path | str, *cells: str) -> list[dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            VISITOR,
            str(connection_file),
            *cells,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0
        return [json.loads(line) for line in said.splitlines()]

    return visit


@pytest.fixture
def token() -> str:
    """A text that occurs nowhere else."""
    return f"secret-{secrets.token_hex(8)}"
