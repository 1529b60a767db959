"""Answers in the formats of model families: tools, what the events of an answer say, a tokenizer of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from ktransformers.serve.doors.conversation import Tool

WEATHER = Tool(
    "get_weather",
    "The weather of a town.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"type": "object", "properties": {"temperature": {"type": "string"}}},
            "hourly": {"type": "boolean"},
            "zip": {"type": "string"},
        },
        "required": ["city"],
    },
)
PING = Tool("ping", "No arguments.", {"type": "object", "properties": {}})
TOOLS = (WEATHER, PING)


@dataclass
class Answer:
    reasoning: str = ""
    text: str = ""
    names: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]

    @property
    def content(self) -> tuple[Any, ...]:
        """All but the ids, which are drawn."""
        return self.reasoning, self.text, self.names, self.arguments


def joined(events: Iterable[AnswerEvent]) -> Answer:
    """What the events say; regions must not overlap, and a call's pieces are its arguments."""
    answer = Answer()
    for event in events:
        match event:
            case ReasoningDelta(text):
                answer.reasoning += text
            case TextDelta(text):
                answer.text += text
            case CallBegin(index, name, identity):
                assert index == len(answer.names)
                answer.names.append(name)
                answer.ids.append(identity)
                answer.arguments.append("")
            case CallArguments(index, text):
                assert text and index == len(answer.names) - 1
                answer.arguments[index] += text
            case CallEnd(index, arguments):
                assert answer.arguments[index] == arguments
                answer.ended.append(index)
        if not isinstance(event, CallBegin | CallArguments):
            assert len(answer.ended) == len(answer.names)
    return answer


def parse(parser: AnswerParser, pieces: Iterable[str]) -> Answer:
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    return joined([*events, *parser.end()])


def common_beginning(whole: str, prompt: str) -> str:
    """What of the prompt the whole conversation begins with: the prompt may have opened a block that it has not."""
    length = next((at for at, pair in enumerate(zip(whole, prompt, strict=False)) if pair[0] != pair[1]), len(prompt))
    return whole[:length]


def byte_tokenizer(special: Iterable[str]) -> Any:
    """A token for each byte, and special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(text, special=True, normalized=False) for text in ("<eos>", *special)]
    tokenizer.add_special_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
