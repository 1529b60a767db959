"""Answers as they were sampled, so that the next turn of a conversation continues from their tokens.

A client sends an answer back as text, and a chat template renders it anew: the text may be tokenised otherwise than it
was sampled, calls are written in the template's way, and clients drop thinking or add fields to arguments. Each of
these would lose everything of the KV cache that lies behind. So the server remembers answers: their tokens, and where
they begin in the rendered prompt. A worker that prepares a request asks for those of its conversation and puts the
tokens in the place of the rendered answer, up to the token that ends its turn, where all of this holds:

- the client sent back the same text and calls of the same names after the same turns, by which answers are found, and
  the arguments say the same (`same_arguments`);
- the template renders everything before the answer as it did then, which its digest shows;
- what it renders in the answer's place has the answer's thinking. A template that strips thinking from history is
  followed. Thinking that the client dropped is restored only for a template that keeps all of it: one that strips it at
  the next message of the user would lose everything since then, which is far more than the answers without thinking.
  It is restored only with the answer's tokens: another conversation may have the same turns and calls of the same
  names, and its thinking stays there.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Literal

from ktransformers.serve.doors.conversation import Call, Tool, Turn
from ktransformers.serve.formats.arguments import load_object
from ktransformers.serve.formats.families import TURN_MARKS
from ktransformers.serve.http.piece_tokenizer import PieceTokenizer

MAX_BYTES = 64 * 2**20  # of remembered answers
ENTRY_BYTES = 1024  # of one besides its tokens and texts, about
# Whether a prompt continues from the last answer of its conversation, and if not, why: there is none; none is known
# with this text after these turns; the template renders what is before it otherwise, or without its thinking; the
# client changed the arguments of a call.
Continuation = Literal["continued", "first_turn", "other_text", "template", "changed_call"]


@dataclass(frozen=True)
class SampledAnswer:
    prompt_characters: int  # of the rendered prompt that it answers
    prompt_digest: str
    tokens: array[int]  # without the one that ended it
    end: str  # the text of that one; empty: it ended otherwise
    reasoning: str = ""
    arguments: tuple[str, ...] = ()  # of its calls, JSON

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES + 4 * len(self.tokens) + len(self.reasoning) + sum(map(len, self.arguments))


@dataclass(frozen=True)
class PromptEnd:
    """Where the answer to a prompt will begin, for remembering it, and what the prompt has of earlier answers."""

    key: str  # of the conversation's turns
    characters: int
    digest: str
    continuation: Continuation
    continued_tokens: int  # of the prompt, up to the end of the last answer that was put in as it was sampled
    generation_prompt: int  # tokens of the prompt that begin the answer
    # Tokens before those that change if the template strips the thinking since the last message of the user.
    border: int


Recall = Callable[[Sequence[str]], Mapping[str, SampledAnswer]]


def recall_nothing(keys: Sequence[str]) -> Mapping[str, SampledAnswer]:
    return {}


class SampledAnswers:
    """The answers of a server by the turns up to and with them, as many as fit; the least recently used go first."""

    def __init__(self, limit_bytes: int = MAX_BYTES) -> None:
        self._limit, self.bytes = limit_bytes, 0
        self._answers: OrderedDict[str, SampledAnswer] = OrderedDict()

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, key: str, answer: SampledAnswer) -> None:
        replaced = self._answers.pop(key, None)
        self._answers[key] = answer
        self.bytes += answer.bytes - (0 if replaced is None else replaced.bytes)
        while self.bytes > self._limit:
            self.bytes -= self._answers.popitem(last=False)[1].bytes

    def find(self, keys: Sequence[str]) -> dict[str, SampledAnswer]:
        known = [key for key in keys if key in self._answers]
        for key in known:
            self._answers.move_to_end(key)
        return {key: self._answers[key] for key in known}


def turn_keys(start: str, turns: Iterable[Turn]) -> Iterator[str]:
    """For each turn a name of the conversation up to and with it. Neither thinking nor arguments are in it, which
    clients change, nor ids of calls, which some doors do not have."""
    for turn in turns:
        said = [start, turn.role, turn.text.strip(), [call.name for call in turn.calls]]
        start = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        yield start


def dropped_reasoning(
    turns: Sequence[Turn], tools: Sequence[Tool], answers: Mapping[int, SampledAnswer]
) -> dict[int, str]:
    """By index of the turn the thinking that the client dropped, of answers whose calls say the same."""
    schemas = {tool.name: tool.parameters for tool in tools}
    return {
        index: answer.reasoning
        for index, answer in answers.items()
        if answer.reasoning
        and not turns[index].reasoning
        and _same_calls(turns[index].calls, answer.arguments, schemas)
    }


def restore_reasoning(turns: Sequence[Turn], dropped: Mapping[int, str]) -> tuple[Turn, ...]:
    return tuple(
        replace(turn, reasoning=dropped[index]) if index in dropped else turn for index, turn in enumerate(turns)
    )


@dataclass(frozen=True)
class Splice:
    """An answer whose tokens take the place of these characters of the rendered prompt."""

    turn: int
    start: int
    end: int
    answer: SampledAnswer


def find_splices(
    rendered: str,
    turns: Sequence[Turn],
    tools: Sequence[Tool],
    answers: Mapping[int, SampledAnswer],
    tokenizer: PieceTokenizer,
) -> tuple[list[Splice], Continuation, str]:
    """Where answers stand in the rendered prompt, what became of the last one, and the prompt's digest. What the
    template renders for an answer goes up to the first special token that was not sampled in it, which has to be one
    that ends or begins a turn."""
    splices: list[Splice] = []
    schemas = {tool.name: tool.parameters for tool in tools}
    state: Continuation = "first_turn"
    digests = _digests(rendered, {answer.prompt_characters for answer in answers.values()})
    spliced = 0
    for index, turn in enumerate(turns):
        if turn.role != "assistant":
            continue
        answer = answers.get(index)
        if answer is None:
            state = "other_text"
            continue
        start, state = answer.prompt_characters, "template"
        if start < spliced or digests.get(start) != answer.prompt_digest:
            continue
        mark = tokenizer.next_other(rendered, start, answer.tokens)
        if mark is None or mark.group() not in (answer.end, *TURN_MARKS):
            continue
        shown = _bare(rendered[start : mark.start()])
        if not all(_bare(part) in shown for part in (answer.reasoning, *([] if turn.calls else [turn.text]))):
            continue
        if not all(call.name in shown for call in turn.calls):
            continue
        if _bare(turn.reasoning) != _bare(answer.reasoning):
            state = "other_text"
        elif not _same_calls(turn.calls, answer.arguments, schemas):
            state = "changed_call"
        else:
            state = "continued"
            splices.append(Splice(index, start, mark.start(), answer))
            spliced = mark.start()
    return splices, state, digests[len(rendered)]


def _digests(text: str, lengths: Set[int]) -> dict[int, str]:
    """Of the beginnings of these lengths, and of all of it."""
    digests, digest, at = {}, hashlib.sha256(), 0
    for length in sorted({len(text), *(length for length in lengths if length < len(text))}):
        digest.update(text[at:length].encode("utf-8", "surrogatepass"))
        digests[length], at = digest.hexdigest(), length
    return digests


def _bare(text: str) -> str:
    """Without white space, which templates and clients change at the ends of thinking."""
    return "".join(text.split())


def _same_calls(calls: Sequence[Call], sampled: Sequence[str], schemas: Mapping[str, Mapping[str, Any]]) -> bool:
    return len(calls) == len(sampled) and all(
        same_arguments(text, call.arguments, schemas.get(call.name, {}))
        for call, text in zip(calls, sampled, strict=True)
    )


def same_arguments(sampled: str, given: dict[str, Any] | str, schema: Mapping[str, Any]) -> bool:
    """Whether arguments that came back say what was sampled: equal values in any order of keys. Clients add fields that
    the model left out, as `replace_all: false`; they change nothing if the value is the schema's default, or null or
    false where it declares none. Anything else is the client's own choice, and the model has to see it."""
    if isinstance(given, str):
        return given == sampled
    called = load_object(sampled)
    if called is None:
        return False
    properties = schema.get("properties")
    declared = properties if isinstance(properties, dict) else {}

    def is_default(name: str, value: Any) -> bool:
        field = declared.get(name)
        if isinstance(field, dict) and "default" in field:
            return _same(value, field["default"])
        return value is None or value is False

    return all(
        _same(called[name], given[name]) if name in called and name in given else is_default(name, value)
        for name, value in (called | given).items()
    )


def _same(first: Any, second: Any) -> bool:
    """As JSON, where true is not 1."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
