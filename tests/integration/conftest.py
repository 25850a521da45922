"""Commands as people start them: real processes, in a private place of their own."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

BOUND_S = 40.0
"""The bound of every wait that is expected to end much earlier."""


def wait_until(holds: Callable[[], Any], *, within_s: float = BOUND_S) -> Any:
    """Poll the state of files and processes, which tell no events."""
    deadline = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.02)
    return found


@dataclass
class Ended:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def everything(self) -> str:
        return self.stdout + self.stderr

    @property
    def next_step(self) -> str:
        """What its last line says to do next."""
        last = self.everything.strip().splitlines()[-1]
        assert last.startswith("Next: "), self.everything
        return last.removeprefix("Next: ")


@dataclass
class Command:
    """A command that runs."""

    process: "subprocess.Popen[str]"

    @property
    def pid(self) -> int:
        return self.process.pid

    def interrupt(self) -> None:
        """What ctrl-C in a terminal does: the whole group gets it."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        self.process.kill()

    def ended(self, *, within_s: float = BOUND_S) -> Ended:
        """Wait for its end."""
        stdout, stderr = self.process.communicate(timeout=within_s)
        return Ended(self.process.returncode, stdout, stderr)

    def below(self) -> list[psutil.Process]:
        """The live processes that it and its own have started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def harness(self) -> list[psutil.Process]:
        """The runtime of DeepSeek Harness."""
        return [p for p in self.below() if "--profile" in _command_line(p)]

    def kernels(self) -> list[psutil.Process]:
        return [p for p in self.below() if "kernel_ext" in _command_line(p)]


def _command_line(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@dataclass
class Place:
    """Where commands of one test run: all directories are its own."""

    directory: Path
    environ: dict[str, str]
    commands: list[Command] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.directory / "state"

    @property
    def cwd(self) -> Path:
        return self.directory / "cwd"

    def start(
        self, *words: str, stdin: Any = subprocess.DEVNULL, **environ: str
    ) -> Command:
        """Start ``rlm-kernel`` with these words."""
        argv = [sys.executable, "-m", "host_bridge", *words]
        return self.start_program(argv, stdin=stdin, **environ)

    def start_program(
        self, argv: list[str], *, stdin: Any = subprocess.DEVNULL, **environ: str
    ) -> Command:
        process = subprocess.Popen(
            argv,
            env={**self.environ, **environ},
            cwd=self.cwd,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.commands.append(Command(process))
        return self.commands[-1]

    def run(self, *words: str, input: str | None = None, **environ: str) -> Ended:
        """Run it to its end."""
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        command = self.start(*words, stdin=stdin, **environ)
        stdout, stderr = command.process.communicate(input, timeout=BOUND_S)
        return Ended(command.process.returncode, stdout, stderr)

    def with_environ(self, **environ: str) -> "Place":
        return dataclasses.replace(self, environ={**self.environ, **environ})

    def processes(self) -> list[psutil.Process]:
        """Every live process of this place, its orphans included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                ours = str(self.directory) in process.environ().get("HOME", "")
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def environments(self) -> str:
        """The environment blocks of all these processes, as the system shows them."""
        blocks = []
        for process in self.processes():
            with contextlib.suppress(OSError):
                blocks.append(Path(f"/proc/{process.pid}/environ").read_bytes())
        return b"\n".join(blocks).decode(errors="replace")

    def sessions(self) -> set[str]:
        return _names(self.home / "sessions")

    def harness_homes(self) -> set[str]:
        return _names(self.home / "dsh")

    def sockets(self) -> list[Path]:
        return list(self.directory.glob("tmp/rlm-kernel-*/*"))

    def snapshot(self) -> dict[str, float]:
        """Every file of the place, and when it was changed."""
        return {
            str(path): path.lstat().st_mtime
            for path in sorted(self.directory.rglob("*"))
            if self.directory / "tmp" not in (path, *path.parents)
        }

    def is_clean(self) -> bool:
        """Whether no process, no socket and no home of a harness is left."""
        return not (self.processes() or self.sockets() or self.harness_homes())


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()


