"""Model requests of a real DSH: routes, keys, failures, and what goes along.

The DSH of this module is started from an environment with keys and with a proxy
that answers nobody.
"""

import json
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from host_bridge.harness.port import (
    ChildRequest,
    ModelRequestFailed,
    Route,
    ToolOutcome,
)
from host_bridge.harness.script import Reply

from .conftest import FLASH, PRO, World

pytestmark = [pytest.mark.dsh, pytest.mark.asyncio(loop_scope="module")]

FOREIGN = {
    "DEEPSEEK_API_KEY": "a-key-of-the-environment",
    "OPENAI_API_KEY": "sk-of-somebody-else",
    "RLM_SOME_SECRET": "do-not-tell",
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NODE_USE_ENV_PROXY": "1",
    "NO_PROXY": "example.org",
}
CREDENTIALS = (
    b"version: 1\nrefs:\n  DEEPSEEK_API_KEY: sk-from-the-file\n"
    b"  LOCAL_KEY: sk-local-from-the-file\n"
)


def rows(base_url):
    """The rows of an OpenAI-compatible server, and the plugin of the tests."""
    local = {
        "displayName": "Local server",
        "apiKeyEnv": "LOCAL_KEY",
        "api": "openai-completions",
        "baseURL": f"{base_url}/v1",
        "models": [{"id": "my-model", "contextWindow": 65536, "maxTokens": 4096}],
    }
    reroute = {
        "id": "rlm-test-reroute",
        "name": str(Path(__file__).with_name("reroute.mjs")),
        "config": {"model": PRO.model},
    }
    return [
        {"id": "llm-pi-ai", "config": {"providers": {"local": local}}},
        {"insert": [reroute]},
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("dsh"))
    try:
        await world.server.start()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in FOREIGN.items():
                patch.setenv(name, value)
            await world.start(
                credentials=CREDENTIALS, extra_patch_rows=rows(world.server.base_url)
            )
        yield world
    finally:
        await world.close()


def key_of(request):
    """The key of a request, whichever of the two wire formats it has."""
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    return bearer or request.headers.get("x-api-key")


# -- the environment ---------------------------------------------------------------


async def test_dsh_gets_no_credential_in_its_environment(world):
    environment = psutil.Process(world.harness.pid).environ()

    assert not set(environment) & {"DEEPSEEK_API_KEY", "OPENAI_API_KEY", "LOCAL_KEY"}
    assert "RLM_SOME_SECRET" not in environment
    assert not set(environment.values()) & {
        FOREIGN["DEEPSEEK_API_KEY"],
        FOREIGN["OPENAI_API_KEY"],
    }
    assert environment["DSH_TELEMETRY_MODE"] == "DISABLED"


async def test_dsh_never_asks_a_proxy_for_this_machine(world):
    environment = psutil.Process(world.harness.pid).environ()

    assert environment["HTTP_PROXY"] == FOREIGN["HTTP_PROXY"]
    for name in ("NO_PROXY", "no_proxy"):
        direct = environment[name].split(",")
        assert direct == ["example.org", "127.0.0.1", "localhost", "::1"]


async def test_the_key_comes_from_the_credentials_file(world):
    root = await world.root()
    ended = await world.ask(root, world.says(lambda t: Reply(text="hello")))

    assert ended.reason == "completed"
    assert key_of(world.requests_of(root)[0]) == "sk-from-the-file"


async def test_the_home_and_its_files_are_private(world):
    home = world.directory / "dsh"

    assert home.stat().st_mode & 0o777 == 0o700
    for name in (".credentials.yaml", "rlm-kernel.patch.yml"):
        assert (home / name).stat().st_mode & 0o777 == 0o600


async def test_a_request_carries_nothing_but_the_conversation(world):
    root = await world.root()
    await world.ask(root, world.says(lambda t: Reply(text="hello")))

    body = world.requests_of(root)[0].body
    assert not [key for key in body if key.startswith("dsh")]
    assert "dsh_session_log" not in json.dumps(body)
    assert "dsh_plugin_packages" not in json.dumps(body)


# -- routes ------------------------------------------------------------------------


async def test_the_running_route_is_that_of_the_request_and_not_of_the_options(world):
    seen = []

    async def cell(call):
        seen.append(await world.harness.running_route(call.agent.id))
        return ToolOutcome(text="seen")

    root = await world.harness.create_root(
        agent_id="rerouted-1", cwd=str(world.workspace), route=FLASH
    )
    await world.ask(root.id, world.runs(cell))

    assert world.requests_of(root.id)[0].body["model"] == PRO.model
    assert seen == [PRO]


async def test_a_child_of_a_rerouted_parent_takes_the_running_route(world):
    children = []
    leaf = world.says(lambda t: Reply(text="leaf"))

    async def cell(call):
        request = ChildRequest(
            parent_id=call.agent.id, prompt=leaf, label="kid", max_depth=1
        )
        children.append(await world.harness.start_child(request))
        return ToolOutcome(text="started")

    root = await world.harness.create_root(
        agent_id="rerouted-2", cwd=str(world.workspace), route=FLASH
    )
    await world.ask(root.id, world.runs(cell))
    await world.until(lambda: world.requests_of(children[0].id))

    assert world.requests_of(children[0].id)[0].body["model"] == PRO.model


async def test_any_openai_compatible_server_is_a_route(world):
    route = Route(provider="local", model="my-model")
    prompt = world.says(lambda t: Reply(text="from the local server"))

    root = await world.root(route=route)
    ended = await world.ask(root, prompt)

    (request,) = [r for r in world.requests if prompt in json.dumps(r.body)]
    assert ended.reason == "completed"
    assert request.path == "/v1/chat/completions"
    assert request.body["model"] == "my-model"
    assert key_of(request) == "sk-local-from-the-file"
    assert route in await world.harness.advertised_models()


# -- failures ----------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 401, 404])
@pytest.mark.parametrize(
    "route",
    [FLASH, Route(provider="local", model="my-model")],
    ids=["official", "local"],
)
async def test_a_refusal_for_good_is_asked_for_once(world, status, route):
    prompt = world.says(lambda t: Reply(status=status, text="no such thing"))

    root = await world.root(route=route)
    ended = await world.ask(root, prompt)

    assert ended.reason == "error"
    assert ended.error
    assert ended.code
    assert len([r for r in world.requests if prompt in json.dumps(r.body)]) == 1
    (failed,) = world.of(ModelRequestFailed, root)
    assert failed.attempt == 1
    assert failed.status in (status, None)


async def test_a_busy_server_is_told_of_at_each_attempt(world):
    headers = {"retry-after": "1"}
    attempts = []

    def line(transcript):
        attempts.append(transcript)
        if len(attempts) < 3:
            return Reply(status=429, headers=headers)
        return Reply(text="at last")

    root = await world.root()
    ended = await world.ask(root, world.says(line))

    failed = world.of(ModelRequestFailed, root)
    assert ended.reason == "completed"
    assert [event.attempt for event in failed] == [1, 2]
    assert {event.status for event in failed} == {429}


async def test_a_busy_server_can_be_given_up(world):
    root = await world.root()
    await world.harness.send(root, world.says(lambda t: Reply(status=500)))
    await world.until(lambda: world.of(ModelRequestFailed, root))

    await world.harness.cancel(root)
    await world.idle(root)

    assert world.of(ModelRequestFailed, root)[0].status == 500
