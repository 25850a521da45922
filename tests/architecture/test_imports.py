"""What an import brings along, by the set of modules and never by the clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("kernel_ext", "host_bridge", "magics")
HOST_ONLY = {"pydantic", "httpx", "honcho", "typer", "rich", "host_bridge"}
WIRE_MODULES = sorted(
    f"kernel_ext.wire.{path.stem}"
    for path in (ROOT / "kernel_ext/wire").glob("*.py")
    if not path.stem.startswith("__")
)


def modules_after(*statements: str) -> list[set[str]]:
    """The modules that a fresh interpreter has after each statement."""
    lines = ["import json, sys", "seen = []"]
    for statement in statements:
        lines += [statement, "seen.append(sorted(sys.modules))"]
    lines.append("print(json.dumps(seen))")
    ended = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [set(names) for names in json.loads(ended.stdout)]


def of_ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name.partition(".")[0] in OURS}


def tops(modules: set[str]) -> set[str]:
    """The packages and modules that an import statement begins with."""
    return {name.partition(".")[0] for name in modules}


def foreign(modules: set[str]) -> set[str]:
    """The packages that are neither ours nor the standard library's."""
    return tops(modules - of_ours(modules)) - set(sys.stdlib_module_names)


def test_importing_the_package_loads_nothing_else_of_ours():
    before, after = modules_after("pass", "import kernel_ext")

    assert of_ours(after) == {"kernel_ext"}
    assert foreign(after - before) == set()


@pytest.mark.parametrize("module", ["kernel_ext.wire", *WIRE_MODULES])
def test_the_wire_needs_the_standard_library_alone(module):
    before, after = modules_after("pass", f"import {module}")

    assert foreign(after - before) == set()
    assert of_ours(after) - {"kernel_ext"} == {
        name for name in of_ours(after) if name.startswith("kernel_ext.wire")
    }


def test_the_extension_adds_only_itself_to_a_kernel():
    before, after = modules_after(
        "import ipykernel.kernelapp, ipykernel.zmqshell", "import kernel_ext.extension"
    )

    assert foreign(after - before) == set()
    assert tops(of_ours(after)) == {"kernel_ext"}
    assert tops(after) & HOST_ONLY == set()


def test_the_kernel_application_loads_no_host_library():
    (after,) = modules_after("import kernel_ext.application")

    assert tops(after) & HOST_ONLY == set()


def test_the_kernels_process_is_small_until_its_guard_is_there():
    (after,) = modules_after("import kernel_ext.__main__")

    assert not after & {"IPython", "ipykernel", "zmq", "asyncio", "traitlets"}
