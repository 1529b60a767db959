"""Decode steps in which rows have adapters, several and none, from step to step others: which set of adapters a step
takes, and when sets are evicted. As in test_step_graphs.py a recorder stands in for CUDA graphs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.modeling.cuda_graphs import CAPTURE_AT
from ktransformers.place import attach
from ktransformers.place.gpu.multi_lora import LoraCache
from ktransformers.place.placement import Placement
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.graphs import step_graphs as graphs_module
from ktransformers.serve.graphs.adapter_set import AdapterSet
from ktransformers.serve.graphs.captured_step import ACTIVE, ADAPTER
from ktransformers.serve.graphs.step_graphs import MAX_ADAPTER_SETS, StepGraphs, StepKey
from ktransformers.serve.scheduler.forward import Chunk, Forward
from ktransformers.serve.scheduler.lora import LinearLora, LoadedAdapter, LoraModules
from tests.support.decode_recorder import EagerCapture, graphs_of
from tests.support.serving import EngineHarness, random_prompt, same_completion

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")
NEAR = 1e-2  # of the logits' norm: residents round what they are given to bf16
# Graphs are captured for one memory.
UNUSED = KVSlot.together(400, 64)
Names = list[str | None]


def all_of(harness: EngineHarness) -> dict[str, LoadedAdapter]:
    """The bench's adapters and two more: one with experts alone, one that lacks a layer."""
    one, two = harness.loaded["one"], harness.loaded["two"]
    first = next(iter(expert_modules(harness.model).values()))
    upper = dict(list(two.linears.items())[3:])
    experts = {module: packed for module, packed in two.experts.items() if module is not first}
    more = (replace(one, name="experts", linears={}), replace(two, name="upper", linears=upper, experts=experts))
    return harness.loaded | {adapter.name: adapter for adapter in more}


@pytest.fixture(scope="module")
def placed(model_directory: Path, adapters: dict[str, Path]) -> Iterator[tuple[EngineHarness, Placement]]:
    harness = EngineHarness(model_directory, adapters)
    placement = attach(harness.model, policy="resident", device="cpu")
    assert placement is not None
    harness.loaded = {
        name: harness.lora_modules.open(path, name, 1, str(model_directory)) for name, path in adapters.items()
    }
    harness.loaded = all_of(harness)  # behind the engine, as a server loads them
    yield harness, placement
    placement.detach()


@pytest.fixture
def capture(placed: tuple[EngineHarness, Placement]) -> Iterator[EagerCapture]:
    harness, placement = placed
    placement.place_residents(count=0)
    made = EagerCapture(placement)
    harness.forward.graphs = StepGraphs(harness.model, placement, made)
    yield made
    graphs_of(harness).clear()
    harness.forward.graphs = None


def steps(forward: Forward, loaded: dict[str, LoadedAdapter], mixtures: list[Names]) -> list[Tensor]:
    """Logits of steps in which row i of the batch has the i-th name's adapter; each (row, name) has a slot of its own,
    with a prompt that nobody looks at."""
    slots: dict[tuple[int, str | None], KVSlot] = {}
    found = []
    with torch.inference_mode():
        for number, names in enumerate(mixtures):
            pieces = []
            for row, name in enumerate(names):
                adapter = loaded[name] if name else None
                if (row, name) not in slots:
                    slots[row, name] = UNUSED.pop()
                    graphs, forward.graphs = forward.graphs, None
                    forward.run([Chunk(slots[row, name], random_prompt(row, 5 + row), 0, adapter)])
                    forward.graphs = graphs
                slot = slots[row, name]
                pieces.append(Chunk(slot, [17 + 3 * row + number], slot.length, adapter, greedy=True))
            rows = [one.logits for one in forward.run(pieces) if one is not None]
            found.append(torch.stack(rows).float().clone())
    return found


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, wanted, strict=True))


MIXTURES: dict[str, list[Names]] = {
    "one": [["one"]] * 6,
    "linears alone": [["attention", "attention"]] * 6,
    "experts alone": [["experts", None]] * 6,
    "ranks and the base": [["one", "two", None], ["two", None, "one"], ["one", "two", "two"]] * 2,
    "one lacks a layer": [["upper", "one", None], [None, "upper", "one"]] * 3,
    "everybody": [["one", "two", "attention", "experts", "upper", None]] * 5,
}


