"""A scripted model: what it reads, what it says, and the script that runs Python.

Used by the loopback model server of the demo and by the in-memory harness, so
that both play the same words.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ("Reply", "Script", "ToolUse", "Transcript", "Turn", "run_fenced_python")


@dataclass(frozen=True, slots=True)
class Turn:
    """One entry of a conversation, oldest first."""

    role: Literal["user", "assistant", "call", "tool"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A model request, whatever its wire format."""

    system: str
    turns: Sequence[Turn]
    tools: frozenset[str]
    session_id: str | None = None

    @property
    def prompts(self) -> list[str]:
        """What people and agents said, without the harness's own context notes."""
        return [
            turn.text
            for turn in self.turns
            if turn.role == "user"
            and not turn.text.startswith(
                ("Current runtime context", "<system-reminder")
            )
        ]

    @property
    def tool_results(self) -> list[str]:
        """Every tool result so far, oldest first."""
        return [turn.text for turn in self.turns if turn.role == "tool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The model wants a tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model says; *status* other than 200 is an HTTP failure instead."""

    text: str = ""
    tool_uses: tuple[ToolUse, ...] = ()
    delay_s: float = 0.0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Script = Callable[[Transcript], Reply]

_FENCE = re.compile(
    r"^(```|~~~)(?:python|py|ipython)?[ \t]*\n(.*?)^\1", re.DOTALL | re.MULTILINE
)


def run_fenced_python(transcript: Transcript) -> Reply:
    """Run the fenced Python of the first prompt with ``ipython``; answer its text.

    A prompt without a fence is answered with one sentence that says so. This is
    the model of ``--scripted``: it needs no key and no network.
    """
    prompts = transcript.prompts
    found = _FENCE.search(prompts[0]) if prompts else None
    if found is None:
        return Reply(
            text="I am the scripted model: I run fenced Python, and this prompt has none."
        )
    if results := transcript.tool_results:
        return Reply(text=results[-1])
    return Reply(tool_uses=(ToolUse(name="ipython", arguments={"code": found[2]}),))
