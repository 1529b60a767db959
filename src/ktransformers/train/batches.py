"""Token-budget batching: the rows of one optimiser step, cut into parts that hold at most so many tokens.

Plain accumulation cuts a step into parts of `per_device_train_batch_size` rows, whatever their lengths; the experts
then see few tokens at once. Here the whole step `[rows, L]`, right-padded, comes as one batch; its rows are sorted by
length and cut where a part, padding included, would exceed the budget. Each part's loss is normalised by the step, so
the gradient is the same sum in another order. Pairs have weights for it: accumulation averages batches, of which the
last of an epoch may be short.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def split_by_budget(lengths: list[int], budget: int) -> list[list[int]]:
    """Row numbers of each part; a row longer than the budget has a part of its own."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    parts: list[list[int]] = []
    for row in order:
        if parts and (len(parts[-1]) + 1) * lengths[row] <= budget:
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def select_rows(inputs: dict[str, Any], rows: list[int], width: int) -> dict[str, Any]:
    """These rows of every `[rows, L]` and `[rows]` tensor, cut to `width` columns."""
    index = torch.tensor(rows)

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        chosen = value[index.to(value.device)]
        return chosen[:, :width].contiguous() if value.dim() > 1 else chosen

    return {key: take(value) for key, value in inputs.items()}


def pair_weights(count: int, batch: int) -> Tensor:
    """Of each pair `[count]` in the loss of a step that accumulation would cut into batches of so many."""
    sizes = [min(batch, count - start) for start in range(0, count, batch)]
    return torch.tensor([1 / (len(sizes) * size) for size in sizes for _ in range(size)])


def split_step(inputs: dict[str, Any], budget: int) -> list[dict[str, Any]]:
    lengths = inputs["attention_mask"].sum(1).tolist()
    return [select_rows(inputs, rows, max(lengths[row] for row in rows)) for rows in split_by_budget(lengths, budget)]


def split_pairs(inputs: dict[str, Any], budget: int, batch: int) -> list[dict[str, Any]]:
    """The first half of the rows are chosen answers and the second half the rejected ones; the two of a pair stay
    together. `batch`: pairs that accumulation would take at once, for `weights` in each part."""
    lengths = inputs["attention_mask"].sum(1).tolist()
    half = len(lengths) // 2
    inputs = inputs | {"weights": pair_weights(half, batch).to(inputs["attention_mask"].device)}
    both = [max(lengths[row], lengths[row + half]) for row in range(half)]
    parts = []
    for rows in split_by_budget([2 * length for length in both], budget):
        width = max(both[row] for row in rows)
        single = {key: value for key, value in inputs.items() if isinstance(value, Tensor) and value.shape[0] == half}
        double = {key: value for key, value in inputs.items() if key not in single}
        parts.append(
            select_rows(double, [*rows, *(row + half for row in rows)], width) | select_rows(single, rows, width)
        )
    return parts
