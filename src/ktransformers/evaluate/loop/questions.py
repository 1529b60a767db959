"""The same questions to the base and to the adapter, as soon as a server has both: before and after, side by side."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ktransformers.ground.files import write_json

MAX_NEW_TOKENS = 96
TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True)
class AnswerPair:
    asked: str
    base: str
    adapter: str


def _answer(url: str, model: str, question: str) -> str:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}]}
    body |= {"max_tokens": MAX_NEW_TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
        document: Any = json.load(reply)
    return str(document["choices"][0]["message"]["content"])


def ask(url: str, base: str, adapter: str, questions: Sequence[str]) -> list[AnswerPair]:
    """The answers to all questions, in one batch of the server. A model that cannot chat has none."""
    if not questions:
        return []
    pairs = [(model, question) for question in questions for model in (base, adapter)]
    with ThreadPoolExecutor(len(pairs)) as pool:
        try:
            texts = list(pool.map(lambda pair: _answer(url, *pair), pairs))
        except (OSError, ValueError, LookupError):  # no chat template, an answer that is none
            return []
    return [AnswerPair(question, *texts[2 * index : 2 * index + 2]) for index, question in enumerate(questions)]


def write_answers(file: Path, answers: Sequence[AnswerPair]) -> None:
    write_json(file, [asdict(pair) for pair in answers])


def read_answers(file: Path) -> list[AnswerPair]:
    return [AnswerPair(**pair) for pair in json.loads(file.read_text())] if file.is_file() else []
