"""Which model a person chose: options, environment, and what the harness is told."""

import pytest

from host_bridge.errors import SetupError
from host_bridge.harness.port import Route
from host_bridge.model import ModelChoice
from kernel_ext.wire.codes import ErrorCode

KEY = "sk-0123456789abcdef"


@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for name in ("DEEPSEEK_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "options",
    [{"model": "m"}, {"base_url": "http://127.0.0.1:1"}, {"key_variable": "K"}],
    ids=str,
)
def test_the_scripted_model_goes_with_no_other_option(options):
    with pytest.raises(SetupError) as caught:
        ModelChoice(scripted=True, **options).check()

    assert caught.value.code == "CONFIG_INVALID"


def refusal(choice: ModelChoice) -> SetupError:
    with pytest.raises(SetupError) as caught:
        choice.setup()
    return caught.value


@pytest.mark.parametrize(
    ("model", "route"),
    [
        (None, None),
        ("flash", Route(provider="deepseek-official", model="flash")),
        ("other/flash", Route(provider="other", model="flash")),
        ("other/a/b", Route(provider="other", model="a/b")),
    ],
)
def test_a_model_name_becomes_a_route(monkeypatch, model, route):
    monkeypatch.setenv("DEEPSEEK_API_KEY", KEY)

    setup = ModelChoice(model=model).setup()

    assert setup.route == route
    assert setup.credential.name == "DEEPSEEK_API_KEY"
    assert setup.base_url is None


def test_a_server_gets_a_row_with_its_address_and_the_name_of_the_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    choice = ModelChoice(model="org/some-model", base_url="https://example.org/v1")

    setup = choice.setup()

    (row,) = setup.patch_rows
    provider = row["config"]["providers"]["server"]
    assert setup.route == Route(provider="server", model="org/some-model")
    assert provider["baseURL"] == "https://example.org/v1"
    assert provider["apiKeyEnv"] == setup.credential.name
    assert provider["models"][0]["id"] == "org/some-model"
    assert KEY not in repr(setup)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_server_on_this_machine_needs_no_key(host):
    setup = ModelChoice(model="m", base_url=f"http://{host}:8080/v1").setup()

    assert setup.credential.is_secret is False


BAD_ADDRESSES = {
    "no scheme": "example.org",
    "other scheme": "ftp://example.org",
    "file": "file:///etc/passwd",
    "no host": "http://",
    "half an address": "http://[::1",
    "no port": "http://example.org:99999999",
    "letters for a port": "http://example.org:x",
    "space": "http:// example.org",
    "line break": "http://example.org\nx",
    "not ascii": "http://exämple.org",
    "query": "http://example.org/v1?x=1",
    "fragment": "http://example.org/v1#x",
    "password": "https://user:secret@example.org/v1",
    "password and no host": "https://user:secret@",
}


@pytest.mark.parametrize("address", BAD_ADDRESSES.values(), ids=BAD_ADDRESSES)
def test_an_address_that_no_client_could_use_is_refused(address):
    error = refusal(ModelChoice(model="m", base_url=address))

    assert error.code is ErrorCode.CONFIG_INVALID
    assert "--base-url" in str(error)
    assert "secret" not in str(error)


def test_a_server_needs_the_name_of_a_model():
    error = refusal(ModelChoice(base_url="http://127.0.0.1:1"))

    assert error.code is ErrorCode.CONFIG_INVALID
    assert "--model" in str(error)


@pytest.mark.parametrize(
    ("choice", "variable"),
    [
        (ModelChoice(), "DEEPSEEK_API_KEY"),
        (ModelChoice(model="m", base_url="https://example.org"), "OPENAI_API_KEY"),
        (ModelChoice(key_variable="MINE"), "MINE"),
    ],
    ids=["deepseek", "server", "own-variable"],
)
def test_a_missing_key_is_told_with_both_remedies(choice, variable):
    error = refusal(choice)

    assert error.code is ErrorCode.MODEL_NOT_CONFIGURED
    assert variable in str(error)
    assert "--scripted" in str(error)
    assert len(str(error).splitlines()) == 1
    assert error.next_step


CHOICES = {
    "nothing": ModelChoice(),
    "scripted": ModelChoice(scripted=True),
    "server": ModelChoice(
        model="a/b", base_url="http://127.0.0.1:1/v1", key_variable="K"
    ),
}


@pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
def test_a_choice_survives_its_way_through_a_kernelspec(choice):
    assert ModelChoice.from_environment(choice.as_environment()) == choice


def test_a_key_file_survives_its_way_through_a_kernelspec(short_path):
    choice = ModelChoice(key_file=short_path / "key")

    assert ModelChoice.from_environment(choice.as_environment()) == choice


def test_a_kernelspec_names_where_the_key_is_and_never_the_key(monkeypatch):
    monkeypatch.setenv("MINE", KEY)

    environment = ModelChoice(key_variable="MINE").as_environment()

    assert environment == {"RLM_KERNEL_KEY_VARIABLE": "MINE"}
