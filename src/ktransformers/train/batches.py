"""What the model gets of an optimizer step: parts of at most a given number of tokens, and of these the rows whose next
token has a label for the LM head.

Token-budget batching splits the rows of an optimizer step into parts of at most a given number of tokens.

Plain accumulation splits a step into batches of `per_device_train_batch_size` rows regardless of their lengths, so the
experts get few tokens per call. Here the whole step `[rows, L]`, right-padded, arrives as one batch; its rows are
sorted by length and split where a part, padding included, would exceed the budget. The loss of each part is normalised
by the step, so the gradient is the same sum in another order. Preference pairs carry explicit weights, because
accumulation averages over batches, of which the last of an epoch may be short.

Of a chat's tokens a third or less have a label, and the head and the softmax over its logits dominate the cost of a
small model on a CPU. On a GPU TRL leaves those rows out; on a CPU it computes all of them and masks them. Here the head
gets the hidden states whose next token has a label (`modeling/head_rows.py`), and TRL the matching labels, already
shifted. The sums over labelled tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ktransformers.modeling.head_rows import head_rows_only
from ktransformers.train.data.render import IGNORE_INDEX


def split_by_budget(lengths: list[int], budget: int) -> list[list[int]]:
    """Row indices of each part; a row longer than the budget forms its own part."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    parts: list[list[int]] = []
    for row in order:
        if parts and (len(parts[-1]) + 1) * lengths[row] <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def select_rows(inputs: dict[str, Any], rows: list[int], width: int) -> dict[str, Any]:
    """These rows of every `[rows, L]` and `[rows]` tensor, truncated to `width` columns."""
    index = torch.tensor(rows)

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        chosen = value[index.to(value.device)]
        return chosen[:, :width].contiguous() if value.dim() > 1 else chosen

    return {key: take(value) for key, value in inputs.items()}


def pair_weights(count: int, batch: int) -> Tensor:
    """Weight of each pair `[count]` in a step that accumulation would split into batches of `batch` pairs."""
    sizes = [min(batch, count - start) for start in range(0, count, batch)]
    return torch.tensor([1 / (len(sizes) * size) for size in sizes for _ in range(size)])


def split_step(inputs: dict[str, Any], budget: int) -> list[dict[str, Any]]:
    """Splits a right-padded SFT step."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    return [select_rows(inputs, rows, max(lengths[row] for row in rows)) for rows in split_by_budget(lengths, budget)]


def split_pairs(inputs: dict[str, Any], budget: int, batch: int) -> list[dict[str, Any]]:
    """Splits a step of pairs: rows of the first half are chosen answers, of the second half rejected ones, and the two
    of a pair stay together. `batch` is the number of pairs per accumulated batch, for `weights` in each part."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    half = len(lengths) // 2
    inputs = inputs | {"weights": pair_weights(half, batch).to(inputs["attention_mask"].device)}
    pair_lengths = [max(lengths[row], lengths[row + half]) for row in range(half)]
    parts = []
    for rows in split_by_budget([2 * length for length in pair_lengths], budget):
        width = max(pair_lengths[row] for row in rows)
        per_pair = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.shape[0] == half}
        per_row = {key: value for key, value in inputs.items() if key not in per_pair}
        parts.append(
            select_rows(per_row, [*rows, *(row + half for row in rows)], width) | select_rows(per_pair, rows, width)
        )
    return parts


def labelled_positions(labels: Tensor) -> Tensor:
    """`[B, L - 1]`: whether the next token has a label. At least one is True, so that every step has a gradient."""
    mask = labels[:, 1:] != IGNORE_INDEX
    if not bool(mask.any()):
        mask[0, 0] = True
    return mask


@contextmanager
def labelled_rows_only(model: Any, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inputs for TRL's fused head, which then gets labelled rows only. `model` has the head and no wrappers."""
    labels = inputs["labels"]
    mask = labelled_positions(labels)
    with head_rows_only(model, pad(mask, (0, 1))):
        other_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        yield other_inputs | {"shift_labels": labels[:, 1:][mask][None]}
