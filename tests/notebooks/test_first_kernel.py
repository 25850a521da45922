"""The notebooks of the project run as they stand, in two stock runners."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from host_bridge.kernelspec import install
from host_bridge.model import ModelChoice

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
KEY = "sk-0123456789abcdef"

pytestmark = pytest.mark.posix


@pytest.fixture
def environ(short_path, monkeypatch):
    """The environment of a front end that has the kernel RLM installed."""
    environ = {
        "HOME": str(short_path / "home"),
        "TMPDIR": str(short_path / "tmp"),
        "RLM_KERNEL_HOME": str(short_path / "state"),
        "JUPYTER_DATA_DIR": str(short_path / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(short_path / "run"),
        "JUPYTER_CONFIG_DIR": str(short_path / "conf"),
        "DEEPSEEK_API_KEY": KEY,
    }
    for name in ("HOME", "TMPDIR"):
        Path(environ[name]).mkdir()
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    install(ModelChoice(scripted=True))
    return environ


def left_in(directory: Path) -> list[Path]:
    """Files of sessions, harness homes and sockets."""
    found = []
    for pattern in ("state/*/*", "tmp/rlm-kernel-*/*", "run/kernel-*"):
        found += directory.glob(pattern)
    return found


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_stands_in_git_without_outputs(name):
    notebook = nbformat.read(FOLDER / name, as_version=4)

    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert cells
    assert [cell.outputs for cell in cells] == [[] for _ in cells]
    assert {cell.execution_count for cell in cells} == {None}
    assert notebook.metadata.kernelspec.name == "rlm"


@pytest.mark.kernel
@pytest.mark.dsh
@pytest.mark.parametrize("name", NOTEBOOKS)
async def test_a_notebook_runs_in_nbclient(name, environ, short_path):
    notebook = nbformat.read(FOLDER / name, as_version=4)
    probe = "import os; 'DEEPSEEK_API_KEY' in os.environ"
    notebook.cells.append(nbformat.v4.new_code_cell(probe))
    client = NotebookClient(notebook, timeout=60, kernel_name="rlm")

    await client.async_execute(cwd=str(short_path))

    assert "widgets" not in notebook.metadata
    by_id = {
        cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"
    }
    assert by_id["report"][0].data["text/plain"] == "'168'"
    assert "bash says: 42" in by_id["bash"][0].text
    assert notebook.cells[-1].outputs[0].data["text/plain"] == "False"
    assert left_in(short_path) == []


@pytest.mark.kernel
@pytest.mark.dsh
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_in_nbconvert_with_nothing_said_about_comms(
    name, environ, short_path
):
    argv = [
        sys.executable,
        "-m",
        "jupyter",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
    ]

    ended = subprocess.run(
        [*argv, "--output-dir", str(short_path), str(FOLDER / name)],
        env={**os.environ, **environ},
        cwd=short_path,
        capture_output=True,
        text=True,
        timeout=80,
    )

    assert ended.returncode == 0, ended.stderr
    assert "comm" not in ended.stderr.replace("All communication", "").lower()
    assert "Traceback" not in ended.stderr
    written = json.loads((short_path / name).read_text("utf-8"))
    assert "'168'" in json.dumps(written)
    assert "widgets" not in written["metadata"]
    assert KEY not in json.dumps(written)
    assert left_in(short_path) == []
