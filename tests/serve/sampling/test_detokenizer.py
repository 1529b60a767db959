"""StreamingText: text, characters and stop strings."""

from __future__ import annotations

import pytest

from ktransformers.serve.sampling.detokenizer import StreamingText
from tests.support.serving import EngineHarness


@pytest.mark.parametrize(
    "said", ["Plain words, and more.", "Ein schöner Tag 🌞🌞 am Meer", "日本語のテキスト", "a  b\n\nc"]
)
def test_streamed_pieces_join_to_the_text(harness: EngineHarness, said: str) -> None:
    text = StreamingText(harness.tokenizer)
    pieces = [text.add(token) for token in harness.tokenizer(said)["input_ids"]]
    assert "".join(pieces) + text.end() == said
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("stop", ["Tag", "schöner", " am", "🌞"])
def test_stop_string_is_never_emitted(harness: EngineHarness, stop: str) -> None:
    said = "Ein schöner Tag 🌞 am Meer"
    text, out = StreamingText(harness.tokenizer, ["nie", stop]), ""
    for token in harness.tokenizer(said)["input_ids"]:
        out += text.add(token)
        if text.stopped is not None:
            break
    assert out == said[: said.index(stop)] and text.stopped == stop and text.end() == ""
