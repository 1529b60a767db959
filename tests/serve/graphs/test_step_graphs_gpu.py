"""Decoding in CUDA graphs against the same engine kernel by kernel: sequences that join and leave, slots that grow,
prompts and adapters in between, residents that change, and what cannot be captured. Tokens must be the same up to the
first at which the two most likely were as close as roundings are, and log-probabilities with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.modeling.cuda_graphs import CAPTURE_AT
from ktransformers.place import attach
from ktransformers.place.placement import Placement
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.flags import Launch
from ktransformers.serve.graphs.step_graphs import Compute, StepGraphs, why_not
from ktransformers.serve.http.metrics import render
from ktransformers.serve.loading import open_service
from ktransformers.serve.sampling.sampling import Score
from ktransformers.serve.scheduler.forward import Chunk
from ktransformers.serve.target import Target
from tests.support.serving import GPU_TOLERANCE, EngineHarness, RecordedEvents, random_prompt, wait_for_finish

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*bf16.*")]
ROUNDED = 0.05  # residents round what they are given to bf16: a sum in another order may fall on another step of it


@pytest.fixture(scope="module")
def on_gpu(model_directory: Path, adapters: dict[str, Path]) -> Iterator[EngineHarness]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield EngineHarness(model_directory, adapters, device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def placement(on_gpu: EngineHarness, adapters: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Placement]:
    """With graphs; by the parameter a policy and a number of residents. Adapters are loaded behind the engine, as by a
    server."""
    policy, count = getattr(request, "param", ("resident", 2))
    made = attach(on_gpu.model, policy=policy)
    assert made is not None and not made.left
    made.place_residents(count=count)
    names = adapters.items()
    on_gpu.loaded = {name: on_gpu.lora_modules.open(path, name, 1, str(on_gpu.directory)) for name, path in names}
    on_gpu.forward.graphs = StepGraphs(on_gpu.model, made)
    assert not why_not(on_gpu.forward, made)
    yield made
    on_gpu.forward.graphs = None
    made.detach()


def ask(
    harness: EngineHarness, engine: Any, lengths: list[tuple[int, int]], names: list[str | None] | None = None
) -> list[RecordedEvents]:
    """Prompts of so many tokens, answers of so many."""
    given = zip(range(len(lengths)), lengths, names or [None] * len(lengths), strict=True)
    made = [harness.sequence(random_prompt(seed, length), name, max_tokens=new) for seed, (length, new), name in given]
    harness.run(engine, *(one for one, _ in made))
    return [recorded for _, recorded in made]


def launched(
    harness: EngineHarness, lengths: list[tuple[int, int]], names: list[str | None] | None = None
) -> list[RecordedEvents]:
    """The same kernel by kernel."""
    graphs, harness.forward.graphs = harness.forward.graphs, None
    try:
        return ask(harness, harness.engine(), lengths, names)
    finally:
        harness.forward.graphs = graphs


def uncaptured(
    harness: EngineHarness, placement: Placement, lengths: list[tuple[int, int]], names: list[str | None]
) -> list[RecordedEvents]:
    """The same steps as in graphs, but computed again. With adapters and residents kernel by kernel is another way,
    whose roundings may send a token to another expert."""

    def record(compute: Compute) -> Compute:
        def again() -> torch.Tensor:
            with placement.capture_warmup():
                logits = compute()
            torch.cuda.synchronize()
            return logits

        again()
        return again

    graphs, harness.forward.graphs = harness.forward.graphs, StepGraphs(harness.model, placement, record)
    try:
        return ask(harness, harness.engine(max_running_requests=4), lengths, names)
    finally:
        harness.forward.graphs = graphs


def replayed(harness: EngineHarness) -> int:
    assert harness.forward.graphs is not None
    return harness.forward.graphs.replayed


def told(recorded: RecordedEvents) -> list[Score]:
    assert recorded.finish == "length", recorded.events[-1].error
    return [score for event in recorded.events for score in event.scores]


def agree(found: list[RecordedEvents], wanted: list[RecordedEvents], apart: float = ROUNDED) -> None:
    for one, two in zip(found, wanted, strict=True):
        alike(told(one), told(two), apart)


def alike(found: list[Score], wanted: list[Score], apart: float) -> None:
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        if one.token != two.token:
            (_, first), (_, second) = two.top
            assert first - second < 2 * apart, "another token, and no tie"
            return
        assert one.logprob == pytest.approx(two.logprob, abs=apart)


@pytest.mark.parametrize(
    "placement", [("resident", 0), ("resident", 2), ("resident", 6), ("auto", 2)], indirect=True, ids=str
)
def test_completions_match_eager(on_gpu: EngineHarness, placement: Placement) -> None:
    """Seven sequences, of which six run at once: steps of 1, 2, 4 and 8 rows, prompts between them."""
    lengths = [(5, 30), (40, 22), (9, 31), (70, 18), (1, 25), (12, 40), (33, 28)]
    engine = on_gpu.engine(max_running_requests=6)
    found = ask(on_gpu, engine, lengths)
    assert replayed(on_gpu) > engine.counts.steps // 2
    agree(
        found,
        launched(on_gpu, lengths),
        ROUNDED if any(engine.executor.residents for engine in placement.engines) else GPU_TOLERANCE,
    )


@pytest.mark.parametrize("placement", [("resident", 0)], indirect=True, ids=str)
def test_growing_slots_and_cached_prefixes_match_eager(on_gpu: EngineHarness, placement: Placement) -> None:
    engine = on_gpu.engine()
    (first,) = ask(on_gpu, engine, [(60, 100)])
    assert replayed(on_gpu) == 99 - CAPTURE_AT + 1, "one graph for all capacities"
    agree([first], launched(on_gpu, [(60, 100)]), GPU_TOLERANCE)
    longer = random_prompt(0, 60) + first.tokens[:80]
    again, later = on_gpu.sequence(longer, max_tokens=20)
    on_gpu.run(engine, again)
    assert later.events[-1].cached == len(longer) - 1
    alike(told(later), told(first)[80:], GPU_TOLERANCE)


@pytest.mark.parametrize("placement", [("resident", 0), ("resident", 2), ("resident", 6)], indirect=True, ids=str)
def test_adapters_match_eager(on_gpu: EngineHarness, placement: Placement) -> None:
    """Ranks, attention alone, and the base, at first all in one batch; then others beside whoever is left."""
    lengths: list[tuple[int, int]] = [(10, 20), (20, 34), (5, 30), (7, 25), (6, 12)]
    names = ["one", None, "two", "attention", "one"]
    engine = on_gpu.engine(max_running_requests=4)
    found = ask(on_gpu, engine, lengths, names)
    assert replayed(on_gpu) > engine.counts.steps // 2
    agree(found, uncaptured(on_gpu, placement, lengths, names), GPU_TOLERANCE)
    if not any(one.executor.residents for one in placement.engines):
        agree(found, launched(on_gpu, lengths, names), GPU_TOLERANCE)


@pytest.mark.parametrize("placement", [("resident", 6)], indirect=True, ids=str)
def test_steps_ahead_give_the_same_tokens(on_gpu: EngineHarness, placement: Placement) -> None:
    """All experts resident: the next step is queued before the host reads the tokens of this one. Sequences join, stop
    at a token and leave; two have an adapter."""

    def decode(overlap: bool, stops: list[frozenset[int]]) -> list[list[int]]:
        graphs = on_gpu.forward.graphs = StepGraphs(on_gpu.model, placement, overlap=overlap)
        engine, made = on_gpu.engine(max_running_requests=5), []
        for seed, stop in enumerate(stops):
            options: dict[str, Any] = {"logprobs": None, "stop_tokens": stop, "max_tokens": 40 + 7 * seed}
            name = "one" if seed % 3 == 1 else None
            made.append(on_gpu.sequence(random_prompt(seed, 5 + 9 * seed), name, **options)[0])
            engine.submit(made[-1:])
            for _ in range(6):
                engine.step()
        while engine.busy:
            engine.step()
        assert (graphs.overlapped > graphs.replayed // 2) == overlap
        return [sequence.new_tokens for sequence in made]

    answers = decode(False, [frozenset()] * 7)
    stops = [frozenset({tokens[20]}) if seed % 2 else frozenset() for seed, tokens in enumerate(answers)]
    plain = decode(False, stops)
    assert decode(True, stops) == plain and [len(tokens) for tokens in plain] != [len(tokens) for tokens in answers]


@pytest.mark.parametrize("placement", [("resident", 2)], indirect=True, ids=str)
def test_base_rows_are_bit_identical_beside_adapters(on_gpu: EngineHarness, placement: Placement) -> None:
    unused = KVSlot.together(16, 64)  # graphs are captured for one memory

    def logits(names: list[str | None], told: int) -> torch.Tensor:
        slots = [unused.pop() for _ in names]
        adapters = [on_gpu.loaded[name] if name else None for name in names]
        graphs, on_gpu.forward.graphs = on_gpu.forward.graphs, None
        for row, (slot, adapter) in enumerate(zip(slots, adapters, strict=True)):
            on_gpu.forward.run([Chunk(slot, random_prompt(row, 9), 0, adapter)])
        on_gpu.forward.graphs = graphs
        for step in range(told):
            pieces = [
                Chunk(slot, [5 + step], slot.length, adapter) for slot, adapter in zip(slots, adapters, strict=True)
            ]
            found = on_gpu.forward.run(pieces)
        return torch.stack([one.logits for one in found if one is not None]).clone()

    with torch.inference_mode():
        for _ in range(2):  # the second time all steps are replayed
            mixture, base = logits(["one", None, "two", None], CAPTURE_AT), logits([None] * 4, CAPTURE_AT)
    assert torch.equal(mixture[[1, 3]], base[[1, 3]]) and not torch.equal(mixture[0], base[0])


def test_unloaded_adapter_is_replaced_by_another(
    on_gpu: EngineHarness, placement: Placement, adapters: dict[str, Path]
) -> None:
    """What its graphs held goes, other graphs of the same pool go on, and the memory serves others."""
    engine, lengths = on_gpu.engine(), [(10, 16), (9, 16)]
    wanted = uncaptured(on_gpu, placement, lengths, ["one", None])
    for version in range(2, 5):
        on_gpu.loaded["one"] = on_gpu.lora_modules.open(adapters["one"], "one", version, str(on_gpu.directory))
        agree(ask(on_gpu, engine, lengths, ["one", None]), wanted, GPU_TOLERANCE)
        engine.drop_adapter(("one", version))
        engine.step()
        assert on_gpu.forward.graphs is not None and not on_gpu.forward.graphs.sets
        assert not any(one.callbacks._lora_pointers or one.executor.lora_cache._pins for one in placement.engines)
        agree(ask(on_gpu, engine, [(10, 12), (9, 12)]), launched(on_gpu, [(10, 12), (9, 12)]))
    assert replayed(on_gpu) > 3 * 2 * (12 - CAPTURE_AT - 2)


def test_graphs_are_recaptured_when_residents_change(on_gpu: EngineHarness, placement: Placement) -> None:
    one, recorded = on_gpu.sequence(random_prompt(0, 10), max_tokens=60)
    engine = on_gpu.engine()
    engine.submit([one])
    for step in range(59):
        if step == 40:
            placement.place_residents(count=4)
        engine.step()
    on_gpu.run(engine)
    assert replayed(on_gpu) == 59 - 2 * (CAPTURE_AT - 1), "captured again"
    agree([recorded], launched(on_gpu, [(10, 60)]))


def test_routing_counts_match_eager(on_gpu: EngineHarness, placement: Placement) -> None:
    """Statistics are those of every token, replayed or not; padding counts nowhere."""
    ask(on_gpu, on_gpu.engine(), [(6, 30), (7, 30), (8, 30)])
    rows = [int(row.sum()) for row in placement.counts()]
    tokens = 6 + 7 + 8 + 3 * 29
    top_k = on_gpu.model.config.num_experts_per_tok
    assert [row // top_k - tokens for row in rows] == [2 * 3] * len(rows), "two rehearsals of three rows"


@pytest.mark.parametrize("placement", [("stream", 0)], indirect=True, ids=str)
def test_streamed_experts_are_not_captured(
    on_gpu: EngineHarness, placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        found = ask(on_gpu, on_gpu.engine(), [(6, 12)])
    assert not replayed(on_gpu) and sum("streamed" in line for line in caplog.messages) == 1
    agree(found, launched(on_gpu, [(6, 12)]))


def test_device_sync_is_detected_before_capture(
    on_gpu: EngineHarness, placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    def look(module: nn.Module, given: tuple[Any, ...], out: torch.Tensor) -> None:
        float(out.sum())

    hook = on_gpu.model.model.norm.register_forward_hook(look)
    try:
        with caplog.at_level("WARNING"):
            found = ask(on_gpu, on_gpu.engine(), [(6, 12), (7, 12)])
    finally:
        hook.remove()
    assert not replayed(on_gpu) and sum("synchronizing" in line for line in caplog.messages) == 1
    agree(found, launched(on_gpu, [(6, 12), (7, 12)]))
    on_gpu.forward.graphs = StepGraphs(on_gpu.model, placement)
    agree(ask(on_gpu, on_gpu.engine(), [(6, 12)]), launched(on_gpu, [(6, 12)]))
    assert replayed(on_gpu), "nothing is left of the attempt"


def test_served_model_decodes_in_graphs(model_directory: Path) -> None:
    """`kt serve` with a GPU: bf16, in the engine's own thread, policy and residents by themselves."""
    launch = Launch(str(model_directory), memory=0.01, max_running_requests=4, context_length=256)
    said: list[str] = []
    service = open_service(launch, Target(model_directory, name="tiny"), said.append)
    assert "in CUDA graphs, batches of up to 4 sequences" in said[-1], said
    harness = EngineHarness.__new__(EngineHarness)
    harness.directory, harness.tokenizer, harness.forward = model_directory, service.tokenizer, service.engine.forward
    service.engine.start()
    try:
        made = [harness.sequence(random_prompt(seed, 25), max_tokens=40) for seed in range(3)]
        service.engine.submit([one for one, _ in made])
        for _, recorded in made:
            wait_for_finish(recorded)
    finally:
        service.engine.stop()
    steps = service.engine.replayed
    assert steps > 20 and f"kt_graph_steps_total {steps}\n" in render(service, Counter(), 0)
    alone = open_service(
        Launch(str(model_directory), memory=0.01, place={"kt_place": "cpu"}),
        Target(model_directory, name="tiny"),
        said.append,
    )
    assert "in CUDA graphs" in said[-1] and alone.placement.placement.policy == "resident"
    assert not any(engine.executor.residents for engine in alone.placement.placement.engines)
    harness.forward = alone.engine.forward
    ask(harness, alone.engine, [(9, 20)])
    assert alone.engine.replayed > 10, "an engine without residents has the CPU's experts"
    off = open_service(
        Launch(str(model_directory), memory=0.01, disable_cuda_graph=True),
        Target(model_directory, name="tiny"),
        said.append,
    )
    assert off.engine.forward.graphs is None and said[-1].endswith("without CUDA graphs: --disable-cuda-graph")
