"""Host callbacks with adapters, as a graph captures them: adapter indices of rows are on the device, the CPU has packed
factors, residents read theirs through addresses. Compared with the CPU's own store, as in test_host_callback.py. With
TRITON_INTERPRET=1 the Triton kernels run in its interpreter, which truncates to bf16 instead of rounding."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ktransformers.experts.gate import Gate
from ktransformers.experts.lora import ExpertLora
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore
from ktransformers.place.gpu import resident_decode
from ktransformers.place.gpu.multi_lora import LoraCache, LoraPointers
from ktransformers.place.host_callback import find_resident_slots
from ktransformers.place.placed_experts import PlacedExperts
from tests.support.placed_experts import (
    ADAPTERS,
    CLOSE,
    SMALL,
    cpu_output,
    cpu_output_with_adapters,
    devices,
    make_store,
    placed_for_inference,
    relative_error,
    small_batch,
    with_adapters,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RESIDENTS = pytest.mark.parametrize("residents", [(), (1, 4), tuple(range(8))], ids=["none", "some", "all"])


def placed_with_warmup(store: ExpertStore, device: str, residents: tuple[int, ...]) -> PlacedExperts:
    place = placed_for_inference(store, device, "resident", residents=residents)
    place.engine.callbacks.warming_up = True
    return place


@devices
@RESIDENTS
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_match_the_cpu(biased: bool, residents: tuple[int, ...], device: str) -> None:
    """Other ranks, other matrices, other scales, rows without any, from call to call another mixture; a row without an
    adapter has the bits that it has where nobody wants one."""
    store = make_store(SMALL, biased=biased)
    place = placed_with_warmup(store, device, residents)
    for rows in ([0, -1, 1, 2, 0], [2, 2, -1, 1, -1], [-1] * 5):
        given = with_adapters(store, small_batch(SMALL, 5, device), rows)
        got, want = place.engine.infer(place.layer, given), cpu_output_with_adapters(store, given)
        assert not place.layer.last_split, "somebody asked"
        assert relative_error(got, want) < CLOSE if residents else torch.equal(got.cpu(), want)
        bare = place.engine.infer(place.layer, replace(given, mixed=None))
        alone = torch.tensor(rows) < 0
        assert torch.equal(got.cpu()[alone], bare.cpu()[alone])
        assert alone.all() or relative_error(bare.cpu()[~alone], want[~alone]) > 0.05, "the adapters do something"


@devices
@pytest.mark.parametrize("spec", ["int4:32", "nvfp4"])
def test_formats_match_the_cpu(spec: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also some tokens at a time."""
    store = make_store(SMALL, spec)
    place = placed_with_warmup(store, device, (1, 4, 6))
    given = with_adapters(store, small_batch(SMALL, 5, device), [0, 1, -1, 2, 1])
    got = place.engine.infer(place.layer, given)
    assert relative_error(got, cpu_output_with_adapters(store, given)) < CLOSE
    monkeypatch.setattr(resident_decode, "DECODED_BYTES", 4 * place.layer.packed.geometry.decoded_bytes)
    assert torch.equal(place.engine.infer(place.layer, given), got)


@devices
def test_activation_without_a_kernel_matches_the_cpu(device: str) -> None:
    plain = make_store(SMALL)
    e, h, i = SMALL.experts, SMALL.hidden, SMALL.intermediate
    store = ExpertStore(e, h, i, activation="gelu")
    store.pack(**{name: torch.stack([plain.decode(name, at) for at in range(e)]) for name in ("gate", "up", "down")})
    place = placed_with_warmup(store, device, (0, 2, 3))
    place.layer.packed = replace(place.layer.packed, gate=Gate("gelu"))
    given = with_adapters(store, small_batch(SMALL, 4, device), [1, 0, -1, 2])
    assert relative_error(place.engine.infer(place.layer, given), cpu_output_with_adapters(store, given)) < CLOSE


@devices
def test_which_batches_are_refused(device: str) -> None:
    """Outside of graphs nothing has changed; in them rows have to be where replays find others."""
    store = make_store(SMALL)
    place = placed_for_inference(store, device, "resident", residents=(1,))
    path, layer = place.engine.callbacks, place.layer.packed
    given = with_adapters(store, small_batch(SMALL, 2, device), [0, -1])
    assert path.refusal(layer, given, "resident")
    path.warming_up = True
    assert not path.refusal(layer, given, "resident")
    with pytest.raises(InputError, match="LoRA on experts"):
        path.check(layer, replace(given, mixed=None, lora=ADAPTERS[0]), "resident")
    if device != "cpu":
        assert given.mixed is not None
        host = replace(given.mixed, rows=given.mixed.rows.cpu())
        with pytest.raises(InputError, match="in host memory"):
            path.check(layer, replace(given, mixed=host), "resident")


@devices
@pytest.mark.parametrize("residents", [(), (1, 4)], ids=["none", "some"])
def test_unused_adapters_are_released(residents: tuple[int, ...], device: str) -> None:
    """Calls of other adapters than the used ones go with all that they held; the others compute as before."""
    store = make_store(SMALL)
    place = placed_with_warmup(store, device, residents)
    path, lora_cache = place.engine.callbacks, place.engine.executor.lora_cache
    both = with_adapters(store, small_batch(SMALL, 3, device), [0, 1, -1], ADAPTERS[:2])
    last = with_adapters(store, small_batch(SMALL, 3, device), [0, -1, 0], [ADAPTERS[2]])
    first = with_adapters(store, small_batch(SMALL, 3, device), [0, -1, 0], [ADAPTERS[0]])
    wanted = [place.engine.infer(place.layer, one).clone() for one in (both, last, first)]
    place.engine.infer(place.layer, replace(both, mixed=None))
    assert len(path._prepared) == 4 and len(path._buffers) == 1
    path._captured[0] = [(ready, store) for ready in path._prepared.values()]
    assert first.mixed is not None
    used = tuple(first.mixed.adapters)
    path.release_unused_adapters({used})
    assert {key[2] for key in path._prepared} == {(), used} and len(path._captured[0]) == 2
    held = [id(ADAPTERS[0])] if residents else []
    assert list(lora_cache._pins) == held and [key[1] for key in path._lora_pointers] == ([used] if residents else [])
    again = [place.engine.infer(place.layer, one) for one in (both, last, first)]
    assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))


