"""The same questions to the base and to the adapter, as soon as a server has both: before and after, side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ktransformers.ground.client import Client
from ktransformers.ground.errors import KTError

MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class AnswerPair:
    asked: str
    base: str
    adapter: str


def ask(url: str, base: str, adapter: str, questions: Sequence[str]) -> list[AnswerPair]:
    """The answers to all questions, in one batch of the server. A model that cannot chat has none."""
    if not questions:
        return []

    def answer(pair: tuple[str, str]) -> str:
        body = {"model": pair[0], "messages": [{"role": "user", "content": pair[1]}]}
        reply = Client(url).request("/v1/chat/completions", {**body, "max_tokens": MAX_NEW_TOKENS, "temperature": 0})
        return str(reply["choices"][0]["message"]["content"])

    pairs = [(model, question) for question in questions for model in (base, adapter)]
    with ThreadPoolExecutor(len(pairs)) as pool:
        try:
            texts = list(pool.map(answer, pairs))
        except (KTError, ValueError, LookupError):  # no chat template, an answer that is none
            return []
    return [AnswerPair(question, *texts[2 * index : 2 * index + 2]) for index, question in enumerate(questions)]


def read_answers(file: Path) -> list[AnswerPair]:
    return [AnswerPair(**pair) for pair in json.loads(file.read_text())] if file.is_file() else []
