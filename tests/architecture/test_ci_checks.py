"""The scans of `.ci/check`: what they find, and what they leave alone."""

import importlib.util
import secrets
import shutil
import string
import subprocess
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def load_checks():
    spec = importlib.util.spec_from_file_location("ci_checks", ROOT / ".ci/checks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


checks = load_checks()


def made_up(length: int, letters: str = string.ascii_letters + string.digits) -> str:
    """A key of nobody, with every letter different: it is never too plain."""
    return "".join(secrets.SystemRandom().sample(letters, length))


def scan(check, tmp_path: Path, text: str, name: str = "page.md") -> list[str]:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return list(check(tmp_path, [path]))


@pytest.mark.parametrize(
    "key",
    [
        "sk-" + made_up(48),
        "sk-proj-" + made_up(40),
        "ghp_" + made_up(36),
        "xoxb-" + made_up(24),
        "AKIA" + made_up(16, string.ascii_uppercase + string.digits),
        "AIza" + made_up(35),
        "-----BEGIN " + "PRIVATE KEY-----",
        "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    ],
    ids=lambda key: key[:8],
)
def test_a_key_is_found_with_its_place_and_not_printed(tmp_path, key):
    found = scan(checks.secrets, tmp_path, f"one\nkey = '{key}'\n")

    assert len(found) == 1
    assert found[0].startswith("page.md:2: ")
    assert key not in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "sk-your-key-here",
        "sk-" + "x" * 40,
        "sk-test",
        "task-" + made_up(30),
        "sha256:" + "0123456789abcdef" * 4,
        "sk-" + made_up(40) + "  # scan-ok: made up for this test",
    ],
    ids=range(6),
)
def test_what_is_no_key_is_left_alone(tmp_path, text):
    assert scan(checks.secrets, tmp_path, text) == []


@pytest.mark.parametrize("path", ["work/a", "root/.x", "home/sam/b", "Users/sam/b"])
def test_a_path_of_one_machine_is_found(tmp_path, path):
    assert len(scan(checks.machine_paths, tmp_path, f"see `/{path}`\n")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "https://example.org/work/a",
        "~/work/a",
        "./root/x",
        "src/home/page",
        "/homework/x",
        "/home/<name>",
        "a / work / b",
    ],
)
def test_another_path_is_left_alone(tmp_path, text):
    assert scan(checks.machine_paths, tmp_path, text) == []


@pytest.mark.parametrize(
    ("name", "lines", "found"),
    [
        ("kernel_ext/a.py", 400, 0),
        ("kernel_ext/a.py", 401, 1),
        ("host_bridge/b/c.py", 401, 1),
        ("magics/d.py", 401, 1),
        ("tests/e.py", 401, 0),
        ("host_bridge/f.mjs", 401, 0),
    ],
)
def test_a_long_module_is_found(tmp_path, name, lines, found):
    assert len(scan(checks.long_modules, tmp_path, "x = 1\n" * lines, name)) == found


@pytest.mark.parametrize(
    ("cell", "found"),
    [
        ('{"outputs": [], "execution_count": null}', 0),
        ('{"outputs": [{"text": "42"}], "execution_count": null}', 1),
        ('{"outputs": [], "execution_count": 3}', 1),
        ('{"source": "text"}', 0),
    ],
)
def test_a_notebook_with_outputs_is_found(tmp_path, cell, found):
    text = f'{{"cells": [{cell}]}}'

    assert len(scan(checks.notebook_outputs, tmp_path, text, "a.ipynb")) == found


@pytest.mark.parametrize("with_git", [True, False])
def test_the_files_of_a_project_are_listed_with_and_without_git(tmp_path, with_git):
    for name in ("a.py", "b/c.py", "__pycache__/d.pyc", ".venv/e.py", ".ci/run"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("__pycache__/\n.venv*/\n")
    if with_git:
        git = shutil.which("git")
        if git is None:
            pytest.skip("this machine has no git")
        subprocess.run([git, "init", "-q", tmp_path], check=True)

    found = {
        path.relative_to(tmp_path).as_posix() for path in checks.project_files(tmp_path)
    }

    assert found == {".gitignore", "a.py", "b/c.py", ".ci/run"}


def test_a_file_that_the_wheel_lacks_is_found(tmp_path):
    tree = tmp_path / "tree"
    for name in ("host_bridge/a.py", "host_bridge/plugin.mjs", "tests/t.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).touch()
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("host_bridge/a.py", "")

    found = list(checks.missing_from_wheel(tree, wheel))

    assert found == ["host_bridge/plugin.mjs: is not in the wheel"]
