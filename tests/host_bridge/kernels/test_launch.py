"""Starting a kernel process: what it needs, and what is left when it fails."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from host_bridge.errors import SetupError
from host_bridge.kernels.launch import launch

pytestmark = pytest.mark.posix


@pytest.fixture
def paths(state):
    return state.session("s").make()


@pytest.fixture
def environment():
    return {"PATH": os.environ["PATH"], "RLM_GENERATION": "g-test"}


async def test_it_runs_from_a_directory_of_any_depth(
    paths, environment, tmp_path, monkeypatch, waits
):
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr("tempfile.tempdir", None)

    process = await waits.within(
        launch(paths=paths, cwd=deep, environment={**environment, "TMPDIR": str(deep)})
    )
    try:
        assert len(str(process.directory)) < 60
    finally:
        await waits.within(process.end(grace_s=0))

    assert not process.directory.exists()


async def test_it_is_recorded_with_its_bridge(paths, environment, tmp_path, waits):
    process = await waits.within(
        launch(paths=paths, cwd=tmp_path, environment=environment)
    )
    record = json.loads(paths.runtime.read_text())
    await waits.within(process.end(grace_s=0))

    assert record["kernel"]["pid"] == process.pid
    assert record["bridge"]["pid"] == os.getpid()
    assert paths.runtime.stat().st_mode & 0o777 == 0o600


async def test_when_it_can_not_be_recorded_it_does_not_run(
    paths, environment, tmp_path, waits
):
    paths.runtime.mkdir()

    with pytest.raises(SetupError) as caught:
        await waits.within(launch(paths=paths, cwd=tmp_path, environment=environment))

    assert caught.value.code == "STATE_ROOT_UNUSABLE"


@pytest.mark.parametrize("what", ["cwd", "python"])
async def test_what_is_missing_leaves_no_socket_directory(
    paths, environment, tmp_path, monkeypatch, waits, what
):
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    options = {"cwd": tmp_path, "python": sys.executable, what: tmp_path / "nowhere"}

    with pytest.raises(OSError, match="nowhere"):
        await waits.within(
            launch(
                paths=paths,
                environment=environment,
                cwd=options["cwd"],
                python=str(options["python"]),
            )
        )

    assert [*runtime.glob("*/*")] == []


async def test_its_last_words_are_kept_however_much_it_says(
    paths, environment, tmp_path, waits
):
    shouting = tmp_path / "python"
    shouting.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "sys.stderr.write('x' * 1_000_000 + 'the end')\nsys.exit(3)\n"
    )
    shouting.chmod(0o700)

    process = await waits.within(
        launch(paths=paths, cwd=tmp_path, environment=environment, python=str(shouting))
    )
    await waits.within(process.process.wait())
    await waits.within(process._drain)
    await waits.within(process.end(grace_s=0))

    assert process.returncode == 3
    assert process.stderr_tail.endswith("the end")
    assert len(process.stderr_tail) <= 64 * 1024


async def test_ending_it_twice_at_once_is_fine(paths, environment, tmp_path, waits):
    process = await waits.within(
        launch(paths=paths, cwd=tmp_path, environment=environment)
    )

    await waits.within(
        asyncio.gather(process.end(grace_s=0), process.end(grace_s=0.01))
    )
    await waits.within(process.end(grace_s=0))

    assert process.returncode is not None


@pytest.mark.kernel
@pytest.mark.parametrize("change", [{"key": ""}, {"key": None}], ids=["empty", "none"])
async def test_a_kernel_refuses_a_connection_without_a_key(
    short_path, environment, waits, change
):
    connection = {
        "transport": "ipc",
        "ip": str(short_path / "k"),
        "signature_scheme": "hmac-sha256",
        **{
            name: number
            for number, name in enumerate(
                ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port"), 1
            )
        },
    }
    if change["key"] is not None:
        connection |= change
    file = short_path / "kernel.json"
    file.write_text(json.dumps(connection))

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kernel_ext",
        "-f",
        str(file),
        env={**environment, "IPYTHONDIR": str(short_path / "ipython")},
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    try:
        _, said = await waits.within(process.communicate())
    finally:
        if process.returncode is None:
            process.kill()

    assert process.returncode not in (0, None)
    assert b"has no key" in said


@pytest.mark.kernel
async def test_a_kernel_whose_owner_has_ended_does_not_start(
    short_path, environment, waits
):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "kernel_ext",
        "-f",
        str(short_path / "none.json"),
        env={**environment, "JPY_PARENT_PID": "1999999"},
        stderr=asyncio.subprocess.DEVNULL,
        stdin=asyncio.subprocess.DEVNULL,
    )

    assert await waits.within(process.wait()) == 1


def test_another_local_user_reaches_nothing_of_a_session(short_path):
    """Fork, become nobody, and try; no exec, as nobody may read the interpreter."""
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    # Its parents let everyone pass: what protects the session is its own.
    short_path.chmod(0o755)
    found = asyncio.run(_intrude(short_path))

    assert found == {"tried": found["tried"], "reached": []}
    assert found["tried"] >= 10


async def _intrude(directory: Path) -> dict:
    from host_bridge.kernels.kernel import KernelSettings, KernelSpec
    from host_bridge.kernels.registry import KernelRegistry
    from host_bridge.paths import StateRoot

    state = StateRoot(directory / "state", "the test's own")
    spec = KernelSpec(agent_id="a", depth=0, cwd=directory, paths=state.session("a"))

    async def dispatch(request, asker):
        raise AssertionError

    registry = KernelRegistry(KernelSettings(), dispatch=dispatch)
    try:
        kernel = await registry.kernel(spec)
        await kernel.execute(
            "open(f\"{__import__('os').environ['RLM_SESSION_DIR']}"
            "/exports/mine\", 'w').write('x')"
        )
        sockets = [*kernel.connection_file.parent.iterdir()]
        files = [*state.directory.rglob("*")]
        return await asyncio.to_thread(
            _as_nobody, [*sockets, *files, kernel.connection_file.parent]
        )
    finally:
        await registry.close()


def _as_nobody(targets: list[Path]) -> dict:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        reached = []
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            reached += [str(target) for target in targets if _reaches(target)]
            os.write(writer, json.dumps(reached).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answers:
        said = answers.read()
    os.waitpid(pid, 0)
    return {"tried": len(targets), "reached": json.loads(said)}


def _reaches(target: Path) -> bool:
    for attempt in (
        lambda: target.read_bytes(),
        lambda: [*target.iterdir()],
        lambda: target.open("ab").close(),
        lambda: (target / "new").touch(),
        lambda: socket.socket(socket.AF_UNIX).connect(str(target)),
    ):
        try:
            attempt()
        except OSError:
            continue
        return True
    return False
