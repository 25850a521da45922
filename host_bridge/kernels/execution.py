"""One cell: what it was asked, what came back, and how that is counted."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from kernel_ext.wire.codes import ErrorCode

from .channels import Message

__all__ = ("Cell", "CellError", "ExecutionResult", "OutputBudget")

_MAX_ERROR_NAME_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class CellError:
    """Why a cell did not end well (specification 8.1)."""

    name: str
    message: str
    traceback: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionResult:
    """What one cell came to (specification 8.1).

    Attributes:
        generation: 1 for an agent's first kernel; counts up with each new one.
        kernel_restarted: The kernel ended in this call: its variables are gone,
            and the next call gets a new one.
    """

    status: Literal["ok", "error", "aborted"]
    stdout: str
    stderr: str
    result: str | None
    duration_ms: int
    generation: int
    kernel_restarted: bool = False
    error: CellError | None = None


class OutputBudget:
    """Bytes that a cell's texts may have together; cuts between code points."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._left = max_bytes
        self._was_cut = False

    def take(self, text: str) -> str:
        """As much of *text* as is left; the first cut says where it was made."""
        if self._was_cut:
            return ""
        encoded = text.encode(errors="backslashreplace")
        if len(encoded) <= self._left:
            self._left -= len(encoded)
            # A lone surrogate can not travel on; it is shown as its escape.
            return encoded.decode()
        kept = encoded[: self._left].decode(errors="ignore")
        self._left, self._was_cut = 0, True
        return f"{kept}\n[... output truncated at {self._max_bytes} bytes ...]"


@dataclass(slots=True, eq=False)
class Cell:
    """A cell that runs: its outputs so far, and its nested calls.

    *execution_id* names the harness's open tool call, where there is one.
    *interrupted*: we asked it to stop; *was_stopped*: the kernel had taken that
    before the cell was over.
    """

    budget: OutputBudget
    execution_id: str | None = None
    message_id: str = ""
    is_open: bool = True
    interrupted: bool = False
    was_stopped: bool = False
    _started: float = field(default_factory=time.monotonic)
    _streams: dict[str, list[str]] = field(
        default_factory=lambda: {"stdout": [], "stderr": []}
    )
    _result: str | None = None
    _error: CellError | None = None
    _reply: dict[str, Any] | None = None
    _is_idle: bool = False
    _nested_calls: int = 0
    settled: asyncio.Event = field(default_factory=asyncio.Event)

    def next_nested_number(self) -> int:
        """Number the nested tool calls of this cell: 1, 2, 3."""
        self._nested_calls += 1
        return self._nested_calls

    def on_reply(self, message: Message) -> None:
        """Take the execute_reply: the status that also knows of failed magics."""
        self._reply = message.content
        self._settle()

    def on_output(self, message: Message) -> None:
        """Take one IOPub message of this cell."""
        content = message.content
        match message.type, content:
            case "stream", {"name": "stdout" | "stderr" as name, "text": str(text)}:
                self._streams[name].append(self.budget.take(text))
            case "execute_result", {"data": {"text/plain": str(text)}}:
                self._result = self.budget.take(text) or None
            case "error", _:
                self._error = self._error_from(content)
            case "status", {"execution_state": "idle"}:
                self._is_idle = True
                self._settle()

    def result(self, *, generation: int) -> ExecutionResult:
        """The result of a settled cell: reply and IOPub taken together."""
        reply = self._reply or {}
        error = self._error
        if error is None and reply.get("status") == "error":
            # A failed TaskGroup or magic is told in the reply alone.
            error = self._error_from(reply)
        status: Literal["ok", "error", "aborted"] = "ok"
        if error is not None:
            stopped = error.name in ("KeyboardInterrupt", "CancelledError")
            was_stopped = self.was_stopped or (self.interrupted and stopped)
            status = "aborted" if was_stopped else "error"
        elif reply.get("status") == "aborted" or self.was_stopped:
            # A shell command takes the interrupt, and its cell ends as if well.
            status = "aborted"
        return self._build(status, error, generation=generation)

    def begin(self) -> None:
        """Start the clock: the time in the queue is not the cell's."""
        self._started = time.monotonic()

    def not_started(self, *, generation: int) -> ExecutionResult:
        """The result of a cell that was cancelled before it began."""
        error = CellError(
            name=str(ErrorCode.CANCELLED), message="cancelled before the cell began"
        )
        return self._build("aborted", error, generation=generation)

    def ended(
        self,
        status: Literal["error", "aborted"],
        name: str,
        message: str,
        *,
        generation: int,
    ) -> ExecutionResult:
        """The result of a cell whose kernel is gone, with what it had printed."""
        error = CellError(name=str(name), message=message)
        return self._build(status, error, generation=generation, kernel_restarted=True)

    def _build(
        self,
        status: Literal["ok", "error", "aborted"],
        error: CellError | None,
        *,
        generation: int,
        kernel_restarted: bool = False,
    ) -> ExecutionResult:
        return ExecutionResult(
            status=status,
            stdout="".join(self._streams["stdout"]),
            stderr="".join(self._streams["stderr"]),
            result=self._result,
            duration_ms=round((time.monotonic() - self._started) * 1000),
            generation=generation,
            kernel_restarted=kernel_restarted,
            error=error,
        )

    def _error_from(self, content: dict[str, Any]) -> CellError:
        name = str(content.get("ename", "Error")).encode(errors="backslashreplace")
        lines = content.get("traceback")
        return CellError(
            name=name[:_MAX_ERROR_NAME_BYTES].decode(errors="ignore"),
            message=self.budget.take(str(content.get("evalue", ""))),
            traceback=tuple(
                text
                for line in (lines if isinstance(lines, list) else ())
                if (text := self.budget.take(str(line)))
            ),
        )

    def _settle(self) -> None:
        # The next cell may start only after both: one that starts on an error
        # seen earlier is aborted by the kernel (reference performance.md 1.3).
        if self._reply is not None and self._is_idle:
            self.settled.set()
