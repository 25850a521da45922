"""`rlm-kernel run` against an OpenAI-compatible server, on the real harness."""

import asyncio
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from host_bridge.demo.model_server import ModelRequest, ModelServer
from host_bridge.harness.script import Reply, Script, Transcript, run_fenced_python

pytestmark = [pytest.mark.kernel, pytest.mark.dsh, pytest.mark.posix]


@dataclass
class Provider:
    """A model server in the test, and what it was asked."""

    script: Script
    seen: list[ModelRequest] = field(default_factory=list)
    server: ModelServer = field(init=False)

    def __post_init__(self) -> None:
        self.server = ModelServer(lambda t: self.script(t), on_request=self.seen.append)

    @property
    def options(self) -> tuple[str, ...]:
        return ("--base-url", f"{self.server.base_url}/v1", "--model", "some-model")


@pytest.fixture
async def provider():
    """A server that plays the fenced Python of its prompt, until told otherwise."""
    provider = Provider(run_fenced_python)
    await provider.server.start()
    yield provider
    await provider.server.close()


@pytest.fixture
def run(place, provider):
    """Runs a task on that server."""

    async def run_task(*words: str, **environ: str):
        return await asyncio.to_thread(
            place.run, "run", *words, *provider.options, **environ
        )

    return run_task


@pytest.fixture
def key() -> str:
    return f"sk-{secrets.token_hex(20)}"


def failing(status: int, text: str = "") -> Script:
    return lambda transcript: Reply(status=status, text=text)


async def test_the_answer_goes_to_stdout_and_what_goes_on_to_stderr(
    place, provider, run, key
):
    ended = await run("```python\nprint(6 * 7)\n```", OPENAI_API_KEY=key)

    assert (ended.status, ended.stdout) == (0, "42\n")
    assert "cell ok" in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("Next: ")
    assert {r.headers["authorization"] for r in provider.seen} == {f"Bearer {key}"}
    assert {r.body["model"] for r in provider.seen} == {"some-model"}
    assert place.is_clean()
    assert place.sessions() == set()


async def test_a_run_with_children_answers_with_their_reports_as_json(
    place, provider, run
):
    task = '''~~~python
h = await rlm("""Count.
```python
await agent_message.send("21", receiver_role="parent")
```""", name="counter")
print(2 * int(await h.report(timeout_s=30)))
~~~'''

    ended = await run("--json", "--session", "mine", task)

    assert ended.status == 0
    assert ended.stderr == ""
    facts = ended.json
    assert facts["status"] == "ok"
    assert "42" in facts["answer"]
    assert (facts["children"], facts["reports"], facts["silent_children"]) == (1, 1, [])
    assert facts["session"] == "mine"
    assert Path(facts["exports"]).is_dir()
    assert place.is_clean()
    assert place.sessions() == {"mine"}


async def test_a_child_that_only_answers_is_named_as_one_without_a_report(
    run, provider
):
    task = '~~~python\nh = await rlm("no fence", name="mute")\n~~~'

    ended = await run(task)

    assert ended.status == 0
    assert "No report came from: mute" in ended.stderr


@pytest.mark.parametrize("status", [400, 401, 404])
async def test_a_refused_request_is_made_once_and_told_in_four_lines(
    place, provider, run, key, status
):
    provider.script = failing(status, f"no such thing\n\n{key}\nreally")

    ended = await run("hello", OPENAI_API_KEY=key)

    assert ended.status == 2
    assert len(provider.seen) == 1
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) <= 4
    assert "MODEL_REFUSED: the model server" in ended.stderr
    assert f"({status})" in ended.stderr
    assert ended.next_step
    assert key not in ended.everything
    assert place.is_clean()
    assert place.sessions() == set()


@pytest.mark.parametrize(("status", "retries"), [(429, 1), (500, 0)])
async def test_a_busy_server_is_asked_again_and_given_up_at_the_limit(
    place, provider, run, status, retries
):
    provider.script = failing(status, "busy")

    ended = await run("hello", "--retries", str(retries))

    assert ended.status == 2
    assert len(provider.seen) == retries + 1
    told = [f"model server busy ({status}), retry {n + 1}" for n in range(retries)]
    assert all(line in ended.stderr for line in told)
    assert f"retry {retries + 1}" not in ended.stderr
    assert "MODEL_BUSY: " in ended.stderr
    assert ended.next_step
    assert place.is_clean()


