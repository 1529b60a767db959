"""Decode attention over slots found by address: the Triton kernels and the torch fallback against float64. Without a
GPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1; the fallback always runs.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ktransformers.serve.attention.attention import AttentionSpec
from ktransformers.serve.attention.latent import LatentProjection
from ktransformers.serve.cache.cache_codes import round_trip
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.graphs import decode_attention
from ktransformers.serve.graphs.step_table import ACTIVE, CAPACITY, FIRST_ADDRESS, POSITION, CacheLines

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
        return decode_attention._attend_in_torch(*given)  # type: ignore[arg-type]
    kernels = pytest.importorskip("ktransformers.serve.graphs.decode_attention_triton")
    actual: Tensor = kernels.attend(*given)
    return actual


def filled(length: int, sizes: tuple[int, int, int], dtype: torch.dtype, device: str, *, fp8: bool = False) -> KVSlot:
    groups, key, value = sizes
    slot = KVSlot(None, capacity=length + 9, fp8=fp8)
    slot.store("keys", 2, 0, torch.randn(groups, length, key).to(dtype).to(device))
    slot.store("values", 2, 0, torch.randn(groups, length, value).to(dtype).to(device))
    return slot


def oracle(query: Tensor, slot: KVSlot, end: int, kind: AttentionSpec) -> Tensor:
    """query [heads, d] -> [heads, dv], in float64."""
    keys, values = (slot.read(part, 2, 0, end, torch.float32).cpu().double() for part in ("keys", "values"))
    start = 0 if kind.window is None else max(0, end - kind.window)
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


def table_of(slots: list[KVSlot | None], positions: list[int]) -> Tensor:
    """The table of two layers, of which the second is used; None: an inactive row."""
    table = torch.zeros(FIRST_ADDRESS + 8, len(slots), dtype=torch.int64)
    for row, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        if slot is not None:
            table[POSITION, row], table[CAPACITY, row], table[ACTIVE, row] = position, slot.capacity, 1
            table[FIRST_ADDRESS + 1, row] = slot.keys[2].data_ptr()
            table[FIRST_ADDRESS + 3, row] = slot.values[2].data_ptr() if slot.values else 0
            table[FIRST_ADDRESS + 5, row] = slot.key_scales[2].data_ptr() if slot.fp8 else 0
            table[FIRST_ADDRESS + 7, row] = slot.value_scales[2].data_ptr() if slot.value_scales else 0
    return table


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
        ((4, 4, 192, 128), torch.bfloat16, None, ""),
        ((4, 4, 192, 128), torch.float32, None, "sinks"),
    ],
)
def test_decode_attention_matches_float64(
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: int | None,
    extra: str,
    fp8: bool,
    backend: str,
    device: str,
) -> None:
    heads, groups, key, value = sizes
    if backend == "kernels" and device == "cpu" and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter multiplies the bits of bf16 as if they were integers
    torch.manual_seed(0)
    lengths = [1, 33, 0, 700, 64]
    slots: list[KVSlot | None] = [filled(length, (groups, key, value), dtype, device, fp8=fp8) for length in lengths]
    slots[4] = None
    query = torch.randn(len(slots), heads, key).to(dtype).to(device).transpose(0, 1)
    new_keys = torch.randn(len(slots), groups, key).to(dtype).to(device).transpose(0, 1)
    new_values = torch.randn(len(slots), groups, value).to(dtype).to(device).transpose(0, 1)
    sinks = torch.randn(heads).to(dtype).to(device) if extra == "sinks" else None
    spec = AttentionSpec(2, key**-0.5, window, 1.5 if extra == "cap" else None, sinks)
    table = table_of(slots, lengths).to(device)
    actual = attend(backend, table, CacheLines.of_layer(1, 2, fp8=fp8), spec, query, new_keys, new_values)
    assert actual.shape == (len(slots), heads, value) and actual.dtype == dtype
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if slot is None:
            assert not actual[row].any()
            continue
        for part, new in (("keys", new_keys), ("values", new_values)):
            held = slot.read(part, 2, length, length + 1, dtype)
            assert torch.equal(held, stored_rows(new[:, row : row + 1], fp8=fp8))
        expected = oracle(query[:, row], slot, length + 1, spec)
        limit = LIMITS[dtype]
        torch.testing.assert_close(actual[row].cpu().double(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_row_is_bit_identical_in_every_batch(backend: str, device: str) -> None:
    torch.manual_seed(0)
    slots: list[KVSlot | None] = [filled(length, (2, 32, 32), torch.bfloat16, device) for length in (300, 20, 9)]
    query, key = (torch.randn(heads, 3, 32).bfloat16().to(device) for heads in (8, 2))
    cache_lines, spec = CacheLines(FIRST_ADDRESS + 1, FIRST_ADDRESS + 3), AttentionSpec(2, 0.2, None, None, None)
    together = attend(backend, table_of(slots, [300, 20, 9]).to(device), cache_lines, spec, query, key, key)
    for row, length in enumerate((300, 20, 9)):
        table, part = table_of([slots[row]], [length]).to(device), slice(row, row + 1)
        alone = attend(backend, table, cache_lines, spec, query[:, part], key[:, part], key[:, part])
        assert torch.equal(alone[0], together[row])


def latents(length: int, width: int, dtype: torch.dtype, device: str, *, fp8: bool = False) -> KVSlot:
    slot = KVSlot(None, capacity=length + 9, fp8=fp8)
    slot.store("keys", 2, 0, torch.randn(1, length, width).to(dtype).to(device))
    return slot


def latent_spec(heads: int, rank: int, rope: int, scale: float) -> AttentionSpec:
    projection = LatentProjection(torch.nn.Linear(rank, heads * 16, bias=False), heads, rank, 8, rope, 8)
    return AttentionSpec(2, scale, None, None, None, projection)


def attend_latents(
    backend: str, table: Tensor, spec: AttentionSpec, query: Tensor, key: Tensor, *, fp8: bool = False
) -> Tensor:
    lines = CacheLines.of_layer(1, 2, fp8=fp8)
    if backend == "twin":
        return decode_attention.attend_latents(table, lines, spec, query, key)
    kernels = pytest.importorskip("ktransformers.serve.graphs.decode_latents_triton")
    actual: Tensor = kernels.attend(table, lines, spec, query, key)
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
    slots: list[KVSlot | None] = [latents(length, width, dtype, device, fp8=fp8) for length in lengths]
    slots[4] = None
    query = torch.randn(len(slots), heads, width).to(dtype).to(device).transpose(0, 1)
    new = torch.randn(1, len(slots), width).to(dtype).to(device)
    spec = latent_spec(heads, rank, rope, width**-0.5)
    actual = attend_latents(backend, table_of(slots, lengths).to(device), spec, query, new, fp8=fp8)
    assert actual.shape == (len(slots), heads, rank) and actual.dtype == dtype
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if slot is None:
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
    slots: list[KVSlot | None] = [latents(length, 80, dtype, device) for length in (300, 20, 9)]
    query, key = (torch.randn(heads, 3, 80).to(dtype).to(device) for heads in (20, 1))
    spec = latent_spec(20, 64, 16, 0.1)
    together = attend_latents(backend, table_of(slots, [300, 20, 9]).to(device), spec, query, key)
    for row, length in enumerate((300, 20, 9)):
        part = slice(row, row + 1)
        alone = attend_latents(backend, table_of([slots[row]], [length]).to(device), spec, query[:, part], key[:, part])
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
    kernels = pytest.importorskip("ktransformers.serve.graphs.decode_latents_triton")
    tile = kernels.tiling(heads, width, element, shared_kib << 10)
    assert (tile.heads, tile.block) == expected
    padded = 576 if element == 2 else 1024  # rank and rope are padded apart
    assert (tile.heads + tile.stages * tile.block) * padded * element <= shared_kib << 10
