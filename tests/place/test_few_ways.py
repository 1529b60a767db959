"""Which way a few tokens go under `auto`: the one that a clock finds to be fastest, of those that are possible; right
numbers and right counts in all of them. On torch's CPU device the clock is made of numbers, a way each; on a GPU it is
the device's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ktransformers.nn.gate import Gate
from ktransformers.nn.store import NO_DROPOUT
from ktransformers.place import attach
from ktransformers.place import engine as engine_module
from ktransformers.place import trials as module
from ktransformers.place.gpu.executor import ExpertBatch
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.host_callback import MOST
from ktransformers.place.placed_store import ServedStore, ThresholdEngine
from ktransformers.place.placement import geometry_of, new_layer
from ktransformers.place.trials import BRIEF, EVERY, WARM, Trial, Trials
from tests.place.test_few import CLOSE, batch, empty, expected
from tests.place.test_gpu_engine import EVEN, SMALL, TOLERANCE, devices, error, make_store
from tests.place.test_passes import ADAPTERS, mixture
from tests.place.test_residents import tiny

LAYERS = 3
SOME = (1, 4, 6)
ALL = tuple(range(SMALL.experts))
pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


class Clock:
    """Seconds that layers take by the way they go, and how often somebody looked."""

    def __init__(self, **ways: float) -> None:
        self.ways, self.now, self.looks = ways, 0.0, 0

    def perf_counter(self) -> float:
        self.looks += 1
        return self.now

    def let(self, way: str) -> None:
        self.now += self.ways.get(way, 10e-3)


class Layers:
    """Of one engine; all have the same experts."""

    def __init__(self, device: str, residents: tuple[int, ...], spec: str = "bf16") -> None:
        where = torch.device(device)
        self.store = make_store(SMALL, spec)
        sizes = geometry_of(self.store)
        self.engine = ThresholdEngine(where, "auto", ExpertCache(sizes, 2 * SMALL.experts, where, None))
        self.placed: list[ServedStore] = []
        for index in range(LAYERS):
            layer = self.engine.layers[index] = new_layer(self.engine, index, self.store, Gate("silu"), sizes)
            layer.costs = {"forward": EVEN, "backward": EVEN}
            if residents:
                room = self.engine.side.residents[index] = ExpertCache(sizes, len(residents), where, None)
                room.fetch(index, layer.packed.source, residents)
            self.placed.append(ServedStore(self.engine, layer, index))
        self.gone: list[str] = []  # ways, a pass through a layer each
        self.rows = np.zeros(SMALL.experts, np.int64)  # that each layer was asked for

    def by(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Layers:
        """Passes take what the clock says."""
        monkeypatch.setattr(module, "time", clock)
        forward, queue = self.engine._forward, self.engine.few.forward

        def asked(layer: Any, given: ExpertBatch, retain: bool, phase: Any, way: str) -> Any:
            clock.let(way)
            self.gone.append(way)
            return forward(layer, given, retain, phase, way)

        def queued(*rest: Any) -> Tensor:
            clock.let("queued")
            self.gone.append("queued")
            return queue(*rest)

        monkeypatch.setattr(self.engine, "_forward", asked)
        monkeypatch.setattr(self.engine.few, "forward", queued)
        return self

    def walk(self, tokens: int, seed: int = 0) -> None:
        given = batch(SMALL, tokens, str(self.engine.device), seed)
        want = expected(self.store, given)
        with torch.no_grad():
            for placed in self.placed:
                got = placed(given.hidden, given.ids, given.weights, None, NO_DROPOUT, False)
                assert error(got, want) < TOLERANCE
        ids = given.ids[(given.ids >= 0) & (given.ids < SMALL.experts)].cpu()
        self.rows += np.bincount(ids.numpy(), minlength=SMALL.experts)

    def settle(self, tokens: int) -> None:
        for seed in range(200):
            self.walk(tokens, seed)
            if self.engine.trials.ways() and self.engine.trials.settled(tokens):
                return
        raise AssertionError(self.engine.trials.ways())

    def counted(self) -> None:
        for placed in self.placed:
            counts = self.engine.counts(placed.layer)
            self.engine.few.tally(placed.layer.packed.index, counts)
            assert np.array_equal(counts, self.rows)


@pytest.mark.parametrize(
    ("fastest", "residents"),
    [
        ("cpu", ()),
        ("stream", ()),
        ("queued", ()),
        ("cpu", SOME),
        ("stream", SOME),
        ("resident", SOME),
        ("queued", SOME),
        ("cpu", ALL),
        ("resident", ALL),
        ("queued", ALL),
    ],
)
def test_the_fastest_is_found(fastest: str, residents: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever costs prefer; it does not have to be far ahead."""
    tokens = 4 if fastest == "queued" else 1
    taken = {"cpu": 1.0e-3, "stream": 1.1e-3, "resident": 1.05e-3, "queued": 1.2e-3, "both": 2e-3}
    layers = Layers("cpu", residents).by(Clock(**taken | {fastest: 0.8e-3}), monkeypatch)
    layers.settle(tokens)
    assert layers.engine.trials.ways()[f"few {tokens}"]["best"] == fastest
    layers.gone.clear()
    for seed in range(3):
        layers.walk(tokens, seed)
    assert layers.gone == [fastest] * 3 * LAYERS
    layers.counted()


