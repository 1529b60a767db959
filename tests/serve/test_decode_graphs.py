"""Decode steps from a table of fixed size: which steps are captured, padding, KV cache slots that grow, residents that
change, failed captures. Here a recorder that computes again stands in for CUDA graphs, and torch for Triton; the rest
is what a GPU runs (tests/serve/test_gpu_decode_graphs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.cuda_graphs import CAPTURE_AT
from ktransformers.nn.experts import pack_module, select_implementation
from ktransformers.nn.padding import mask_padding, use_padding_mask
from ktransformers.place import attach
from ktransformers.place.placement import Placement
from ktransformers.serve.engine.forward import Chunk, Forward
from ktransformers.serve.engine.kv_cache import KVSlot
from ktransformers.serve.engine.sampling import Sampling
from ktransformers.serve.graphs.decode_graphs import DecodeGraphs, StepKey, why_not
from tests.nn.families import build
from tests.serve.conftest import Bench
from tests.serve.test_engine import close, text
from tests.support.decode_recorder import Recorder, graphs_of

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


@pytest.fixture(scope="module")
def placed(model_directory: Path, adapters: dict[str, Path]) -> Iterator[tuple[Bench, Placement]]:
    bench = Bench(model_directory, adapters)
    placement = attach(bench.model, policy="resident", device="cpu")
    assert placement is not None
    yield bench, placement
    placement.detach()


@pytest.fixture
def recorder(placed: tuple[Bench, Placement]) -> Iterator[Recorder]:
    bench, placement = placed
    placement.place_residents(count=0)
    made = Recorder(placement)
    bench.forward.graphs = DecodeGraphs(bench.model, placement, made)
    yield made
    bench.forward.graphs = None


def test_answers_are_the_same(placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench) -> None:
    """Sequences of several lengths that join and leave; prompts in between go the other way."""
    here, _ = placed
    lengths = [(5, 30), (40, 12), (9, 21), (70, 8), (1, 15)]
    prompts = [text(seed, length) for seed, (length, _) in enumerate(lengths)]
    engine = here.engine(running=3)
    made = [here.sequence(prompt, max_tokens=new) for prompt, (_, new) in zip(prompts, lengths, strict=True)]
    here.run(engine, *(one for one, _ in made))
    graphs = graphs_of(here)
    assert recorder.captures == 3 and 0 < graphs.replayed < engine.counts.steps
    for prompt, (_, new), (_, heard) in zip(prompts, lengths, made, strict=True):
        assert close(heard, bench.alone(prompt, max_tokens=new))


def test_slots_grow_and_prefixes_are_found(placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench) -> None:
    here, _ = placed
    prompt, engine = text(3, 60), here.engine()
    first, heard = here.sequence(prompt, max_tokens=100)
    here.run(engine, first)
    assert graphs_of(here).replayed > 90 and recorder.captures == 1
    assert close(heard, bench.alone(prompt, max_tokens=100))
    longer = prompt + heard.tokens[:80]
    again, later = here.sequence(longer, max_tokens=20)
    here.run(engine, again)
    assert later.events[-1].cached == len(longer) - 1
    assert close(later, bench.alone(longer, max_tokens=20))


def test_scored_prompts_are_not_captured(placed: tuple[Bench, Placement], recorder: Recorder) -> None:
    here, _ = placed
    asked = {"max_tokens": 0, "prompt_logprobs": True, "logprobs": 0}
    here.run(here.engine(chunk=1), here.sequence(text(2, 9), **asked)[0])
    graphs = graphs_of(here)
    assert not graphs.replayed and not recorder.captures, "scored prompts are launched"
    here.run(here.engine(), here.sequence(text(5, 9), max_tokens=10)[0])
    assert graphs.replayed == 10 - 1 - (CAPTURE_AT - 1)


def test_draws_are_those_of_the_logits(placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench) -> None:
    """Greedy and drawn rows in one step."""
    here, _ = placed
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=7)
    both = []
    for one in (here, bench):
        engine = one.engine()
        made = [
            one.sequence(text(1, 12), max_tokens=14, sampling=sampling),
            one.sequence(text(2, 30), max_tokens=14),
        ]
        one.run(engine, *(sequence for sequence, _ in made))
        both.append([heard for _, heard in made])
    assert graphs_of(here).replayed
    assert all(close(a, b) for a, b in zip(*both, strict=True))


def test_padding_rows_are_not_routed(placed: tuple[Bench, Placement], recorder: Recorder) -> None:
    """Three sequences in a step of four: the fourth row has no slot, and no expert is counted for it."""
    here, placement = placed
    made = [here.sequence(text(seed, 6), max_tokens=20) for seed in range(3)]
    before = [int(row.sum()) for row in placement.counts()]
    engine = here.engine()
    here.run(engine, *(one for one, _ in made))
    graphs = graphs_of(here)
    assert list(graphs.graphs.captured) == [(4, ())]
    table = graphs.graphs.captured[StepKey(4, ())].table
    assert table[3].tolist() == [1, 1, 1, 0] and not table[:, 3].any()
    top_k = here.model.config.num_experts_per_tok
    tokens = 3 * (6 + 19) + 3  # the step that was recorded was computed once more
    for row, then in zip(placement.counts(), before, strict=True):
        assert int(row.sum()) - then == tokens * top_k


def test_ids_of_padding() -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert mask_padding(ids) is ids
    with use_padding_mask(torch.tensor([True, False, True])):
        assert mask_padding(ids).tolist() == [[1, 2], [-1, -1], [5, 6]]


def test_residents_change(placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench) -> None:
    here, placement = placed
    placement.place_residents(count=2)
    engine = here.engine()
    first, heard = here.sequence(text(8, 10), max_tokens=30)
    engine.submit([first])
    for _ in range(12):
        engine.step()
    graphs = graphs_of(here)
    assert recorder.captures == 1
    placement.update_residents()
    for _ in range(5):
        engine.step()
    assert recorder.captures == 1, "in the same memory"
    few = placement.engines[0].few
    few._captured[0] = [(ready, placement.layers[0].store) for ready in few._ready.values()]  # as a capture does
    placement.place_residents(count=3)
    here.run(engine)
    assert recorder.captures == 2, "captured anew"
    assert not few._captured, "memory of the residents before is freed"
    assert heard.finish == "length" and graphs.replayed == 29 - 2 * (CAPTURE_AT - 1)
    alone = bench.alone(text(8, 10), max_tokens=30)
    assert torch.allclose(torch.tensor(heard.logprobs[:1]), torch.tensor(alone.logprobs[:1]), atol=0.05)


@pytest.mark.parametrize(
    ("failure", "subjects"),
    [
        (lambda: InputError("CUDA graph", "this", "that"), ["decode steps of 2 rows", "decode steps of 1 rows"]),
        (lambda: RuntimeError("not while capturing"), ["decode steps"]),
        (lambda: torch.OutOfMemoryError("tried to allocate"), ["decode steps"]),
    ],
    ids=["input", "capture", "memory"],
)
def test_failed_capture_is_logged_once_and_answers_go_on(
    failure: Callable[[], Exception],
    subjects: list[str],
    placed: tuple[Bench, Placement],
    recorder: Recorder,
    bench: Bench,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An input that a graph cannot have is refused for that size, any other failure for good."""
    here, _ = placed
    recorder.failure = failure
    made = [here.sequence(text(seed, 10), max_tokens=new) for seed, new in ((1, 10), (2, 20))]
    with caplog.at_level("WARNING"):
        here.run(here.engine(), *(one for one, _ in made))
    lines = [line.partition(", launched kernel by kernel instead")[0] for line in caplog.messages if "CUDA" in line]
    assert lines == [f"no further CUDA graphs of {subject}" for subject in subjects]
    assert not graphs_of(here).replayed and graphs_of(here).graphs.closed == (len(subjects) == 1)
    for (_, heard), (seed, new) in zip(made, ((1, 10), (2, 20)), strict=True):
        assert close(heard, bench.alone(text(seed, 10), max_tokens=new))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral", "glm4_moe", "qwen2_moe"])
