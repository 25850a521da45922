"""Compares pyproject.toml, the locks and upstreams.json: ``python provenance/check.py``.

They tell one story or the check fails: each direct dependency stands in
``upstreams.json`` with its range, each lock pins what it should within that
range, and nothing is installed that no hash vouches for.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

__all__ = ("disagreements",)

LOCKED_GROUPS = ("base", "host", "test", "build")
"""The groups of upstreams.json that every lock holds; ``dsh`` differs by lock."""

HARNESS = "deepseek-harness-sdk"

_PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)")
_REVISION = re.compile(r"^[0-9a-f]{40}$")


def disagreements(root: Path) -> Iterator[str]:
    """What is wrong in the project at *root*, one ``file: text`` each."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))
    upstreams = json.loads((root / "provenance/upstreams.json").read_text("utf-8"))
    yield from _records(upstreams)
    yield from _ranges(project, upstreams["dependencies"])
    locks = sorted((root / "provenance/locks").glob("dsh-*.txt"))
    harness = next(d for d in upstreams["dependencies"] if d["name"] == HARNESS)
    if [f"dsh-{version}" for version in sorted(harness["tested"])] != [
        lock.stem for lock in locks
    ]:
        yield "provenance/locks: not one lock for each tested harness"
    for lock in locks:
        yield from _lock(lock, upstreams["dependencies"])


def _records(upstreams: dict[str, Any]) -> Iterator[str]:
    """Each record is whole; a revision is a full one."""
    for entry in (*upstreams["specification"], *upstreams["dependencies"]):
        where = f"provenance/upstreams.json: {entry['name']}"
        if not entry.get("licence") or not entry.get("use"):
            yield f"{where}: no licence or no use"
        if entry.get("vendored") is not False:
            yield f"{where}: nothing is vendored here"
    for entry in upstreams["specification"]:
        if not _REVISION.match(entry["revision"]):
            yield f"provenance/upstreams.json: {entry['name']}: not a full revision"


def _ranges(project: dict[str, Any], recorded: list[dict[str, Any]]) -> Iterator[str]:
    """Each dependency of the project is recorded, with its group and range."""
    extras = project["project"]["optional-dependencies"]
    declared = {
        (group, canonicalize_name(requirement.name)): str(requirement.specifier)
        for group, lines in {
            "base": project["project"]["dependencies"],
            "build": project["build-system"]["requires"],
            **extras,
        }.items()
        for requirement in map(Requirement, lines)
        if requirement.name != project["project"]["name"]  # the extra `all`
    }
    known = {
        (entry["group"], entry["name"]): str(
            Requirement(f"x{entry['range']}").specifier
        )
        for entry in recorded
    }
    for group, name in sorted(declared.keys() - known.keys()):
        yield f"provenance/upstreams.json: {name} ({group}) is missing"
    for group, name in sorted(known.keys() - declared.keys()):
        yield f"pyproject.toml: {name} ({group}) is recorded, but no dependency"
    for group, name in sorted(declared.keys() & known.keys()):
        if declared[group, name] != known[group, name]:
            yield f"provenance/upstreams.json: {name}: the range is another one"


def _lock(lock: Path, recorded: list[dict[str, Any]]) -> Iterator[str]:
    """Each line has a hash and no source; each dependency is within its range."""
    where = f"provenance/locks/{lock.name}"
    text = lock.read_text("utf-8")
    lines = [
        line for line in text.replace("\\\n", " ").splitlines() if _is_requirement(line)
    ]
    pinned: dict[str, Version] = {}
    for line in lines:
        found = _PINNED.match(line)
        if found is None:
            yield f"{where}: not a pinned release: {line[:60]}"
            continue
        pinned[canonicalize_name(found[1])] = Version(found[2])
        if "--hash=sha256:" not in line:
            yield f"{where}: {found[1]} has no hash"
    if "://" in text:
        yield f"{where}: names an index or an address"
    for entry in recorded:
        if entry["group"] not in LOCKED_GROUPS:
            continue
        version = pinned.get(entry["name"])
        if version is None:
            yield f"{where}: {entry['name']} is missing"
        elif version not in Requirement(f"x{entry['range']}").specifier:
            yield f"{where}: {entry['name']} {version} is not {entry['range']}"
    if str(pinned.get(HARNESS)) != lock.stem.removeprefix("dsh-"):
        yield f"{where}: holds another harness than its name says"


def _is_requirement(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def main() -> int:
    """Print what is wrong; the exit status."""
    found = list(disagreements(Path(__file__).resolve().parent.parent))
    for line in found:
        sys.stderr.write(f"{line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
