"""`rlm`: admit child agents and hear from them (specification rlm.md section 11)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from IPython.core.getipython import get_ipython

from kernel_ext.client import CLIENT_ATTRIBUTE, HostClient
from kernel_ext.wire import messages

__all__ = ("RLMSpawnHandle", "RLMSubagent", "Rlm")

_Status = Literal["running", "completed", "error"]


@dataclass(frozen=True, slots=True)
class RLMSpawnHandle:
    """A child that was admitted: it has the prompt, it has not answered.

    Attributes:
        rlm_child_id: The child's session id in the harness.
        name: Its label, unique among the children of one parent.
        session_dir: Its own directory, absolute.
        model: ``provider/model``.
    """

    rlm_child_id: str
    name: str
    session_dir: Path
    model: str

    async def report(self, timeout_s: float | None = None) -> str:
        """Await what the child reports; its closing text where it sends nothing.

        Args:
            timeout_s: Give up after so many seconds; None: 600. Call it again to
                go on waiting.

        Raises:
            HostError: TIMEOUT names the child; CHILD_FAILED when it ended with
                nothing to say; CHILD_NOT_FOUND when it is no child of yours.
            RuntimeError: The extension is not loaded in this process.
        """
        __tracebackhide__ = True
        if timeout_s is not None and (
            isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float)
        ):
            msg = f"timeout_s must be a number, got {type(timeout_s).__name__}"
            raise TypeError(msg)
        answer = await _client_of_this_kernel().request(
            messages.RLM_REPORT,
            {
                "rlm_child_id": self.rlm_child_id,
                "timeout_s": None if timeout_s is None else float(timeout_s),
            },
        )
        return _text(answer, "text", "rlm.report returned an invalid report")


@dataclass(frozen=True, slots=True)
class RLMSubagent:
    """One row of `Rlm.list_subagents`, with Prime's field names."""

    rlm_child_id: str
    active_session_id: str | None
    session_id: str | None
    session_name: str
    session_dir: Path
    status: _Status

    @property
    def name(self) -> str:
        """The label, as a handle calls it."""
        return self.session_name


class Rlm:
    """Callable: ``handle = await rlm("prompt", name="label")``.

    The call returns at once with an admission handle. The child works in its
    own kernel; what it has to say comes with ``await handle.report()``, or as a
    message that wakes the agent.
    """

    def __init__(self, client: HostClient) -> None:
        self._client = client

    async def __call__(self, prompt: str, **options: Any) -> RLMSpawnHandle:
        """The same as `run`."""
        __tracebackhide__ = True
        return await self.run(prompt, **options)

    async def run(self, prompt: str, **options: Any) -> RLMSpawnHandle:
        """Admit one child agent (section 11.1).

        Args:
            prompt: All that the child is told; it sees none of your variables.
            **options: ``name`` (a label of your choice, unique), ``model``
                (exactly ``provider/model``; without it the model that runs you).

        Raises:
            TypeError: The prompt is no ``str``.
            HostError: INVALID_ARGUMENT, DEPTH_LIMIT, DUPLICATE_LABEL,
                MODEL_UNAVAILABLE, or no host.
        """
        __tracebackhide__ = True
        if not isinstance(prompt, str):
            msg = f"prompt must be str, got {type(prompt).__name__}"
            raise TypeError(msg)
        answer = await self._client.request(
            messages.RLM_RUN, {"prompt": prompt, "kwargs": options}
        )
        wrong = "rlm.run returned an invalid spawn handle"
        return RLMSpawnHandle(
            rlm_child_id=_text(answer, "rlm_child_id", wrong),
            name=_text(answer, "name", wrong),
            session_dir=Path(_text(answer, "session_dir", wrong)),
            model=_text(answer, "model", wrong),
        )

    async def list_subagents(self) -> list[RLMSubagent]:
        """List the caller's direct children (section 11.3).

        Raises:
            HostError: No host.
        """
        __tracebackhide__ = True
        answer = await self._client.request(messages.RLM_LIST_SUBAGENTS)
        rows = answer.get("subagents")
        if not isinstance(rows, list):
            msg = "rlm.list_subagents returned an invalid subagents registry"
            raise RuntimeError(msg)  # noqa: TRY004  # Prime raises RuntimeError here
        return [_subagent(row) for row in rows]

    async def find_models(self, query: str = "", limit: int = 8) -> list[Any]:
        """Search the advertised models (section 11.2).

        Raises:
            TypeError: *query* is no ``str``, or *limit* no ``int``.
            HostError: UNSUPPORTED_MODEL_SEARCH where the host can not search.
        """
        __tracebackhide__ = True
        if not isinstance(query, str):
            msg = f"query must be str, got {type(query).__name__}"
            raise TypeError(msg)
        if isinstance(limit, bool) or not isinstance(limit, int):
            msg = f"limit must be int, got {type(limit).__name__}"
            raise TypeError(msg)
        answer = await self._client.request(
            messages.RLM_FIND_MODELS, {"query": query, "limit": limit}
        )
        return list(answer["models"])

    async def delete_subagent(self, target: str | RLMSubagent | RLMSpawnHandle) -> Any:
        """Delete a direct child (section 11.4).

        Args:
            target: Its id or label, a row of `list_subagents`, or a handle.

        Raises:
            TypeError: *target* is none of these.
            ValueError: *target* is blank.
            HostError: UNSUPPORTED_DELETION where the host can not delete.
        """
        __tracebackhide__ = True
        if isinstance(target, RLMSubagent | RLMSpawnHandle):
            target = target.rlm_child_id
        if not isinstance(target, str):
            msg = f"target must be str or RLMSubagent, got {type(target).__name__}"
            raise TypeError(msg)
        if not target.strip():
            msg = "target must not be empty"
            raise ValueError(msg)
        return await self._client.request(
            messages.RLM_DELETE_SUBAGENT, {"target": target.strip()}
        )


def _client_of_this_kernel() -> HostClient:
    """Find the way to the host: handles are plain data, to be copied and stored."""
    kernel = getattr(get_ipython(), "kernel", None)
    client = getattr(kernel, CLIENT_ATTRIBUTE, None)
    if not isinstance(client, HostClient):
        msg = "kernel_ext is not loaded in this process"
        raise RuntimeError(msg)  # noqa: TRY004  # no value has a wrong type
    return client


def _text(answer: dict[str, Any], key: str, wrong: str) -> str:
    value = answer.get(key)
    if not isinstance(value, str) or (not value and key != "text"):
        raise RuntimeError(wrong)
    return value


def _subagent(row: Any) -> RLMSubagent:
    wrong = "rlm.list_subagents entry is missing "
    if not isinstance(row, dict):
        msg = "rlm.list_subagents returned an invalid subagents registry"
        raise RuntimeError(msg)  # noqa: TRY004  # Prime raises RuntimeError here
    for key in ("active_session_id", "session_id"):
        if not isinstance(row.get(key), str | None):
            msg = f"rlm.list_subagents entry has invalid {key}"
            raise RuntimeError(msg)  # noqa: TRY004  # Prime raises RuntimeError here
    if row.get("status") not in get_args(_Status):
        msg = "rlm.list_subagents entry has invalid status"
        raise RuntimeError(msg)
    return RLMSubagent(
        rlm_child_id=_text(row, "rlm_child_id", wrong + "rlm_child_id"),
        active_session_id=row.get("active_session_id"),
        session_id=row.get("session_id"),
        session_name=_text(row, "session_name", wrong + "session_name"),
        session_dir=Path(_text(row, "session_dir", wrong + "session_dir")),
        status=row["status"],
    )