def test_families(family: str, device: str) -> None:
    """Sinks and windows, keys and values of different sizes, dense layers, shared experts; the same tokens are told
    both times, so that a near tie decides nothing. On a GPU these are real graphs."""
    model: Any = build(family)
    for module in expert_modules(model).values():
        pack_module(module, free=True)
    select_implementation(model)
    forward = Forward(model.to(device))
    placement = attach(model, policy="resident", device=device)
    assert placement is not None and not placement.left
    placement.place_residents(count=2)
    prompts = [[(seed + 7 * at) % 90 for at in range(length)] for seed, length in ((3, 5), (4, 21), (5, 12))]
    with torch.inference_mode():
        told, wanted = decode(forward, prompts, 12)
        assert not (why := why_not(forward, placement)) or device == "cpu", why
        forward.graphs = DecodeGraphs(model, placement, Recorder(placement) if device == "cpu" else None)
        _, found = decode(forward, prompts, 12, told)
    assert forward.graphs.replayed == 12 - CAPTURE_AT + 1
    for got, want in zip(found, wanted, strict=True):  # residents round what they are given to bf16
        assert float((got - want).norm() / want.norm()) < 1e-2
    placement.detach()


def decode(
    forward: Forward, prompts: list[list[int]], new: int, told: list[list[int]] | None = None
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """All prompts, then `new` steps of a token each: the most likely ones, or those that are told; and all logits."""
    slots = [KVSlot(None, capacity=64) for _ in prompts]
    pieces = [Chunk(slot, prompt, 0, None, greedy=True) for slot, prompt in zip(slots, prompts, strict=True)]
    tokens, logits = list[list[int]](), list[torch.Tensor]()
    for step in range(new + 1):
        found = [one for one in forward.run(pieces) if one is not None]
        logits.append(torch.stack([one.logits for one in found]).float().cpu())
        tokens.append([one.token for one in found if one.token is not None] if told is None else told[step])
        pieces = [
            Chunk(slot, [token], slot.length, None, greedy=True) for slot, token in zip(slots, tokens[-1], strict=True)
        ]
    return tokens, logits


def test_reason_for_no_graphs_names_device_or_switch(
    placed: tuple[Bench, Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, placement = placed
    assert "on cpu, not on one GPU" in why_not(here.forward, placement)
    monkeypatch.setenv("KT_GRAPHS", "experts,attention")
    assert why_not(here.forward, placement) == "KT_GRAPHS does not name decode"
