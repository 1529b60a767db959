"""Decode steps in a CUDA graph: experts on the CPU and on the GPU, captured once and replayed without Python, compared
with the same calls outside of a graph. Host callbacks are nodes of the graph; a replay with other inputs is another
batch."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from ktransformers.experts.backend import ExpertBatch
from ktransformers.ground.errors import DamagedFileError, InputError
from ktransformers.nn import ExpertStore
from ktransformers.place import attach
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.placed_experts import PlacedExperts
from tests.support.placed_experts import (
    ADAPTERS,
    CLOSE,
    QWEN,
    SMALL,
    Size,
    cpu_output,
    cpu_output_with_adapters,
    make_store,
    placed_for_inference,
    relative_error,
    small_batch,
    tiny_packed_model,
    with_adapters,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*bf16.*")]
GPU = "cuda:0"
LENGTH = 32  # of the static cache


def capture(place: PlacedExperts, given: ExpertBatch) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    with torch.no_grad():
        place.engine.infer(place.layer, given)  # what is made once is made outside
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = place.engine.infer(place.layer, given)
    return graph, out


def replay(graph: torch.cuda.CUDAGraph, static: ExpertBatch, given: ExpertBatch) -> None:
    for name in ("hidden", "ids", "weights"):
        getattr(static, name).copy_(getattr(given, name))
    graph.replay()


@pytest.mark.parametrize(("size", "tokens"), [(SMALL, 1), (SMALL, 7), (QWEN, 1), (QWEN, 16)])
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_replays_match_the_cpu(share: float, size: Size, tokens: int) -> None:
    store = make_store(size)
    place = placed_for_inference(store, GPU, "resident", residents=tuple(range(int(share * size.experts))))
    static = small_batch(size, tokens, GPU)
    graph, out = capture(place, static)
    for seed in range(1, 5):
        given = small_batch(size, tokens, GPU, seed=seed)
        replay(graph, static, given)
        got, want = out.cpu(), cpu_output(store, given)
        assert torch.equal(got, want) if not share else relative_error(got, want) < CLOSE
        assert torch.equal(got, place.engine.infer(place.layer, given).cpu()), "captured or not, the same bits"
        assert relative_error(place.engine.forward(place.layer, given, False)[0], want) < 0.01
    counts = place.engine.counts(place.layer)  # of calls that went another way
    place.engine.callbacks.add_counts(0, counts)
    ids = torch.cat([small_batch(size, tokens, "cpu", seed=seed).ids for seed in (0, *[1, 2, 3, 4] * 3)])
    ids = ids[(ids >= 0) & (ids < size.experts)]
    assert np.array_equal(counts, torch.bincount(ids, minlength=size.experts)), "replays are counted too"


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("residents", [(), (0, 3)])
def test_a_damaged_expert_is_an_error_before_its_result_is_used(residents: tuple[int, ...], captured: bool) -> None:
    """The CPU compares it with its checksum in a host callback, which cannot raise."""
    packed = make_store(SMALL)
    checksums = torch.tensor(packed.checksums())
    checksums[5] += 1
    store = ExpertStore(SMALL.experts, SMALL.hidden, SMALL.intermediate)
    store.adopt(**packed.memory(), checksums=checksums, source="packed-00000.safetensors")
    place = placed_for_inference(store, GPU, "host_callback", residents=residents)
    whole = small_batch(SMALL, 1, GPU)
    whole.ids.copy_(torch.tensor([[1, 2]]))
    damaged = replace(whole, ids=torch.tensor([[1, 5]], device=GPU))
    if captured:
        graph, _ = capture(place, whole)
        replay(graph, whole, damaged)
        torch.cuda.synchronize()
        raises = functools.partial(place.engine.callbacks.raise_pending, 1)
    else:
        raises = place.engine.callbacks.raise_launched
        place.engine.infer(place.layer, whole)
        raises()
        place.engine.infer(place.layer, damaged)
    with pytest.raises(DamagedFileError, match=r"packed-00000\.safetensors, expert 5"):
        raises()
    again = small_batch(SMALL, 1, GPU)
    again.ids.copy_(torch.tensor([[1, 2]]))
    assert relative_error(place.engine.infer(place.layer, again).cpu(), cpu_output(packed, again)) < CLOSE
    place.engine.callbacks.raise_launched()


@pytest.mark.parametrize("spec", ["bf16", "int4:32"])
@pytest.mark.parametrize("residents", [(), (0, 2, 3, 7), tuple(range(8))], ids=["none", "some", "all"])
def test_replays_with_adapters_match_the_cpu(residents: tuple[int, ...], spec: str) -> None:
    """From replay to replay another mixture, one behind the other; a row without has the bits that it has alone."""
    store = make_store(SMALL, spec)
    place = placed_for_inference(store, GPU, "resident", residents=residents)
    place.engine.callbacks.warming_up = True
    static = with_adapters(store, small_batch(SMALL, 4, GPU), [-1] * 4)
    graph, out = capture(place, static)
    mixtures = [[0, 1, 2, -1], [-1, 2, 0, 1], [1, -1, -1, 1], [2, 0, 0, -1]]
    batches = [with_adapters(store, small_batch(SMALL, 4, GPU, seed=seed), rows) for seed, rows in enumerate(mixtures)]
    found = []
    for given in batches:
        assert static.mixed is not None and given.mixed is not None
        static.mixed.rows.copy_(given.mixed.rows)
        replay(graph, static, given)
        found.append(out.clone())
    for given, got, rows in zip(batches, found, mixtures, strict=True):
        want = cpu_output_with_adapters(store, given)
        assert relative_error(got, want) < CLOSE if residents else torch.equal(got.cpu(), want)
        alone = torch.tensor(rows) < 0
        bare = place.engine.infer(place.layer, replace(given, mixed=None))
        assert torch.equal(got.cpu()[alone], bare.cpu()[alone])
    path = place.engine.callbacks
    assert len(path._captured[0]) == 1
    del graph
    path.release_unused_adapters(set())
    assert not path._captured[0] and not path._lora_pointers and not place.engine.executor.lora_cache._pins


@pytest.mark.parametrize("spec", ["int4:32", "nvfp4", "q5_1"])
def test_quantised_residents_are_dequantised_in_a_graph(spec: str) -> None:
    store = make_store(SMALL, spec)
    place = placed_for_inference(store, GPU, "resident", residents=(0, 2, 3, 7))
    static = small_batch(SMALL, 5, GPU)
    graph, out = capture(place, static)
    for seed in range(1, 4):
        given = small_batch(SMALL, 5, GPU, seed=seed)
        replay(graph, static, given)
        assert relative_error(out, cpu_output(store, given)) < CLOSE


def test_queued_replays_match_the_cpu() -> None:
    """Many are queued before the first has ended; each sees the buffers in the order of the stream."""
    store = make_store(QWEN)
    place = placed_for_inference(store, GPU, "resident", residents=tuple(range(32)))
    static = small_batch(QWEN, 2, GPU)
    graph, out = capture(place, static)
    batches = [small_batch(QWEN, 2, GPU, seed=seed) for seed in range(20)]
    found = []
    for given in batches:
        replay(graph, static, given)
        found.append(out.clone())
    for given, got in zip(batches, found, strict=True):
        assert relative_error(got, cpu_output(store, given)) < CLOSE


def test_graph_outlives_its_residents() -> None:
    """They get another cache, and the graph computes the same results, with that layer on the CPU."""
    store = make_store(SMALL)
    place = placed_for_inference(store, GPU, "resident", residents=(1, 6))
    static = small_batch(SMALL, 4, GPU)
    graph, out = capture(place, static)
    given = small_batch(SMALL, 4, GPU, seed=3)
    given.ids[:, 0] = torch.tensor([1, 6, 1, 6], device=GPU)
    replay(graph, static, given)
    assert relative_error(out, cpu_output(store, given)) < CLOSE
    place.engine.executor.residents[0].first.zero_()
    replay(graph, static, given)
    assert relative_error(out, cpu_output(store, given)) > 0.1, "the residents' bytes are read"
    place.engine.callbacks.drop_calls(0)
    cache = place.engine.executor.residents[0] = ExpertCache(place.layer.packed.geometry, 3, torch.device(GPU), None)
    cache.fetch(0, place.layer.packed.source, (0, 1, 7))
    replay(graph, static, given)
    assert torch.equal(out.cpu(), cpu_output(store, given))
    graph, out = capture(place, static)
    replay(graph, static, given)
    assert relative_error(out, cpu_output(store, given)) < CLOSE


def test_calls_on_another_stream_wait() -> None:
    store = make_store(SMALL)
    place = placed_for_inference(store, GPU, "resident", residents=(1, 6))
    first, second = small_batch(SMALL, 4, GPU), small_batch(SMALL, 4, GPU, seed=1)
    place.engine.infer(place.layer, first)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    for _ in range(10):
        one = place.engine.infer(place.layer, first)
        with torch.cuda.stream(stream):
            two = place.engine.infer(place.layer, second)
        torch.cuda.synchronize()
        assert (
            relative_error(one, cpu_output(store, first)) < CLOSE
            and relative_error(two, cpu_output(store, second)) < CLOSE
        )


def test_formats_without_a_triton_decoder_are_refused() -> None:
    store = make_store(Size(8, 256, 256, 2, 41, 4), "tq1_0")
    place = placed_for_inference(store, GPU, "resident", residents=(1, 6))
    given = small_batch(Size(8, 256, 256, 2, 41, 4), 4, GPU)
    assert relative_error(place.engine.infer(place.layer, given), cpu_output(store, given)) < 0.01
    assert place.layer.last_split["forward"].resident or place.layer.last_split["forward"].cpu


def test_refused_captures_give_the_reason() -> None:
    store = make_store(SMALL)
    place = placed_for_inference(store, GPU, "resident", residents=(1, 6))
    static = small_batch(SMALL, 4, GPU)

    def attempt(given: ExpertBatch) -> None:
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device=GPU)  # torch warns of empty graphs
            place.engine.infer(place.layer, given)

    with pytest.raises(InputError, match="not computed before"):
        attempt(static)
    place.engine.infer(place.layer, static)
    with pytest.raises(InputError, match="LoRA"):
        attempt(replace(static, lora=ADAPTERS[0]))
    with pytest.raises(InputError, match="33 tokens"):
        attempt(small_batch(SMALL, 33, GPU))
    graph, out = capture(place, static)  # nothing is left of the attempts
    graph.replay()
    assert relative_error(out, cpu_output(store, static)) < CLOSE


def positions(model: Any, at: Tensor) -> dict[str, Tensor]:
    """With a mask that is ready: what transformers makes of none differs by its version."""
    visible = torch.arange(LENGTH, device=GPU)[None] <= at[:, None]
    found = {"position_ids": at[None], "attention_mask": visible[None, None]}
    if "cache_position" in inspect.signature(type(model).forward).parameters:
        found["cache_position"] = at
    return found


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_model_decodes_from_a_graph(share: float) -> None:
    """Stock transformers with a static cache: the whole step, attention, router, experts and head, captured once."""
    model: Any = tiny_packed_model().eval().to(GPU)
    placement = attach(model, policy="resident")
    assert placement is not None and not placement.left
    placement.place_residents(ratio=share)
    prompt = torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(1)).to(GPU)
    steps, cache = 12, StaticCache(config=model.config, max_cache_len=LENGTH)

    def prefill(cache: StaticCache) -> Tensor:
        at = torch.arange(prompt.shape[1], device=GPU)
        logits: Tensor = model(prompt, past_key_values=cache, use_cache=True, **positions(model, at)).logits
        return logits[:, -1:].argmax(-1)

    def step(token: Tensor, at: Tensor, cache: StaticCache) -> Tensor:
        logits: Tensor = model(token, past_key_values=cache, use_cache=True, **positions(model, at)).logits
        return logits

    with torch.inference_mode():
        token, want, scores = prefill(cache), [], []
        for at in range(9, 9 + steps):
            logits = step(token, torch.tensor([at], device=GPU), cache)
            token = logits[:, -1:].argmax(-1)
            want.append(int(token))
            scores.append(logits.float().cpu())
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        token, at_static = prefill(cache), torch.tensor([9], device=GPU)
        static = token.clone()
        got = [int(step(static, at_static, cache)[:, -1:].argmax(-1))]  # the first step is the warm-up, and counts
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step(static, at_static, cache)
        for at in range(10, 9 + steps):
            static.fill_(got[-1])
            at_static.fill_(at)
            graph.replay()
            got.append(int(logits[:, -1:].argmax(-1)))
            assert relative_error(logits.float(), scores[at - 9]) < 0.02
    assert got == want
