"""What the pages say runs, and where they point exists.

Every ``python`` block compiles as a cell and every ``bash`` block parses. A
``python`` block right below ``<!-- runnable -->`` runs in a managed kernel under
the scripted harness, and one below ``<!-- output -->`` is what it prints.
"""

import ast
import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "provenance").glob("*.md"),
    ]
)
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[\w-]+) -->\n+)?```(?P<language>[\w-]*)\n(?P<text>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    mark: str | None
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_in(path: Path) -> list[Block]:
    text = path.read_text("utf-8")
    page = path.relative_to(ROOT).as_posix()
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["mark"],
            found["language"],
            found["text"],
        )
        for found in FENCE.finditer(text)
    ]


def anchors_in(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


BLOCKS = [block for page in PAGES for block in blocks_in(page)]
NEXT_TO = dict(itertools.pairwise(BLOCKS))


def of(language: str, mark: str | None = None) -> list[Block]:
    return [
        block
        for block in BLOCKS
        if block.language == language and (mark is None or block.mark == mark)
    ]


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_python_on_a_page_compiles_as_a_cell(block):
    source = TransformerManager().transform_cell(block.text)

    compile(source, str(block), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.skipif(sys.platform == "win32", reason="has no bash to ask")
@pytest.mark.parametrize("block", of("bash"), ids=str)
def test_bash_on_a_page_parses(block):
    ended = subprocess.run(
        ["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=20
    )

    assert ended.stderr == ""


@pytest.mark.kernel
@pytest.mark.parametrize("block", of("python", "runnable"), ids=str)
def test_a_runnable_example_prints_what_its_page_says(block, tmp_path, monkeypatch):
    monkeypatch.setenv("RLM_KERNEL_HOME", str(tmp_path / "state"))

    ended = subprocess.run(
        [sys.executable, "-m", "host_bridge", "exec", "-"],
        input=block.text,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 0, ended.stderr
    told = NEXT_TO.get(block)
    if told is not None and told.mark == "output":
        assert ended.stdout.strip() == told.text.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    dead = []
    prose = FENCE.sub("", page.read_text("utf-8"))
    for found in LINK.finditer(prose):
        target, _, anchor = found["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (
            anchor and file.suffix == ".md" and anchor not in anchors_in(file)
        ):
            dead.append(found["target"])

    assert dead == []


def test_readme_says_how_to_test():
    text = (ROOT / "README.md").read_text("utf-8")
    found = re.search(
        r"<!-- test-command -->\n(.*?)<!-- /test-command -->", text, re.DOTALL
    )

    assert found
    assert "python -m pytest" in found[1].splitlines()