@devices
@pytest.mark.parametrize("spec", ["bf16", "int4:32"])
@pytest.mark.parametrize("residents", [(), SOME, ALL], ids=["none", "some", "all"])
def test_by_the_clock_of_the_device(residents: tuple[int, ...], spec: str, device: str) -> None:
    """Some way is found, all that are possible were tried, and nothing is lost on the way."""
    layers = Layers(device, residents, spec)
    layers.settle(1)
    (found,) = layers.engine.trials.ways().values()
    tried = {"cpu", "stream", "queued"} | ({"resident"} if residents else set())
    assert set(found["seconds"]) >= tried and found["best"] in found["seconds"]
    layers.walk(1)
    layers.counted()


def test_settled_walks_are_hardly_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(cpu=1e-3)
    layers = Layers("cpu", ()).by(clock, monkeypatch)
    layers.settle(1)
    layers.walk(1)
    clock.looks = 0
    for _ in range(2 * EVERY):
        layers.walk(1)
    assert 0 < clock.looks <= 2 * 2 * LAYERS


def test_longer_walks_are_all_timed() -> None:
    for seconds, timed in ((0.9 * BRIEF, 1), (1.1 * BRIEF, EVERY)):
        trial = Trial()
        for _ in range(20):
            trial.begin(lambda: {"cpu": 1e-3})
            trial.end("cpu", seconds, 16)
        assert trial.settled
        found = []
        for _ in range(EVERY):
            trial.begin(lambda: {"cpu": 1e-3})
            found.append(trial.timed)
        assert sum(found) == timed


def test_a_machine_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was best becomes slow: after some walks, of which few are timed, another way is taken."""
    clock = Clock(cpu=1.0e-3, stream=0.8e-3, resident=1.1e-3, queued=1.2e-3)
    layers = Layers("cpu", SOME).by(clock, monkeypatch)
    layers.settle(1)
    clock.ways["stream"] = 4e-3
    for _ in range(12 * EVERY):
        layers.walk(1)
    assert layers.gone[-LAYERS:] == ["cpu"] * LAYERS


def test_what_a_graph_needs_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first pass of every number of tokens, whatever its walk does; again when residents get another room."""
    layers = Layers("cpu", SOME).by(Clock(cpu=1e-3), monkeypatch)
    layers.walk(5)
    assert layers.gone == ["queued"] * LAYERS
    layers.settle(5)
    layers.gone.clear()
    layers.walk(6)  # of the same kind
    layers.walk(6)
    assert layers.gone == ["queued"] * LAYERS + ["cpu"] * LAYERS
    layers.placed[1].renew(np.array([9, 0, 9, 0, 0, 9, 0, 0]))
    layers.gone.clear()
    layers.walk(5)
    assert layers.gone == ["cpu"] * LAYERS, "tables were written where they lie"
    layers.engine.few.retire(1)
    layers.gone.clear()
    layers.walk(5)
    assert layers.gone == ["cpu", "queued", "cpu"]
    assert layers.engine.trials._walk is not None and layers.engine.trials._walk.fresh, "nothing is told by that"


def test_layers_that_host_functions_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are part of the walk all the same, and are asked."""
    layers = Layers("cpu", SOME).by(Clock(queued=0.5e-3, resident=1e-3, cpu=1e-3), monkeypatch)
    takes = layers.engine.few.takes

    def not_the_second(layer: Any, given: ExpertBatch, policy: str) -> bool | None:
        return False if layer.index == 1 else takes(layer, given, policy)

    monkeypatch.setattr(layers.engine.few, "takes", not_the_second)
    layers.settle(2)
    (found,) = layers.engine.trials.ways().values()
    assert found["best"] == "queued"
    layers.gone.clear()
    layers.walk(2)
    assert layers.gone == ["queued", "resident", "queued"]
    assert layers.engine.trials._walk is not None and len(layers.engine.trials._walk.visited) == LAYERS
    layers.counted()


def test_lora_is_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host functions know none; neither one adapter nor several make a batch without them go another way."""
    layers = Layers("cpu", SOME).by(Clock(queued=0.5e-3, resident=1e-3), monkeypatch)
    given, lora = batch(SMALL, 2, "cpu"), mixture(layers.store, ADAPTERS, 2)
    for _ in range(40):
        layers.walk(2)
        for placed in layers.placed:
            with torch.no_grad():
                placed(given.hidden, given.ids, given.weights, ADAPTERS[0], NO_DROPOUT, False)
        for placed in layers.placed:
            placed.forward_mixed(given.hidden, given.ids, given.weights, lora)
        if layers.engine.trials.settled(2):
            break
    found = layers.engine.trials.ways()
    assert set(found) == {"few 2", "forward 2"}
    assert found["few 2"]["best"] == "queued" and "queued" not in found["forward 2"]["seconds"]


