"""Logits of many rows, computed some rows at a time.

Log-probabilities of a prompt need one row of the vocabulary per token, and a vocabulary is a hundred times wider than a
hidden state: 512 tokens of Qwen3 are 0.3 GB in float32, and their softmax as much again. So the logits of `SCORED_ROWS`
rows are computed at a time and passed to a reader, which keeps only the scores. The whole model is called for each
part, not the module of its head, because families scale or cap logits in their own forward; its body computes once and
returns the stored result in the following calls. A family without `logits_to_keep` computes all rows at once.
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

from ktransformers.modeling.substitute import Restore
from ktransformers.plan.memory import SCORED_ROWS

LogitsReader = Callable[[int, Tensor], None]  # (first row of the chunk, logits [n, V] from that row on)


@dataclass(frozen=True)
class ScoredRows:
    """Rows first .. last - 1 of the batch, whose logits `read` receives, possibly in parts."""

    first: int
    last: int
    read: LogitsReader


def collect_rows(into: list[Tensor]) -> LogitsReader:
    """A reader that keeps all rows."""

    def read(first: int, logits: Tensor) -> None:
        into.append(logits)

    return read


class LogitsHead:
    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        self._body: Any = model.base_model
        self._selects_rows = "logits_to_keep" in inspect.signature(type(model).forward).parameters
        self._splits_rows = self._selects_rows and self._body is not model
        self._device = next(model.parameters()).device

    def logits(self, picked: Sequence[int], scored: Sequence[ScoredRows], inputs: dict[str, Any]) -> Tensor:
        """Logits `[picked, V]` of the model called with `inputs`; every reader has received its rows before."""
        if not scored:
            return self._logits_of_rows(picked, inputs)
        rows = [row for entry in scored for row in range(entry.first, entry.last)]
        if not self._splits_rows:
            logits = self._logits_of_rows([*rows, *picked], inputs)
            _call_readers(scored, 0, logits[: len(rows)])
            return logits[len(rows) :]
        with self._body_computed_once():
            for start in range(0, len(rows), SCORED_ROWS):
                part = rows[start : start + SCORED_ROWS]
                _call_readers(scored, start, self._logits_of_rows(part, inputs))
            return self._logits_of_rows(picked, inputs)

    def _logits_of_rows(self, rows: Sequence[int], inputs: dict[str, Any]) -> Tensor:
        keep = torch.tensor(rows or [0], device=self._device)
        options = {"logits_to_keep": keep} if self._selects_rows else {}
        logits: Tensor = self._model(**inputs, **options).logits[0]
        return logits if self._selects_rows else logits[keep]

    @contextmanager
    def _body_computed_once(self) -> Iterator[None]:
        """The body of the model computes in its first call and returns the same in all others."""
        body, outputs = self._body, list[Any]()
        forward = body.forward

        def compute_once(*args: Any, **kwargs: Any) -> Any:
            if not outputs:
                outputs.append(forward(*args, **kwargs))
            return outputs[0]

        with Restore() as restore:
            restore.put(body, "forward", compute_once)
            yield


def _call_readers(scored: Sequence[ScoredRows], start: int, logits: Tensor) -> None:
    """`logits` belong to the rows from `start` on, counted over the rows of all readers."""
    end, before = start + logits.shape[0], 0
    for entry in scored:
        count = entry.last - entry.first
        first, last = max(start - before, 0), min(end - before, count)
        if first < last:
            entry.read(first, logits[before + first - start : before + last - start])
        before += count
