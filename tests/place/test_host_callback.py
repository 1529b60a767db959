"""Small batches through host callbacks: weight offsets, skip masks, buffers, counts, and changes of residents. On
torch's CPU device the calling thread submits the calls that a stream submits on a GPU, and torch replaces Triton.
Compared with the CPU's own store: both keep gate and up in float32, so results differ by the order of sums and the
rounding of the CPU's share to bf16."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.gate import Gate
from ktransformers.experts.store import NO_DROPOUT
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore
from ktransformers.place.gpu import resident_decode
from ktransformers.place.gpu.executor import LayerOnDevice
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.host_callback import HostCallbackPath, ResidentTable
from ktransformers.place.placement import geometry_of
from ktransformers.plan.modes import MAX_CAPTURED_TOKENS, MAX_DECODE_TOKENS
from ktransformers.quantized.gpu.dequantize import decode_plain
from ktransformers.quantized.gpu.layout import PackedMatrix, format_of
from tests.support.placed_experts import (
    ADAPTERS,
    CLOSE,
    SMALL,
    Size,
    cpu_output,
    devices,
    make_store,
    placed_for_inference,
    relative_error,
    small_batch,
)

ODD = Size(6, 80, 48, 3, 5, 4)  # half blocks that are not full
pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(32, 64), (48, 80), (80, 48), (33, 256)])
def test_weight_offsets_follow_the_layout(rows: int, columns: int, paired: bool) -> None:
    matrix = PackedMatrix(rows, columns, (format_of("bf16"), format_of("bf16")), paired)
    numbers = torch.arange(matrix.expert_bytes // 2, dtype=torch.int16)  # bits that decoding must not change
    want = torch.empty(matrix.out_rows, columns, dtype=torch.bfloat16)
    decode_plain(numbers.view(torch.uint8), matrix, want)
    assert torch.equal(numbers[resident_decode.weight_offsets(matrix)], want.view(torch.int16))


@devices
@pytest.mark.parametrize("residents", [(), (1, 4), tuple(range(6))], ids=["none", "some", "all"])
@pytest.mark.parametrize("biased", [False, True])
def test_outputs_match_the_cpu(biased: bool, residents: tuple[int, ...], device: str) -> None:
    store = make_store(ODD, biased=biased)
    place = placed_for_inference(store, device, "resident", residents=residents)
    for tokens in (1, 5, 2, 5):
        given = small_batch(ODD, tokens, device, seed=tokens)
        got = place.engine.callbacks.forward(place.layer.packed, store, given)
        assert got.dtype == torch.bfloat16 and got.device == given.hidden.device
        want = cpu_output(store, given)
        assert torch.equal(got.cpu(), want) if not residents else relative_error(got, want) < CLOSE
    assert not place.layer.counts.any() and not place.layer.last_split, "the host was told nothing"
    asked = place.engine.forward(place.layer, given, False)[0]
    assert relative_error(got, asked.cpu()) < 0.01


@devices
@pytest.mark.parametrize("gate", [Gate("gelu"), Gate("silu", limit=0.5), Gate("swiglu_oai", limit=7.0, alpha=1.702)])
def test_gates_and_dtypes_match_the_cpu(gate: Gate, device: str) -> None:
    """Of hidden states, routing weights and ids; and gates that no kernel has."""
    e, h, i = ODD.experts, ODD.hidden, ODD.intermediate
    plain = make_store(ODD)
    store = ExpertStore(e, h, i, activation=gate.activation, limit=gate.limit, alpha=gate.alpha)
    store.pack(**{name: torch.stack([plain.decode(name, at) for at in range(e)]) for name in ("gate", "up", "down")})
    place = placed_for_inference(store, device, "resident", residents=(0, 2, 3))
    place.layer.packed = replace(place.layer.packed, gate=gate)
    given = small_batch(ODD, 4, device)
    for hidden, weights, ids in (
        (torch.bfloat16, torch.bfloat16, torch.int64),
        (torch.float32, torch.float32, torch.int32),
    ):
        cast = replace(given, hidden=given.hidden.to(hidden), weights=given.weights.to(weights), ids=given.ids.to(ids))
        got = place.engine.infer(place.layer, cast)
        assert got.dtype == hidden and relative_error(got, cpu_output(store, cast)) < CLOSE


@devices
def test_experts_without_a_gate_match_the_cpu(device: str) -> None:
    e, h, i = ODD.experts, ODD.hidden, ODD.intermediate
    plain = make_store(ODD)
    store = ExpertStore(e, h, i, gated=False, activation="relu2")
    store.pack(**{name: torch.stack([plain.decode(name, at) for at in range(e)]) for name in ("up", "down")})
    place = placed_for_inference(store, device, "resident", residents=(0, 2, 3, 5))
    place.layer.packed = replace(place.layer.packed, gate=Gate("relu2"))
    given = small_batch(ODD, 4, device)
    assert relative_error(place.engine.infer(place.layer, given), cpu_output(store, given)) < CLOSE


@devices
def test_which_batches_are_refused(device: str) -> None:
    """Others go the way that asks for the ids."""
    store = make_store(SMALL)
    place = placed_for_inference(store, device, "resident", residents=(1,))
    callbacks, layer = place.engine.callbacks, place.layer.packed
    assert not callbacks.refusal(layer, small_batch(SMALL, MAX_DECODE_TOKENS, device), "resident")
    assert callbacks.refusal(layer, small_batch(SMALL, MAX_DECODE_TOKENS + 1, device), "resident")
    assert callbacks.refusal(layer, small_batch(SMALL, 1, device), "stream")
    assert callbacks.refusal(layer, replace(small_batch(SMALL, 1, device), lora=ADAPTERS[0]), "resident")
    assert callbacks.refusal(layer, empty(device), "resident")
    bare = placed_for_inference(store, device, "resident", residents=())
    assert bare.engine._inference_mode(bare.layer, small_batch(SMALL, 2, device)) == "host_callback", (
        "buffers are allocated"
    )
    bare.engine.infer(bare.layer, small_batch(SMALL, 2, device))
    assert bare.engine._inference_mode(bare.layer, small_batch(SMALL, 2, device)) == "cpu"
    bare.engine.dispatcher.forced = "host_callback"
    assert bare.engine._inference_mode(bare.layer, small_batch(SMALL, 2, device)) == "host_callback"


def empty(device: str) -> ExpertBatch:
    return ExpertBatch(
        torch.empty(0, SMALL.hidden, dtype=torch.bfloat16, device=device),
        torch.empty(0, SMALL.top_k, dtype=torch.int64, device=device),
        torch.empty(0, SMALL.top_k, device=device),
        None,
        NO_DROPOUT,
    )


@devices
@pytest.mark.parametrize("residents", [(), (1, 4, 6)], ids=["none", "some"])
@pytest.mark.parametrize("spec", ["int8", "int4:32", "mxfp4", "nvfp4", "q4_0", "q5_0"])
def test_formats_match_the_cpu(
    spec: str, residents: tuple[int, ...], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(SMALL, spec)
    place = placed_for_inference(store, device, "resident", residents=residents)
    given = small_batch(SMALL, 5, device)
    got, want = place.engine.infer(place.layer, given), cpu_output(store, given)
    assert not place.layer.last_split, "somebody asked"
    assert relative_error(got, want) < CLOSE if residents else torch.equal(got.cpu(), want)
    monkeypatch.setattr(resident_decode, "DECODED_BYTES", 9 * geometry_of(store).decoded_bytes)
    refused = not residents or resident_decode.decodes_first(geometry_of(store), torch.device(device))
    mode = place.engine._inference_mode(place.layer, given)
    assert (mode != "host_callback") == refused, "no residents, or too large once decoded"
    assert not place.engine.callbacks.refusal(place.layer.packed, small_batch(SMALL, 4, device), "resident")
    place.engine.callbacks.warming_up = True
    assert not place.engine.callbacks.refusal(place.layer.packed, given, "resident"), (
        "in a graph, some tokens at a time"
    )
    assert torch.equal(place.engine.infer(place.layer, given), got)


@devices
def test_add_counts_fetches_rows_counted_on_the_device(device: str) -> None:
    store = make_store(SMALL)
    place = placed_for_inference(store, device, "resident", residents=(0, 3))
    counts = np.zeros(SMALL.experts, np.int64)
    place.engine.callbacks.add_counts(0, counts)
    assert not counts.any()
    seen = []
    for turn in range(3):
        given = small_batch(SMALL, 4, device, seed=turn)
        place.engine.infer(place.layer, given)
        seen.append(given.ids.cpu())
        if turn:
            place.engine.callbacks.add_counts(0, counts)
    ids = torch.cat(seen)
    assert np.array_equal(counts, torch.bincount(ids[(ids >= 0) & (ids < SMALL.experts)], minlength=SMALL.experts))


@devices
def test_changed_residents_are_used(device: str) -> None:
    """Residents in another cache are found by the next call, and none after the cache is gone."""
    store, given = make_store(SMALL), small_batch(SMALL, 4, device)
    place, want = placed_for_inference(store, device, "resident", residents=(1, 6)), cpu_output(store, given)
    path, sizes = place.engine.callbacks, geometry_of(store)
    with torch.inference_mode():
        assert relative_error(place.engine.infer(place.layer, given), want) < CLOSE
    held = residents_of(path, 0)
    assert held.skip.nonzero().flatten().tolist() == [1, 6] and held.slot_of.cpu()[[1, 6]].tolist() == [0, 1]
    cache = place.engine.executor.residents[0] = ExpertCache(sizes, 3, torch.device(device), None)
    cache.fetch(0, place.layer.packed.source, (0, 1, 7))
    assert relative_error(place.engine.infer(place.layer, given), want) < CLOSE
    assert residents_of(path, 0).skip.nonzero().flatten().tolist() == [0, 1, 7]
    del place.engine.executor.residents[0]
    assert torch.equal(place.engine.infer(place.layer, given).cpu(), want)


def residents_of(path: HostCallbackPath, index: int) -> ResidentTable:
    found = path._residents[index]
    assert found is not None
    return found


def test_graph_captured_before_a_new_cache_leaves_the_layer_to_the_cpu() -> None:
    """A captured call is kept when residents get another cache: its tables say that no expert is resident."""
    store, given = make_store(SMALL), small_batch(SMALL, 4, "cpu")
    place = placed_for_inference(store, "cpu", "resident", residents=(1, 6))
    path, packed = place.engine.callbacks, place.layer.packed
    place.engine.infer(place.layer, given)
    (ready,) = path._prepared.values()
    path._captured[0] = [(ready, store)]
    inputs, want, before = (given.hidden, given.ids, given.weights), cpu_output(store, given), path.generation
    assert ready.residents is residents_of(path, 0)
    assert ready.residents.skip.nonzero().flatten().tolist() == [1, 6]
    assert 0 < relative_error(path._forward(packed, ready, inputs), want) < CLOSE, "some are the device's"
    path.drop_calls(0)
    cache = place.engine.executor.residents[0] = ExpertCache(geometry_of(store), 3, torch.device("cpu"), None)
    cache.fetch(0, packed.source, (0, 1, 7))
    assert torch.equal(path._forward(packed, ready, inputs), want) and path.generation == before + 1
    assert relative_error(place.engine.infer(place.layer, given), want) < CLOSE


@devices
def test_capture_warmup_accepts_and_refuses_as_a_capture(device: str) -> None:
    """Also under `auto`, which asks for the ids of more than a few tokens; what a graph cannot hold is refused."""
    store = make_store(SMALL)
    place = placed_for_inference(store, device, "auto", residents=(1,))
    callbacks, given = place.engine.callbacks, small_batch(SMALL, 16, device)
    assert not callbacks.capturing
    callbacks.warming_up = True
    assert callbacks.capturing and place.engine._inference_mode(place.layer, given) == "host_callback"
    assert relative_error(place.engine.infer(place.layer, given), cpu_output(store, given)) < CLOSE
    callbacks.raise_pending(16)
    with pytest.raises(InputError, match="257 tokens"):
        callbacks.check(place.layer.packed, small_batch(SMALL, MAX_CAPTURED_TOKENS + 1, device), "auto")
    with pytest.raises(InputError, match="streamed"):
        callbacks.check(place.layer.packed, given, "stream")


def test_buffers_are_shared_by_layers_of_a_size() -> None:
    store, other = make_store(SMALL), make_store(SMALL, seed=1)
    place = placed_for_inference(store, "cpu", "resident")
    path = place.engine.callbacks
    packed: LayerOnDevice = replace(place.layer.packed, index=1)
    given = small_batch(SMALL, 2, "cpu")
    first, second = path.forward(place.layer.packed, store, given), path.forward(packed, other, given)
    assert torch.equal(first, cpu_output(store, given)) and torch.equal(second, cpu_output(other, given))
    assert len(path._buffers) == 1 and len(path._prepared) == 2
    with torch.inference_mode():
        path.forward(packed, other, small_batch(SMALL, 1, "cpu"))
    path.forward(
        packed, other, small_batch(SMALL, 1, "cpu")
    )  # buffers made in inference mode are written to outside of it
    assert len(path._buffers) == 2


def test_the_cpu_has_no_share_if_all_experts_are_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of graphs; in a graph only if its owner captures it again when residents change."""
    store = make_store(ODD)
    place = placed_for_inference(store, "cpu", "resident", residents=tuple(range(ODD.experts)))
    path, packed, given = place.engine.callbacks, place.layer.packed, small_batch(ODD, 4, "cpu")
    queued: list[int] = []
    queue = path._queue_cpu_share
    monkeypatch.setattr(path, "_queue_cpu_share", lambda *words: (queued.append(1), queue(*words)))
    alone = path.forward(packed, store, given)
    assert not queued and relative_error(alone, cpu_output(store, given)) < CLOSE
    monkeypatch.setattr(path, "_stream_captures", lambda: True)
    assert torch.equal(path.forward(packed, store, given), alone) and queued == [1]
    path.recaptured = True
    assert torch.equal(path.forward(packed, store, given), alone) and queued == [1]
    before = path.generation
    monkeypatch.setattr(path, "_stream_captures", lambda: False)
    path.drop_calls(packed.index)
    assert path.generation == before + 1, "graphs without the CPU's share are captured again"
