"""Attention on packed rows, one row at a time, for models that train on a CPU.

Packing lays rows `[t1], [t2], ...` end to end into one sequence `[1, T]`. transformers then gives SDPA a mask `[T, T]`
whose blocks keep the rows apart, and the CPU's kernel computes what the mask throws away: eight rows of 64 tokens cost
eight times too much, both ways. Here queries, keys and values `[1, heads, T, d]` are cut where rows end, and each piece
goes to the stock function without a mask. The surprising decision: this is an implementation of attention that
transformers knows by name, so no model's code is touched; where rows begin is what TRL's collator says
(`cu_seq_lens_q`), which checkpointing keeps with the layer's other arguments. With padding, or with a cache, it is
stock SDPA.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

ROWS = "kt_rows"
STOCK = "sdpa"


def _lengths(query: Tensor, given: dict[str, Any]) -> list[int]:
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


def attend_rows(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """`[1, heads, T, d]` -> `[1, T, heads, d]`, as transformers' functions of attention do it."""
    known: Any = AttentionInterface
    stock = known()[STOCK]
    lengths = _lengths(query, given) if attention_mask is None else []
    if len(lengths) < 2 or key.shape[2] != query.shape[2]:
        found: tuple[Tensor, None] = stock(module, query, key, value, attention_mask, **given)
        return found
    parts: Any = zip(*(torch.split(tensor, lengths, dim=2) for tensor in (query, key, value)), strict=True)
    return torch.cat([stock(module, *part, None, **given)[0] for part in parts], dim=1), None


def rows_mask(**given: Any) -> Any:
    """None where `attend_rows` keeps the rows apart by itself, else SDPA's mask."""
    if given.get("attention_mask") is None and given["q_length"] == given["kv_length"]:
        return None
    known: Any = AttentionMaskInterface
    return known()[STOCK](**given)


def attends_fully(config: Any) -> bool:
    """Every layer sees all tokens of its row: nothing but causality is in the masks that are left out."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    chunk = getattr(text, "attention_chunk_size", None)
    return kinds == {"full_attention"} and window is None and chunk is None


def attend_by_rows(model: PreTrainedModel) -> bool:
    """Let a model whose attention is SDPA take packed rows one by one; False where it has to stay as it is."""
    if model.config._attn_implementation != STOCK or not attends_fully(model.config):
        return False
    AttentionInterface.register(ROWS, attend_rows)
    AttentionMaskInterface.register(ROWS, rows_mask)
    model.set_attn_implementation(ROWS)
    return True
