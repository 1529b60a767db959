"""Attention over packed rows, each row on its own, for training on a CPU.

Packing concatenates rows `[t1], [t2], ...` into one sequence `[1, T]`. transformers then gives SDPA a block-diagonal
mask `[T, T]`, and the CPU kernel computes the masked blocks in forward and backward. Here rows go to SDPA one by one,
without a mask. In bf16 the backward of SDPA is slow for short rows (two AMX cores: 2 ms for 9 heads and 70 tokens), so
there rows become a batch `[R, L]`, padded at the end, which causal attention never reads, and attention is a few
batched products in float32, recomputed in backward rather than saved.

It is registered with transformers as an attention implementation, so no model code changes. Row boundaries come from
TRL's collator (`cu_seq_lens_q`), which checkpointing keeps with the layer's other arguments. With padding or a KV cache
stock SDPA runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

PACKED_ROWS = "kt_rows"
SDPA = "sdpa"
MAX_SCORES = 2**25  # of one layer and all heads; 128 MB in float32


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class PaddedRows:
    """Maps packed tokens to a padded batch `[R, L]` and back: `source` [R * L] is the token of each slot, `slot` [T]
    the slot of each token."""

    rows: int
    width: int
    source: Tensor
    slot: Tensor

    @classmethod
    def from_lengths(cls, lengths: list[int]) -> PaddedRows:
        width = max(lengths)
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
        columns = torch.arange(width)
        real = columns < torch.tensor(lengths)[:, None]
        source = torch.where(real, starts[:, None] + columns, 0).flatten()
        return cls(len(lengths), width, source, real.flatten().nonzero()[:, 0])

    def pad(self, tensor: Tensor, groups: int, zero_padding: bool = False) -> Tensor:
        """`[T, heads, d]` -> `[R * groups, heads / groups * L, d]` in at least float32; `zero_padding` zeroes the
        padding."""
        heads, size = tensor.shape[1:]
        if zero_padding:
            padded = tensor.new_zeros(self.rows * self.width, heads, size).index_copy_(0, self.slot, tensor)
        else:
            padded = tensor.index_select(0, self.source)
        padded = padded.view(self.rows, self.width, heads, size).transpose(1, 2).to(_compute_dtype(tensor.dtype))
        return padded.reshape(self.rows * groups, heads // groups * self.width, size)

    def unpad(self, tensor: Tensor, heads: int) -> Tensor:
        """The inverse of `pad`: -> `[T, heads, d]`."""
        size = tensor.shape[-1]
        padded = tensor.view(self.rows, heads, self.width, size).transpose(1, 2)
        return padded.reshape(self.rows * self.width, heads, size).index_select(0, self.slot)


def _attention_weights(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Causal softmax weights of the queries `[B, g * L, d]` over the keys `[B, L, d]`."""
    width = key.shape[1]
    later = torch.ones(width, width, dtype=torch.bool).triu(1)
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    scores.view(scores.shape[0], -1, width, width).masked_fill_(later, float("-inf"))
    return torch.softmax(scores, -1)


class RowAttention(torch.autograd.Function):
    """query `[T, heads, d]`, key and value `[T, groups, d]` -> `[T, heads, d]`; grouped-query attention."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PaddedRows, scale: float) -> Tensor:
        groups = key.shape[1]
        ctx.save_for_backward(query, key, value)
        ctx.layout, ctx.scale = layout, scale
        q, k, v = (layout.pad(tensor, groups) for tensor in (query, key, value))
        return layout.unpad(torch.bmm(_attention_weights(q, k, scale), v), query.shape[1]).to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        layout: PaddedRows = ctx.layout
        heads, groups = query.shape[1], key.shape[1]
        q, k, v = (layout.pad(tensor, groups) for tensor in (query, key, value))
        grad = layout.pad(grads[0], groups, zero_padding=True)
        weights = _attention_weights(q, k, ctx.scale)
        value_grad = torch.bmm(weights.transpose(1, 2), grad)
        weight_grad = torch.bmm(grad, v.transpose(1, 2))
        row_sums = (weights * weight_grad).sum(-1, keepdim=True)
        score_grad = weight_grad.sub_(row_sums).mul_(weights).mul_(ctx.scale)
        query_grad, key_grad = torch.bmm(score_grad, k), torch.bmm(score_grad.transpose(1, 2), q)
        input_grads = (
            layout.unpad(query_grad, heads),
            layout.unpad(key_grad, groups),
            layout.unpad(value_grad, groups),
        )
        return (*(tensor.to(query.dtype) for tensor in input_grads), None, None)


def _row_lengths(query: Tensor, kwargs: dict[str, Any]) -> list[int]:
    """Tokens of each row of this sequence."""
    borders, positions = kwargs.get("cu_seq_lens_q"), kwargs.get("position_ids")
    if borders is not None:
        return [int(length) for length in torch.diff(borders).tolist()]
    tokens = query.shape[2]
    if positions is None or positions.shape[-1] != tokens or query.shape[0] != 1:
        return [tokens]
    starts = positions.reshape(-1, tokens)[0].eq(0).nonzero()[:, 0].tolist()
    ends = [*starts[1:], tokens]
    return [end - start for start, end in zip(starts, ends, strict=True)] if starts[:1] == [0] else [tokens]


def packed_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """`[1, heads, T, d]` -> `[1, T, heads, d]`, the signature of transformers' attention functions."""
    implementations: Any = AttentionInterface
    sdpa = implementations()[SDPA]
    lengths = _row_lengths(query, kwargs) if attention_mask is None and query.shape[0] == 1 else []
    if not lengths or key.shape[2] != query.shape[2] or kwargs.get("dropout"):
        output: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **kwargs)
        return output
    if query.dtype is torch.bfloat16 and query.shape[1] * len(lengths) * max(lengths) ** 2 <= MAX_SCORES:
        scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
        inputs = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out: Tensor = RowAttention.apply(*inputs, PaddedRows.from_lengths(lengths), scale)  # type: ignore[no-untyped-call]
        return out[None], None
    parts: Any = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([sdpa(module, *part, None, **kwargs)[0] for part in parts], dim=1), None


def packed_mask(**kwargs: Any) -> Any:
    """None if `packed_attention` separates the rows itself, else SDPA's mask."""
    if kwargs.get("attention_mask") is None and kwargs["q_length"] == kwargs["kv_length"]:
        return None
    implementations: Any = AttentionMaskInterface
    return implementations()[SDPA](**kwargs)


def has_full_attention(config: Any) -> bool:
    """Whether every layer attends to all earlier tokens of its row, so that the omitted masks are purely causal."""
    text = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    chunk = getattr(text, "attention_chunk_size", None)
    return layer_types == {"full_attention"} and window is None and chunk is None


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switches a model from SDPA to packed attention; False if the model must stay as it is."""
    if model.config._attn_implementation != SDPA or not has_full_attention(model.config):
        return False
    AttentionInterface.register(PACKED_ROWS, packed_attention)
    AttentionMaskInterface.register(PACKED_ROWS, packed_mask)
    model.set_attn_implementation(PACKED_ROWS)
    return True


def restore_sdpa(model: PreTrainedModel) -> None:
    """Switches back before the proof's rows are recorded, because a server computes with SDPA, and in bf16 differently
    rounded products deviate from the first layer on."""
    if model.config._attn_implementation == PACKED_ROWS:
        model.set_attn_implementation(SDPA)
