"""Which model a person chose, and how the harness is told (design 3.16)."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kernel_ext.wire.codes import ErrorCode

from .credentials import Credential, read_credential
from .errors import SetupError
from .harness.port import Route

__all__ = ("ModelChoice", "ModelSetup")

_DEEPSEEK_PROVIDER = "deepseek-official"
_DEEPSEEK_KEY = "DEEPSEEK_API_KEY"
_SERVER_PROVIDER = "server"
_SERVER_KEY = "RLM_KERNEL_SERVER_KEY"
_CONTEXT_TOKENS = 65_536
_ANSWER_TOKENS = 8_192
_LOOPBACK = ("127.0.0.1", "::1", "localhost")

_VARIABLES = {
    "model": "RLM_KERNEL_MODEL",
    "base_url": "RLM_KERNEL_BASE_URL",
    "key_variable": "RLM_KERNEL_KEY_VARIABLE",
    "key_file": "RLM_KERNEL_KEY_FILE",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSetup:
    """What the harness is told; the key alone is secret, and shows no value.

    *route* None: the first model that the harness advertises.
    """

    route: Route | None
    credential: Credential
    base_url: str | None = None
    patch_rows: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The options that choose a model, from a command line or a kernelspec.

    Attributes:
        model: ``provider/model``; with *base_url* the server's own name of it.
        base_url: An OpenAI-compatible server; without it DeepSeek's own.
        key_variable: The environment variable that holds the key.
        key_file: A 0600 file that holds it instead.
        scripted: A scripted model on loopback; needs nothing else.
    """

    model: str | None = None
    base_url: str | None = None
    key_variable: str | None = None
    key_file: Path | None = None
    scripted: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "ModelChoice":
        """Read what `as_environment` wrote into a kernelspec."""
        values = {name: environ.get(key) or None for name, key in _VARIABLES.items()}
        key_file = values.pop("key_file")
        return cls(
            **values,
            key_file=Path(key_file) if key_file else None,
            scripted=environ.get("RLM_KERNEL_SCRIPTED") == "1",
        )

    def as_environment(self) -> dict[str, str]:
        """The choice as variables. It names where the key is, never the key."""
        chosen = {key: getattr(self, name) for name, key in _VARIABLES.items()}
        found = {key: str(value) for key, value in chosen.items() if value}
        return found | ({"RLM_KERNEL_SCRIPTED": "1"} if self.scripted else {})

    def check(self) -> None:
        """Look at the options alone; the key is read later, and perhaps elsewhere.

        Raises:
            SetupError: CONFIG_INVALID.
        """
        if self.scripted and len(self.as_environment()) > 1:
            raise SetupError(
                ErrorCode.CONFIG_INVALID,
                "--scripted brings its own model: leave out --model, --base-url, "
                "--key-env and --key-file.",
            )
        if self.base_url:
            _host(self.base_url)
            if not self.model:
                raise SetupError(
                    ErrorCode.CONFIG_INVALID,
                    "--base-url needs --model, the name that the server has for it.",
                )

    def setup(self) -> ModelSetup:
        """Read the key and put the harness's settings together.

        Raises:
            SetupError: MODEL_NOT_CONFIGURED without a key; CONFIG_INVALID for
                options that do not go together.
        """
        return self._server() if self.base_url else self._deepseek()

    def _deepseek(self) -> ModelSetup:
        credential = self._credential(_DEEPSEEK_KEY, default_variable=_DEEPSEEK_KEY)
        if credential is None:
            variable = self.key_variable or _DEEPSEEK_KEY
            raise SetupError(
                ErrorCode.MODEL_NOT_CONFIGURED,
                f"no model is configured: set {variable} before you start, or use the "
                "scripted model (--scripted).",
                next_step="rlm-kernel run --help",
            )
        route = None
        if self.model:
            provider, slash, model = self.model.partition("/")
            route = (
                Route(provider=provider, model=model)
                if slash
                else Route(provider=_DEEPSEEK_PROVIDER, model=self.model)
            )
        return ModelSetup(route=route, credential=credential)

    def _server(self) -> ModelSetup:
        self.check()
        host = _host(self.base_url or "")
        model = self.model or ""
        credential = self._credential(_SERVER_KEY, default_variable="OPENAI_API_KEY")
        if credential is None and host in _LOOPBACK:
            # A local server asks for no key, but the harness refuses to go without.
            credential = Credential.placeholder(_SERVER_KEY, "none")
        if credential is None:
            variable = self.key_variable or "OPENAI_API_KEY"
            raise SetupError(
                ErrorCode.MODEL_NOT_CONFIGURED,
                f"no key for {host}: set {variable} before you start, name a file with "
                "--key-file, or use the scripted model (--scripted).",
                next_step="rlm-kernel run --help",
            )
        row = {
            "id": "llm-pi-ai",
            "config": {"providers": {_SERVER_PROVIDER: self._provider(model)}},
        }
        return ModelSetup(
            route=Route(provider=_SERVER_PROVIDER, model=model),
            credential=credential,
            patch_rows=(row,),
        )

    def _provider(self, model: str) -> dict[str, Any]:
        return {
            "displayName": "OpenAI-compatible server",
            "apiKeyEnv": _SERVER_KEY,
            "api": "openai-completions",
            "baseURL": self.base_url,
            "compat": {
                "supportsDeveloperRole": False,
                "supportsStore": False,
                "maxTokensField": "max_tokens",
                "supportsReasoningEffort": False,
            },
            "models": [
                {
                    "id": model,
                    "contextWindow": _CONTEXT_TOKENS,
                    "maxTokens": _ANSWER_TOKENS,
                }
            ],
        }

    def _credential(self, name: str, *, default_variable: str) -> Credential | None:
        return read_credential(
            name, variable=self.key_variable or default_variable, file=self.key_file
        )


def _host(address: str) -> str:
    """The host of a server's address.

    Raises:
        SetupError: CONFIG_INVALID; no client could use it. The text never holds it
            where it holds a password.
    """
    try:
        url = urlsplit(address)
        host, _ = url.hostname, url.port  # each raises for nonsense of its own
    except ValueError:
        host, url = None, urlsplit("")
    if url.username or url.password:
        raise SetupError(
            ErrorCode.CONFIG_INVALID, "--base-url must not hold a user or a password."
        )
    is_plain = address.isascii() and address.isprintable() and " " not in address
    if not host or not is_plain or url.scheme not in ("http", "https"):
        shown = "that one" if "@" in address else repr(address)
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            f"--base-url must be an http or https address, not {shown}.",
        )
    if url.query or url.fragment:
        raise SetupError(
            ErrorCode.CONFIG_INVALID,
            "--base-url must end before any ? or #: paths are added to it.",
        )
    return host
