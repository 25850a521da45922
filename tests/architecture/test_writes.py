"""One writer: only `host_bridge.durable` creates or changes files of the bridge.

What another module does with files stands in `ALLOWED`, with its reason.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WRITER = "host_bridge/durable.py"
MODULES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "host_bridge").rglob("*.py")
)

ALLOWED: dict[tuple[str, str], str] = {
    ("host_bridge/kernels/launch.py", "write_connection_file"): (
        "jupyter_client makes it, 0600, in the kernel's own socket directory: "
        "it lasts as long as one kernel process and nothing is rebuilt from it"
    ),
    ("host_bridge/kernelspec.py", "write_text"): (
        "a temporary file that jupyter_client copies to Jupyter's own place, where "
        "the other users of an environment must be able to read it"
    ),
}
"""(module, call) -> why it may do what only the writer does elsewhere."""

WRITING_FLAGS = {"O_CREAT", "O_WRONLY", "O_RDWR", "O_APPEND", "O_TRUNC", "O_TMPFILE"}
OF_MODULE = {
    "os": {"replace", "rename", "renames", "link", "symlink", "truncate", "fsync"},
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move"},
    "tempfile": {"mkstemp", "NamedTemporaryFile", "TemporaryFile"},
}
OF_PATH = {"write_text", "write_bytes", "touch", "rename", "hardlink_to", "symlink_to"}


def writes(source: str) -> Iterator[tuple[int, str]]:
    """The calls in *source* that create, replace or change a file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Name("open"):
                if opens_for_writing(node, mode_at=1):
                    yield node.lineno, "open"
            case ast.Name("write_connection_file"):
                yield node.lineno, "write_connection_file"
            case ast.Attribute(ast.Name("os"), "open"):
                names = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
                if names & WRITING_FLAGS:
                    yield node.lineno, "os.open"
            case ast.Attribute(ast.Name("os"), "fdopen"):
                if opens_for_writing(node, mode_at=1):
                    yield node.lineno, "os.fdopen"
            case ast.Attribute(ast.Name(module), name) if name in OF_MODULE.get(
                module, ()
            ):
                yield node.lineno, f"{module}.{name}"
            case ast.Attribute(ast.Name(module)) if module in OF_MODULE:
                pass
            case ast.Attribute(_, "open"):
                if opens_for_writing(node, mode_at=0):
                    yield node.lineno, "open"
            case ast.Attribute(_, name) if name in OF_PATH:
                yield node.lineno, name
            # str.replace takes two arguments, dataclasses.replace keywords.
            case ast.Attribute(_, "replace") if len(node.args) == 1:
                if not node.keywords:
                    yield node.lineno, "replace"


def opens_for_writing(call: ast.Call, *, mode_at: int) -> bool:
    given = [word.value for word in call.keywords if word.arg == "mode"]
    given += call.args[mode_at : mode_at + 1]
    if not given:
        return False
    mode = given[0]
    if isinstance(mode, ast.Constant) and isinstance(mode.value, str):
        return bool(set(mode.value) & set("wax+"))
    return True  # a mode that is not written down may be any


@pytest.mark.parametrize("module", [name for name in MODULES if name != WRITER])
def test_only_the_writer_writes(module):
    found = {
        f"{module}:{line}: {call}"
        for line, call in writes((ROOT / module).read_text("utf-8"))
        if (module, call) not in ALLOWED
    }

    assert found == set()


def test_every_exception_is_in_use_and_says_why():
    used = {
        (module, call)
        for module in MODULES
        for _, call in writes((ROOT / module).read_text("utf-8"))
    }

    assert set(ALLOWED) - used == set()
    assert all(ALLOWED.values())


@pytest.mark.parametrize(
    "source",
    [
        "open(p, 'w')",
        "open(p, mode='ab')",
        "open(p, mode)",
        "p.open('r+')",
        "p.write_text('x')",
        "p.write_bytes(b'x')",
        "p.touch()",
        "p.rename(q)",
        "p.replace(q)",
        "os.replace(a, b)",
        "os.rename(a, b)",
        "os.open(p, os.O_CREAT | os.O_WRONLY)",
        "os.fdopen(d, 'wb')",
        "shutil.copyfile(a, b)",
        "tempfile.mkstemp()",
        "write_connection_file(p)",
    ],
)
def test_the_scan_finds_a_write(source):
    assert len(list(writes(source))) == 1


@pytest.mark.parametrize(
    "source",
    [
        "open(p)",
        "open(p, 'rb')",
        "p.open()",
        "p.read_text('utf-8')",
        "text.replace('a', 'b')",
        "dataclasses.replace(x, a=1)",
        "os.open(p, os.O_RDONLY)",
        "stream.write(b'x')",
    ],
)
def test_the_scan_leaves_reading_alone(source):
    assert list(writes(source)) == []
