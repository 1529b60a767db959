"""Deferred experts: a part of a layer's experts is added to the output of the next layer, so that their computation
overlaps with its attention.

With d deferred experts per token, the k - d experts of highest weight are computed at once. An expert that is among
these for any token of the batch is computed at once for every token, as in kt-kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor


def select_deferred(ids: Tensor, scores: Tensor, protected: int, experts: int) -> tuple[Tensor, Tensor]:
    """(ids to compute now, ids to defer), each `[T, k]` with -1 in place of the other's; on the device of `ids`."""
    if protected <= 0:
        return torch.full_like(ids, -1), ids
    if protected >= ids.shape[1]:
        return ids, torch.full_like(ids, -1)
    top = torch.topk(scores, protected, dim=1).indices
    named = torch.where((ids < 0) | (ids >= experts), experts, ids).long()  # others share one place of the table
    table = torch.zeros(experts + 1, dtype=torch.bool, device=ids.device)
    table.index_fill_(0, named.gather(1, top).flatten(), True)
    now = table[named]
    nothing = torch.full_like(ids, -1)
    return torch.where(now, ids, nothing), torch.where(now, nothing, ids)
