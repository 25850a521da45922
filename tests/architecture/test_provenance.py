"""pyproject.toml, the locks and the record of upstreams tell one story."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOCK = "provenance/locks/dsh-0.1.2a3.txt"


def check(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, root / "provenance/check.py"],
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def copy(tmp_path):
    """The files that the check reads, to be spoilt."""
    shutil.copytree(ROOT / "provenance", tmp_path / "provenance")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def spoil(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), "utf-8")


def test_the_records_agree():
    ended = check(ROOT)

    assert ended.stderr == ""
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (
            "pyproject.toml",
            '"psutil>=6"',
            '"psutil>=6",\n  "attrs>=25"',
            "attrs (host)",
        ),
        ("pyproject.toml", '"psutil>=6"', '"psutil>=7"', "psutil: the range"),
        ("pyproject.toml", '  "psutil>=6",\n', "", "psutil (host) is recorded"),
        (LOCK, "traitlets==", "traitlets @ file:traitlets==", "not a pinned release"),
        (LOCK, "traitlets==5.", "traitlets==5.0.", "traitlets 5.0."),
        (LOCK, "# via", "# via https://index.example", "names an index"),
        (
            LOCK,
            "deepseek-harness-sdk==0.1.2a3",
            "deepseek-harness-sdk==0.1.2a2",
            "another",
        ),
        (
            "provenance/upstreams.json",
            '"vendored": false',
            '"vendored": true',
            "vendored",
        ),
        ("provenance/upstreams.json", "dd6322d6", "", "not a full revision"),
    ],
)
def test_a_disagreement_is_found(copy, file, old, new, told):
    spoil(copy / file, old, new)

    ended = check(copy)

    assert told in ended.stderr
    assert ended.returncode == 1


def test_a_line_without_a_hash_is_found(copy):
    lock = copy / LOCK
    lines = lock.read_text("utf-8").splitlines()
    kept = []
    for line in lines:
        if line.lstrip().startswith("--hash") and kept[-1].startswith("traitlets=="):
            continue
        kept.append(line)
    lock.write_text("\n".join(kept), "utf-8")

    ended = check(copy)

    assert "traitlets has no hash" in ended.stderr
    assert ended.returncode == 1


def test_every_record_has_its_licence():
    upstreams = json.loads((ROOT / "provenance/upstreams.json").read_text("utf-8"))
    entries = [*upstreams["specification"], *upstreams["dependencies"]]

    assert [entry["name"] for entry in entries if not entry["licence"]] == []
