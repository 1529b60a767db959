"""Answers of OpenAI's Responses API: the events of a stream and the document, item by item.

The events of each item have the order that OpenAI's client and Codex expect; a call of a custom tool is streamed as the
text of its input.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenScores,
    Usage,
)
from ktransformers.serve.doors.door import AnswerHead
from ktransformers.serve.doors.template_messages import read_arguments
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.json_slices import sse_event

CUSTOM_PARAMETER = "input"  # of the function that stands for a custom tool
REASONING_PREFIX = "kt1:"  # of `encrypted_content` that is ours


def encode_reasoning(text: str) -> str:
    return REASONING_PREFIX + base64.b64encode(text.encode()).decode()


def decode_reasoning(content: str) -> str:
    """Empty for reasoning that another server has encrypted."""
    try:
        is_ours = content.startswith(REASONING_PREFIX)
        return base64.b64decode(content.removeprefix(REASONING_PREFIX), validate=True).decode() if is_ours else ""
    except ValueError:
        return ""


@dataclass(frozen=True)
class ItemKind:
    """How items of one type are streamed."""

    prefix: str  # of ids
    event: str  # of the events with pieces of the text and with all of it
    field: str  # that has all of the text
    part: dict[str, Any] | None = None  # of the content, empty; None: the item has its text itself


TEXT_PART = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
ITEM_KINDS = {
    "reasoning": ItemKind("rs", "reasoning_text", "text", {"type": "reasoning_text", "text": ""}),
    "message": ItemKind("msg", "output_text", "text", TEXT_PART),
    "function_call": ItemKind("fc", "function_call_arguments", "arguments"),
    "custom_tool_call": ItemKind("ctc", "custom_tool_call_input", "input"),
}


class OutputItem:
    """An item of the answer while it is generated."""

    def __init__(self, kind: str, fields: dict[str, Any]) -> None:
        self.kind = ITEM_KINDS[kind]
        item_id = f"{self.kind.prefix}_{uuid.uuid4().hex}"
        self.document = {"type": kind, "id": item_id, "status": "in_progress", **fields}
        self.text = ""
        self.scores: list[dict[str, Any]] = []  # log-probabilities of the text
        self._arguments = ""  # of a custom tool's call

    def piece_of(self, arguments: str) -> str:
        """What the next piece of a call's arguments adds to the item's text, which for a custom tool is a string in
        them."""
        if self.kind.field != "input":
            return arguments
        self._arguments += arguments
        try:
            known = from_json(self._arguments, allow_partial="trailing-strings")
        except ValueError:  # nothing of it is JSON yet
            return ""
        return self._rest_of(known.get(CUSTOM_PARAMETER) if isinstance(known, dict) else "")

    def end_of(self, arguments: str) -> str:
        """What is missing of the item's text when the call is complete."""
        return self._rest_of(_custom_input(arguments) if self.kind.field == "input" else arguments)

    def _rest_of(self, text: Any) -> str:
        return text[len(self.text) :] if isinstance(text, str) and text.startswith(self.text) else ""


def _custom_input(arguments: str) -> str:
    """The input among a call's arguments, or the only string there; all of them if that is not to be found."""
    document = read_arguments(arguments)
    texts = [value for value in document.values() if isinstance(value, str)] if isinstance(document, dict) else []
    given = document.get(CUSTOM_PARAMETER) if isinstance(document, dict) else None
    return given if isinstance(given, str) else texts[0] if len(texts) == 1 else arguments


