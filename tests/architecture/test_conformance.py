"""docs/conformance.md: every row names living tests or a decision that exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/conformance.md"
TEST_ID = re.compile(r"(?P<file>tests/[\w./-]+\.py)(?:::(?P<name>\w+))?")
DECISION = re.compile(r"(?P<file>decisions/\d{4}-[\w-]+\.md)")


def rows(text: str) -> list[str]:
    """The lines of the tables, without their heads and rules."""
    lines = [line.strip() for line in text.splitlines()]
    found = []
    for before, line in zip(["", *lines], lines, strict=False):
        if re.fullmatch(r"\|[\s:|-]+\|", line) and before.startswith("|"):
            found.remove(before)
        elif line.startswith("|"):
            found.append(line)
    return found


def functions_in(file: Path) -> set[str]:
    return {
        node.name
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


def faults(row: str, *, root: Path, page: Path) -> list[str]:
    """What is wrong with a row of the page."""
    tests = list(TEST_ID.finditer(row))
    decisions = list(DECISION.finditer(row))
    wrong = [] if tests or decisions else ["neither a test nor a decision"]
    for found in tests:
        file = root / found["file"]
        if not file.is_file():
            wrong.append(f"{found['file']} does not exist")
        elif not found["name"]:
            wrong.append(f"{found['file']}: name the test")
        elif found["name"] not in functions_in(file):
            wrong.append(f"{found[0]} does not exist")
    wrong += [
        f"{found['file']} does not exist"
        for found in decisions
        if not (page.parent / found["file"]).is_file()
    ]
    return wrong


def test_every_row_leads_to_a_test_or_a_decision():
    found = rows(PAGE.read_text("utf-8"))

    assert found
    assert {
        row: wrong for row in found if (wrong := faults(row, root=ROOT, page=PAGE))
    } == {}


@pytest.mark.parametrize(
    ("row", "wrong"),
    [
        ("| x | `tests/a_test.py::test_here` |", []),
        ("| x | `tests/a_test.py::test_slow` |", []),
        ("| x | [0001](decisions/0001-a.md) |", []),
        ("| x | soon |", ["neither a test nor a decision"]),
        (
            "| x | `tests/a_test.py::test_gone` |",
            ["tests/a_test.py::test_gone does not exist"],
        ),
        ("| x | `tests/b_test.py::test_here` |", ["tests/b_test.py does not exist"]),
        ("| x | `tests/a_test.py` |", ["tests/a_test.py: name the test"]),
        ("| x | [2](decisions/0002-b.md) |", ["decisions/0002-b.md does not exist"]),
    ],
)
def test_a_dead_row_is_found(tmp_path, row, wrong):
    page = tmp_path / "docs/conformance.md"
    (tmp_path / "docs/decisions").mkdir(parents=True)
    (tmp_path / "docs/decisions/0001-a.md").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/a_test.py").write_text(
        "def test_here(): ...\nasync def test_slow(): ...\n"
    )

    assert rows(f"| what | where |\n|---|---|\n{row}\n") == [row]
    assert faults(row, root=tmp_path, page=page) == wrong
