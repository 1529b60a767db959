"""JSON of answers, encoded in slices so that no call holds the GIL for long."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from ktransformers.serve.http.answers import encode_json


@pytest.mark.parametrize(
    "document",
    [
        {},
        [],
        {"a": None, "b": [], "ü": "ä\n\"'", "c": {"d": [1.5, True, -3]}},
        {"tokens": [str(number) for number in range(1000)], "top": [{"a": 0.5, "b": None}] * 700},
        [[1, 2], [{"x": [3] * 600}]],
    ],
)
def test_slices_are_the_text_of_one_call(document: Any) -> None:
    assert encode_json(document) == json.dumps(document, ensure_ascii=False)


def test_unpaired_surrogates_can_be_sent() -> None:
    document = {"arguments": {"a": "\ud83d"}, "texts": ["\ud83d"] * 600, "ü": 1}
    assert json.loads(encode_json(document).encode()) == document


def test_other_threads_run_while_log_probabilities_of_a_long_prompt_are_encoded() -> None:
    top = [{f"token {index} {other}": -1.25 for other in range(20)} for index in range(30_000)]
    gaps: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    started = time.perf_counter()
    json.dumps(top, ensure_ascii=False)
    whole = time.perf_counter() - started
    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    encode_json({"choices": [{"logprobs": {"top_logprobs": top}}]})
    ended.set()
    ticker.join()
    assert max(gaps) < max(0.25, whole / 2)