async def test_a_server_that_recovers_is_no_failure(provider, run):
    def first_busy(transcript: Transcript) -> Reply:
        return Reply(status=503) if len(provider.seen) == 1 else Reply(text="here I am")

    provider.script = first_busy

    ended = await run("hello")

    assert (ended.status, ended.stdout) == (0, "here I am\n")
    assert "retry 1" in ended.stderr


async def test_a_server_that_is_not_there_is_given_up_at_the_limit(
    place, provider, run
):
    await provider.server.close()

    ended = await run("hello", "--retries", "0")

    assert ended.status == 2
    assert "MODEL_BUSY: " in ended.stderr
    assert "no answer" in ended.stderr
    assert ended.next_step
    assert place.is_clean()


async def test_a_refusal_is_json_for_programs(provider, run):
    provider.script = failing(401, "bad key")

    ended = await run("hello", "--json")

    assert ended.status == 2
    assert ended.stderr == ""
    assert ended.json["status"] == "error"
    assert ended.json["code"] == "MODEL_REFUSED"
    assert ended.json["next"]


@pytest.mark.parametrize("source", ["chosen-variable", "file"])
async def test_no_process_has_the_key_in_its_environment(
    place, provider, until, key, source
):
    words, environ, file = (), {}, place.directory / "key"
    match source:
        case "chosen-variable":
            words, environ = ("--key-env", "MY_OWN_KEY"), {"MY_OWN_KEY": key}
        case "file":
            file.write_text(f"{key}\n")
            file.chmod(0o600)
            words = ("--key-file", str(file))
    task = "```python\nimport pathlib, time\npathlib.Path('began').touch()\ntime.sleep(600)\n```"
    command = place.start("run", task, *words, *provider.options, **environ)
    await asyncio.to_thread(until, (place.cwd / "began").exists)

    environments = place.environments()
    started = len(place.processes())
    command.interrupt()
    ended = await asyncio.to_thread(command.ended)

    assert started >= 3, "bridge, harness and kernel"
    assert "RLM_GENERATION=" in environments
    assert "DSH_HOME=" in environments
    assert key not in environments
    assert {r.headers["authorization"] for r in provider.seen} == {f"Bearer {key}"}
    assert ended.status == 130
    assert ended.stdout == "Stopped.\n"
    assert ended.stderr.splitlines()[-1].startswith("Next: ")
    assert place.is_clean()


async def test_a_server_that_repeats_the_key_does_not_get_it_shown_or_stored(
    place, provider, run, key
):
    def echo(transcript: Transcript) -> Reply:
        return Reply(text=f"your key is {key}, and {key[:-1]}{key[-1]} again")

    provider.script = echo

    ended = await run("hello", "--session", "kept", OPENAI_API_KEY=key)

    assert ended.status == 0
    assert "[credential]" in ended.stdout
    assert key not in ended.everything
    stored = [
        f
        for f in place.directory.rglob("*")
        if f.is_file() and key.encode() in f.read_bytes()
    ]
    assert stored == []


async def test_a_child_that_was_told_the_key_does_not_report_it(
    place, provider, run, key
):
    task = '~~~python\nh = await rlm("tell the key", name="teller")\nprint(await h.report(timeout_s=30))\n~~~'

    def script(transcript: Transcript) -> Reply:
        if not any("~~~python" in prompt for prompt in transcript.prompts):
            return Reply(text=f"the key is {key}")
        return run_fenced_python(transcript)

    provider.script = script

    ended = await run(task, OPENAI_API_KEY=key)

    assert ended.status == 0
    assert "[credential]" in ended.stdout
    assert key not in ended.everything


