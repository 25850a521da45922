"""The kernelspec: its content, and the places it is written to."""

import json
import os
import sys

import pytest

from host_bridge.errors import SetupError
from host_bridge.kernelspec import KERNEL_NAME, install, kernelspec
from host_bridge.model import ModelChoice
from kernel_ext.wire.codes import ErrorCode


@pytest.fixture
def jupyter(short_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(short_path / "jupyter"))
    return short_path / "jupyter"


def test_the_argv_is_the_bridge_in_the_interpreter_that_installs():
    argv = kernelspec(ModelChoice())["argv"]

    # VS Code wants exactly this shape: python -m module arguments.
    assert argv[:2] == [sys.executable, "-m"]
    assert argv[2].startswith("host_bridge.")
    assert argv[3:] == ["-f", "{connection_file}"]


def test_a_front_end_may_encrypt_and_interrupts_by_message():
    spec = kernelspec(ModelChoice())

    assert spec["interrupt_mode"] == "message"
    assert spec["metadata"]["supported_encryption"] == "curve"
    assert spec["language"] == "python"


def test_the_scripted_kernel_is_told_apart_by_its_name():
    names = {
        kernelspec(ModelChoice(scripted=flag))["display_name"] for flag in (True, False)
    }

    assert len(names) == 2


def test_the_model_of_the_children_stands_in_the_environment():
    choice = ModelChoice(model="m", base_url="http://127.0.0.1:1/v1", key_variable="K")

    environ = kernelspec(choice)["env"]

    assert ModelChoice.from_environment(environ) == choice


def test_it_is_installed_for_the_user(jupyter):
    directory = install(ModelChoice())

    assert directory == jupyter / "kernels" / KERNEL_NAME
    assert json.loads((directory / "kernel.json").read_text()) == kernelspec(
        ModelChoice()
    )


def test_it_is_installed_into_an_environment(short_path):
    directory = install(ModelChoice(), prefix=str(short_path))

    assert directory == short_path / "share/jupyter/kernels/rlm"
    assert (directory / "kernel.json").is_file()


def test_an_older_one_is_replaced_whole(jupyter):
    old = jupyter / "kernels/rlm"
    old.mkdir(parents=True)
    (old / "logo.png").touch()
    (old / "kernel.json").write_text("not json")

    directory = install(ModelChoice(scripted=True))

    assert [path.name for path in directory.iterdir()] == ["kernel.json"]
    assert json.loads((directory / "kernel.json").read_text())["env"][
        "RLM_KERNEL_SCRIPTED"
    ]


@pytest.mark.skipif(os.name != "posix", reason="looks at modes")
def test_others_of_an_environment_can_read_it(short_path):
    directory = install(ModelChoice(), prefix=str(short_path))

    assert (directory / "kernel.json").stat().st_mode & 0o044 == 0o044
    assert directory.stat().st_mode & 0o055 == 0o055


def test_a_place_that_can_not_be_written_is_said_with_another(jupyter):
    jupyter.parent.joinpath("jupyter").write_text("a file")

    with pytest.raises(SetupError) as caught:
        install(ModelChoice())

    assert caught.value.code is ErrorCode.STATE_ROOT_UNUSABLE
    assert caught.value.next_step == "rlm-kernel install --sys-prefix"


def test_an_environment_that_can_not_be_written_is_not_told_to_use_itself(short_path):
    (short_path / "share").write_text("a file")

    with pytest.raises(SetupError) as caught:
        install(ModelChoice(), prefix=str(short_path))

    assert caught.value.next_step == "rlm-kernel install"
