"""The experts of each token and their weights from the router's logits, in one Triton kernel: softmax in float32 and
the k largest, of equal ones the lowest index first.
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,untyped-decorator,misc"
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EXPERTS_PER_WARP = 256


@triton.jit
def _select(
    logits,  # [T, E]
    scores,  # [T, k]
    ids,  # int64 [T, k]
    experts,
    TOP_K: tl.constexpr,
    NORMALISE: tl.constexpr,
    CHOICES: tl.constexpr,  # k, padded
    WIDE: tl.constexpr,  # E, padded
):
    row, e = tl.program_id(0), tl.arange(0, WIDE)
    left = tl.load(logits + row * experts + e, mask=e < experts, other=float("-inf")).to(tl.float32)
    largest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - largest), axis=0)
    c = tl.arange(0, CHOICES)
    values, indices = tl.full((CHOICES,), float("-inf"), tl.float32), tl.zeros((CHOICES,), tl.int32)
    for choice in tl.static_range(TOP_K):
        value = tl.max(left, axis=0)
        index = tl.min(tl.where(left == value, e, WIDE), axis=0)
        values, indices = tl.where(c == choice, value, values), tl.where(c == choice, index, indices)
        left = tl.where(e == index, float("-inf"), left)
    chosen = tl.exp(values - largest)
    if NORMALISE:
        total = tl.sum(chosen, axis=0)
    at = row * TOP_K + c
    tl.store(ids + at, indices.to(tl.int64), mask=c < TOP_K)
    tl.store(scores + at, (chosen / total).to(scores.dtype.element_ty), mask=c < TOP_K)


def select(logits: Tensor, top_k: int, normalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits `[T, E]` -> scores in `dtype` and ids int64, both `[T, k]`. `normalise`: the k scores sum to one."""
    rows, experts = logits.shape
    scores = torch.empty(rows, top_k, dtype=dtype, device=logits.device)
    ids = torch.empty(rows, top_k, dtype=torch.int64, device=logits.device)
    wide = triton.next_power_of_2(experts)
    warps = max(1, min(8, wide // EXPERTS_PER_WARP))
    kernel: Any = _select[(rows,)]
    constants = {"TOP_K": top_k, "NORMALISE": normalise, "CHOICES": triton.next_power_of_2(top_k), "WIDE": wide}
    kernel(logits, scores, ids, experts, **constants, num_warps=warps)
    return scores, ids
