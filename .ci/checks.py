"""What a change must pass beside its tests: ``.ci/check``.

Each check yields what is wrong, ``file:line: text``. All run; one finding fails.
``checks.py --wheel FILE`` compares a built wheel with the tree instead.
"""

import json
import math
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = (
    "long_modules",
    "machine_paths",
    "missing_from_wheel",
    "notebook_outputs",
    "project_files",
    "secrets",
)

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("kernel_ext", "host_bridge", "magics")

MAX_LINES = 400

ALLOWED = "scan-ok:"
"""On a line, with a reason after it: neither a secret nor a path of a machine."""

SECRET = re.compile(
    r"""
    -----BEGIN[ ](?:[A-Z]+[ ])*PRIVATE[ ]KEY-----
    | \b(?:sk|rk)-(?P<provider>[A-Za-z0-9_-]{20,})
    | \b(?:gh[pousr]_|github_pat_|hf_|glpat-)(?P<forge>[A-Za-z0-9_-]{20,})
    | \bxox[abeprs]-(?P<slack>[A-Za-z0-9-]{20,})
    | \bAKIA(?P<amazon>[0-9A-Z]{16})\b
    | \bAIza(?P<google>[A-Za-z0-9_-]{35})
    """,
    re.VERBOSE,
)

MIN_ENTROPY = 3.2
"""Bits per character; random keys have 3.4 and more, words and fillers less."""

MACHINE_PATH = re.compile(
    r"(?<![\w.~/\-])/(?:work|root|workspace)/|(?<![\w.~/\-])/(?:home|Users)/[A-Za-z]"
)

_NOT_OURS = re.compile(
    r"^(?:\.git|\.venv.*|__pycache__|build|dist|.*\.egg-info|\..*_cache"
    r"|\.hypothesis|\.ipynb_checkpoints)$"
)


def project_files(root: Path) -> list[Path]:
    """The files that are or will be in the repository; all, where git is not."""
    git = shutil.which("git")
    if git and (root / ".git").exists():
        command = [git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True)
        names = sorted(set(listed.stdout.decode().split("\0")) - {""})
        return [root / name for name in names if (root / name).is_file()]
    return sorted(
        path
        for path in root.rglob("*")
        if path.is_file()
        and not any(_NOT_OURS.match(part) for part in path.relative_to(root).parts)
    )


def secrets(root: Path, files: list[Path]) -> Iterator[str]:
    """Keys and tokens that somebody could use."""
    for where, line in _lines(root, files):
        for found in SECRET.finditer(line):
            body = next((part for part in found.groups() if part), None)
            if body is None or _entropy(body) >= MIN_ENTROPY:
                yield f"{where}: looks like a secret ({found[0][:6]}…)"


def machine_paths(root: Path, files: list[Path]) -> Iterator[str]:
    """Absolute paths that exist on one machine only."""
    for where, line in _lines(root, files):
        if found := MACHINE_PATH.search(line):
            yield f"{where}: a path of one machine ({found[0]}…)"


def long_modules(root: Path, files: list[Path]) -> Iterator[str]:
    """Modules of more than 400 lines: each is probably two ideas."""
    for path in files:
        name = path.relative_to(root)
        if path.suffix != ".py" or name.parts[0] not in PACKAGES:
            continue
        count = len(path.read_text("utf-8").splitlines())
        if count > MAX_LINES:
            yield f"{name.as_posix()}:{count}: more than {MAX_LINES} lines"


def notebook_outputs(root: Path, files: list[Path]) -> Iterator[str]:
    """Notebooks that were saved with what they printed."""
    for path in files:
        if path.suffix != ".ipynb":
            continue
        cells = json.loads(path.read_text("utf-8"))["cells"]
        for number, cell in enumerate(cells, 1):
            if cell.get("outputs") or cell.get("execution_count"):
                name = path.relative_to(root).as_posix()
                yield f"{name}: cell {number} holds outputs; clear them"


def missing_from_wheel(root: Path, wheel: Path) -> Iterator[str]:
    """Files of the packages that an installed distribution would not have."""
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    for path in project_files(root):
        name = path.relative_to(root)
        if name.parts[0] in PACKAGES and name.as_posix() not in inside:
            yield f"{name.as_posix()}: is not in the wheel"


def _lines(root: Path, files: list[Path]) -> Iterator[tuple[str, str]]:
    """Each line of each text file with its place, without the allowed ones."""
    for path in files:
        data = path.read_bytes()
        if b"\0" in data:
            continue
        name = path.relative_to(root).as_posix()
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            if ALLOWED not in line:
                yield f"{name}:{number}", line


def _entropy(text: str) -> float:
    """Shannon's bits per character."""
    shares = [count / len(text) for count in Counter(text).values()]
    return -sum(share * math.log2(share) for share in shares)


def _tool(*arguments: str) -> Callable[[], Iterator[str]]:
    """A check that another program makes; its text is shown when it fails."""

    def run() -> Iterator[str]:
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True
        )
        if ended.returncode:
            yield (ended.stdout + ended.stderr).rstrip()

    return run


def _scan(
    check: Callable[[Path, list[Path]], Iterator[str]],
) -> Callable[[], Iterator[str]]:
    """A check of ours over the project's files."""
    return lambda: check(ROOT, project_files(ROOT))


CHECKS: dict[str, Callable[[], Iterator[str]]] = {
    "lint": _tool("-m", "ruff", "check", "--quiet", "."),
    "format": _tool("-m", "ruff", "format", "--check", "--quiet", "."),
    "types": _tool("-m", "mypy"),
    "types of the scripts": _tool(
        "-m", "mypy", "--strict", ".ci/checks.py", "provenance/check.py"
    ),
    "import contracts": _tool(
        "-c",
        "from importlinter.cli import lint_imports_command as run; run(['--no-logo'])",
    ),
    "provenance": _tool("provenance/check.py"),
    "secrets": _scan(secrets),
    "paths of a machine": _scan(machine_paths),
    "length of modules": _scan(long_modules),
    "outputs in notebooks": _scan(notebook_outputs),
}


def main(arguments: list[str]) -> int:
    """Run the checks, say how each went; the exit status."""
    if arguments[:1] == ["--wheel"]:
        found = list(missing_from_wheel(ROOT, Path(arguments[1])))
        sys.stdout.write("".join(f"{line}\n" for line in found))
        return 1 if found else 0
    failed = 0
    for name, check in CHECKS.items():
        started = time.monotonic()
        found = list(check())
        failed += bool(found)
        verdict = "FAILED" if found else "ok"
        took = time.monotonic() - started
        sys.stdout.write(f"{name:<22} {verdict:<6} {took:5.1f} s\n")
        sys.stdout.write("".join(f"{line}\n" for line in found))
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
