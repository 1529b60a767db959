"""Attention on packed rows, each by itself, for models that train on a CPU.

Packing lays rows `[t1], [t2], ...` end to end into one sequence `[1, T]`. transformers then gives SDPA a mask `[T, T]`
whose blocks keep the rows apart, and the CPU's kernel computes what the mask throws away, both ways. Here rows go to
SDPA one by one, without a mask. In bf16 its backward pass is slow at short rows (two AMX cores: 2 ms for 9 heads and 70
tokens), so there rows become a batch `[R, L]`, padded at their ends, where causal attention never looks, and attention
is a handful of batched products in float32, computed again in backward rather than kept.

The surprising decision: this is an implementation of attention that transformers knows by name, so no model's code is
touched. Where rows begin is what TRL's collator says (`cu_seq_lens_q`), which checkpointing keeps with the layer's
other arguments. With padding, or with a cache, it is stock SDPA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

PACKED_ROWS = "kt_rows"
SDPA = "sdpa"
MAX_SCORES = 2**25  # of one layer at most, all heads: 128 MB in float32


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class PaddedRows:
    """Rows as a batch `[R, L]` and back: `source` [R * L] is each place's token, `place` [T] each token's place."""

    rows: int
    width: int
    source: Tensor
    place: Tensor

    @classmethod
    def of(cls, lengths: list[int]) -> PaddedRows:
        width = max(lengths)
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        columns = torch.arange(width)
        real = columns < torch.tensor(lengths)[:, None]
        source = torch.where(real, starts[:, None] + columns, 0).flatten()
        return cls(len(lengths), width, source, real.flatten().nonzero()[:, 0])

    def spread(self, tensor: Tensor, groups: int, blank: bool = False) -> Tensor:
        """`[T, heads, d]` -> `[R * groups, heads / groups * L, d]` in float32 at least; `blank`: zeros where there
        is no token."""
        heads, size = tensor.shape[1:]
        if blank:
            laid = tensor.new_zeros(self.rows * self.width, heads, size).index_copy_(0, self.place, tensor)
        else:
            laid = tensor.index_select(0, self.source)
        laid = laid.view(self.rows, self.width, heads, size).transpose(1, 2).to(_compute_dtype(tensor.dtype))
        return laid.reshape(self.rows * groups, heads // groups * self.width, size)

    def gather(self, tensor: Tensor, heads: int) -> Tensor:
        """The way back: -> `[T, heads, d]`."""
        size = tensor.shape[-1]
        laid = tensor.view(self.rows, heads, self.width, size).transpose(1, 2)
        return laid.reshape(self.rows * self.width, heads, size).index_select(0, self.place)


def _attention_weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """What each query `[B, g * L, d]` takes of the keys `[B, L, d]`."""
    width = key.shape[1]
    later = torch.ones(width, width, dtype=torch.bool).triu(1)
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    scores.view(scores.shape[0], -1, width, width).masked_fill_(later, float("-inf"))
    return torch.softmax(scores, -1)


class RowAttention(torch.autograd.Function):
    """query `[T, heads, d]`, key and value `[T, groups, d]` -> `[T, heads, d]`; heads share keys by groups."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, grid: PaddedRows, scale: float) -> Tensor:
        groups = key.shape[1]
        ctx.save_for_backward(query, key, value)
        ctx.grid, ctx.scale = grid, scale
        q, k, v = (grid.spread(tensor, groups) for tensor in (query, key, value))
        return grid.gather(torch.bmm(_attention_weights(q, k, scale), v), query.shape[1]).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        grid: PaddedRows = ctx.grid
        heads, groups = query.shape[1], key.shape[1]
        q, k, v = (grid.spread(tensor, groups) for tensor in (query, key, value))
        grad = grid.spread(grads[0], groups, blank=True)
        shares = _attention_weights(q, k, ctx.scale)
        value_grad = torch.bmm(shares.transpose(1, 2), grad)
        share_grad = torch.bmm(grad, v.transpose(1, 2))
        inner = (shares * share_grad).sum(-1, keepdim=True)
        scores = share_grad.sub_(inner).mul_(shares).mul_(ctx.scale)
        query_grad, key_grad = torch.bmm(scores, k), torch.bmm(scores.transpose(1, 2), q)
        found = (grid.gather(query_grad, heads), grid.gather(key_grad, groups), grid.gather(value_grad, groups))
        return (*(tensor.to(query.dtype) for tensor in found), None, None)


def _row_lengths(query: Tensor, given: dict[str, Any]) -> list[int]:
    """Tokens of each row of this sequence."""
    borders, positions = given.get("cu_seq_lens_q"), given.get("position_ids")
    if borders is not None:
        return [int(length) for length in torch.diff(borders).tolist()]
    tokens = query.shape[2]
    if positions is None or positions.shape[-1] != tokens or query.shape[0] != 1:
        return [tokens]
    starts = positions.reshape(-1, tokens)[0].eq(0).nonzero()[:, 0].tolist()
    ends = [*starts[1:], tokens]
    return [end - start for start, end in zip(starts, ends, strict=True)] if starts[:1] == [0] else [tokens]


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """`[1, heads, T, d]` -> `[1, T, heads, d]`, as transformers' functions of attention do it."""
    known: Any = AttentionInterface
    stock = known()[SDPA]
    lengths = _row_lengths(query, given) if attention_mask is None and query.shape[0] == 1 else []
    if not lengths or key.shape[2] != query.shape[2] or given.get("dropout"):
        found: tuple[Tensor, None] = stock(module, query, key, value, attention_mask, **given)
        return found
    if query.dtype is torch.bfloat16 and query.shape[1] * len(lengths) * max(lengths) ** 2 <= MAX_SCORES:
        scale = given.get("scaling") or query.shape[-1] ** -0.5
        inputs = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out: Tensor = RowAttention.apply(*inputs, PaddedRows.of(lengths), scale)  # type: ignore[no-untyped-call]
        return out[None], None
    parts: Any = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([stock(module, *part, None, **given)[0] for part in parts], dim=1), None


def packed_mask(**given: Any) -> Any:
    """None where `packed_attention` keeps the rows apart by itself, else SDPA's mask."""
    if given.get("attention_mask") is None and given["q_length"] == given["kv_length"]:
        return None
    known: Any = AttentionMaskInterface
    return known()[SDPA](**given)


def has_full_attention(config: Any) -> bool:
    """Every layer sees all tokens of its row: nothing but causality is in the masks that are left out."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    chunk = getattr(text, "attention_chunk_size", None)
    return kinds == {"full_attention"} and window is None and chunk is None


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Let a model whose attention is SDPA take packed rows one by one; False where it has to stay as it is."""
    if model.config._attn_implementation != SDPA or not has_full_attention(model.config):
        return False
    AttentionInterface.register(PACKED_ROWS, packed_attention)
    AttentionMaskInterface.register(PACKED_ROWS, packed_mask)
    model.set_attn_implementation(PACKED_ROWS)
    return True


def restore_sdpa(model: PreTrainedModel) -> None:
    """What a trained model says of its proof's rows is measured as whoever serves it computes: in bf16 products rounded
    elsewhere differ from the first layer on."""
    if model.config._attn_implementation == PACKED_ROWS:
        model.set_attn_implementation(SDPA)
