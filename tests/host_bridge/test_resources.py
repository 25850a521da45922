"""What our processes use and own, and what of it is left."""

import json
import os
import subprocess
import sys

import pytest

from host_bridge.errors import SetupError
from host_bridge.processes import mark_of
from host_bridge.resources import ResourceWatch, claim_directory, owner_of
from kernel_ext.wire.codes import ErrorCode

GONE = {"pid": 2**22 - 7, "started_at": 1.0}
"""A process that never was."""


@pytest.fixture
def child():
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    yield process
    process.stdin.close()
    process.wait(5)


async def test_memory_of_this_process_is_counted_at_once():
    async with ResourceWatch() as watch:
        pass

    assert watch.peak_mb > 0


async def test_a_process_that_runs_on_is_counted_as_left_and_one_that_ends_is_not(
    child,
):
    async with ResourceWatch() as watch:
        pass

    before = watch.still_running()
    child.kill()
    child.wait(5)

    assert before >= 1
    assert watch.still_running() == before - 1


async def test_a_zombie_is_not_left():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    async with ResourceWatch() as watch:
        pass
    before = watch.still_running()

    process.stdin.close()
    while process.returncode is None and before == watch.still_running():
        pass  # bounded by the test's own timeout; nobody has waited for it yet

    assert watch.still_running() == before - 1
    process.wait(5)


async def test_a_watch_that_never_began_ends_all_the_same():
    watch = ResourceWatch()

    await watch.__aexit__(None, None, None)

    assert watch.still_running() >= 0


def test_a_claimed_directory_is_private_and_names_its_owner(short_path):
    claimed = claim_directory(short_path / "a/b")

    assert claimed == short_path / "a/b"
    assert owner_of(claimed) == mark_of(os.getpid())
    if os.name == "posix":
        assert claimed.stat().st_mode & 0o777 == 0o700


def test_a_directory_of_a_live_process_is_not_taken_from_it(short_path, child):
    other = mark_of(child.pid)
    (short_path / "owner.json").write_text(json.dumps(other.as_json()))

    with pytest.raises(SetupError) as caught:
        claim_directory(short_path)

    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert str(child.pid) in str(caught.value)
    assert owner_of(short_path) == other


def test_what_an_ended_process_left_is_removed_before_it_is_claimed(short_path):
    (short_path / "owner.json").write_text(json.dumps(GONE))
    (short_path / ".credentials.yaml").write_text("old")

    claim_directory(short_path)

    assert [path.name for path in short_path.iterdir()] == ["owner.json"]


def test_what_nobody_has_claimed_is_not_removed(short_path):
    (short_path / "mine").touch()

    claim_directory(short_path)

    assert (short_path / "mine").exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": "x"}'])
def test_a_claim_that_can_not_be_read_is_none(short_path, text):
    (short_path / "owner.json").write_text(text)

    assert owner_of(short_path) is None
