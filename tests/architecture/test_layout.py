"""The shape of every module: its length, its docstring, what it exports."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("kernel_ext", "host_bridge", "magics")
MODULES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
)
MAX_LINES = 400
FORBIDDEN_WORDS = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "misc", "base", "manager"}
BARE_SUPPRESSION = re.compile(r"#\s*(?:type: ignore|noqa|pragma)(?:\s*$|\s*#\s*$)")

each_module = pytest.mark.parametrize("module", MODULES)


def tree_of(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text("utf-8"))


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Every name that the module binds at its top level, imports included."""
    for statement in ast.walk(tree):
        match statement:
            case ast.Import() | ast.ImportFrom():
                for alias in statement.names:
                    yield alias.asname or alias.name.partition(".")[0]
    for statement in tree.body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield statement.name
            case ast.Assign():
                for target in statement.targets:
                    if isinstance(target, ast.Name):
                        yield target.id
            case ast.AnnAssign(target=ast.Name(name)):
                yield name


def exported_names(tree: ast.Module) -> list[str] | None:
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__"
            for target in statement.targets
        ):
            return list(ast.literal_eval(statement.value))
    return None


def public_definitions(tree: ast.Module) -> set[str]:
    return {
        statement.name
        for statement in tree.body
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not statement.name.startswith("_")
    }


@each_module
def test_a_module_is_one_idea_long(module):
    lines = (ROOT / module).read_text("utf-8").splitlines()

    assert len(lines) <= MAX_LINES


@each_module
def test_a_module_says_what_it_is_for(module):
    docstring = ast.get_docstring(tree_of(module))

    assert docstring
    assert docstring.splitlines()[0].rstrip()[-1] in ".:`"


@each_module
def test_a_module_leaves_nothing_for_later(module):
    text = (ROOT / module).read_text("utf-8")

    assert FORBIDDEN_WORDS.findall(text) == []
    assert [line for line in text.splitlines() if BARE_SUPPRESSION.search(line)] == []


@each_module
def test_a_module_is_named_for_its_idea(module):
    assert FORBIDDEN_NAMES.isdisjoint(Path(module).with_suffix("").parts)


@each_module
def test_a_module_exports_what_it_defines(module):
    tree = tree_of(module)
    exported = exported_names(tree)
    public = public_definitions(tree)

    if exported is None:
        assert public == set(), "a module with public names needs __all__"
    else:
        assert len(exported) == len(set(exported))
        assert set(exported) - set(defined_names(tree)) == set()
        assert public - set(exported) == set()
