"""Decode steps in which rows have adapters, several and none, from step to step others: which set of adapters a step
takes, and when sets are evicted. As in test_decode_graphs.py a recorder stands in for CUDA graphs."""

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

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
from ktransformers.nn.cuda_graphs import CAPTURE_AT
from ktransformers.place import attach
from ktransformers.place.gpu.multi_lora import LoraCache
from ktransformers.place.placement import Placement
from ktransformers.serve.engine.forward import Chunk, Forward
from ktransformers.serve.engine.kv_cache import KVSlot
from ktransformers.serve.engine.lora import LinearLora, LoadedAdapter, LoraModules
from ktransformers.serve.graphs import decode_graphs as graphs_module
from ktransformers.serve.graphs.adapter_set import AdapterSet
from ktransformers.serve.graphs.decode_graphs import MAX_ADAPTER_SETS, DecodeGraphs, StepKey
from tests.serve.conftest import Bench
from tests.serve.test_engine import close, text
from tests.support.decode_recorder import Recorder, graphs_of

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")
NEAR = 1e-2  # of the logits' norm: residents round what they are given to bf16
Names = list[str | None]


def all_of(bench: Bench) -> dict[str, LoadedAdapter]:
    """The bench's adapters and two more: one with experts alone, one that lacks a layer."""
    one, two = bench.residents["one"], bench.residents["two"]
    first = next(iter(expert_modules(bench.model).values()))
    upper = dict(list(two.linears.items())[3:])
    experts = {module: packed for module, packed in two.experts.items() if module is not first}
    more = (replace(one, name="experts", linears={}), replace(two, name="upper", linears=upper, experts=experts))
    return bench.residents | {resident.name: resident for resident in more}


@pytest.fixture(scope="module")
def placed(model_directory: Path, adapters: dict[str, Path]) -> Iterator[tuple[Bench, Placement]]:
    bench = Bench(model_directory, adapters)
    placement = attach(bench.model, policy="resident", device="cpu")
    assert placement is not None
    bench.residents = {name: bench.places.open(path, name, 1, str(model_directory)) for name, path in adapters.items()}
    bench.residents = all_of(bench)  # behind the engine, as a server loads them
    yield bench, placement
    placement.detach()


@pytest.fixture
def recorder(placed: tuple[Bench, Placement]) -> Iterator[Recorder]:
    bench, placement = placed
    placement.place_residents(count=0)
    made = Recorder(placement)
    bench.forward.graphs = DecodeGraphs(bench.model, placement, made)
    yield made
    graphs_of(bench).clear()
    bench.forward.graphs = None


def steps(forward: Forward, residents: dict[str, LoadedAdapter], mixtures: list[Names]) -> list[Tensor]:
    """Logits of steps in which row i of the batch has the i-th name's adapter; each (row, name) has a slot of its own,
    with a prompt that nobody looks at."""
    slots: dict[tuple[int, str | None], KVSlot] = {}
    found = []
    with torch.inference_mode():
        for number, names in enumerate(mixtures):
            pieces = []
            for row, name in enumerate(names):
                adapter = residents[name] if name else None
                if (row, name) not in slots:
                    slots[row, name] = KVSlot(None, capacity=64)
                    graphs, forward.graphs = forward.graphs, None
                    forward.run([Chunk(slots[row, name], text(row, 5 + row), 0, adapter)])
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
def test_numbers(
    which: str,
    count: int,
    placed: tuple[Bench, Placement],
    recorder: Recorder,
    bench: Bench,
) -> None:
    """Against the CPU without an engine, step by step with the same tokens."""
    here, placement = placed
    placement.place_residents(count=count)
    mixtures = MIXTURES[which]
    wanted = steps(bench.forward, all_of(bench), mixtures)
    found = steps(here.forward, here.residents, mixtures)
    assert recorder.captures == 1 and graphs_of(here).replayed == len(mixtures) - CAPTURE_AT + 1
    assert apart(found, wanted) < (NEAR if count else 1e-4)
    base = steps(bench.forward, all_of(bench), [[None] * len(names) for names in mixtures])
    assert apart(base, wanted) > 5 * NEAR, "the adapters do something"