@pytest.mark.parametrize("count", [0, 2, 6])
@pytest.mark.parametrize("which", list(MIXTURES))
def test_mixed_adapters_match_eager(
    which: str, count: int, placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    """Against the CPU without an engine, step by step with the same tokens."""
    placed_harness, placement = placed
    placement.place_residents(count=count)
    mixtures = MIXTURES[which]
    wanted = steps(harness.forward, all_of(harness), mixtures)
    found = steps(placed_harness.forward, placed_harness.loaded, mixtures)
    assert capture.captures == 1 and graphs_of(placed_harness).replayed == len(mixtures) - CAPTURE_AT + 1
    assert apart(found, wanted) < (NEAR if count else 1e-4)
    base = steps(harness.forward, all_of(harness), [[None] * len(names) for names in mixtures])
    assert apart(base, wanted) > 5 * NEAR, "the adapters do something"


@pytest.mark.parametrize("count", [0, 2])
def test_base_rows_are_bit_identical_beside_adapters(
    count: int, placed: tuple[EngineHarness, Placement], capture: EagerCapture
) -> None:
    placed_harness, placement = placed
    placement.place_residents(count=count)
    for _ in range(2):  # the second time all steps are replayed
        mixed = steps(placed_harness.forward, placed_harness.loaded, [["one", None, "two", None]] * 4)
        base = steps(placed_harness.forward, placed_harness.loaded, [[None] * 4] * 4)
    assert capture.captures == 2, "steps of the base alone have a graph of their own"
    assert torch.equal(mixed[-1][1], base[-1][1]) and torch.equal(mixed[-1][3], base[-1][3])
    assert not torch.equal(mixed[-1][0], base[-1][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_stacked_linear_lora_matches_float64(dtype: torch.dtype) -> None:
    """Ranks, scales and a layer that one adapter lacks; rows without keep the bits, zeros with a sign among them."""
    made = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Linear(24, 8)).to(dtype)
    LoraModules(_Named(model))

    def factors(module: nn.Module, rank: int, scaling: float) -> LinearLora:
        linear: Any = module
        a, b = torch.randn(rank, linear.in_features, generator=made), torch.randn(rank, linear.out_features)
        return LinearLora(a, b, scaling)

    one = LoadedAdapter("one", 1, "", {model[0]: factors(model[0], 3, 0.7), model[1]: factors(model[1], 3, 0.7)}, {})
    two = LoadedAdapter("two", 1, "", {model[0]: factors(model[0], 5, 2.0)}, {})
    mixture = AdapterSet((one, two), torch.device("cpu"))
    with torch.inference_mode():
        x = torch.randn(4, 16, generator=made).to(dtype)
        x[3] = -0.0
        who = torch.tensor([1, 0, 2, 0])
        bare = model[0](x)
        with mixture.applied(who):
            got, second = model[0](x), model[1](bare)
        assert torch.equal(got[[1, 3]].view(torch.uint8), bare[[1, 3]].view(torch.uint8))
        for row, adapter in ((0, one), (2, two)):
            linear = adapter.linears[model[0]]
            want = bare[row].double() + linear.scales * (x[row].double() @ linear.a.double().T @ linear.b.double())
            assert torch.allclose(got[row].double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert torch.equal(second[1:], model[1](bare)[1:]) and not torch.equal(second[0], model[1](bare)[0])
        with mixture.applied(who), pytest.raises(InputError, match="3 rows in a batch of 4"):
            model[0](x[:3])
    assert mixture.bytes == 4 * (8 * (16 + 24) + 3 * (24 + 8))


class _Named(nn.Module):
    """Layers under names that adapters use."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"q_proj": layers[0], "o_proj": layers[1]})])


def test_completions_match_eager(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    """Sequences that join and leave, prompts in between, rows that only fill up."""
    placed_harness, _ = placed
    asked: list[tuple[int, int, str | None]] = [
        (5, 20, "one"),
        (40, 12, None),
        (9, 21, "two"),
        (30, 8, "attention"),
        (3, 15, "one"),
        (7, 15, None),
    ]
    engine = placed_harness.engine(max_running_requests=3)
    made = [
        placed_harness.sequence(random_prompt(seed, length), name, max_tokens=new)
        for seed, (length, new, name) in enumerate(asked)
    ]
    placed_harness.run(engine, *(one for one, _ in made))
    graphs = graphs_of(placed_harness)
    assert capture.captures > 2 and graphs.replayed > 20
    for seed, ((length, new, name), (_, recorded)) in enumerate(zip(asked, made, strict=True)):
        assert same_completion(recorded, harness.alone(random_prompt(seed, length), name, max_tokens=new))


def sets_of(harness: EngineHarness) -> list[list[str]]:
    return [[adapter.name for adapter in one] for one in graphs_of(harness).sets]


def test_graph_of_larger_set_is_reused(placed: tuple[EngineHarness, Placement], capture: EagerCapture) -> None:
    """Whoever wants some of its adapters takes its graph; at another size the same set is captured."""
    placed_harness, _ = placed
    both: list[Names] = [["one", "two"]] * CAPTURE_AT
    steps(placed_harness.forward, placed_harness.loaded, [*both, ["two", None], ["one", "one"], [None, "two"]])
    graphs = graphs_of(placed_harness)
    assert capture.captures == 1 and graphs.replayed == 4 and sets_of(placed_harness) == [["one", "two"]]
    steps(placed_harness.forward, placed_harness.loaded, [["one"]] * CAPTURE_AT)
    assert capture.captures == 2 and sets_of(placed_harness) == [["one", "two"]], "its factors are there already"
    steps(placed_harness.forward, placed_harness.loaded, [["attention", "one"]] * CAPTURE_AT)
    assert sets_of(placed_harness) == [["one", "two"], ["attention", "one"]]
    rows = graphs.graphs.captured[StepKey(2, next(reversed(graphs.sets)))].inputs.rows
    assert rows[ADAPTER].tolist() == [1, 2] and rows[ACTIVE].tolist() == [1, 1]


def calls(placement: Placement) -> set[Any]:
    """Adapters of prepared calls and of what is held for graphs, over all layers."""
    return {key[2] for engine in placement.engines for key in engine.callbacks._prepared if key[2]}


def test_number_of_sets_is_bounded(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, adapters: dict[str, Path]
) -> None:
    placed_harness, placement = placed
    placement.place_residents(count=2)
    names = [f"copy{at}" for at in range(MAX_ADAPTER_SETS + 2)]
    opened = {
        name: placed_harness.lora_modules.open(adapters["one"], name, 1, str(placed_harness.directory))
        for name in names
    }
    for name in names:
        steps(placed_harness.forward, opened, [[name]] * CAPTURE_AT)
        steps(placed_harness.forward, opened, [["copy0"]])  # used again and again: it stays
    assert sets_of(placed_harness) == [*([name] for name in names[-MAX_ADAPTER_SETS + 1 :]), ["copy0"]]
    assert calls(placement) == {
        (packed,) for one in graphs_of(placed_harness).sets for packed in one[0].experts.values()
    }
    gone = weakref.ref(opened.pop("copy1"))
    graphs_of(placed_harness).graphs.reset()
    gc.collect()
    assert gone() is None, "nobody holds what was forgotten"
    assert capture.captures == MAX_ADAPTER_SETS + 2


def test_bytes_of_copied_factors_are_bounded(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed_harness, _ = placed
    steps(placed_harness.forward, placed_harness.loaded, [["one", "two"]] * CAPTURE_AT)
    (large,) = graphs_of(placed_harness).sets.values()
    monkeypatch.setattr(graphs_module, "MAX_SET_BYTES", large.bytes)
    steps(placed_harness.forward, placed_harness.loaded, [["one", "attention"]] * CAPTURE_AT)
    assert sets_of(placed_harness) == [["attention", "one"]], "both are too much"
    steps(placed_harness.forward, placed_harness.loaded, [["one"], ["two"]] * CAPTURE_AT)
    assert ["two"] in sets_of(placed_harness), "one alone has no copies"
    steps(placed_harness.forward, placed_harness.loaded, [["attention", "one", "two"]] * CAPTURE_AT)
    assert len(sets_of(placed_harness)) == 2 and capture.captures == 4, "too much alone: nobody has to go for it"


def test_unloaded_adapter_drops_its_graphs(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness, adapters: dict[str, Path]
) -> None:
    """While a request wants it, which goes on in its graph to its end; then everything of it goes."""
    placed_harness, placement = placed
    placement.place_residents(count=2)
    placed_harness.loaded["short"] = placed_harness.lora_modules.open(
        adapters["one"], "short", 7, str(placed_harness.directory)
    )
    engine = placed_harness.engine()
    first, recorded = placed_harness.sequence(random_prompt(1, 9), "short", max_tokens=25)
    engine.submit([first])
    for _ in range(8):
        engine.step()
    graphs = graphs_of(placed_harness)
    engine.drop_adapter(("short", 7))
    before = graphs.replayed
    engine.step()
    assert graphs.replayed == before + 1 and sets_of(placed_harness) == [["short"]]
    while engine.busy:
        engine.step()
    engine.step()
    assert recorded.finish == "length" and graphs.replayed == 24 - CAPTURE_AT + 1 and capture.captures == 1
    assert not sets_of(placed_harness) and not calls(placement) and not graphs.graphs.captured
    assert not any(engine.executor.lora_cache._pins for engine in placement.engines)
    alone = harness.alone(random_prompt(1, 9), "one", max_tokens=25)
    assert recorded.tokens[0] == alone.tokens[0] and recorded.logprobs[0] == pytest.approx(alone.logprobs[0], abs=0.05)
    gone = weakref.ref(placed_harness.loaded.pop("short"))
    del first, recorded
    gc.collect()
    assert gone() is None
    assert not engine._unloaded


def test_adapters_match_after_residents_change(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    placed_harness, placement = placed
    mixtures: list[Names] = [["one", None]] * 4
    wanted = steps(harness.forward, harness.loaded, mixtures)
    for turn, count in enumerate((2, 3, 0, 6), start=1):
        placement.place_residents(count=count)
        assert apart(steps(placed_harness.forward, placed_harness.loaded, mixtures), wanted) < NEAR
        assert capture.captures == turn and sets_of(placed_harness) == [["one"]]


def test_full_lora_cache_evicts_other_sets(
    placed: tuple[EngineHarness, Placement],
    capture: EagerCapture,
    harness: EngineHarness,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Factors beside residents have a budget: the set that is wanted pushes others out, and one that is too large alone
    is refused, once, while the others go on."""
    placed_harness, placement = placed
    placement.place_residents(count=2)
    (engine,) = placement.engines
    shelf = engine.executor.lora_cache
    steps(placed_harness.forward, placed_harness.loaded, [["two"]] * CAPTURE_AT)
    size = sum(known[2] for at, known in shelf._entries.items() if shelf._pins[at])
    graphs_of(placed_harness).clear()
    engine.executor.lora_cache = LoraCache(torch.device("cpu"), size)
    try:
        with caplog.at_level("WARNING"):
            for name in ("one", "two"):
                steps(placed_harness.forward, placed_harness.loaded, [[name]] * CAPTURE_AT)
                assert sets_of(placed_harness) == [[name]]
            mixtures: list[Names] = [["one", "two"]] * (CAPTURE_AT + 2)
            wanted = steps(harness.forward, harness.loaded, mixtures)
            found = steps(placed_harness.forward, placed_harness.loaded, mixtures)
        assert apart(found, wanted) < 2 * NEAR, "eager gate and up are rounded as well"
        lines = [line for line in caplog.messages if "run eagerly" in line]
        assert len(lines) == 1 and "decode steps of 2 rows with one, two" in lines[0] and "with residents" in lines[0]
        assert not engine.executor.lora_cache._pins and not calls(placement)
        graphs_of(placed_harness).forget(("one", 1))
        assert not graphs_of(placed_harness).graphs.refused, "there may be memory now"
    finally:
        graphs_of(placed_harness).clear()
        engine.executor.lora_cache = shelf


def test_out_of_memory_evicts_other_sets_and_then_refuses_the_set(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, caplog: pytest.LogCaptureFixture
) -> None:
    """Sets and sizes that fit go on."""
    placed_harness, _ = placed
    for name in ("one", "two"):
        steps(placed_harness.forward, placed_harness.loaded, [[name]] * CAPTURE_AT)
    assert sets_of(placed_harness) == [["one"], ["two"]]
    capture.failure = lambda: torch.OutOfMemoryError("tried to allocate")
    steps(placed_harness.forward, placed_harness.loaded, [["attention"]] * (CAPTURE_AT + 2))
    assert not sets_of(placed_harness), "both were evicted for it"
    lines = [line for line in caplog.messages if "run eagerly" in line]
    assert len(lines) == 1 and "decode steps of 1 rows with attention" in lines[0] and "no GPU memory" in lines[0]
    capture.failure = None
    before = graphs_of(placed_harness).replayed
    steps(placed_harness.forward, placed_harness.loaded, [["one"]])
    assert graphs_of(placed_harness).replayed == before + 1 and sets_of(placed_harness) == [["one"]], (
        "captured again at once"
    )


def test_adapter_loaded_before_the_engine_is_not_captured(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, caplog: pytest.LogCaptureFixture
) -> None:
    placed_harness, _ = placed
    bare = {"old": replace(placed_harness.loaded["one"], name="old", factors={})}
    with caplog.at_level("WARNING"):
        steps(placed_harness.forward, bare, [["old", None]] * (CAPTURE_AT + 2))
    assert (
        not graphs_of(placed_harness).replayed
        and sum("packed for the CPU only" in line for line in caplog.messages) == 1
    )
    steps(placed_harness.forward, placed_harness.loaded, [["one", None]] * CAPTURE_AT)
    assert graphs_of(placed_harness).replayed == 1
