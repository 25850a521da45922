"""Validates, dispatches, and is the one boundary for errors (design 3.7)."""

import dataclasses
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kernel_ext.wire.codes import ErrorCode
from kernel_ext.wire.envelope import ErrorReply, OkReply, Request
from kernel_ext.wire.messages import REQUEST_TYPES
from kernel_ext.wire.strict import PayloadError, check_json

from ..errors import HostBridgeError, RequestError
from ..kernels.attachment import Asker
from .context import RequestContext

__all__ = ("Dispatcher", "Handler")

_log = logging.getLogger(__name__)

_MAX_COMPLAINT_CHARS = 2000

Handler = Callable[[Any, RequestContext], Awaitable[Any]]
"""Takes the validated payload; returns a result dataclass, or a dict of fields."""


@dataclass(frozen=True, slots=True)
class _Route:
    payload: TypeAdapter[Any]
    handler: Handler


class Dispatcher:
    """Answers requests with the handlers it was given.

    Args:
        handlers: By request type; each type stands in the wire contract.
        redact: Takes the key out of an error's text, which may be the model's or
            the harness's.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], *, redact: Callable[[str], str] = str
    ) -> None:
        self._redact = redact
        self._routes = {
            name: _Route(TypeAdapter(REQUEST_TYPES[name][0]), handler)
            for name, handler in handlers.items()
        }

    async def dispatch(self, request: Request, asker: Asker) -> OkReply | ErrorReply:
        """Answer one request. Never raises but when it is cancelled."""
        context = RequestContext(
            f"{asker.generation}:{request.id}", asker.agent_id, asker
        )
        try:
            route = self._route(request)
            payload = _validated(route.payload, request)
            context.check()
            fields = _fields(await route.handler(payload, context))
            context.check()
            check_json(fields, path="result")
            return OkReply(id=request.id, result=fields)
        except HostBridgeError as error:
            text = self._redact(str(error))
            return ErrorReply(id=request.id, code=error.code, error=text)
        except Exception:  # noqa: BLE001  # the boundary: whatever is raised gets a code
            reference = secrets.token_hex(4)
            _log.exception("request %s failed, reference %s", request.type, reference)
            return ErrorReply(
                id=request.id,
                code=ErrorCode.INTERNAL,
                error=f"the host failed on this request; its log has reference {reference}",
            )

    def _route(self, request: Request) -> _Route:
        route = self._routes.get(request.type)
        if route is None:
            raise RequestError(
                ErrorCode.UNSUPPORTED_REQUEST,
                f'host request type "{request.type[:80]}" is not available in this session',
            )
        return route


def _validated(adapter: TypeAdapter[Any], request: Request) -> Any:
    """The payload as its dataclass; JSON mode, as strict mode refuses a dict."""
    try:
        check_json(request.payload)
        return adapter.validate_json(json.dumps(request.payload))
    except PayloadError as error:
        raise RequestError(ErrorCode.INVALID_ARGUMENT, str(error)) from error
    except ValidationError as error:
        raise RequestError(
            ErrorCode.INVALID_ARGUMENT,
            _complaint(request.type, error)[:_MAX_COMPLAINT_CHARS],
        ) from error


def _complaint(request_type: str, error: ValidationError) -> str:
    """Name the fields, never their values; Prime's text where there is one."""
    problems = error.errors(
        include_url=False, include_input=False, include_context=False
    )
    unknown = sorted(
        str(problem["loc"][1])
        for problem in problems
        if problem["type"] == "unexpected_keyword_argument"
        and len(problem["loc"]) == 2
        and problem["loc"][0] == "kwargs"
    )
    if request_type == "rlm.run" and unknown:
        return f"Unsupported rlm.run kwargs: {', '.join(unknown)}"
    lines = (
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
        for problem in problems[:5]
    )
    return f"{request_type}: {'; '.join(lines)}"


def _fields(result: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return dataclasses.asdict(result)
    return dict(result)
