"""Decode attention of the core against torch: groups of heads, windows, mixed with prompt chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ktransformers.serve.attention import attention
from ktransformers.serve.attention.attention import attend_to_slots, attention_forward
from ktransformers.serve.attention.step import BatchStep, Span
from ktransformers.serve.cache.kv_cache import KVSlot


class Layer(nn.Module):
    layer_idx = 0


def filled(lengths: Sequence[int], groups: int, key: int, value: int, dtype: torch.dtype) -> list[KVSlot]:
    slots = KVSlot.together(len(lengths), max(lengths) + 8)
    for slot, length in zip(slots, lengths, strict=True):
        slot.write("keys", 0, 0, torch.randn(groups, length, key).to(dtype))
        slot.write("values", 0, 0, torch.randn(groups, length, value).to(dtype))
    return slots


def oracle(query: Tensor, slot: KVSlot, end: int, window: int | None) -> Tensor:
    """query [heads, d] -> [heads, dv], in float64."""
    keys, values = (slot.read(part, 0, 0, end, query.dtype).double() for part in ("keys", "values"))
    start = 0 if window is None else max(0, end - window)
    repeat = query.shape[0] // keys.shape[0]
    keys, values = (held[:, start:].repeat_interleave(repeat, 0) for held in (keys, values))
    return scaled_dot_product_attention(query.double()[:, None], keys, values, scale=0.1)[:, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("heads", "groups", "key", "value"), [(8, 2, 32, 32), (3, 3, 48, 16), (5, 1, 16, 64)])
@pytest.mark.parametrize("window", [None, 40])
def test_core_decode_matches_float64(
    heads: int, groups: int, key: int, value: int, window: int | None, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    lengths = [1, 33, 700]
    slots = filled(lengths, groups, key, value, dtype)
    query = torch.randn(1, 3, heads, key).to(dtype).transpose(1, 2)
    new_keys, new_values = torch.randn(1, groups, 3, key).to(dtype), torch.randn(1, groups, 3, value).to(dtype)
    rows = [Span(slot, at, at + 1, length) for at, (slot, length) in enumerate(zip(slots, lengths, strict=True))]
    with attend_to_slots(BatchStep(rows)):
        actual, _ = attention_forward(Layer(), query, new_keys, new_values, None, scaling=0.1, sliding_window=window)
    for at, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        for part, new in (("keys", new_keys), ("values", new_values)):
            assert torch.equal(slot.read(part, 0, length, length + 1, dtype)[:, 0], new[0, :, at])
        expected = oracle(query[0, :, at], slot, length + 1, window)
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual[0, at].double(), expected, rtol=limit, atol=limit)
        alone = Span(slot, 0, 1, length)
        with attend_to_slots(BatchStep([alone])):
            single, _ = attention_forward(
                Layer(),
                query[:, :, at : at + 1],
                new_keys[:, :, at : at + 1],
                new_values[:, :, at : at + 1],
                None,
                scaling=0.1,
                sliding_window=window,
            )
        assert torch.equal(single[0, 0], actual[0, at])


def test_decode_beside_a_prompt_matches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One batch holds a prompt chunk between two new tokens."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, 4, 7, 32), torch.randn(1, 2, 7, 32), torch.randn(1, 2, 7, 32)

    def run() -> tuple[Tensor, list[KVSlot]]:
        torch.manual_seed(1)
        slots = filled((9, 4, 20), 2, 32, 32, torch.float32)
        rows = [Span(slots[0], 0, 1, 9), Span(slots[1], 1, 6, 4), Span(slots[2], 6, 7, 20)]
        with attend_to_slots(BatchStep(rows)):
            return attention_forward(Layer(), query, keys, values, None)[0], slots

    actual, slots = run()
    monkeypatch.setattr(attention, "_core_decodes", lambda *_: False)
    expected, others = run()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for one, other, end in zip(slots, others, (10, 9, 21), strict=True):
        assert torch.equal(*(slot.read("keys", 0, 0, end, torch.float32) for slot in (one, other)))
