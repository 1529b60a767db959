"""Generated text -> answer events, for every format of `families.py`.

The parser is a coroutine over a buffer: it yields where more text is needed to decide. Text that may be the beginning
of a marker is held back and released. JSON arguments are passed on as they come, and a closing tag inside of one of
their strings does not end them; arguments in tags are passed on one by one. Text that begins as a call and is none
comes out as text. A call that the end of the answer cuts off ends with the arguments so far, which are no JSON then.

transformers' `ResponseParser` ends a call at the first closing tag, tells its name only at its end and loses a call
that it cannot read, so it parses only answers of tokenizers that bring a response template and whose format is not in
the table (`response_template.py`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import Any

import regex  # type: ignore[import-untyped]

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from ktransformers.serve.doors.conversation import Tool
from ktransformers.serve.formats.arguments import (
    BracketScanner,
    dump_json,
    gemma_arguments,
    load_object,
    nested_value,
    python_arguments,
    schema_types,
    typed_value,
)
from ktransformers.serve.formats.syntax import CallSyntax, Thinking, pattern_of

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")

Steps = Generator[None, None, Any]


class TextParser:
    """Of answers that are text and nothing else."""

    def feed(self, text: str) -> list[AnswerEvent]:
        return [TextDelta(text)] if text else []

    def end(self) -> list[AnswerEvent]:
        return []


class FormatParser:
    """Of one answer. `calls` is None where no tools are offered."""

    def __init__(
        self,
        calls: CallSyntax | None,
        thinking: Thinking | None,
        marks: tuple[str, ...],
        in_thinking: bool,
        tools: tuple[Tool, ...],
    ) -> None:
        self._calls, self._thinking, self._marks = calls, thinking, marks
        self._schemas = {tool.name: tool.parameters for tool in tools}
        self._buffer, self._ended = "", False
        self._events: list[AnswerEvent] = []
        self._reasoning = in_thinking
        self._held = ""  # whitespace that is emitted if text follows
        self._strip = in_thinking  # whitespace at the beginning of the region is dropped
        self._fresh = True  # nothing but whitespace in this region yet
        self._count = 0  # calls
        self._steps = self._parse()

    def feed(self, text: str) -> list[AnswerEvent]:
        self._buffer += text
        return self._advance()

    def end(self) -> list[AnswerEvent]:
        self._ended = True
        return self._advance()

    def _advance(self) -> list[AnswerEvent]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    def _parse(self) -> Steps:
        while True:
            if self._calls is not None and self._calls.bare and self._fresh and not self._reasoning:
                yield from self._calls_at_start(self._calls, frozenset(self._schemas))
            start = yield from self._next_start()
            if not start:
                break
            taken = yield from self._take(start)
            if not taken:
                self._emit(self._drop(len(start)))
        if not self._reasoning and not self._strip and self._held:
            self._events.append(TextDelta(self._held))

    # Text and reasoning

    def _emit(self, text: str) -> None:
        if self._strip:
            text = text.lstrip()
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        if kept:
            self._strip = self._fresh = False
            self._events.append(ReasoningDelta(kept) if self._reasoning else TextDelta(kept))

    def _region(self, reasoning: bool) -> None:
        self._reasoning, self._held, self._strip, self._fresh = reasoning, "", True, True

    def _drop(self, length: int) -> str:
        dropped, self._buffer = self._buffer[:length], self._buffer[length:]
        return dropped

    # Markers

    def _next_start(self) -> Steps:
        """Emits text up to the next marker, which is returned; empty: the answer has ended."""
        while True:
            starts = _starts(self._calls, self._thinking, self._marks, self._reasoning)
            found = _search(starts, self._buffer)
            if found is not None:
                self._emit(self._drop(found.start()))
                return found.group()
            held = 0 if self._ended else _begun(self._buffer, starts)
            self._emit(self._drop(len(self._buffer) - held))
            if self._ended:
                return ""
            yield

    def _match(self, pattern: str) -> Steps:
        """The match at the beginning of the buffer, as soon as it is known; None: there is none."""
        compiled = _compiled(pattern)
        while True:
            match = compiled.match(self._buffer, partial=not self._ended)
            if match is None or not match.partial:
                return match
            yield

    def _literal(self, text: str) -> Steps:
        if text and (yield from self._match(re.escape(text))):
            self._drop(len(text))
            return True
        return False

    def _take(self, start: str) -> Steps:
        """Whether the text that begins with `start` was a marker or a call."""
        thinking = self._thinking
        if self._reasoning and thinking is not None and (yield from self._literal(thinking.close)):
            self._region(reasoning=False)
            return True
        if not self._reasoning and thinking is not None and (self._fresh or thinking.anywhere):
            if (yield from self._literal(thinking.open)):
                self._region(reasoning=True)
                return True
            # The template closed the block itself, and the model does so again.
            if self._fresh and not thinking.anywhere and (yield from self._literal(thinking.close)):
                self._region(reasoning=False)
                return True
        if self._calls is not None and (yield from self._calls_at_start(self._calls)):
            return True
        for mark in () if self._reasoning else _matching(self._marks, start):
            if (yield from self._literal(mark)):
                self._held, self._strip = "", True
                return True
        return False

    # Calls

    def _calls_at_start(self, syntax: CallSyntax, only: frozenset[str] | None = None) -> Steps:
        """Reads the call at the beginning of the buffer and those that follow in its section; whether there is one.
        `only`: names that a call may have."""
        separator = r"\s*" if only is not None else ""
        taken, before = False, self._count
        while (yield from self._one_call(syntax, separator, only)):
            malformed, taken, before = before == self._count, True, self._count
            if malformed:
                break
            closing = syntax.section[1].strip()
            if closing and (match := (yield from self._match(r"\s*" + pattern_of(closing)))) is not None:
                self._drop(match.end())
                break
            if not closing and not syntax.bare:
                break
            separator = rf"\s*{re.escape(syntax.between.strip())}\s*"
        return taken

    def _one_call(self, syntax: CallSyntax, separator: str, only: frozenset[str] | None) -> Steps:
        head = yield from self._match(separator + syntax.head_pattern)
        if head is None:
            return syntax.object_pattern and only is None and (yield from self._object_call(syntax, separator))
        groups = head.groupdict()
        name = str(groups["name"] or groups.get("late"))
        if only is not None and name not in only:
            return False
        identity = syntax.call_id.replace("$NAME", name).replace("$INDEX", groups.get("index") or "")
        raw = self._drop(head.end())
        if syntax.arguments == "json":
            yield from self._json_arguments(syntax, name, identity)
        elif syntax.arguments == "tags":
            yield from self._tagged_arguments(syntax, name, raw)
        else:
            yield from self._block_arguments(syntax, name, raw)
        return True

    def _object_call(self, syntax: CallSyntax, separator: str) -> Steps:
        """A call that is a JSON object with name and arguments in any order."""
        match = yield from self._match(separator + syntax.object_pattern)
        if match is None:
            return False
        raw = self._drop(match.end())
        body, _ = yield from self._scan(BracketScanner('"'))
        value = load_object(body) or {}
        name = next((value[key] for key in NAME_KEYS if isinstance(value.get(key), str)), None)
        given: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
        arguments = load_object(given) if isinstance(given, str) else given
        if name is None or not isinstance(arguments, dict):
            self._emit(raw + body)
            return True
        self._whole(name, dump_json(arguments))
        closing = syntax.after.lstrip("}").strip()
        if closing and (match := (yield from self._match(r"\s*" + pattern_of(closing)))) is not None:
            self._drop(match.end())
        return True

    def _scan(self, scanner: BracketScanner) -> Steps:
        """The text up to the end of the brackets, or of the answer, and the same with control characters escaped."""
        raw, escaped = "", ""
        while True:
            text, used, complete = scanner.scan(self._buffer)
            raw, escaped = raw + self._drop(used), escaped + text
            if complete or self._ended:
                return raw, escaped
            yield

    def _begin(self, name: str, identity: str = "") -> int:
        self._region(reasoning=False)
        index, self._count = self._count, self._count + 1
        self._events.append(CallBegin(index, name, identity) if identity else CallBegin(index, name))
        return index

    def _piece(self, index: int, text: str) -> str:
        if text:
            self._events.append(CallArguments(index, text))
        return text

    def _whole(self, name: str, arguments: str) -> None:
        index = self._begin(name)
        self._events.append(CallEnd(index, self._piece(index, arguments)))

    def _json_arguments(self, syntax: CallSyntax, name: str, identity: str) -> Steps:
        index = self._begin(name, identity)
        scanner = BracketScanner('"')
        pieces: list[str] = []
        self._drop(len(self._buffer) - len(self._buffer.lstrip()))
        while True:
            text, used, complete = scanner.scan(self._buffer)
            self._drop(used)
            pieces.append(self._piece(index, text))
            if complete or self._ended:
                break
            yield
        if complete:
            yield from self._tail(syntax)
        self._events.append(CallEnd(index, "".join(pieces)))

    def _tail(self, syntax: CallSyntax) -> Steps:
        """Whether the call is closed. The end of an answer may cut its closing tags behind the first."""
        match = yield from self._match(syntax.tail_pattern)
        first = "" if syntax.arguments == "json" else syntax.after.split("\n")[0]
        if match is None and self._ended and self._buffer.strip().startswith(first):
            match = _compiled(syntax.tail_pattern).fullmatch(self._buffer, partial=True)
        if match is not None:
            self._drop(match.end())
        return match is not None

    def _tagged_arguments(self, syntax: CallSyntax, name: str, raw: str) -> Steps:
        root = self._schemas.get(name, {})
        properties = root.get("properties")
        schemas = properties if isinstance(properties, dict) else {}
        before, _, after = syntax.argument.partition("$VALUE")
        opening = rf"\s*{pattern_of(before.rstrip())}"
        namespace = before.partition("<$KEY>")[0] if "<$KEY>" in before else ""
        index: int | None = None
        pieces: list[str] = []
        while (match := (yield from self._match(opening))) is not None:
            key, kind = match["key"], match.groupdict().get("kind")
            follow = rf"\s*(?:{pattern_of(before.split('$KEY')[0].strip())}|{pattern_of(syntax.after.strip())})"
            raw += self._drop(match.end())
            value = yield from self._until(after.strip().replace("$KEY", key), follow)
            if value is None:
                break
            raw += value + after.strip().replace("$KEY", key)
            if before.endswith("\n"):
                value = value.removeprefix("\n").removesuffix("\n")
            if namespace:
                decoded = nested_value(value, namespace, schemas.get(key), root)
            else:
                decoded = typed_value(value, schema_types(schemas.get(key), root), kind)
            index = self._begin(name) if index is None else index
            comma = ", " if pieces else "{"
            text = f"{comma}{dump_json(key)}: {dump_json(decoded)}"
            pieces.append(self._piece(index, text))
        closed = match is None and (yield from self._tail(syntax))
        if index is None and closed:
            self._whole(name, "{}")
        elif index is None:
            self._emit(raw)
        else:
            pieces.append(self._piece(index, "}" if closed else ""))
            self._events.append(CallEnd(index, "".join(pieces)))

    def _until(self, closing: str, follow: str) -> Steps:
        """The text before the closing tag that something expected follows, and not its tag; None: the answer ended."""
        searched = 0
        while True:
            found = self._buffer.find(closing, searched)
            if found >= 0:
                match = _compiled(follow).match(self._buffer, found + len(closing), partial=True)
                if match is not None and (not match.partial or self._ended):
                    value = self._drop(found)
                    self._drop(len(closing))
                    return value
                if match is None:
                    searched = found + 1
                    continue
            else:
                searched = max(searched, len(self._buffer) - len(closing) + 1)
            if self._ended:
                return None
            yield

    def _block_arguments(self, syntax: CallSyntax, name: str, raw: str) -> Steps:
        """Arguments in a notation that is read when it is complete."""
        if syntax.arguments == "python":
            block, text = yield from self._scan(BracketScanner("\"'", depth=1))
        else:
            while (end := self._buffer.find(syntax.after)) < 0 and not self._ended:
                yield
            block = text = self._drop(end + len(syntax.after) if end >= 0 else len(self._buffer))
        read = python_arguments if syntax.arguments == "python" else gemma_arguments
        complete = block.endswith(syntax.after)
        arguments = read(text.removesuffix(syntax.after)) if complete else None
        if arguments is None:
            self._emit(raw + block)
        else:
            self._whole(name, arguments)


@functools.cache
def _compiled(pattern: str) -> Any:
    return regex.compile(pattern, regex.DOTALL)


@functools.cache
def _starts(
    calls: CallSyntax | None, thinking: Thinking | None, marks: tuple[str, ...], reasoning: bool
) -> tuple[str, ...]:
    """Literals at which a marker may begin; of one that begins with another, the other is enough."""
    literals: list[str] = []
    if thinking is not None:
        literals += [thinking.close] if reasoning else [thinking.open, thinking.close]
    if calls is not None and (not reasoning or calls.ends_thinking):
        literals += calls.start_literals
    if not reasoning:
        literals += marks
    return tuple(
        text
        for text in dict.fromkeys(literals)
        if not any(other != text and text.startswith(other) for other in literals)
    )


def _search(starts: tuple[str, ...], text: str) -> Any:
    return _compiled("|".join(map(re.escape, starts))).search(text) if starts else None


def _begun(text: str, starts: tuple[str, ...]) -> int:
    """Length of the end of the text that a marker may begin with."""
    longest = max(map(len, starts), default=1) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if text.endswith(tuple(start[:size] for start in starts if len(start) > size)):
            return size
    return 0


def _matching(marks: tuple[str, ...], start: str) -> list[str]:
    return sorted((mark for mark in marks if mark.startswith(start) or start.startswith(mark)), key=len, reverse=True)