def test_pinned_adapters_stay_within_the_budget() -> None:
    wide, device = 2 * SMALL.intermediate, torch.device("cpu")
    size = sum(
        2 * (pair.a.numel() + pair.b.numel()) for pair in LoraCache(device, 1 << 30).get(ADAPTERS[0], wide).values()
    )
    lora_cache = LoraCache(device, size)
    first = lora_cache.pin(ADAPTERS[0], wide)
    lora_cache.get(ADAPTERS[1], wide)
    lora_cache.get(ADAPTERS[2], wide)
    assert lora_cache.get(ADAPTERS[0], wide) is first
    with pytest.raises(InputError, match=f"{size} at most"):
        LoraPointers.pin(lora_cache, ADAPTERS[:2], wide, device)
    lora_cache.unpin(ADAPTERS[0])
    LoraPointers.pin(lora_cache, ADAPTERS[2:], wide, device)
    assert lora_cache.get(ADAPTERS[0], wide) is not first, "let go of, and the longest unused"


def test_adapters_over_the_budget_leave_nothing_pinned() -> None:
    store = make_store(SMALL)
    place = placed_with_warmup(store, "cpu", (1, 4))
    place.engine.executor.lora_cache = lora_cache = LoraCache(torch.device("cpu"), 1)
    with pytest.raises(InputError, match="with residents"):
        place.engine.infer(place.layer, with_adapters(store, small_batch(SMALL, 2, "cpu"), [0, 1]))
    assert not lora_cache._pins and not place.engine.callbacks._lora_pointers
    given = small_batch(SMALL, 2, "cpu")
    assert relative_error(place.engine.infer(place.layer, given), cpu_output(store, given)) < CLOSE


@pytest.mark.skipif(not INTERPRETED, reason="no interpreter")
@pytest.mark.parametrize(
    ("gate", "spec", "grouped"),
    [
        (Gate("silu"), "bf16", 0),
        (Gate("gelu"), "bf16", 2),
        (Gate("silu", 0.5), "bf16", 2),
        (Gate("swiglu_oai", 0.5, 1.702), "bf16", 0),
        (Gate("swiglu_oai", 0.5, 1.702), "int4:32", 4),
        (Gate("gelu"), "int4:32", 4),
    ],
)
def test_kernels_match_torch_in_the_interpreter(
    gate: Gate, spec: str, grouped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases and LoRA; alone, or in groups of so many rows."""
    gemv = pytest.importorskip("ktransformers.place.gpu.resident_decode_triton")
    monkeypatch.setattr(gemv, "group_rows", lambda *sizes: grouped)
    store = make_store(SMALL, spec, biased=True)
    place = placed_for_inference(store, "cpu", "resident", residents=(1, 4, 5))
    layer, cache, device = (
        replace(place.layer.packed, gate=gate),
        place.engine.executor.residents[0],
        torch.device("cpu"),
    )
    wide = [*ADAPTERS[:2], _of_rank(40)]
    pointers = LoraPointers.pin(LoraCache(device, 1 << 30), wide, layer.geometry.first.out_rows, device)
    given, where = small_batch(SMALL, 5, "cpu"), find_resident_slots(layer, cache)
    rows = torch.tensor([0, -1, 1, 2, 2], dtype=torch.int32)
    inputs = (given.hidden, given.ids, given.weights)

    def computed(lora: resident_decode.Lora | None) -> Tensor:
        first, down = (None if lora is None else pointers.kernel_arguments(lora[0], name) for name in ("first", "down"))
        fused, sizes = gate if gemv.fuses(gate) else None, layer.geometry
        groups = gemv.group_routes(given.ids, where, None, sizes.first, sizes.down) if grouped else None
        h = gemv.first(*inputs[:2], where, cache.first, layer.biases[0], sizes.first, fused, first, groups=groups)
        h = h if fused is not None else resident_decode._activate(h, gate, True)
        found: Tensor = gemv.down(h, *inputs[1:], where, cache.down, layer.biases[1], sizes.down, down, groups=groups)
        return found

    got, bare = computed((rows, pointers)), computed(None)
    want = resident_decode._reference_forward(layer, cache, where, *inputs, (rows, pointers))
    assert relative_error(got, want) < 0.02 < 0.1 < relative_error(bare, want)
    assert torch.equal(got[1], bare[1])


def _of_rank(rank: int) -> ExpertLora:
    made = torch.Generator().manual_seed(rank)
    e, h, i = SMALL.experts, SMALL.hidden, SMALL.intermediate
    tensors = (torch.randn(e, rank, i, generator=made) / 9, torch.randn(e, h, rank, generator=made) / 9)
    return ExpertLora.of_tensors(("down_a", "down_b"), tensors, (1.0, 1.0, 1.0))


def test_adapter_indices_are_read_from_the_batch() -> None:
    """By the door that a model takes."""
    store = make_store(SMALL)
    place = placed_with_warmup(store, "cpu", (1, 4))
    given = with_adapters(store, small_batch(SMALL, 4, "cpu"), [0, 2, -1, 1])
    assert given.mixed is not None
    got = place.infer(given)
    assert relative_error(got, cpu_output_with_adapters(store, given)) < CLOSE and not place.layer.last_split
