"""Logits of many rows, some rows at a time.

Whoever asks for the log-probabilities of a prompt wants a row of the vocabulary for every token, and a vocabulary is a
hundred times wider than a hidden state: 512 tokens of Qwen3 are 0.3 GB in float32, their softmax as much again. So the
head is asked for `SCORED_ROWS` rows at a time, and what a reader makes of them is all that stays. The surprising
decision: not the head's module is called but the whole model, again and again, with a body that computes only the
first time and then says the same; scales and caps that a family puts on its logits are in its own forward, not ours.
A family that cannot be asked for some rows gives them all at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ktransformers.plan.memory import SCORED_ROWS

Reader = Callable[[int, Tensor], None]  # of the piece's rows from this one on: their logits [n, V]


@dataclass(frozen=True)
class ScoredRows:
    """Rows first .. last of the batch, whose logits someone reads; they may come in parts."""

    first: int
    last: int
    read: Reader


def collect(into: list[Tensor]) -> Reader:
    """A reader that keeps all rows."""

    def read(first: int, logits: Tensor) -> None:
        into.append(logits)

    return read


class LogitsHead:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._body: Any = model.base_model
        self._picks = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._divides = self._picks and self._body is not model
        self._device = next(model.parameters()).device

    def logits(self, picked: Sequence[int], scored: Sequence[ScoredRows], words: dict[str, Any]) -> Tensor:
        """`[picked, V]` of the model called with these words; each reader gets its rows before."""
        if not scored:
            return self._rows(picked, words)
        rows = [row for one in scored for row in range(one.first, one.last)]
        if not self._divides:
            found = self._rows([*rows, *picked], words)
            _tell(scored, 0, found[: len(rows)])
            return found[len(rows) :]
        with self._once():
            for start in range(0, len(rows), SCORED_ROWS):
                part = rows[start : start + SCORED_ROWS]
                _tell(scored, start, self._rows(part, words))
            return self._rows(picked, words)

    def _rows(self, rows: Sequence[int], words: dict[str, Any]) -> Tensor:
        keep = torch.tensor(rows or [0], device=self._device)
        options = {"logits_to_keep": keep} if self._picks else {}
        found: Tensor = self._model(**words, **options).logits[0]
        return found if self._picks else found[keep]

    @contextmanager
    def _once(self) -> Iterator[None]:
        """The body computes when it is called first and says the same afterwards."""
        body, said = self._body, list[Any]()
        forward, own = body.forward, "forward" in vars(body)

        def remembered(*args: Any, **given: Any) -> Any:
            if not said:
                said.append(forward(*args, **given))
            return said[0]

        body.forward = remembered
        try:
            yield
        finally:
            if own:
                body.forward = forward
            else:
                del body.forward


def _tell(scored: Sequence[ScoredRows], start: int, logits: Tensor) -> None:
    """`logits` are those of the rows from `start` on, all readers' rows counted through."""
    end, before = start + logits.shape[0], 0
    for one in scored:
        count = one.last - one.first
        first, last = max(start - before, 0), min(end - before, count)
        if first < last:
            one.read(first, logits[before + first - start : before + last - start])
        before += count
