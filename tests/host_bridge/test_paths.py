"""Where things live, and which ids may become a directory's name."""

import os

import pytest

from host_bridge.errors import SetupError
from host_bridge.paths import StateRoot, check_session_id, new_socket_directory


@pytest.mark.parametrize("name", ["a", "0", "A.b_c-d", "x" * 200, "a..b"])
def test_a_session_id_may_be(name):
    assert check_session_id(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "-a",
        "_a",
        ".a",
        "a/b",
        "a\\b",
        "../a",
        "a b",
        "ä",
        "a\n",
        "a\0",
        "x" * 201,
        "a:b",
        "٣",
    ],
    ids=ascii,
)
def test_a_session_id_may_not_be(name):
    with pytest.raises(SetupError) as caught:
        StateRoot.find({"RLM_KERNEL_HOME": "/x"}).session(name)

    assert caught.value.code == "CONFIG_INVALID"


def test_the_state_root_is_chosen_or_the_users_own(tmp_path):
    chosen = StateRoot.find({"RLM_KERNEL_HOME": str(tmp_path)})
    default = StateRoot.find({"RLM_KERNEL_HOME": "  "})

    assert (chosen.directory, chosen.reason) == (tmp_path, "RLM_KERNEL_HOME")
    assert default.directory.name == "rlm-kernel"
    assert default.directory.is_absolute()


def test_a_relative_state_root_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert StateRoot.find({"RLM_KERNEL_HOME": "here"}).directory == tmp_path / "here"


def test_nothing_is_made_before_it_is_asked_for(state):
    paths = state.session("s")
    assert not state.directory.exists()

    paths.make()

    assert paths.exports.is_dir()
    assert {p.name for p in paths.directory.iterdir()} == {"exports", "ipython"}


@pytest.mark.posix
def test_a_socket_directory_is_short_private_and_new(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 60)))

    made = [new_socket_directory({"XDG_RUNTIME_DIR": ""}) for _ in range(2)]

    try:
        assert made[0] != made[1]
        for directory in made:
            assert len(os.fsencode(directory / "bridge.sock")) <= 103
            assert directory.stat().st_mode & 0o777 == 0o700
            assert directory.parent.stat().st_mode & 0o777 == 0o700
    finally:
        for directory in made:
            directory.rmdir()


@pytest.mark.posix
def test_the_users_runtime_directory_comes_first(short_path):
    made = new_socket_directory({"XDG_RUNTIME_DIR": str(short_path)})

    assert short_path in made.parents


@pytest.mark.posix
@pytest.mark.parametrize("base", ["/nowhere/of/all", "relative/place"])
def test_a_runtime_directory_that_does_not_exist_is_not_made(
    base, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)

    made = new_socket_directory({"XDG_RUNTIME_DIR": base})

    made.rmdir()
    assert base not in str(made)
    assert not os.path.exists(base)


@pytest.mark.posix
def test_where_no_place_is_left_each_is_named(monkeypatch, tmp_path, short_path):
    taken = short_path / f"rlm-kernel-{os.geteuid()}"
    taken.touch()
    monkeypatch.setattr("host_bridge.paths._LAST_RESORT", str(short_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 60)))

    with pytest.raises(SetupError) as caught:
        new_socket_directory({})

    assert caught.value.code == "STATE_ROOT_UNUSABLE"
    assert str(taken) in str(caught.value)
    assert "too long" in str(caught.value)


def test_an_empty_session_is_removed(state):
    paths = state.session("s").make()

    assert paths.remove_if_empty()
    assert not paths.directory.exists()


@pytest.mark.parametrize("place", ["exports", "."])
def test_a_session_in_which_a_cell_left_a_file_stays(state, place):
    paths = state.session("s").make()
    left = paths.directory / place / "result.csv"
    left.write_text("1,2")

    assert not paths.remove_if_empty()
    assert left.read_text() == "1,2"


def test_sessions_are_closed_to_others_below_an_open_root(state):
    state.directory.mkdir(parents=True, mode=0o777)
    state.directory.chmod(0o777)

    state.session("s").make()

    assert state.sessions.stat().st_mode & 0o777 == 0o700
