"""Attention of a step by block tables: the Triton kernels and the torch fallback against float64. Without a
GPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1; the fallback always runs.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ktransformers.serve.attention.latent import LatentProjection
from ktransformers.serve.attention.spec import AttentionSpec
from ktransformers.serve.attention.step import COUNT, FIRST_ROW, DeviceStep, Span
from ktransformers.serve.cache.cache_codes import round_trip
from ktransformers.serve.cache.kv_cache import BLOCK_TOKENS, BlockMemory, KVSlot
from ktransformers.serve.graphs import paged_attention

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = [
    pytest.param("twin", "cpu", id="twin"),
    pytest.param(
        "kernels", "cpu", id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter")
    ),
    pytest.param("kernels", "cuda:0", id="gpu", marks=pytest.mark.gpu),
]
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def attend(backend: str, *given: object) -> Tensor:
    if backend == "twin":
        return paged_attention._attend_in_torch(*given)  # type: ignore[arg-type]
    kernels = pytest.importorskip("ktransformers.serve.graphs.paged_attention_triton")
    actual: Tensor = kernels.attend(*given)
    return actual


def slots_of(lengths: list[int], *, fp8: bool = False) -> list[KVSlot]:
    """Sequences with room for so many tokens and some more, whose blocks lie among each other's."""
    counts = [(length + 200) // BLOCK_TOKENS + 1 for length in lengths]
    memory = BlockMemory(sum(counts), fp8=fp8)
    numbers = torch.randperm(sum(counts)).split(counts)
    return [KVSlot(None, memory, blocks.tolist()) for blocks in numbers]


def filled(
    lengths: list[int], sizes: tuple[int, int, int], dtype: torch.dtype, device: str, *, fp8: bool = False
) -> list[KVSlot]:
    groups, key, value = sizes
    slots = slots_of(lengths, fp8=fp8)
    for slot, length in zip(slots, lengths, strict=True):
        slot.store("keys", 2, 0, torch.randn(groups, max(1, length), key).to(dtype).to(device))
        slot.store("values", 2, 0, torch.randn(groups, max(1, length), value).to(dtype).to(device))
    return slots


def step_of(slots: list[KVSlot], lengths: list[int], counts: list[int], device: str) -> DeviceStep:
    """Each sequence has so many rows after so many tokens; 0: it has none, but a column."""
    firsts = [sum(max(1, count) for count in counts[:at]) for at in range(len(counts))]
    spans = [
        Span(slot, first, first + count, length)
        for slot, first, count, length in zip(slots, firsts, counts, lengths, strict=True)
    ]
    step = DeviceStep.of_spans(spans, torch.device(device))
    assert step.table[COUNT].tolist() == counts and step.table[FIRST_ROW].tolist() == firsts
    return step


def oracle(query: Tensor, slot: KVSlot, end: int, kind: AttentionSpec) -> Tensor:
    """query [heads, d] -> [heads, dv], in float64."""
    keys, values = (slot.read(part, 2, 0, end, torch.float32).cpu().double() for part in ("keys", "values"))
    start = kind.first_key(end - 1)
    repeat = query.shape[0] // keys.shape[0]
    keys, values = (held[:, start:].repeat_interleave(repeat, 0) for held in (keys, values))
    query = query.cpu().double()
    if not kind.softcap and kind.sinks is None:
        return scaled_dot_product_attention(query[:, None], keys, values, scale=kind.scale)[:, 0]
    scores = (keys @ query[:, :, None])[..., 0] * kind.scale
    if kind.softcap:
        scores = kind.softcap * torch.tanh(scores / kind.softcap)
    if kind.sinks is not None:
        scores = torch.cat([scores, kind.sinks.cpu().double()[:, None]], dim=1)
    return (scores.softmax(-1)[:, None, : keys.shape[1]] @ values)[:, 0]


def stored_rows(rows: Tensor, *, fp8: bool) -> Tensor:
    """What a slot holds of these rows."""
    return round_trip(rows) if fp8 else rows


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("fp8", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize(
    ("sizes", "dtype", "window", "extra"),
    [
        ((8, 2, 32, 32), torch.bfloat16, None, ""),
        ((8, 2, 32, 32), torch.float16, 40, "cap"),
        ((8, 2, 32, 32), torch.float32, 40, "sinks"),
        ((3, 3, 48, 16), torch.float32, None, ""),
        ((5, 1, 24, 8), torch.float16, 40, ""),
        ((32, 4, 128, 128), torch.bfloat16, None, ""),
        ((32, 4, 128, 128), torch.float32, 40, ""),
        ((8, 2, 32, 32), torch.float32, None, "chunk"),
        ((4, 4, 192, 128), torch.bfloat16, None, ""),
        ((4, 4, 192, 128), torch.float32, None, "sinks"),
    ],
)
def test_attention_matches_float64(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: int | None,
    extra: str,
    fp8: bool,
    backend: str,
    device: str,
) -> None:
    """New tokens, a sequence without rows, and prompt chunks at the beginning and in the middle of a sequence."""
    heads, groups, key, value = sizes
    if backend == "kernels" and device == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter multiplies the bits of bf16 as if they were integers
    torch.manual_seed(0)
    lengths, counts = [1, 33, 0, 700, 64, 0, 70], [1, 1, 1, 1, 0, 150, 19]
    slots = filled(lengths, (groups, key, value), dtype, device, fp8=fp8)
    total = sum(max(1, count) for count in counts)
    query = torch.randn(total, heads, key).to(dtype).to(device).transpose(0, 1)
    new_keys = torch.randn(total, groups, key).to(dtype).to(device).transpose(0, 1)
    new_values = torch.randn(total, groups, value).to(dtype).to(device).transpose(0, 1)
    sinks = torch.randn(heads).to(dtype).to(device) if extra == "sinks" else None
    chunk = 48 if extra == "chunk" else None
    spec = AttentionSpec(2, key**-0.5, window, 1.5 if extra == "cap" else None, sinks, chunk=chunk)
    step = step_of(slots, lengths, counts, device)
    like = torch.empty(groups, 0, 1)
    cache = slots[0].memory.of_layer(2, like, like)
    actual = attend(backend, step, cache, spec, query, new_keys, new_values)
    assert actual.shape == (total, heads, value) and actual.dtype == dtype
    for slot, length, count, first in zip(slots, lengths, counts, step.table[FIRST_ROW].tolist(), strict=True):
        if not count:
            assert not actual[first].any()
        rows = slice(first, first + count)
        for part, new in (("keys", new_keys), ("values", new_values)):
            held = slot.read(part, 2, length, length + count, dtype) if count else new[:, rows]
            assert torch.equal(held, stored_rows(new[:, rows], fp8=fp8))
        for row in range(count):
            expected = oracle(query[:, first + row], slot, length + row + 1, spec)
            limit = LIMITS[dtype]
            torch.testing.assert_close(actual[first + row].cpu().double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_rows_are_bit_identical_in_every_batch(backend: str, device: str) -> None:
    torch.manual_seed(0)
    lengths, counts = [300, 20, 9], [1, 40, 1]
    slots = filled(lengths, (2, 32, 32), torch.float32, device)
    query, key = (torch.randn(heads, sum(counts), 32).to(device) for heads in (8, 2))
    spec, cache = AttentionSpec(2, 0.2, None, None, None), slots[0].memory.of_layer(2, key, key)
    together = attend(backend, step_of(slots, lengths, counts, device), cache, spec, query, key, key)
    first = 0
    for slot, length, count in zip(slots, lengths, counts, strict=True):
        step, part = step_of([slot], [length], [count], device), slice(first, first + count)
        alone = attend(backend, step, cache, spec, query[:, part], key[:, part], key[:, part])
        assert torch.equal(alone, together[part])
        first += count


def latents(lengths: list[int], width: int, dtype: torch.dtype, device: str, *, fp8: bool = False) -> list[KVSlot]:
    slots = slots_of(lengths, fp8=fp8)
    for slot, length in zip(slots, lengths, strict=True):
        slot.store("keys", 2, 0, torch.randn(1, max(1, length), width).to(dtype).to(device))
    return slots


def latent_spec(heads: int, rank: int, rope: int, scale: float) -> AttentionSpec:
    projection = LatentProjection(torch.nn.Linear(rank, heads * 16, bias=False), heads, rank, 8, rope, 8)
    return AttentionSpec(2, scale, None, None, None, projection)


def attend_latents(
    backend: str, step: DeviceStep, slot: KVSlot, spec: AttentionSpec, query: Tensor, key: Tensor
) -> Tensor:
    cache = slot.memory.of_layer(2, key)
    if backend == "twin":
        return paged_attention.attend_latents(step, cache, spec, query, key)
    kernels = pytest.importorskip("ktransformers.serve.graphs.paged_latents_triton")
    actual: Tensor = kernels.attend(step.table, cache, spec, query, key)
    return actual


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
@pytest.mark.parametrize("fp8", [False, True], ids=["numbers", "codes"])
@pytest.mark.parametrize(
    ("heads", "rank", "rope", "dtype"),
    [
        (16, 512, 64, torch.bfloat16),
        (80, 64, 16, torch.bfloat16),  # more heads than a tile
        (5, 48, 8, torch.float16),
        (4, 32, 0, torch.float32),
    ],
)
def test_latent_attention_matches_float64(
    heads: int, rank: int, rope: int, dtype: torch.dtype, fp8: bool, backend: str, device: str
) -> None:
    """Contexts of no, one and many splits, and an inactive row."""
    if backend == "kernels" and device == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter multiplies the bits of bf16 as if they were integers
    torch.manual_seed(0)
    width, lengths = rank + rope, [1, 33, 0, 2300, 64]
    slots, counts = latents(lengths, width, dtype, device, fp8=fp8), [1, 1, 1, 1, 0]
    query = torch.randn(len(slots), heads, width).to(dtype).to(device).transpose(0, 1)
    new = torch.randn(1, len(slots), width).to(dtype).to(device)
    spec = latent_spec(heads, rank, rope, width**-0.5)
    actual = attend_latents(backend, step_of(slots, lengths, counts, device), slots[0], spec, query, new)
    assert actual.shape == (len(slots), heads, rank) and actual.dtype == dtype
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if not counts[row]:
            assert not actual[row].any()
            continue
        held = slot.read("keys", 2, 0, length + 1, dtype)[0]
        assert torch.equal(held[length:], stored_rows(new[:, row : row + 1], fp8=fp8)[0])
        held = held.double()
        expected = (query[:, row].double() @ held.T * spec.scale).softmax(-1) @ held[:, :rank]
        limit = LIMITS[dtype]
        torch.testing.assert_close(actual[row].double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_latent_row_is_bit_identical_in_every_batch(backend: str, device: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float16
    lengths = [300, 20, 9]
    slots = latents(lengths, 80, dtype, device)
    query, key = (torch.randn(heads, 3, 80).to(dtype).to(device) for heads in (20, 1))
    spec = latent_spec(20, 64, 16, 0.1)
    together = attend_latents(backend, step_of(slots, lengths, [1, 1, 1], device), slots[0], spec, query, key)
    for row, length in enumerate(lengths):
        step, part = step_of([slots[row]], [length], [1], device), slice(row, row + 1)
        alone = attend_latents(backend, step, slots[0], spec, query[:, part], key[:, part])
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize(
    ("heads", "width", "element", "shared_kib", "expected"),
    [
        (128, 576, 2, 227, (32, 64)),
        (128, 576, 2, 99, (16, 32)),
        (16, 576, 2, 227, (16, 32)),
        (128, 576, 4, 227, (16, 32)),
    ],
)
def test_latent_tiles_fit_shared_memory(
    heads: int, width: int, element: int, shared_kib: int, expected: tuple[int, int]
) -> None:
    kernels = pytest.importorskip("ktransformers.serve.graphs.paged_latents_triton")
    tile = kernels.tiling(heads, width, element, shared_kib << 10)
    assert (tile.heads, tile.block) == expected
    padded = 576 if element == 2 else 1024  # rank and rope are padded apart
    assert (tile.heads + tile.stages * tile.block) * padded * element <= shared_kib << 10
