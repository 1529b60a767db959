"""Residents computed from codes, in every format, against matrices decoded in torch. Without a GPU the kernels run in
Triton's interpreter if TRITON_INTERPRET=1."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ktransformers.experts.gate import Gate
from ktransformers.nn import ExpertStore
from ktransformers.place.gpu import resident_decode
from ktransformers.place.gpu.executor import LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.placement import geometry_of
from ktransformers.quantized.gpu.layout import PackedMatrix, format_of
from tests.place.test_gpu_decode import blocks
from tests.support.formats import SPECS
from tests.support.gguf_blocks import HALVES
from tests.support.placed_experts import Size, make_store
from tests.support.triton_devices import triton_devices

E, H, I, TOP_K = 3, 256, 256, 2  # noqa: E741


def stored(spec: str) -> ExpertStore:
    if spec not in HALVES:
        return make_store(Size(E, H, I, TOP_K, 4, 4), spec)
    random = np.random.default_rng(0)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    store = ExpertStore(E, H, I, formats=spec)
    store.pack(**{name: blocks(spec, *shape, random) for name, shape in shapes.items()})
    return store


def cached(store: ExpertStore, device: str) -> tuple[LayerOnDevice, ExpertCache]:
    """All experts in slots of their own, the last one first."""
    sizes, memory = geometry_of(store), store.memory()
    cache = ExpertCache(sizes, E, torch.device(device), None)
    for name, target in (("gate_up", cache.first), ("down", cache.down)):
        target.copy_(memory[name].view(E, -1).flip(0))
    source: object = None
    return LayerOnDevice(0, sizes, Gate("silu"), source, (None, None)), cache  # type: ignore[arg-type]


def batch(tokens: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Slots, hidden states, ids (one out of range, one that is not resident), weights."""
    torch.manual_seed(0)
    slot_of = torch.tensor([2, -1, 0], dtype=torch.int32)
    ids = torch.tensor([[0, 2], [2, 1], [-1, 0], [2, 0]])[:tokens]
    hidden, weights = torch.randn(tokens, H).bfloat16(), torch.rand(tokens, TOP_K)
    return tuple(tensor.to(device) for tensor in (slot_of, hidden, ids, weights))  # type: ignore[return-value]


@triton_devices
@pytest.mark.parametrize("spec", [*SPECS, *HALVES])
def test_products_match_decoded_matrices(spec: str, device: str) -> None:
    kernels = pytest.importorskip(resident_decode.TRITON)
    store = stored(spec)
    layer, cache = cached(store, device)
    first, down = layer.geometry.first, layer.geometry.down
    if not (kernels.reads_packed(first) and kernels.reads_packed(down)):
        assert not kernels.dequantize_triton.supports(first) or first.formats[0].span % 32, "codes could be read"
        pytest.skip("decoded first")
    check_products(layer, cache, batch(4, device), device)


