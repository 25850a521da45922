"""The exact environment of a kernel: nothing that nobody chose."""

import os

import psutil
import pytest

from host_bridge.errors import SetupError
from host_bridge.kernels.environment import (
    SYSTEM_VARIABLES,
    KernelVariables,
    kernel_environment,
)

ENVIRON = {"PATH": "/bin", "HOME": "/h", "SECRET_TOKEN": "s", "EXTRA": "e"}

OURS = {"RLM_SESSION_DIR", "RLM_GENERATION", "RLM_DEPTH", "RLM_MAX_DEPTH"}


@pytest.fixture
def variables(tmp_path):
    return KernelVariables(
        session_dir=tmp_path / "s",
        ipython_dir=tmp_path / "i",
        generation="g",
        depth=1,
        max_depth=2,
    )


def test_the_set_is_the_systems_and_ours(variables, tmp_path):
    assert kernel_environment(variables, environ=ENVIRON) == {
        "PATH": "/bin",
        "HOME": "/h",
        "IPYTHONDIR": str(tmp_path / "i"),
        "RLM_SESSION_DIR": str(tmp_path / "s"),
        "RLM_GENERATION": "g",
        "RLM_DEPTH": "1",
        "RLM_MAX_DEPTH": "2",
        "JPY_PARENT_PID": str(os.getpid()),
    }


def test_the_allowlist_adds_what_it_names(variables):
    found = kernel_environment(
        variables, allowlist=("EXTRA", "NOT_SET"), environ=ENVIRON
    )

    assert found["EXTRA"] == "e"
    assert "NOT_SET" not in found
    assert "SECRET_TOKEN" not in found


@pytest.mark.parametrize(
    "name", ["RLM_GENERATION", "RLM_ANYTHING", "IPYTHONDIR", "JPY_PARENT_PID"]
)
def test_the_allowlist_may_not_name_one_of_ours(variables, name):
    with pytest.raises(SetupError) as caught:
        kernel_environment(variables, allowlist=("EXTRA", name), environ=ENVIRON)

    assert caught.value.code == "CONFIG_INVALID"
    assert name in str(caught.value)


def test_no_system_variable_sounds_like_a_secret():
    assert not [
        name
        for name in SYSTEM_VARIABLES
        if any(word in name for word in ("KEY", "TOKEN", "SECRET", "PASS", "PROXY"))
    ]


@pytest.mark.kernel
@pytest.mark.asyncio(loop_scope="module")
async def test_a_real_kernel_has_exactly_this_environment(
    lab, monkeypatch, token, capsys
):
    for name in (
        "DEEPSEEK_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "HTTPS_PROXY",
        "LD_PRELOAD",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "SSH_AUTH_SOCK",
    ):
        monkeypatch.setenv(name, "/nowhere" if name == "LD_PRELOAD" else token)

    kernel = await lab.kernel()
    started_with = psutil.Process(kernel.pid).environ()
    result = await kernel.execute("import os; '\\n'.join(os.environ.values())")

    print("\n".join(sorted(started_with)))
    expected = {name for name in SYSTEM_VARIABLES if name in os.environ}
    assert set(started_with) - {"LC_CTYPE"} == (
        expected | OURS | {"IPYTHONDIR", "JPY_PARENT_PID"}
    ) - {"LC_CTYPE"}
    assert token not in "\n".join(started_with.values())
    assert token not in result.result
    assert "IPYTHONDIR" in capsys.readouterr().out
