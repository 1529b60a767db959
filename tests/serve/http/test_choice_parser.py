"""An answer as events when its parser fails."""

from __future__ import annotations

import pytest

from ktransformers.serve.doors.answer_events import AnswerEvent, CallBegin, CallEnd, TextDelta
from ktransformers.serve.http.choice_parser import ChoiceParser
from ktransformers.serve.scheduler.sequence import Event


class FailingParser:
    def feed(self, text: str) -> list[AnswerEvent]:
        if text == "fail":
            raise TypeError("no JSON")
        return [CallBegin(0, text)]

    def end(self) -> list[AnswerEvent]:
        raise AssertionError


def test_the_rest_of_an_answer_is_text_when_its_parser_fails(caplog: pytest.LogCaptureFixture) -> None:
    choice = ChoiceParser(FailingParser(), None)
    with caplog.at_level("ERROR", "ktransformers"):
        assert isinstance(choice.events(Event("ping", tokens=1))[0], CallBegin)
        assert choice.events(Event("fail", tokens=2)) == [CallEnd(0, ""), TextDelta("fail")]
        assert choice.events(Event("more", tokens=3, finish="stop")) == [TextDelta("more")]
    assert len(caplog.records) == 1
    assert choice.turn().text == "failmore"
