"""A language model as judge: it gets the question, the reference, the answer and a rubric, and gives marks from 1 to 5.

Any OpenAI-compatible URL will do. The rubric is part of the task file; the judge must answer with one JSON object that
has a mark for each criterion. An answer that does not parse is asked for once more and then left without marks: a guess
in its place would look like an opinion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ktransformers.evaluate.remote import Endpoint
from ktransformers.evaluate.task import Rubric

JSON_OBJECT = re.compile(r"\{.*?\}", re.DOTALL)


@dataclass(frozen=True)
class Judge:
    endpoint: Endpoint
    model: str
    parallel: int = 4

    def marks(self, rubric: Rubric, records: Sequence[dict[str, Any]]) -> list[dict[str, int] | None]:
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(lambda record: self._one(rubric, record), records))

    def _one(self, rubric: Rubric, record: dict[str, Any]) -> dict[str, int] | None:
        messages = [
            {"role": "system", "content": rubric.role},
            {"role": "user", "content": judge_prompt(rubric, record)},
        ]
        for seed in range(2):
            body = {"model": self.model, "messages": messages, "max_tokens": 256, "temperature": 0, "seed": seed}
            reply = self.endpoint.ask("/v1/chat/completions", body)
            marks = parse_marks(rubric, str(reply["choices"][0]["message"]["content"] or ""))
            if marks is not None:
                return marks
        return None


def judge_prompt(rubric: Rubric, record: dict[str, Any]) -> str:
    criteria = "\n".join(f"- {name}: {meaning}" for name, meaning in rubric.criteria.items())
    scale = ", ".join(f"{mark} = {meaning}" for mark, meaning in sorted(rubric.scale.items()))
    form = json.dumps(dict.fromkeys(rubric.criteria, 3))
    return (
        f"Question:\n{record['prompt']}\n\nReference answer:\n{record['reference']}\n\n"
        f"Answer to be judged:\n{record['prediction']}\n\nCriteria:\n{criteria}\n\nMarks: {scale}.\n"
        f"Reply with one JSON object and nothing else, in this form: {form}"
    )


def parse_marks(rubric: Rubric, text: str) -> dict[str, int] | None:
    """The marks in an answer, None unless there is one within 1 to 5 for every criterion."""
    for found in JSON_OBJECT.findall(text):
        try:
            given = json.loads(found)
            marks = {name: int(given[name]) for name in rubric.criteria}
        except (ValueError, KeyError, TypeError):
            continue
        if all(1 <= mark <= 5 for mark in marks.values()):
            return marks
    return None