@contextlib.contextmanager
def open_place(directory: Path) -> Iterator[Place]:
    environ = {
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "HOME": str(directory / "home"),
        "TMPDIR": str(directory / "tmp"),
        "RLM_KERNEL_HOME": str(directory / "state"),
        "JUPYTER_DATA_DIR": str(directory / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(directory / "run"),
        "JUPYTER_CONFIG_DIR": str(directory / "conf"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    place = Place(directory, environ)
    for name in ("home", "tmp", "cwd"):
        (directory / name).mkdir()
    try:
        yield place
    finally:
        for command in place.commands:
            if not command.process.stdout.closed:
                command.kill()
                command.process.communicate()
        left = place.processes()
        _, stubborn = psutil.wait_procs(left, timeout=3)
        for process in stubborn:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(stubborn, timeout=3)
    assert stubborn == []


@pytest.fixture
def place(short_path: Path) -> Iterator[Place]:
    """A private place for commands; no process of it is left at the end."""
    with open_place(short_path) as place:
        yield place


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """Waits for what files and processes show."""
    return wait_until


# -- the kernel RLM, as a front end starts it --------------------------------------


@dataclass
class CellOutcome:
    """What a front end shows of a cell."""

    status: str
    count: int | None
    stdout: str
    stderr: str
    result: str | None
    error: str | None
    message: str | None


class FrontEnd:
    """A stock Jupyter front end with one kernel."""

    def __init__(self, place: Place, **options: Any) -> None:
        self.place = place
        specs = KernelSpecManager(
            kernel_dirs=[str(place.directory / "jupyter/kernels")]
        )
        self.manager = KernelManager(
            kernel_name="rlm",
            kernel_spec_manager=specs,
            connection_file=str(place.directory / "run" / "k.json"),
            **options,
        )
        self.client: BlockingKernelClient | None = None

    def start(self, **environ: str) -> "FrontEnd":
        self.manager.start_kernel(
            env={**self.place.environ, **environ}, cwd=str(self.place.cwd)
        )
        return self.join()

    def join(self) -> "FrontEnd":
        """Connect to the kernel, once more after a restart on other ports."""
        if self.client is not None:
            self.client.stop_channels()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=BOUND_S)
        return self

    def run(self, code: str, *, within_s: float = BOUND_S) -> CellOutcome:
        """Run a cell and wait for its reply and its output."""
        return self.wait(self.client.execute(code), within_s=within_s)

    def wait(self, message_id: str, *, within_s: float = BOUND_S) -> CellOutcome:
        texts = {"stdout": "", "stderr": ""}
        result = None
        while True:
            message = self.client.get_iopub_msg(timeout=within_s)
            if message["parent_header"].get("msg_id") != message_id:
                continue
            content = message["content"]
            match message["msg_type"]:
                case "stream":
                    texts[content["name"]] += content["text"]
                case "execute_result":
                    result = content["data"]["text/plain"]
                case "status" if content["execution_state"] == "idle":
                    break
        reply = self.reply(message_id, within_s=within_s)
        return CellOutcome(
            status=reply["status"],
            count=reply.get("execution_count"),
            result=result,
            error=reply.get("ename"),
            message=reply.get("evalue"),
            **texts,
        )

    def reply(self, message_id: str, *, within_s: float = BOUND_S) -> dict[str, Any]:
        while True:
            message = self.client.get_shell_msg(timeout=within_s)
            if message["parent_header"].get("msg_id") == message_id:
                return message["content"]

    @property
    def wrapper(self) -> psutil.Process:
        """The kernelspec's argv: the bridge."""
        return psutil.Process(self.manager.provisioner.process.pid)

    def status(self, *, within_s: float = BOUND_S) -> int:
        """The exit status of the wrapper, as the front end sees it."""
        return self.manager.provisioner.process.wait(within_s)

    def harness(self) -> list[psutil.Process]:
        below = self.wrapper.children(recursive=True)
        return [p for p in below if "--profile" in _command_line(p)]

    def close(self) -> None:
        if self.client is not None:
            self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()
        self.manager.context.destroy(0)


@pytest.fixture
def open_front_end(place: Place) -> Iterator[Callable[..., FrontEnd]]:
    """Installs the kernel with some options, and opens front ends on it."""
    opened: list[FrontEnd] = []
    (place.directory / "run").mkdir(mode=0o700)

    def open_one(*install: str, options: dict[str, Any] | None = None, **environ: str):
        if not opened:
            assert place.run("install", *install).status == 0
        opened.append(FrontEnd(place, **(options or {})))
        return opened[-1].start(**environ)

    yield open_one
    for front_end in opened:
        front_end.close()


@pytest.fixture
def scripted(open_front_end: Callable[..., FrontEnd]) -> FrontEnd:
    """A front end whose children are played by a script."""
    return open_front_end("--scripted")


CHILD = '''
child = await rlm("""```python
await agent_message.send("21", receiver_role="parent")
```""")
'''
"""A cell that admits a child; it reports 21."""


@pytest.fixture(scope="session")
def admit_child() -> str:
    """The cell that admits a child, which reports 21."""
    return CHILD
