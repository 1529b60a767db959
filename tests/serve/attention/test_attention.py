"""Decode attention of the core against torch: groups of heads, windows, mixed with prompt chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ktransformers import _core
from ktransformers.serve.attention import attention
from ktransformers.serve.attention.attention import Span, attend_to_slots, attention_forward
from ktransformers.serve.cache.kv_cache import KVSlot


class Layer(nn.Module):
    layer_idx = 0


def filled(length: int, groups: int, key: int, value: int, dtype: torch.dtype) -> KVSlot:
    slot = KVSlot(None, capacity=length + 8)
    slot.write("keys", 0, 0, torch.randn(groups, length, key).to(dtype))
    slot.write("values", 0, 0, torch.randn(groups, length, value).to(dtype))
    return slot


def oracle(query: Tensor, slot: KVSlot, end: int, window: int | None) -> Tensor:
    """query [heads, d] -> [heads, dv], in float64."""
    keys, values = (held[0][:, :end].double() for held in (slot.keys, slot.values))
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
    slots = [filled(length, groups, key, value, dtype) for length in lengths]
    query = torch.randn(1, 3, heads, key).to(dtype).transpose(1, 2)
    new_keys, new_values = torch.randn(1, groups, 3, key).to(dtype), torch.randn(1, groups, 3, value).to(dtype)
    rows = [Span(slot, at, at + 1, length) for at, (slot, length) in enumerate(zip(slots, lengths, strict=True))]
    with attend_to_slots(rows):
        actual, _ = attention_forward(Layer(), query, new_keys, new_values, None, scaling=0.1, sliding_window=window)
    for at, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        assert torch.equal(slot.keys[0][:, length], new_keys[0, :, at])
        assert torch.equal(slot.values[0][:, length], new_values[0, :, at])
        expected = oracle(query[0, :, at], slot, length + 1, window)
        limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual[0, at].double(), expected, rtol=limit, atol=limit)
        alone = Span(slot, 0, 1, length)
        with attend_to_slots([alone]):
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
        slots = [filled(length, 2, 32, 32, torch.float32) for length in (9, 4, 20)]
        rows = [Span(slots[0], 0, 1, 9), Span(slots[1], 1, 6, 4), Span(slots[2], 6, 7, 20)]
        with attend_to_slots(rows):
            return attention_forward(Layer(), query, keys, values, None)[0], slots

    actual, slots = run()
    monkeypatch.setattr(attention, "_core_decodes", lambda *_: False)
    expected, others = run()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for one, other, end in zip(slots, others, (10, 9, 21), strict=True):
        assert torch.equal(one.keys[0][:, :end], other.keys[0][:, :end])


def test_core_refuses_unsupported_shapes() -> None:
    pool = _core.Pool(1)
    query, key, out = torch.zeros(4, 1, 32), torch.zeros(2, 1, 32), torch.zeros(1, 4, 32)
    slot = torch.zeros(2, 8, 32)
    pool.attend(query, key, key, out, [(0, 0, 8, slot, slot)], 1.0)
    for place, match in (
        ((0, 0, 9, slot, slot), "end"),
        ((1, 0, 8, slot, slot), "row"),
        ((0, 8, 8, slot, slot), "start"),
        ((0, 0, 8, slot[:1], slot), "keys"),
        ((0, 0, 8, slot, slot[:, :4]), "values"),
    ):
        with pytest.raises(ValueError, match=match):
            pool.attend(query, key, key, out, [place], 1.0)
    with pytest.raises(TypeError, match="keys"):
        pool.attend(query, key, key, out, [(0, 0, 8, slot.double(), slot)], 1.0)
    with pytest.raises(ValueError, match="divisor"):
        pool.attend(query[:3], key, key, out[:, :3], [(0, 0, 8, slot, slot)], 1.0)
    with pytest.raises(ValueError, match="multiple of 16"):
        pool.attend(query[..., :8], key[..., :8], key, out, [(0, 0, 8, slot[..., :8], slot)], 1.0)
