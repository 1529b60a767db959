"""The data that a family's format consists of: how tool calls are written, how thinking is marked, what a chat template
calls its switches. In the texts $NAME, $INDEX, $ARGS, $KEY, $KIND and $VALUE stand for what varies; patterns for
parsing and literals for grammars are both made of them, so that what is generated under constraint is what is parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ArgumentStyle = Literal["json", "tags", "gemma", "python"]

_VARIABLES = {
    "$NAME": r"(?P<name>[\w.\-/]+)",
    "$INDEX": r"(?P<index>\d+)",
    "$KEY": r"(?P<key>[^<>\"=\s/][^<>\"=\s]*)",
    "$KIND": r"(?P<kind>true|false)",
}


@dataclass(frozen=True)
class CallSyntax:
    call: str  # one call, whitespace as the chat template writes it
    arguments: ArgumentStyle = "json"
    argument: str = ""  # one argument of `tags`
    section: tuple[str, str] = ("", "")  # around all calls of an answer
    between: str = "\n"  # of two calls
    head: str = ""  # pattern of what precedes $ARGS, where models also write it otherwise than `call`
    tail: str = ""  # pattern of what follows $ARGS, likewise
    starts: tuple[str, ...] = ()  # more literals at which a call may begin
    call_id: str = ""  # the id of a call, where the template renders ids that the model wrote
    bare: bool = False  # no marker: an answer is a call if it begins as a call of a tool that is offered
    ends_thinking: bool = False  # a call may come without the end of the thinking block

    @property
    def before(self) -> str:
        return self.call.split("$ARGS")[0]

    @property
    def after(self) -> str:
        return self.call.split("$ARGS")[1]

    @property
    def start_literals(self) -> tuple[str, ...]:
        """Texts at which a call may begin, for the search in an answer."""
        if self.bare:
            return self.starts
        first = re.match(r"[^\s{]*", self.before.split("$NAME")[0])
        own = (self.section[0].split(" ")[0].strip(), first.group() if first else "")
        return tuple(dict.fromkeys(text for text in (*own, *self.starts) if text))

    @property
    def head_pattern(self) -> str:
        pattern = self.head or pattern_of(self.before)
        if self.section[0]:
            pattern = rf"(?:{pattern_of(self.section[0])})?{pattern}"
        if self.arguments in ("json", "gemma"):
            return pattern + r"\s*(?=\{)"
        # The name is complete where something else begins.
        return pattern + (r"\s*(?=<)" if self.before.strip().endswith("$NAME") else "")

    @property
    def tail_pattern(self) -> str:
        return self.tail or r"\s*" + pattern_of(self.after)

    @property
    def object_pattern(self) -> str:
        """Of what precedes a call that is one JSON object of name and arguments; empty: it is not."""
        start, brace, _ = self.before.partition('{"')
        section = rf"(?:{pattern_of(self.section[0])})?" if self.section[0] else ""
        return rf"{section}{pattern_of(start)}\s*(?=\{{)" if brace else ""


@dataclass(frozen=True)
class Thinking:
    open: str = "<think>"
    close: str = "</think>"
    resume: str = ""  # what the model writes between a thinking block and a call
    marks: tuple[str, ...] = ()  # headers of text, which are no part of it; the first is written before text
    anywhere: bool = False  # a marker that text cannot contain: blocks may open in the middle of an answer
    efforts: tuple[str, ...] = ()  # that `reasoning_effort` of the template knows, in order; empty: any


def pattern_of(literal: str) -> str:
    """A pattern of the literal that is indifferent to whitespace, also between tags and around JSON's punctuation."""
    parts = re.split(r"(\$NAME|\$INDEX|\$KEY|\$KIND|\s+|[{}:,])", literal.replace("><", "> <"))
    return "".join(_VARIABLES.get(part) or _flexible(part) for part in parts if part)


def _flexible(part: str) -> str:
    if part.isspace():
        return r"\s*"
    return rf"\s*{re.escape(part)}\s*" if part in "{}:," else re.escape(part)
