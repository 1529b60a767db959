"""One generated choice as answer events: its text through the parser of the family's format, without special tokens,
and how many tokens were thinking.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ktransformers.serve.doors.answer_events import AnswerEvent, AnswerParser, ReasoningDelta, TextDelta
from ktransformers.serve.scheduler.sequence import Event


class ChoiceParser:
    def __init__(self, parser: AnswerParser, special: re.Pattern[str] | None) -> None:
        self._parser, self._special = parser, special
        self._tokens = 0  # whose text has come out
        self.reasoning_tokens = 0

    def events(self, event: Event) -> list[AnswerEvent]:
        events = self._parser.feed(event.text) if event.text else []
        if event.finish is not None:
            events = [*events, *self._parser.end()]
        if events:  # the tokens since the last events belong to the first of these
            if isinstance(events[0], ReasoningDelta):
                self.reasoning_tokens += event.tokens - self._tokens
            self._tokens = event.tokens
        return [kept for one in events if (kept := self._without_special(one)) is not None]

    def _without_special(self, event: AnswerEvent) -> AnswerEvent | None:
        if self._special is None or not isinstance(event, TextDelta | ReasoningDelta):
            return event
        text = self._special.sub("", event.text)
        return replace(event, text=text) if text else None
