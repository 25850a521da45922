"""How commands end, and how they write."""

import asyncio
import io
import json

import pytest
import typer

from host_bridge.cli import boundary
from host_bridge.errors import KernelError, SetupError
from kernel_ext.wire.codes import ErrorCode


class Closed(io.StringIO):
    """A stream whose reader is gone."""

    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


async def fails(error):
    raise error


def status_of(error, *, as_json=False):
    with pytest.raises(typer.Exit) as caught:
        boundary.run_command(fails(error), as_json=as_json)
    return caught.value.exit_code


def test_an_error_is_two_lines_on_stderr_and_status_2(capsys):
    error = SetupError(ErrorCode.CONFIG_INVALID, "no such thing", next_step="do this")

    assert status_of(error) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "CONFIG_INVALID: no such thing\nNext: do this\n"


def test_an_error_without_a_remedy_of_its_own_leads_on_all_the_same(capsys):
    status_of(KernelError(ErrorCode.KERNEL_START_FAILED, "no"))

    assert capsys.readouterr().err.splitlines()[-1] == "Next: rlm-kernel doctor"


def test_for_programs_an_error_is_one_object_on_stdout(capsys):
    error = SetupError(ErrorCode.CONFIG_INVALID, "no", next_step="do this")

    assert status_of(error, as_json=True) == 2
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "status": "error",
        "code": "CONFIG_INVALID",
        "error": "no",
        "next": "do this",
    }


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyboardInterrupt()])
def test_an_interrupt_that_nobody_took_is_status_130(error):
    assert status_of(error) == 130


@pytest.mark.parametrize(
    ("write", "name"), [(boundary.say, "stdout"), (boundary.note, "stderr")]
)
def test_a_reader_that_went_away_stops_nobody_who_writes(monkeypatch, write, name):
    monkeypatch.setattr(f"sys.{name}", Closed())

    write("one")
    write("two")


def test_a_full_disk_is_said_once(monkeypatch, capsys):
    class Full(io.StringIO):
        encoding = "utf-8"

        def flush(self):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", Full())

    boundary.say("one")
    boundary.say("two")

    assert capsys.readouterr().err.count("No space left on device") == 1


@pytest.mark.parametrize(
    ("encoding", "shown"), [("utf-8", "é\\ud83d"), ("ascii", "\\xe9\\ud83d")]
)
def test_what_the_terminal_can_not_show_is_written_in_escapes(
    monkeypatch, encoding, shown
):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding=encoding))

    boundary.say("é\ud83d")

    assert raw.getvalue().decode(encoding) == shown + "\n"