def test_a_key_file_that_others_can_read_is_refused_with_the_command_that_helps(place):
    file = place.directory / "key file"
    file.write_text("sk-123456789")
    file.chmod(0o644)

    ended = place.run(
        *("run", "hello", "--base-url", "https://example.org/v1"),
        *("--model", "m", "--key-file", str(file)),
    )

    assert ended.status == 2
    assert ended.stderr.startswith("CONFIG_INVALID: ")
    assert "sk-123456789" not in ended.everything
    assert ended.next_step == f"chmod 600 '{file}'"
    assert len(ended.stderr.splitlines()) <= 4
    assert place.is_clean()


def test_an_address_that_is_none_is_refused_before_anything_is_made(place):
    ended = place.run("run", "hello", "--base-url", "http://[::1", "--model", "m")

    assert ended.status == 2
    assert ended.stderr.startswith("CONFIG_INVALID: --base-url")
    assert ended.next_step.startswith("rlm-kernel ")
    assert not place.home.exists()


def test_a_server_without_a_model_name_is_refused(place):
    ended = place.run("run", "hello", "--base-url", "http://127.0.0.1:9")

    assert ended.status == 2
    assert "--model" in ended.stderr


@pytest.mark.parametrize(
    "words",
    [(), ("--base-url", "https://example.org", "--model", "m")],
    ids=["deepseek", "server"],
)
def test_without_a_key_both_remedies_are_said_in_one_sentence(place, words):
    ended = place.run("run", "hello", *words)

    assert ended.status == 2
    first, *rest = ended.stderr.splitlines()
    assert first.startswith("MODEL_NOT_CONFIGURED: ")
    assert "_API_KEY" in first
    assert "--scripted" in first
    assert rest == [f"Next: {ended.next_step}"]
    assert not place.home.exists()


def test_an_unknown_provider_is_refused_without_a_request(place):
    ended = place.run(
        "run", "hello", "--model", "nosuch/thing", DEEPSEEK_API_KEY="sk-none-at-all"
    )

    assert ended.status == 2
    assert "MODEL_UNAVAILABLE: " in ended.stderr
    assert "nosuch/thing" in ended.stderr
    assert "deepseek" in ended.stderr
    assert len(ended.stderr.splitlines()) <= 4
    assert ended.next_step
    assert place.is_clean()


async def test_an_interrupt_while_the_server_thinks_ends_with_130(
    place, provider, until
):
    provider.script = lambda transcript: Reply(text="late", delay_s=600)
    command = place.start("run", "hello", *provider.options)
    await asyncio.to_thread(until, lambda: provider.seen)

    command.interrupt()

    ended = await asyncio.to_thread(command.ended)
    assert ended.status == 130
    assert ended.stdout == "Stopped.\n"
    assert place.is_clean()


def test_two_runs_do_not_share_one_session(place, until):
    task = "```python\nimport pathlib, time\npathlib.Path('began').touch()\ntime.sleep(600)\n```"
    first = place.start("run", "--scripted", "--session", "mine", task)
    until((place.cwd / "began").exists)

    second = place.run("run", "--scripted", "--session", "mine", "hello")

    assert first.process.poll() is None
    first.interrupt()
    assert first.ended().status == 130
    assert second.status == 2
    assert second.stderr.startswith("CONFIG_INVALID: ")
    assert str(first.pid) in second.stderr
    assert place.is_clean()


def test_a_session_that_was_killed_can_be_run_again(place, until):
    task = "```python\nimport pathlib, time\npathlib.Path('began').touch()\ntime.sleep(600)\n```"
    killed = place.start("run", "--scripted", "--session", "mine", task)
    until((place.cwd / "began").exists)
    killed.kill()
    killed.ended()
    until(lambda: not place.processes())

    ended = place.run("run", "--scripted", "--session", "mine", "```python\n6 * 7\n```")

    assert (ended.status, ended.stdout) == (0, "42\n")
    assert place.harness_homes() == set()


def test_an_empty_task_is_refused(place):
    ended = place.run("run", "--scripted", " ")

    assert ended.status == 2
    assert ended.next_step == "rlm-kernel run --help"
    assert not place.home.exists()
