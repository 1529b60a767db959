"""Stops a run whose loss, gradients or weights are not finite, before the optimizer uses them or a save keeps them.

The HF Trainer replaces a NaN loss by the average in its log (`logging_nan_inf_filter`) and goes on, so that every
weight and every later checkpoint is NaN while the log looks fine. Here the loss of every batch is checked when it is
computed, the norm of the gradients before each optimizer step, and the weights before each save. With fp16 the gradient
scaler skips steps whose gradients overflow until it has found its scale; only a long series of them is an error.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from ktransformers.experts.placeholder import Placeholder
from ktransformers.ground.errors import KTError
from ktransformers.parallel.sharding import local_tensor
from ktransformers.train.checkpoints import list_checkpoints
from ktransformers.train.data.render import PreferenceRow

MAX_SKIPPED_STEPS = 20  # in a row; the scale starts at 2**16 and halves
SHOWN_ROWS = 8
SHOWN_CHARACTERS = 48  # of a row's text


class NotFiniteError(KTError):
    """A loss, gradient or weight is NaN or infinite."""


def sequences_of(inputs: dict[str, Any], pairs: bool) -> list[list[int]]:
    """Token ids of each row of a collated batch; of a pair, those of the prompt with the chosen answer."""
    ids, mask, positions = inputs["input_ids"].cpu(), inputs.get("attention_mask"), inputs.get("position_ids")
    kept = torch.ones_like(ids, dtype=torch.bool)
    if mask is not None and mask.shape == ids.shape:  # packed rows have none, or one of [1, 1, L, L]
        kept = mask.cpu().bool()
    if positions is not None and not pairs:  # packed rows, whose positions start at 0
        flat, starting = ids[kept], positions.cpu().expand_as(ids)[kept] == 0
        starts = [*torch.nonzero(starting).flatten().tolist(), len(flat)]
        return [flat[start:end].tolist() for start, end in itertools.pairwise(starts)]
    rows = [row[row_kept].tolist() for row, row_kept in zip(ids, kept, strict=True)]
    return rows[: len(rows) // 2] if pairs else rows


def _ids(row: Any) -> list[int]:
    return [*row.prompt, *row.chosen] if isinstance(row, PreferenceRow) else list(row.ids)


class FiniteCheck(TrainerCallback):
    """`rows` are those of the training set, in the order of the files; `pairs` says that batches are pairs."""

    def __init__(self, model: nn.Module, output: Path, rows: list[Any], tokenizer: Any, pairs: bool) -> None:
        self._model, self._output, self._rows, self._tokenizer, self._pairs = model, output, rows, tokenizer, pairs
        self._batches: list[dict[str, Any]] = []  # since the last optimizer step
        self._loss = 0.0  # the sum of their losses, which is that of the step
        self.step_loss: float | None = None  # of the last optimizer step
        self._norm: Tensor | float | None = None
        self._skipped = 0
        self.has_scaler = False  # gradients are scaled (fp16)

    def record_loss(self, loss: Tensor | float, inputs: dict[str, Any], step: int) -> None:
        """After each forward and backward pass; `step` is the optimizer step that it belongs to."""
        names = ("input_ids", "attention_mask", "position_ids")
        batch = {name: inputs[name] for name in names if inputs.get(name) is not None}
        self._batches.append(batch)
        value = float(loss)
        if not math.isfinite(value):
            raise self._error(step, f"the loss is {value}", [batch])
        self._loss += value

    def record_norm(self, norm: Tensor | float | None) -> None:
        """The norm of all gradients, if the Trainer has computed it."""
        self._norm = norm

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        norm = _gradient_norm(self._model) if self._norm is None else float(self._norm)
        batches, self._batches, self._norm = self._batches, [], None
        self.step_loss, self._loss = self._loss, 0.0
        if math.isfinite(norm):
            self._skipped = 0
            return
        self._skipped += 1
        if not self.has_scaler or self._skipped > MAX_SKIPPED_STEPS:
            raise self._error(state.global_step + 1, f"the norm of the gradients is {norm}", batches)

    def require_finite_weights(self, step: int) -> None:
        """Before a save; of a sharded model each rank looks at its shards."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and _broken(parameter):
                raise self._error(step, f"{name.removeprefix('base_model.model.')} is not finite", [])

    def _error(self, step: int, problem: str, batches: list[dict[str, Any]]) -> NotFiniteError:
        checkpoints = list_checkpoints(self._output)
        kept = f"the last checkpoint is {checkpoints[-1]}" if checkpoints else "no checkpoint was saved before"
        sequences = [ids for batch in batches for ids in sequences_of(batch, self._pairs)]
        rows = f"; rows of this step: {self._describe(sequences)}" if sequences else ""
        remedy = "look at these rows, lower learning_rate, or train in bf16 or float32 if this was fp16"
        if (name := self._broken_of_base()) is not None:
            remedy = f"{name} of the base has NaN or infinite values, download or convert it again"
        return NotFiniteError(f"step {step}: {problem}{rows}; nothing was saved since, {kept}; {remedy}")

    def _broken_of_base(self) -> str | None:
        """The first tensor that is not trained and not finite; experts were looked at when they were packed."""
        for name, tensor in self._model.named_parameters():
            if not tensor.requires_grad and not isinstance(tensor, Placeholder) and _broken(tensor):
                return name.removeprefix("base_model.model.").replace(".base_layer", "")
        return None

    def _describe(self, sequences: list[list[int]]) -> str:
        index_of = {tuple(_ids(row)): index for index, row in enumerate(self._rows)}
        shown = []
        for ids in sequences[:SHOWN_ROWS]:
            text = " ".join(self._tokenizer.decode(ids[:SHOWN_CHARACTERS]).split())
            text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
            shown.append(f"{index_of.get(tuple(ids), 'one')} ({text})")
        more = len(sequences) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _broken(parameter: Tensor) -> bool:
    return parameter.is_floating_point() and not bool(torch.isfinite(local_tensor(parameter)).all())


def _gradient_norm(model: nn.Module) -> float:
    norms = [float(parameter.grad.norm()) for parameter in model.parameters() if parameter.grad is not None]
    return math.sqrt(sum(norm * norm for norm in norms))
