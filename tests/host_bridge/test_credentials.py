"""The one module that sees a key: where it comes from, and where it must not go."""

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_bridge.credentials import Credential, read_credential
from host_bridge.errors import SetupError
from kernel_ext.wire.codes import ErrorCode

KEY = "sk-0123456789abcdef"


@pytest.fixture
def file(short_path):
    file = short_path / "a key"
    file.write_text(f" {KEY}\n")
    file.chmod(0o600)
    return file


def refusal(**options) -> SetupError:
    with pytest.raises(SetupError) as caught:
        read_credential("NAME", variable="SOME_KEY", **options)
    return caught.value


def value_of(credential: Credential) -> str:
    return json.loads(credential.as_dsh_file())["refs"][credential.name]


def test_a_key_from_the_environment_is_gone_from_it(monkeypatch):
    monkeypatch.setenv("SOME_KEY", f" {KEY} ")

    credential = read_credential("NAME", variable="SOME_KEY")

    assert value_of(credential) == KEY
    assert "SOME_KEY" not in os.environ


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_key_is_gone_from_the_environment_block_that_the_system_shows():
    program = (
        "from host_bridge.credentials import read_credential\n"
        "before = open('/proc/self/environ').read()\n"
        "read_credential('N', variable='SOME_KEY')\n"
        "after = open('/proc/self/environ').read()\n"
        f"print({KEY!r} in before, {KEY!r} in after, 'NEXT=1' in after)\n"
    )
    environ = {**os.environ, "SOME_KEY": KEY, "NEXT": "1"}

    found = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True
    )

    assert found.stdout.split() == ["True", "False", "True"]


def test_a_key_file_comes_before_the_variable_which_is_erased_all_the_same(
    monkeypatch, file
):
    monkeypatch.setenv("SOME_KEY", "sk-of-the-environment")

    credential = read_credential("NAME", variable="SOME_KEY", file=file)

    assert value_of(credential) == KEY
    assert "SOME_KEY" not in os.environ


@pytest.mark.parametrize("value", ["", "  ", "\n"])
def test_an_empty_variable_is_no_key(monkeypatch, value):
    monkeypatch.setenv("SOME_KEY", value)

    assert read_credential("NAME", variable="SOME_KEY") is None


@pytest.mark.posix
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o677])
def test_a_key_file_that_others_may_use_is_refused_with_the_remedy(file, mode):
    file.chmod(mode)

    error = refusal(file=file)

    assert error.code is ErrorCode.CONFIG_INVALID
    assert error.next_step == f"chmod 600 '{file}'"


@pytest.mark.posix
@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_key_file_of_the_owner_alone_is_taken(file, mode):
    file.chmod(mode)

    assert read_credential("NAME", variable="SOME_KEY", file=file) is not None


CONTENTS = {
    "empty": b"",
    "blank": b" \n\t",
    "two lines": b"sk-123456\nsk-654321",
    "two words": b"Bearer sk-123456",
    "no text": b"\xff\xfe\x00",
    "not ascii": "sk-ключ".encode(),
    "control characters": b"sk-123\x1b[0m",
}


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS)
def test_a_file_that_holds_no_key_is_refused_without_showing_it(file, content):
    file.write_bytes(content)

    error = refusal(file=file)

    assert error.code is ErrorCode.CONFIG_INVALID
    assert "sk-" not in str(error)


def test_a_file_that_is_missing_or_a_directory_is_refused(file, short_path):
    assert refusal(file=short_path / "none").code is ErrorCode.CONFIG_INVALID
    assert refusal(file=short_path).code is ErrorCode.CONFIG_INVALID


def test_a_key_that_no_header_can_carry_is_refused(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "sk-123\r\nX-Other: 1")

    assert refusal().code is ErrorCode.CONFIG_INVALID
    assert "SOME_KEY" not in os.environ


def test_no_picture_of_a_credential_shows_its_value():
    credential = Credential("NAME", KEY)

    assert KEY not in f"{credential} {credential!r} {[credential]}"


@pytest.mark.parametrize(
    "text",
    [KEY, f"Bearer {KEY}.", f"{KEY}{KEY}", json.dumps({"key": KEY}), f"x\n{KEY}\ny"],
)
def test_a_key_is_taken_out_of_a_text_wherever_it_stands(text):
    assert KEY not in Credential("NAME", KEY).redact(text)


def test_a_key_is_found_in_the_forms_that_json_and_urls_give_it():
    key = 'sk-"a\\b+c/d=='
    credential = Credential("NAME", key)

    for text in (key, json.dumps(key), "https://h/?key=sk-%22a%5Cb%2Bc%2Fd%3D%3D"):
        assert "[credential]" in credential.redact(text)


@given(st.text(max_size=50), st.text(max_size=50))
def test_whatever_stands_around_it_the_key_is_gone(before, after):
    redacted = Credential("NAME", KEY).redact(before + KEY + after)

    assert KEY not in redacted


def test_what_stands_in_for_a_key_is_no_secret():
    placeholder = Credential.placeholder("NAME", "scripted")

    assert placeholder.redact("the scripted model") == "the scripted model"