@pytest.mark.parametrize("count", [0, 2])
def test_rows_without_an_adapter_have_the_base_s_bits(
    count: int, placed: tuple[Bench, Placement], recorder: Recorder
) -> None:
    here, placement = placed
    placement.place_residents(count=count)
    for _ in range(2):  # the second time all steps are replayed
        mixed = steps(here.forward, here.residents, [["one", None, "two", None]] * 4)
        base = steps(here.forward, here.residents, [[None] * 4] * 4)
    assert recorder.captures == 2, "steps of the base alone have a graph of their own"
    assert torch.equal(mixed[-1][1], base[-1][1]) and torch.equal(mixed[-1][3], base[-1][3])
    assert not torch.equal(mixed[-1][0], base[-1][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_linear_layer(dtype: torch.dtype) -> None:
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
            want = bare[row].double() + linear.scaling * (x[row].double() @ linear.a.double().T @ linear.b.double())
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


def test_answers_are_the_same(placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench) -> None:
    """Sequences that join and leave, prompts in between, rows that only fill up."""
    here, _ = placed
    asked: list[tuple[int, int, str | None]] = [
        (5, 20, "one"),
        (40, 12, None),
        (9, 21, "two"),
        (30, 8, "attention"),
        (3, 15, "one"),
        (7, 15, None),
    ]
    engine = here.engine(running=3)
    made = [here.sequence(text(seed, length), name, max_tokens=new) for seed, (length, new, name) in enumerate(asked)]
    here.run(engine, *(one for one, _ in made))
    graphs = graphs_of(here)
    assert recorder.captures > 2 and graphs.replayed > 20
    for seed, ((length, new, name), (_, heard)) in enumerate(zip(asked, made, strict=True)):
        assert close(heard, bench.alone(text(seed, length), name, max_tokens=new))


def sets_of(bench: Bench) -> list[list[str]]:
    return [[adapter.name for adapter in one] for one in graphs_of(bench).sets]


def test_a_larger_set_serves(placed: tuple[Bench, Placement], recorder: Recorder) -> None:
    """Whoever wants some of its adapters takes its graph; at another size the same set is captured."""
    here, _ = placed
    both: list[Names] = [["one", "two"]] * CAPTURE_AT
    steps(here.forward, here.residents, [*both, ["two", None], ["one", "one"], [None, "two"]])
    graphs = graphs_of(here)
    assert recorder.captures == 1 and graphs.replayed == 4 and sets_of(here) == [["one", "two"]]
    steps(here.forward, here.residents, [["one"]] * CAPTURE_AT)
    assert recorder.captures == 2 and sets_of(here) == [["one", "two"]], "its factors are there already"
    steps(here.forward, here.residents, [["attention", "one"]] * CAPTURE_AT)
    assert sets_of(here) == [["one", "two"], ["attention", "one"]]
    table = graphs.graphs.captured[StepKey(2, next(reversed(graphs.sets)))].table
    assert table[4].tolist() == [1, 2] and table[3].tolist() == [1, 1]


def calls(placement: Placement) -> set[Any]:
    """Adapters of prepared calls and of what is held for graphs, over all layers."""
    return {key[2] for engine in placement.engines for key in engine.callbacks._ready if key[2]}


def test_sets_have_a_bound(placed: tuple[Bench, Placement], recorder: Recorder, adapters: dict[str, Path]) -> None:
    here, placement = placed
    placement.place_residents(count=2)
    names = [f"copy{at}" for at in range(MAX_ADAPTER_SETS + 2)]
    opened = {name: here.places.open(adapters["one"], name, 1, str(here.directory)) for name in names}
    for name in names:
        steps(here.forward, opened, [[name]] * CAPTURE_AT)
        steps(here.forward, opened, [["copy0"]])  # used again and again: it stays
    assert sets_of(here) == [*([name] for name in names[-MAX_ADAPTER_SETS + 1 :]), ["copy0"]]
    assert calls(placement) == {(packed,) for one in graphs_of(here).sets for packed in one[0].experts.values()}
    gone = weakref.ref(opened.pop("copy1"))
    graphs_of(here).graphs.reset()
    gc.collect()
    assert gone() is None, "nobody holds what was forgotten"
    assert recorder.captures == MAX_ADAPTER_SETS + 2


def test_copies_have_a_bound(
    placed: tuple[Bench, Placement], recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, _ = placed
    steps(here.forward, here.residents, [["one", "two"]] * CAPTURE_AT)
    (large,) = graphs_of(here).sets.values()
    monkeypatch.setattr(graphs_module, "MAX_SET_BYTES", large.bytes)
    steps(here.forward, here.residents, [["one", "attention"]] * CAPTURE_AT)
    assert sets_of(here) == [["attention", "one"]], "both are too much"
    steps(here.forward, here.residents, [["one"], ["two"]] * CAPTURE_AT)
    assert ["two"] in sets_of(here), "one alone has no copies"
    steps(here.forward, here.residents, [["attention", "one", "two"]] * CAPTURE_AT)
    assert len(sets_of(here)) == 2 and recorder.captures == 4, "too much alone: nobody has to go for it"


def test_an_adapter_is_unloaded(
    placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench, adapters: dict[str, Path]
) -> None:
    """While a request wants it, which goes on in its graph to its end; then everything of it goes."""
    here, placement = placed
    placement.place_residents(count=2)
    here.residents["short"] = here.places.open(adapters["one"], "short", 7, str(here.directory))
    engine = here.engine()
    first, heard = here.sequence(text(1, 9), "short", max_tokens=25)
    engine.submit([first])
    for _ in range(8):
        engine.step()
    graphs = graphs_of(here)
    engine.forget(("short", 7))
    before = graphs.replayed
    engine.step()
    assert graphs.replayed == before + 1 and sets_of(here) == [["short"]]
    while engine.busy:
        engine.step()
    engine.step()
    assert heard.finish == "length" and graphs.replayed == 24 - CAPTURE_AT + 1 and recorder.captures == 1
    assert not sets_of(here) and not calls(placement) and not graphs.graphs.captured
    assert not any(engine.executor.shelf._held for engine in placement.engines)
    alone = bench.alone(text(1, 9), "one", max_tokens=25)
    assert heard.tokens[0] == alone.tokens[0] and heard.logprobs[0] == pytest.approx(alone.logprobs[0], abs=0.05)
    gone = weakref.ref(here.residents.pop("short"))
    del first, heard
    gc.collect()
    assert gone() is None
    assert not engine._gone


def test_residents_get_another_room(placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench) -> None:
    here, placement = placed
    mixtures: list[Names] = [["one", None]] * 4
    wanted = steps(bench.forward, bench.residents, mixtures)
    for turn, count in enumerate((2, 3, 0, 6), start=1):
        placement.place_residents(count=count)
        assert apart(steps(here.forward, here.residents, mixtures), wanted) < NEAR
        assert recorder.captures == turn and sets_of(here) == [["one"]]
        if count == 2:
            placement.update_residents()
            assert apart(steps(here.forward, here.residents, mixtures), wanted) < NEAR
            assert recorder.captures == 1, "in the same room"


def test_no_room_beside_other_sets(
    placed: tuple[Bench, Placement], recorder: Recorder, bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """Factors beside residents have a budget: the set that is wanted pushes others out, and one that is too large alone
    is refused, once, while the others go on."""
    here, placement = placed
    placement.place_residents(count=2)
    (engine,) = placement.engines
    shelf = engine.executor.shelf
    steps(here.forward, here.residents, [["two"]] * CAPTURE_AT)
    size = sum(known[2] for at, known in shelf._known.items() if shelf._held[at])
    graphs_of(here).clear()
    engine.executor.shelf = LoraCache(torch.device("cpu"), size)
    try:
        with caplog.at_level("WARNING"):
            for name in ("one", "two"):
                steps(here.forward, here.residents, [[name]] * CAPTURE_AT)
                assert sets_of(here) == [[name]]
            mixtures: list[Names] = [["one", "two"]] * (CAPTURE_AT + 2)
            wanted = steps(bench.forward, bench.residents, mixtures)
            found = steps(here.forward, here.residents, mixtures)
        assert apart(found, wanted) < 2 * NEAR, "kernel by kernel gate and up are rounded as well"
        lines = [line for line in caplog.messages if "kernel by kernel" in line]
        assert len(lines) == 1 and "decode steps of 2 rows with one, two" in lines[0] and "beside residents" in lines[0]
        assert not engine.executor.shelf._held and not calls(placement)
        graphs_of(here).forget(("one", 1))
        assert not graphs_of(here).graphs.refused, "there may be memory now"
    finally:
        graphs_of(here).clear()
        engine.executor.shelf = shelf


def test_out_of_memory_evicts_other_sets_and_then_refuses_the_set(
    placed: tuple[Bench, Placement], recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    """Sets and sizes that fit go on."""
    here, _ = placed
    for name in ("one", "two"):
        steps(here.forward, here.residents, [[name]] * CAPTURE_AT)
    assert sets_of(here) == [["one"], ["two"]]
    recorder.failure = lambda: torch.OutOfMemoryError("tried to allocate")
    steps(here.forward, here.residents, [["attention"]] * (CAPTURE_AT + 2))
    assert not sets_of(here), "both were evicted for it"
    lines = [line for line in caplog.messages if "kernel by kernel" in line]
    assert len(lines) == 1 and "decode steps of 1 rows with attention" in lines[0] and "no GPU memory" in lines[0]
    recorder.failure = None
    before = graphs_of(here).replayed
    steps(here.forward, here.residents, [["one"]])
    assert graphs_of(here).replayed == before + 1 and sets_of(here) == [["one"]], "captured again at once"


def test_adapters_from_before_the_engine_are_launched(
    placed: tuple[Bench, Placement], recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    here, _ = placed
    bare = {"old": replace(here.residents["one"], name="old", factors={})}
    with caplog.at_level("WARNING"):
        steps(here.forward, bare, [["old", None]] * (CAPTURE_AT + 2))
    assert not graphs_of(here).replayed and sum("only the CPU has" in line for line in caplog.messages) == 1
    steps(here.forward, here.residents, [["one", None]] * CAPTURE_AT)
    assert graphs_of(here).replayed == 1