class ResponsesEmitter:
    """One item is open at a time. It is closed when the next one begins or the answer ends, since only then it is
    known whether it is complete."""

    def __init__(self, head: AnswerHead) -> None:
        self._head, self._created = head, int(time.time())
        self._id = f"resp_{head.request_id.removeprefix('req_')}"
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._item: OutputItem | None = None
        self._scores: list[dict[str, Any]] = []  # of text that follows
        self._reason = "stop"

    def begin(self) -> list[str]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def ping(self) -> str:
        """Codex ends a stream without events after five minutes. Comments are no events. The request's long fields are
        not repeated each time."""
        short = {**self._response("in_progress"), "instructions": None, "tools": []}
        return self._event("response.in_progress", response=short)

    def event(self, choice: int, event: AnswerEvent) -> Iterator[str]:
        match event:
            case TokenScores(content):
                self._scores += content
                return
            case TextDelta(text):
                yield from self._region("message", {"role": "assistant", "content": []})
                yield from self._delta(text)
            case ReasoningDelta(text):
                yield from self._region("reasoning", {"summary": [], "content": []})
                yield from self._delta(text)
            case CallBegin(name=name, id=call_id):
                tool = self._head.echo["tools"].get(name, {"custom": False, "name": name, "namespace": None})
                kind, field = ("custom_tool_call", "input") if tool["custom"] else ("function_call", "arguments")
                fields = {"call_id": call_id, "name": tool["name"], field: ""}
                yield from self._close("completed")
                yield from self._open(kind, fields | ({"namespace": tool["namespace"]} if tool["namespace"] else {}))
            case CallArguments(text=text) if self._item:
                yield from self._delta(self._item.piece_of(text))
            case CallEnd(arguments=arguments) if self._item:
                yield from self._delta(self._item.end_of(arguments))
        self._scores = []

    def finish(self, choice: int, finish: Finish) -> list[str]:
        """A call that was cut off is not announced as done: Codex would run it."""
        self._reason = finish.reason
        if finish.reason == "length" and self._item is not None and self._item.kind.part is None:
            document = {**self._item.document, self._item.kind.field: self._item.text, "status": "incomplete"}
            self._output.append(document)
            return []
        return list(self._close("incomplete" if finish.reason == "length" else "completed"))

    def end(self, usage: Usage) -> list[str]:
        document = self.document(usage)
        return [self._event(f"response.{document['status']}", response=document)]

    def fail(self, error: ApiError) -> list[str]:
        """Codex tries again after rate_limit_exceeded and server_error, and ends the turn after the others."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if error.status < 500 and error.status != 429:
            code = error.code if error.code == "context_length_exceeded" else "invalid_prompt"
        failure = {"code": code, "message": str(error)}
        return [self._event("response.failed", response={**self._response("failed"), "error": failure})]

    def document(self, usage: Usage) -> dict[str, Any]:
        status = "incomplete" if self._reason == "length" else "completed"
        return {
            **self._response(status),
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": usage.prompt,
                "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
                "output_tokens": usage.completion,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            },
        }

    def _response(self, status: str) -> dict[str, Any]:
        head = {"id": self._id, "object": "response", "created_at": self._created, "status": status}
        rest = {"error": None, "incomplete_details": None, "output": list(self._output), "usage": None}
        return {**head, "model": self._head.model, **rest, **self._head.echo["response"]}

    def _region(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        """An item of this kind is open afterwards."""
        if self._item is None or self._item.document["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind, fields)

    def _open(self, kind: str, fields: dict[str, Any]) -> Iterator[str]:
        self._item = item = OutputItem(kind, fields)
        yield self._event("response.output_item.added", output_index=len(self._output), item=item.document)
        if item.kind.part:
            yield self._item_event(item, "content_part.added", part=item.kind.part)

    def _delta(self, text: str) -> Iterator[str]:
        item = self._item
        if item is None or not text:
            return
        item.text += text
        scores = {"logprobs": self._scores} if item.kind.part is TEXT_PART else {}
        item.scores += self._scores
        yield self._item_event(item, f"{item.kind.event}.delta", delta=text, **scores)

    def _close(self, status: str) -> Iterator[str]:
        item, self._item = self._item, None
        if item is None:
            return
        whole: dict[str, Any] = {item.kind.field: item.text}
        scores = {"logprobs": item.scores} if item.kind.part is TEXT_PART else {}
        name = {"name": item.document["name"]} if item.kind.field == "arguments" else {}
        yield self._item_event(item, f"{item.kind.event}.done", **whole, **scores, **name)
        if item.kind.part:
            part = {**item.kind.part, **whole, **scores}
            yield self._item_event(item, "content_part.done", part=part)
            whole = {"content": [part]}
        if item.kind.event == "reasoning_text" and self._head.echo["encrypted_reasoning"]:
            whole["encrypted_content"] = encode_reasoning(item.text)
        document = {**item.document, **whole, "status": status}
        yield self._event("response.output_item.done", output_index=len(self._output), item=document)
        self._output.append(document)

    def _item_event(self, item: OutputItem, kind: str, **fields: Any) -> str:
        place = {"item_id": item.document["id"], "output_index": len(self._output)}
        index = {"content_index": 0} if item.kind.part else {}
        return self._event(f"response.{kind}", **place, **index, **fields)

    def _event(self, kind: str, **fields: Any) -> str:
        document = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return f"event: {kind}\n{sse_event(document)}"