def test_nobody_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty batch is on no walk; of more tokens than few the CPU does not get what is resident."""
    layers = Layers("cpu", SOME).by(Clock(cpu=1e-4), monkeypatch)
    none = empty("cpu")
    out = layers.placed[0](none.hidden, none.ids, none.weights, None, NO_DROPOUT, False)
    assert out.shape == none.hidden.shape and not layers.engine.trials.ways()
    layers.gone.clear()
    layers.settle(MOST + 1)
    assert "cpu" not in layers.gone and "queued" not in layers.gone


def test_hidden_states_come_with_the_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """One descent where the CPU has everything, two where it has a part."""
    layers = Layers("cpu", SOME)
    layers.walk(5)
    descents: list[int] = []
    down = engine_module.start_device_to_host
    monkeypatch.setattr(engine_module, "start_device_to_host", lambda given: descents.append(len(given)) or down(given))
    for way, want in (("cpu", [3]), ("resident", [1, 2]), ("stream", [1])):
        layers.engine.trials.enter = lambda *_, way=way: way  # type: ignore[method-assign,misc]
        layers.walk(5)
        assert descents == want * LAYERS
        descents.clear()


class Moments:
    """A timeline whose moments are numbers."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def between(self, first: float, last: float) -> float:
        return last - first


@pytest.mark.parametrize("until", [3, 100])
def test_walks_in_which_something_is_made_do_not_count(until: int) -> None:
    """A pass that will be recorded is slower than it will be; but what is never done with making is judged."""
    trials, clock = Trials(torch.device("cpu")), Moments()
    trials._timeline = clock  # type: ignore[assignment]
    seconds, walks = {"cpu": 1.0, "stream": 0.5}, {"cpu": 0, "stream": 0}
    for _ in range(30):
        for layer in range(8):
            way = trials.enter("few", 1, (layer, "forward"), lambda: {"cpu": 1.0, "stream": 1.2})
            making = way == "stream" and walks["stream"] < until
            clock.now += 9.0 if making else seconds[way]
            if making:
                trials.spoil()
            trials.leave()
        walks[way] += 1
    (found,) = trials.ways().values()
    assert found["best"] == ("stream" if until < WARM else "cpu")
    assert found["seconds"]["stream"] == (0.5 if until < WARM else 9.0)


def test_other_residents_are_other_layers() -> None:
    model = tiny().eval()
    placement = attach(model, policy="auto", device="cpu")
    assert placement is not None
    token = torch.tensor([[3]])
    with torch.inference_mode():
        want = model(token).logits.clone()
        for _ in range(3):
            model(token)
        assert any(engine.trials.ways() for engine in placement.engines)
        placement.place_residents(count=4)
        assert not any(engine.trials.ways() for engine in placement.engines)
        assert error(model(token).logits, want) < 0.02
    placement.detach()


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["cpu", "stream"])
def test_a_graph_after_another_way(way: str) -> None:
    """Whatever is fastest outside of one, a capture finds what it needs."""
    layers = Layers("cuda:0", SOME)
    layers.engine.trials.enter = lambda *_: way  # type: ignore[method-assign]
    for _ in range(3):
        layers.walk(2)
    static, graph = batch(SMALL, 2, "cuda:0"), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = layers.engine.infer(layers.placed[0].layer, static)
    other = batch(SMALL, 2, "cuda:0", seed=5)
    for name in ("hidden", "ids", "weights"):
        getattr(static, name).copy_(getattr(other, name))
    graph.replay()
    assert error(out, expected(layers.store, other)) < CLOSE
    layers.walk(2)


@pytest.mark.gpu
def test_host_functions_are_timed_to_their_end() -> None:
    """By the device's clock: they return at once, and what is queued takes as long as a batch that waits."""
    layers = Layers("cuda:0", ())
    layers.engine.trials.enter = lambda *_: "queued"  # type: ignore[method-assign]
    layers.walk(1)
    del layers.engine.trials.enter
    layers.engine._foretell = lambda *_: {"queued": 1e-3}  # type: ignore[method-assign]
    for _ in range(3):
        layers.walk(1)
    given = batch(SMALL, 1, "cuda:0")
    torch.cuda.synchronize()
    with torch.no_grad():
        for placed in layers.placed:
            torch.cuda._sleep(60_000_000)  # type: ignore[no-untyped-call]  # 30 ms, before and between
            placed(given.hidden, given.ids, given.weights, None, NO_DROPOUT, False)
        torch.cuda.synchronize()
        layers.walk(1)
    trial = layers.engine.trials._trials["few", 0]
    assert trial.records["queued"].seconds > 2e-3, "the device's time between two layers counts"
