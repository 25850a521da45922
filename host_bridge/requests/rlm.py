"""`rlm.*` requests: admit a child, list children, hear a report (section 11)."""

import contextlib
import difflib
from collections.abc import Mapping

from kernel_ext.wire import messages
from kernel_ext.wire.codes import ErrorCode

from ..agents import AgentTree
from ..errors import RequestError, SetupError
from ..harness.port import ChildRequest, Harness, Route
from ..paths import StateRoot
from .context import RequestContext
from .dispatcher import Handler

__all__ = ("RlmRequests",)

_MAX_PROMPT_BYTES = 1_000_000

_REPORT_BOUND_S = 600.0
"""A cell that waits without a bound of its own: a child may hang for ever."""


class RlmRequests:
    """Handlers of the `rlm` family.

    Args:
        agents: The agents of this bridge.
        harness: Runs the children.
        state: Where a child's own directory is made.
        max_depth: A child may be this deep; a root has depth 0.
    """

    def __init__(
        self, agents: AgentTree, harness: Harness, state: StateRoot, *, max_depth: int
    ) -> None:
        self._agents = agents
        self._harness = harness
        self._state = state
        self._max_depth = max_depth

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """The handlers by request type."""
        return {
            messages.RLM_RUN: self.run,
            messages.RLM_LIST_SUBAGENTS: self.list_subagents,
            messages.RLM_REPORT: self.report,
            messages.RLM_FIND_MODELS: self.find_models,
            messages.RLM_DELETE_SUBAGENT: self.delete_subagent,
        }

    async def run(
        self, payload: messages.RunRequest, context: RequestContext
    ) -> messages.RunResult:
        """Admit one child; returns when its inbox has the prompt."""
        self._check(payload, context.agent_id)
        chosen = await self._route(payload.kwargs.model, context)
        # Nothing may fail once the child exists: asked before.
        running = chosen
        if running is None:
            asked = self._harness.running_route(context.agent_id)
            running = await context.step(asked)
        label = self._agents.reserve_label(context.agent_id, payload.kwargs.name)
        try:
            request = ChildRequest(
                parent_id=context.agent_id,
                prompt=payload.prompt,
                label=label,
                max_depth=self._max_depth,
                route=chosen,
            )
            info = await self._harness.start_child(request)
        except BaseException:
            self._agents.release_label(context.agent_id, label)
            raise
        # The child exists now, whatever has become of the one who asked.
        self._agents.admit(info, label)
        paths = self._state.session(info.id)
        with contextlib.suppress(SetupError):  # its kernel makes it, or says why not
            paths.make()
        return messages.RunResult(
            rlm_child_id=info.id,
            name=label,
            session_dir=str(paths.directory),
            model=running.selector,
        )

    async def list_subagents(
        self, payload: messages.ListSubagentsRequest, context: RequestContext
    ) -> messages.ListSubagentsResult:
        """List direct children; the harness's own delegates as well."""
        return messages.ListSubagentsResult(
            subagents=[
                messages.SubagentRow(
                    rlm_child_id=agent.info.id,
                    active_session_id=agent.info.id if agent.is_live else None,
                    session_id=agent.info.id,
                    session_name=agent.label,
                    session_dir=str(self._state.session(agent.info.id).directory),
                    status=agent.status,
                )
                for agent in self._agents.children(context.agent_id)
            ]
        )

    async def report(
        self, payload: messages.ReportRequest, context: RequestContext
    ) -> messages.ReportResult:
        """Wait for what a child reported (design 3.10)."""
        timeout_s = _REPORT_BOUND_S if payload.timeout_s is None else payload.timeout_s
        if timeout_s < 0:
            raise RequestError(
                ErrorCode.INVALID_ARGUMENT, "timeout_s must not be negative"
            )
        report = await context.step(
            self._agents.report(
                context.agent_id, payload.rlm_child_id, timeout_s=timeout_s
            )
        )
        return messages.ReportResult(text=report.text, source=report.source)

    async def find_models(
        self, payload: messages.FindModelsRequest, context: RequestContext
    ) -> None:
        """Refuse: not offered in this version."""
        raise RequestError(
            ErrorCode.UNSUPPORTED_MODEL_SEARCH,
            "rlm.find_models is not offered by this version; leave model= out to use "
            "the model that runs you",
        )

    async def delete_subagent(
        self, payload: messages.DeleteSubagentRequest, context: RequestContext
    ) -> None:
        """Refuse: not offered in this version."""
        raise RequestError(
            ErrorCode.UNSUPPORTED_DELETION,
            "rlm.delete_subagent is not offered by this version",
        )

    def _check(self, payload: messages.RunRequest, agent_id: str) -> None:
        depth = self._agents.get(agent_id).info.depth
        if depth + 1 > self._max_depth:
            raise RequestError(
                ErrorCode.DEPTH_LIMIT,
                f"RLM recursion depth limit reached (RLM_DEPTH={depth}, "
                f"RLM_MAX_DEPTH={self._max_depth})",
            )
        if not payload.prompt.strip():
            raise RequestError(ErrorCode.INVALID_ARGUMENT, "prompt must not be empty")
        if len(payload.prompt.encode()) > _MAX_PROMPT_BYTES:
            raise RequestError(
                ErrorCode.PAYLOAD_TOO_LARGE,
                f"a prompt may have {_MAX_PROMPT_BYTES} bytes; write the data to a file "
                "in RLM_SESSION_DIR/exports and name the path",
            )
        if payload.kwargs.thinking is not None:
            raise RequestError(
                ErrorCode.UNSUPPORTED_REASONING_EFFORT,
                "thinking= is not offered by this version",
            )

    async def _route(
        self, selector: str | None, context: RequestContext
    ) -> Route | None:
        """The advertised model of that exact name; None inherits, unchecked.

        A harness may run a route that it does not advertise, so what a parent
        runs on is never refused (reference spike.md row 15).
        """
        if selector is None:
            return None
        advertised = await context.step(self._harness.advertised_models())
        by_selector = {route.selector: route for route in advertised}
        if route := by_selector.get(selector):
            return route
        nearest = difflib.get_close_matches(selector, by_selector, n=3, cutoff=0.3)
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        raise RequestError(
            ErrorCode.MODEL_UNAVAILABLE,
            f'Requested subagent model "{selector[:80]}" is unavailable{hint}',
        )
