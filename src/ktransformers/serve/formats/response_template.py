"""Answers of a tokenizer that brings a response template of its own, read by transformers' `ResponseParser`.

Calls are told when they end. A call that cannot be read, and whatever follows it, comes out as text.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from ktransformers.serve.doors.conversation import Tool
from ktransformers.serve.formats.arguments import dump_json

REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class ResponseTemplateParser:
    def __init__(self, template: Mapping[str, Any], prefix: str, tools: tuple[Tool, ...]) -> None:
        chat_parsing = importlib.import_module("transformers.utils.chat_parsing")
        offered = [{"function": {"name": tool.name, "parameters": tool.parameters}} for tool in tools]
        self._parser: Any = chat_parsing.ResponseParser(dict(template), prefix=prefix, tools=offered)
        self._unread = ""  # text since the last event
        self._count = 0

    def feed(self, text: str) -> list[AnswerEvent]:
        self._unread += text
        if self._parser is None:
            return self._as_text()
        try:
            return self._events(self._parser.feed(text))
        except (ValueError, KeyError, TypeError, AttributeError):
            self._parser = None
            return self._as_text()

    def end(self) -> list[AnswerEvent]:
        if self._parser is None:
            return []
        try:
            return self._events(self._parser.finalize()[1])
        except (ValueError, KeyError, TypeError, AttributeError):
            return self._as_text()

    def _as_text(self) -> list[AnswerEvent]:
        text, self._unread = self._unread, ""
        return [TextDelta(text)] if text else []

    def _events(self, parsed: list[dict[str, Any]]) -> list[AnswerEvent]:
        events: list[AnswerEvent] = []
        for event in parsed:
            field, kind = event["field"], event["type"]
            if kind == "region_chunk" and field == "content":
                events.append(TextDelta(event["text"]))
            elif kind == "region_chunk" and field in REASONING_FIELDS:
                events.append(ReasoningDelta(event["text"]))
            elif kind == "region_close" and field == "tool_calls":
                values = event["value"] if isinstance(event["value"], list) else [event["value"]]
                for value in values:
                    events += self._call(value["function"])
        if events:
            self._unread = ""
        return events

    def _call(self, function: dict[str, Any]) -> list[AnswerEvent]:
        index, self._count = self._count, self._count + 1
        given = function["arguments"]
        arguments = given if isinstance(given, str) else dump_json(given)
        return [CallBegin(index, function["name"]), CallArguments(index, arguments), CallEnd(index, arguments)]
