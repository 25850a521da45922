"""The one writer: whole or not at all, and for the owner alone."""

import errno
import os
import stat

import pytest

from host_bridge import durable
from host_bridge.durable import make_private_directory, publish
from host_bridge.errors import SetupError

pytestmark = pytest.mark.posix


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_missing_parents_are_made_for_the_owner_alone(tmp_path):
    made = make_private_directory(tmp_path / "a" / "b" / "c")

    assert made == tmp_path / "a" / "b" / "c"
    assert {mode(tmp_path / p) for p in ("a", "a/b", "a/b/c")} == {0o700}


def test_a_directory_that_others_may_enter_is_closed_to_them(tmp_path):
    open_one = tmp_path / "open"
    open_one.mkdir(mode=0o755)

    make_private_directory(open_one)

    assert mode(open_one) == 0o700


def test_a_parent_that_exists_keeps_its_mode(tmp_path):
    parent = tmp_path / "p"
    parent.mkdir(mode=0o755)

    make_private_directory(parent / "own")

    assert mode(parent) == 0o755


def test_making_it_twice_is_fine(tmp_path):
    for _ in range(2):
        assert make_private_directory(tmp_path / "x").is_dir()


@pytest.mark.parametrize("kind", ["file", "below a file", "link", "dangling link"])
def test_what_is_no_directory_is_refused(tmp_path, kind):
    target = tmp_path / "target"
    match kind:
        case "file":
            target.touch()
        case "below a file":
            target.touch()
            target = target / "below"
        case "link":
            (tmp_path / "elsewhere").mkdir()
            target.symlink_to(tmp_path / "elsewhere")
        case "dangling link":
            target.symlink_to(tmp_path / "nowhere")

    with pytest.raises(SetupError) as caught:
        make_private_directory(target)

    assert caught.value.code == "STATE_ROOT_UNUSABLE"
    assert caught.value.next_step


def test_another_users_directory_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 65534, 65534)

    with pytest.raises(SetupError) as caught:
        make_private_directory(theirs)

    assert "belongs to another user" in str(caught.value)


@pytest.mark.parametrize("place", ["/proc/rlm-kernel", "/sys/rlm-kernel/x"])
def test_a_place_that_nobody_can_write_to_is_refused(place, tmp_path):
    from pathlib import Path

    if not Path(place).parents[len(Path(place).parents) - 2].exists():
        pytest.skip("this system has no such place")

    with pytest.raises(SetupError) as caught:
        make_private_directory(Path(place))

    assert caught.value.code == "STATE_ROOT_UNUSABLE"


def test_a_file_is_published_whole_and_private(tmp_path):
    path = tmp_path / "f"

    publish(path, b"one")
    publish(path, b"two")

    assert path.read_bytes() == b"two"
    assert mode(path) == 0o600
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_step_that_fails_leaves_the_old_content_and_no_rest(
    tmp_path, monkeypatch, step
):
    path = tmp_path / "f"
    publish(path, b"old")

    def fail(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    match step:
        case "write":
            monkeypatch.setattr(durable.os, "open", fail)
        case "fsync":
            monkeypatch.setattr(durable.os, "fsync", fail)
        case "replace":
            monkeypatch.setattr("pathlib.Path.replace", fail)

    with pytest.raises(SetupError) as caught:
        publish(path, b"new")
    monkeypatch.undo()

    assert caught.value.code == "STATE_ROOT_UNUSABLE"
    assert "No space left" in str(caught.value)
    assert path.read_bytes() == b"old"
    assert [*tmp_path.iterdir()] == [path]


def test_the_bytes_are_synced_before_the_name_shows_them(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, type(tmp_path).replace

    def note_fsync(descriptor):
        kind = "directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        done.append(f"sync {kind}")
        fsync(descriptor)

    def note_replace(path, target):
        done.append("rename")
        return replace(path, target)

    monkeypatch.setattr(durable.os, "fsync", note_fsync)
    monkeypatch.setattr("pathlib.Path.replace", note_replace)

    publish(tmp_path / "f", b"x")

    assert done == ["sync file", "rename", "sync directory"]
