"""One generated choice as answer events: its text through the parser of the family's format, without special tokens,
how many tokens were thinking, and all of it as a turn.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ktransformers.ground.log import logger
from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    ReasoningDelta,
    TextDelta,
)
from ktransformers.serve.doors.conversation import Call, Turn
from ktransformers.serve.formats.parser import TextParser
from ktransformers.serve.scheduler.sequence import Event

LOG = logger(__name__)


class ChoiceParser:
    def __init__(self, parser: AnswerParser, special: re.Pattern[str] | None) -> None:
        self._parser, self._special = parser, special
        self._tokens = 0  # whose text has come out
        self.reasoning_tokens = 0
        self._said: list[AnswerEvent] = []

    def events(self, event: Event) -> list[AnswerEvent]:
        try:
            events = self._parsed(event)
        except Exception:  # a model may write anything; what the parser held back is lost
            LOG.exception("the rest of an answer is passed on as text: its parser failed")
            self._parser = TextParser()
            ended = {one.index for one in self._said if isinstance(one, CallEnd)}
            open_calls = [one for one in self._said if isinstance(one, CallBegin) and one.index not in ended]
            events = [*(CallEnd(one.index, "") for one in open_calls), *self._parsed(event)]
        if events:  # the tokens since the last events belong to the first of these
            if isinstance(events[0], ReasoningDelta):
                self.reasoning_tokens += event.tokens - self._tokens
            self._tokens = event.tokens
        events = [kept for one in events if (kept := self._without_special(one)) is not None]
        self._said += [one for one in events if not isinstance(one, CallArguments)]
        return events

    def _parsed(self, event: Event) -> list[AnswerEvent]:
        events = self._parser.feed(event.text) if event.text else []
        return events if event.finish is None else [*events, *self._parser.end()]

    def turn(self) -> Turn:
        """What was said so far; arguments of calls are text."""
        begun = [one for one in self._said if isinstance(one, CallBegin)]
        ended = {one.index: one.arguments for one in self._said if isinstance(one, CallEnd)}
        return Turn(
            "assistant",
            "".join(one.text for one in self._said if isinstance(one, TextDelta)),
            "".join(one.text for one in self._said if isinstance(one, ReasoningDelta)),
            tuple(Call(one.id, one.name, ended.get(one.index, "")) for one in begun),
        )

    def _without_special(self, event: AnswerEvent) -> AnswerEvent | None:
        if self._special is None or not isinstance(event, TextDelta | ReasoningDelta):
            return event
        text = self._special.sub("", event.text)
        return replace(event, text=text) if text else None
