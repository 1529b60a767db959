"""An LLM judge: it receives the question, the reference, the answer and a rubric, and returns marks from 1 to 5.

Works with any OpenAI-compatible URL. The rubric is part of the task file; the judge must reply with one JSON object
that has a mark for each criterion. A reply that does not parse is requested once more and then left without marks,
because a default would count as a judgement.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ktransformers.evaluate.task import Rubric
from ktransformers.ground.client import Client

JSON_OBJECT = re.compile(r"\{.*?\}", re.DOTALL)


@dataclass(frozen=True)
class Judge:
    endpoint: Client
    model: str
    parallel: int = 4

    def marks(self, rubric: Rubric, records: Sequence[dict[str, Any]]) -> list[dict[str, int] | None]:
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(lambda record: self._judge_record(rubric, record), records))

    def _judge_record(self, rubric: Rubric, record: dict[str, Any]) -> dict[str, int] | None:
        messages = [
            {"role": "system", "content": rubric.role},
            {"role": "user", "content": judge_prompt(rubric, record)},
        ]
        for seed in range(2):
            body = {"model": self.model, "messages": messages, "max_tokens": 256, "temperature": 0, "seed": seed}
            reply = self.endpoint.request("/v1/chat/completions", body)
            marks = parse_marks(rubric, str(reply["choices"][0]["message"]["content"] or ""))
            if marks is not None:
                return marks
        return None


def judge_prompt(rubric: Rubric, record: dict[str, Any]) -> str:
    criteria = "\n".join(f"- {name}: {meaning}" for name, meaning in rubric.criteria.items())
    scale = ", ".join(f"{mark} = {meaning}" for mark, meaning in sorted(rubric.scale.items()))
    form = json.dumps(dict.fromkeys(rubric.criteria, 3))
    context = f"Instructions to the assistant:\n{record['system']}\n\n" if record.get("system") else ""
    if record.get("history"):
        turns = "\n".join(f"User: {question}\nAssistant: {answer}" for question, answer in record["history"])
        context += f"Conversation so far:\n{turns}\n\n"
    return (
        f"{context}Question:\n{record['prompt']}\n\nReference answer:\n{record['reference']}\n\n"
        f"Answer to be judged:\n{record['prediction']}\n\nCriteria:\n{criteria}\n\nMarks: {scale}.\n"
        f"Reply with one JSON object and nothing else, in this form: {form}"
    )


def parse_marks(rubric: Rubric, text: str) -> dict[str, int] | None:
    """The marks of a reply, or None unless every criterion has one from 1 to 5."""
    for candidate in JSON_OBJECT.findall(text):
        try:
            values = json.loads(candidate)
            marks = {name: int(values[name]) for name in rubric.criteria}
        except (ValueError, KeyError, TypeError):
            continue
        if all(1 <= mark <= 5 for mark in marks.values()):
            return marks
    return None