@triton_devices
@pytest.mark.parametrize("spec", ["bf16", "int4:32", "q4_k"])
def test_experts_with_many_rows(spec: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More (token, slot) pairs than FEW_ROUTES, and more rows of one expert than a program takes; the same expert
    twice. A row has the same bits in groups of two and of four, as other tokens join and leave its batch."""
    kernels = pytest.importorskip(resident_decode.TRITON)
    layer, cache = cached(stored(spec), device)
    slot_of, *_ = batch(4, device)
    torch.manual_seed(1)
    ids = torch.tensor([[2, 0]] * 17 + [[0, 0], [1, 2], [-1, 9]])
    hidden, weights = torch.randn(len(ids), H).bfloat16(), torch.rand(len(ids), TOP_K)
    found = []
    for rows in (2, 4):
        monkeypatch.setattr(kernels, "group_rows", lambda *sizes, rows=rows: rows)
        given = (slot_of, *(tensor.to(device) for tensor in (hidden, ids, weights)))
        found.append(check_products(layer, cache, given, device))
    assert torch.equal(*found)


@triton_devices
@pytest.mark.parametrize("rows", [2, 4])
def test_pairs_of_one_expert_are_grouped(rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of so many pairs computes for them; pairs of experts that are not resident do not."""
    kernels = pytest.importorskip(resident_decode.TRITON)
    monkeypatch.setattr(kernels, "group_rows", lambda *sizes: rows)
    matrix = geometry_of(ExpertStore(E, H, I, formats="bf16")).first
    slot_of = torch.tensor([2, -1, 0], dtype=torch.int32, device=device)
    counts = torch.zeros(E, dtype=torch.int32, device=device)
    ids = torch.tensor([[2, 0], [2, 1], [-1, 2], [9, 0], [2, 2], [9, 2]], device=device)
    groups = kernels.group_routes(ids, slot_of, counts, matrix, matrix)
    assert counts.tolist() == [2, 1, 6]
    members = {2: [[0, 2], [5, 8], [9, 11], [1, 7]], 4: [[0, 2, 5, 8], [9, 11, -1, -1], [1, 7, -1, -1]]}[rows]
    slots, pairs = groups.slots.tolist(), groups.pairs.tolist()
    assert {route for route, slot in enumerate(slots) if slot >= 0} == {group[0] for group in members}
    assert [pairs[group[0]] for group in members] == members
    assert [slots[group[0]] for group in members] == [0] * (len(members) - 1) + [2]
    assert kernels.group_routes(ids[:1], slot_of, counts, matrix, matrix) is None, "one token has nothing to share"
    assert counts.tolist() == [2, 1, 6]


def test_programs_are_long_where_experts_have_many_rows_and_are_decoded() -> None:
    kernels = pytest.importorskip(resident_decode.TRITON)
    plain, coded = (geometry_of(ExpertStore(E, H, I, formats=spec)).first for spec in ("bf16", "int4:32"))
    assert [kernels.group_rows(16, 4, 32, both) for both in ((plain, plain), (coded, plain), (coded, coded))] == [
        2,
        2,
        4,
    ]
    assert kernels.group_rows(16, 8, 128, (coded, coded)) == 2


def check_products(layer: LayerOnDevice, cache: ExpertCache, given: tuple[Tensor, ...], device: str) -> Tensor:
    kernels: Any = importlib.import_module(resident_decode.TRITON)
    slot_of, hidden, ids, weights = given
    counts = torch.zeros(E, dtype=torch.int32, device=device)
    first, down = layer.geometry.first, layer.geometry.down
    groups = kernels.group_routes(ids, slot_of, counts, first, down)
    left = counts if groups is None else None
    h = kernels.first(hidden, ids, slot_of, cache.first, None, first, layer.gate, None, left, groups)
    actual = kernels.down(h, ids, weights, slot_of, cache.down, None, down, groups=groups)
    on_host = [tensor.cpu() for tensor in given]
    host_cache = ExpertCache(layer.geometry, E, torch.device("cpu"), None)
    host_cache.first, host_cache.down = cache.first.cpu(), cache.down.cpu()
    expected = resident_decode._reference_forward(replace(layer), host_cache, *on_host, None)
    limit = 2e-2 if device == "cpu" else 5e-3  # the interpreter cuts numbers off where a GPU rounds them to bf16
    assert float((actual.cpu() - expected).norm() / expected.norm()) < limit
    assert float(expected.abs().max()) > 0
    valid = ids[(ids >= 0) & (ids < E)].cpu()
    assert torch.equal(counts.cpu(), torch.bincount(valid, minlength=E).int()), "rows of experts are counted"
    return actual


@pytest.mark.parametrize(("spec", "columns"), [("bf16", 2), ("int4:0", 16), ("int8", 8)])
def test_rows_of_words_must_be_whole(spec: str, columns: int) -> None:
    """Otherwise numbers of x behind K would be multiplied; such experts are dequantised first."""
    kernels = pytest.importorskip(resident_decode.TRITON)
    form = format_of(spec)
    supported = {
        k: kernels.reads_packed(PackedMatrix(32, k, (form, form), False)) for k in (5 * columns, 5 * columns + 1)
    }
    assert list(supported.values()) == [True, False]


def test_formats_that_are_read_as_codes() -> None:
    """Almost all: a format that falls back to decoded matrices costs memory and time without a word."""
    kernels = pytest.importorskip(resident_decode.TRITON)
    formats = {spec: geometry_of(ExpertStore(E, H, I, formats=spec)).first for spec in [*SPECS, *HALVES]}
    others = {spec for spec, matrix in formats.items() if not kernels.reads_packed(matrix)}
    assert all(spec.startswith(("iq", "tq")) for spec in others), others
