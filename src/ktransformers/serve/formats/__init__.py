"""How each model family writes reasoning and tool calls.

`recognise` finds a family's format; the format makes parsers of answers and grammars that answers are held to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktransformers.serve.doors.answer_events import AnswerEvent, AnswerParser, TextDelta
from ktransformers.serve.doors.conversation import Reasoning, Tool


class TextParser:
    """Of answers that are text and nothing else."""

    def feed(self, text: str) -> list[AnswerEvent]:
        return [TextDelta(text)] if text else []

    def end(self) -> list[AnswerEvent]:
        return []


@dataclass(frozen=True)
class AnswerFormat:
    name: str = "text"
    thinking: tuple[str, str] | None = None  # what opens and what closes a thinking block

    def parser(self, prefix: str, tools: tuple[Tool, ...]) -> AnswerParser:
        """`prefix`: what the prompt already has of the answer, such as an opened thinking block."""
        return TextParser()

    def constraint(
        self, tools: tuple[Tool, ...], choice: str, chosen: tuple[str, ...], parallel: bool, reasoning: Reasoning
    ) -> str | None:
        """A grammar of llguidance, serialized, that the answer is held to; None: it is free."""
        return None

    def template_variables(self, reasoning: Reasoning) -> Mapping[str, Any]:
        return {}

    def default_tools_prompt(self, tools: tuple[Tool, ...]) -> str:
        return ""


def recognise(
    model_type: str, chat_template: str, tool_call_parser: str | None, reasoning_parser: str | None
) -> AnswerFormat:
    return AnswerFormat()
