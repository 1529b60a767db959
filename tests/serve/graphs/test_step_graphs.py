"""Decode steps from a table of fixed size: which steps are captured, padding, KV cache slots that grow, residents that
change, failed captures. Here a recorder that computes again stands in for CUDA graphs, and torch for Triton; the rest
is what a GPU runs (tests/serve/graphs/test_step_graphs_gpu.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.adapters import LoraPair, adapter_from_tensors
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import mask_padding, pack_module, select_implementation, use_padding_mask
from ktransformers.ground.errors import InputError
from ktransformers.modeling.cuda_graphs import CAPTURE_AT
from ktransformers.modeling.norm import NORMS
from ktransformers.place import attach
from ktransformers.place.placement import Placement
from ktransformers.quantized import weight as quantized_weight
from ktransformers.quantized.gpu import head_products
from ktransformers.quantized.gpu.linear import GpuLinearWeight, packed_linear
from ktransformers.quantized.weight import GpuPacked, QuantizedWeight
from ktransformers.serve.attention.step import COUNT
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.graphs.captured_step import ACTIVE
from ktransformers.serve.graphs.latent_inputs import FUSED_LATENTS
from ktransformers.serve.graphs.step_graphs import StepGraphs, StepKey, why_not
from ktransformers.serve.sampling.sampling import Sampling
from ktransformers.serve.scheduler.forward import Chunk, Forward
from ktransformers.serve.scheduler.lora import LoadedAdapter, LoraModules
from tests.support.decode_recorder import EagerCapture, graphs_of
from tests.support.serving import EngineHarness, random_prompt, same_completion
from tests.support.slow_cases import others_slow
from tests.support.tiny_models import build

pytestmark = pytest.mark.filterwarnings("ignore:.*bf16.*")


@pytest.fixture(scope="module")
def placed(model_directory: Path, adapters: dict[str, Path]) -> Iterator[tuple[EngineHarness, Placement]]:
    harness = EngineHarness(model_directory, adapters)
    placement = attach(harness.model, policy="resident", device="cpu")
    assert placement is not None
    yield harness, placement
    placement.detach()


@pytest.fixture
def capture(placed: tuple[EngineHarness, Placement]) -> Iterator[EagerCapture]:
    harness, placement = placed
    placement.place_residents(count=0)
    made = EagerCapture(placement)
    harness.forward.graphs = StepGraphs(harness.model, placement, made)
    yield made
    harness.forward.graphs = None


def test_completions_match_eager(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    """Sequences of several lengths that join and leave; prompts in between go the other way."""
    placed_harness, _ = placed
    lengths = [(5, 30), (40, 12), (9, 21), (70, 8), (1, 15)]
    prompts = [random_prompt(seed, length) for seed, (length, _) in enumerate(lengths)]
    engine = placed_harness.engine(max_running_requests=3)
    made = [placed_harness.sequence(prompt, max_tokens=new) for prompt, (_, new) in zip(prompts, lengths, strict=True)]
    placed_harness.run(engine, *(one for one, _ in made))
    graphs = graphs_of(placed_harness)
    assert capture.captures == 3 and 0 < graphs.replayed < engine.counts.steps
    for prompt, (_, new), (_, recorded) in zip(prompts, lengths, made, strict=True):
        assert same_completion(recorded, harness.alone(prompt, max_tokens=new))


def test_growing_slots_and_cached_prefixes_match_eager(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    placed_harness, _ = placed
    prompt, engine = random_prompt(3, 60), placed_harness.engine()
    first, recorded = placed_harness.sequence(prompt, max_tokens=100)
    placed_harness.run(engine, first)
    assert graphs_of(placed_harness).replayed > 90 and capture.captures == 1
    assert same_completion(recorded, harness.alone(prompt, max_tokens=100))
    longer = prompt + recorded.tokens[:80]
    again, later = placed_harness.sequence(longer, max_tokens=20)
    placed_harness.run(engine, again)
    assert later.events[-1].cached == len(longer) - 1
    assert same_completion(later, harness.alone(longer, max_tokens=20))


@pytest.mark.parametrize("length", [60, 270], ids=["packed experts", "decoded experts"])
def test_prompts_are_captured_where_every_expert_is_resident(
    length: int, placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    """Prompts, a chunk in the middle of one, and new tokens in one step, against eager steps without residents."""
    placed_harness, placement = placed
    placement.place_residents(count=placed_harness.model.config.num_experts)
    graphs = placed_harness.forward.graphs = StepGraphs(placed_harness.model, placement, capture, max_chunk_rows=300)
    runs: list[list[torch.Tensor]] = []
    for one in (harness, placed_harness):
        slots, found = KVSlot.together(9, 384), list[torch.Tensor]()
        begin = [Chunk(slot, random_prompt(row, 9), 0, None) for row, slot in enumerate(slots[:2])]
        one.forward.run([*begin, Chunk(slots[2], random_prompt(2, 5), 0, None)])
        for turn in range(6):
            chunks = [Chunk(slot, [7 + turn], slot.length, None) for slot in slots[:2]]
            chunks.append(Chunk(slots[2], random_prompt(turn, 11), slots[2].length, None, wants_logits=False))
            chunks.append(Chunk(slots[3 + turn], random_prompt(turn + 3, length), 0, None))
            found += [result.logits.clone() for result in one.forward.run(chunks) if result is not None]
        runs.append(found)
    (key,) = graphs.graphs.captured
    assert key.columns == 8 and key.rows >= length + 13 and graphs.replayed == 6 - CAPTURE_AT + 1
    for expected, actual in zip(*runs, strict=True):
        assert float((actual - expected).norm() / expected.norm()) < 2e-2  # residents round to bf16


def test_scored_prompts_are_not_captured(placed: tuple[EngineHarness, Placement], capture: EagerCapture) -> None:
    placed_harness, _ = placed
    asked = {"max_tokens": 0, "prompt_logprobs": True, "logprobs": 0}
    placed_harness.run(
        placed_harness.engine(chunked_prefill_size=1), placed_harness.sequence(random_prompt(2, 9), **asked)[0]
    )
    graphs = graphs_of(placed_harness)
    assert not graphs.replayed and not capture.captures, "scored prompts are launched"
    placed_harness.run(placed_harness.engine(), placed_harness.sequence(random_prompt(5, 9), max_tokens=10)[0])
    assert graphs.replayed == 10 - 1 - (CAPTURE_AT - 1)


def test_sampled_tokens_match_logits(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    """Greedy and drawn rows in one step."""
    placed_harness, _ = placed
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=7)
    both = []
    for one in (placed_harness, harness):
        engine = one.engine()
        made = [
            one.sequence(random_prompt(1, 12), max_tokens=14, sampling=sampling),
            one.sequence(random_prompt(2, 30), max_tokens=14),
        ]
        one.run(engine, *(sequence for sequence, _ in made))
        both.append([recorded for _, recorded in made])
    assert graphs_of(placed_harness).replayed
    assert all(same_completion(a, b) for a, b in zip(*both, strict=True))


def test_padding_rows_are_not_routed(placed: tuple[EngineHarness, Placement], capture: EagerCapture) -> None:
    """Three sequences in a step of four: the fourth row has no slot, and no expert is counted for it."""
    placed_harness, placement = placed
    made = [placed_harness.sequence(random_prompt(seed, 6), max_tokens=20) for seed in range(3)]
    before = [int(row.sum()) for row in placement.counts()]
    engine = placed_harness.engine()
    placed_harness.run(engine, *(one for one, _ in made))
    graphs = graphs_of(placed_harness)
    assert list(graphs.graphs.captured) == [StepKey(4, ())]
    inputs = graphs.graphs.captured[StepKey(4, ())].inputs
    assert inputs.rows[ACTIVE].tolist() == inputs.table[COUNT].tolist() == [1, 1, 1, 0] and not inputs.rows[:, 3].any()
    top_k = placed_harness.model.config.num_experts_per_tok
    tokens = 3 * (6 + 19) + 3  # the step that was recorded was computed once more
    for row, then in zip(placement.counts(), before, strict=True):
        assert int(row.sum()) - then == tokens * top_k


def test_padding_ids_are_minus_one() -> None:
    ids = torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert mask_padding(ids) is ids
    with use_padding_mask(torch.tensor([True, False, True])):
        assert mask_padding(ids).tolist() == [[1, 2], [-1, -1], [5, 6]]


def test_graphs_are_recaptured_when_residents_change(
    placed: tuple[EngineHarness, Placement], capture: EagerCapture, harness: EngineHarness
) -> None:
    placed_harness, placement = placed
    placement.place_residents(count=2)
    engine = placed_harness.engine()
    first, recorded = placed_harness.sequence(random_prompt(8, 10), max_tokens=30)
    engine.submit([first])
    for _ in range(12):
        engine.step()
    graphs = graphs_of(placed_harness)
    assert capture.captures == 1
    callbacks = placement.engines[0].callbacks
    callbacks._captured[0] = [
        (ready, placement.layers[0].store) for ready in callbacks._prepared.values()
    ]  # as a capture does
    placement.place_residents(count=3)
    placed_harness.run(engine)
    assert capture.captures == 2, "captured anew"
    assert not callbacks._captured, "memory of the residents before is freed"
    assert recorded.finish == "length" and graphs.replayed == 29 - 2 * (CAPTURE_AT - 1)
    alone = harness.alone(random_prompt(8, 10), max_tokens=30)
    assert torch.allclose(torch.tensor(recorded.logprobs[:1]), torch.tensor(alone.logprobs[:1]), atol=0.05)


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
    placed: tuple[EngineHarness, Placement],
    capture: EagerCapture,
    harness: EngineHarness,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An input that a graph cannot have is refused for that size, any other failure for good."""
    placed_harness, _ = placed
    capture.failure = failure
    made = [placed_harness.sequence(random_prompt(seed, 10), max_tokens=new) for seed, new in ((1, 10), (2, 20))]
    with caplog.at_level("WARNING"):
        placed_harness.run(placed_harness.engine(), *(one for one, _ in made))
    lines = [line.partition(", run eagerly instead")[0] for line in caplog.messages if "CUDA" in line]
    assert lines == [f"no further CUDA graphs of {subject}" for subject in subjects]
    assert not graphs_of(placed_harness).replayed and graphs_of(placed_harness).graphs.closed == (len(subjects) == 1)
    for (_, recorded), (seed, new) in zip(made, ((1, 10), (2, 20)), strict=True):
        assert same_completion(recorded, harness.alone(random_prompt(seed, 10), max_tokens=new))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "family",
    ["gpt_oss", "deepseek_v3", "mixtral", "glm4_moe", "qwen2_moe", "qwen3_next", "kimi_linear", "lfm2_moe", "zaya"],
)
def test_families_match_eager(family: str, device: str) -> None:
    """Sinks and windows, latents, dense layers, shared experts, recurrent states; the same tokens are told both times,
    so that a near tie decides nothing. On a GPU these are real graphs."""
    model, forward, placement = served(family, device)
    prompts = [[(seed + 7 * at) % 90 for at in range(length)] for seed, length in ((3, 5), (4, 21), (5, 12))]
    with torch.inference_mode():
        told, wanted = decode(forward, prompts, 12)
        assert not (why := why_not(forward, placement)) or device == "cpu", why
        forward.graphs = StepGraphs(model, placement, EagerCapture(placement) if device == "cpu" else None)
        _, found = decode(forward, prompts, 12, told)
    assert forward.graphs.replayed == 12 - CAPTURE_AT + 1
    for got, want in zip(found, wanted, strict=True):  # residents round what they are given to bf16
        assert float((got - want).norm() / want.norm()) < 1e-2
    placement.detach()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_adapters_of_latents_match_eager(device: str) -> None:
    """LoRA on `kv_b_proj`, which a step with latents never calls: two adapters and the base in one graph."""
    model, forward, placement = served("deepseek_v3", device)
    modules, generator = LoraModules(model), torch.Generator().manual_seed(0)

    def adapter(name: str, rank: int) -> LoadedAdapter:
        pairs = {}
        for layer in range(model.config.num_hidden_layers):
            linear = model.model.layers[layer].self_attn.kv_b_proj
            a = torch.randn(rank, linear.in_features, generator=generator) * 0.3
            b = torch.randn(linear.out_features, rank, generator=generator) * 0.3
            pairs[f"model.layers.{layer}.self_attn.kv_b_proj"] = LoraPair(a, b, 0.5)
        return modules.bind(adapter_from_tensors({}, pairs), name, name, 1)

    adapters = [adapter("one", 4), None, adapter("two", 2)]
    prompts = [[(seed + 7 * at) % 90 for at in range(9)] for seed in (3, 3, 3)]
    with torch.inference_mode():
        told, wanted = decode(forward, prompts, 12, adapters=adapters)
        forward.graphs = StepGraphs(model, placement, EagerCapture(placement) if device == "cpu" else None)
        _, found = decode(forward, prompts, 12, told, adapters)
    assert forward.graphs.replayed == 12 - CAPTURE_AT + 1
    for got, want in zip(found, wanted, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-2
        assert all(float((want[row] - want[1]).norm() / want[1].norm()) > 0.1 for row in (0, 2))
    placement.detach()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spec", others_slow(["fp8:128x128", "int4:32", "mxfp4"], ["fp8:128x128"]))
def test_steps_read_the_codes_of_latents(spec: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kv_b_proj` in codes: logits of a model with the numbers that they stand for. On a GPU no step decodes them; a
    CPU that stands in for one does."""
    monkeypatch.setattr(quantized_weight, "MIN_WEIGHTS", 1 << 10)
    sizes = {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "v_head_dim": 48}
    prompts = [[(seed + 7 * at) % 90 for at in range(length)] for seed, length in ((3, 5), (4, 21), (5, 12))]
    logits, told = [], None
    for has_codes in (False, True):
        model, forward, placement = served("deepseek_v3", device, spec, has_codes=has_codes, **sizes)
        weights = [layer.self_attn.kv_b_proj.weight for layer in model.model.layers]
        assert all(isinstance(weight, QuantizedWeight) == has_codes for weight in weights)
        with torch.inference_mode():
            first, wanted = decode(forward, prompts, 8, told)
            told = told or first
            forward.graphs = StepGraphs(model, placement, EagerCapture(placement) if device == "cpu" else None)
            NORMS.apply(model)
            assert FUSED_LATENTS.apply(model) == len(weights)
            if device != "cpu" and has_codes:
                monkeypatch.setattr(head_products, "decoded_rows", lambda *_: pytest.fail("decoded"))
            _, measured = decode(forward, prompts, 8, told)
        assert forward.graphs.replayed == 8 - CAPTURE_AT + 1
        logits += [wanted, measured]
        placement.detach()
    for other in logits[1:]:
        assert error(other, logits[0]) < (1e-2 if device == "cpu" else 3e-2)


def error(measured: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((one - two).norm() / two.norm()) for one, two in zip(measured, wanted, strict=True))


def as_on_a_gpu(weight: QuantizedWeight, device: str) -> torch.nn.Parameter:
    """The same codes in the memory of a device, which may be the CPU."""
    packed = torch.from_dlpack(weight.impl.linear.memory()).view(-1).clone()  # type: ignore[union-attr]
    codes = GpuLinearWeight.of(packed.to(device), packed_linear(*weight.shape, weight.spec))
    return torch.nn.Parameter(QuantizedWeight(GpuPacked(codes), weight.spec, weight.shape, weight.dtype), False)


def served(
    family: str, device: str, latents: str | None = None, *, has_codes: bool = False, **sizes: int
) -> tuple[Any, Forward, Placement]:
    """`latents`: `kv_b_proj` has codes of this format, or the numbers that these stand for."""
    model: Any = build(family, **sizes)
    for module in expert_modules(model).values():
        pack_module(module, free=True)
    select_implementation(model)
    if latents is not None and device != "cpu":
        model.to(torch.bfloat16)
    for layer in model.model.layers if latents is not None else ():
        linear = layer.self_attn.kv_b_proj
        quantized_weight.quantize_linear("kv_b_proj", linear, latents)
        codes = as_on_a_gpu(linear.weight, device)
        linear.weight = codes if has_codes else torch.nn.Parameter(codes + 0, False)
    forward = Forward(model.to(device))
    placement = attach(model, policy="resident", device=device)
    assert placement is not None and not placement.left
    placement.place_residents(count=2)
    return model, forward, placement


def decode(
    forward: Forward,
    prompts: list[list[int]],
    new: int,
    told: list[list[int]] | None = None,
    adapters: Sequence[LoadedAdapter | None] = (None, None, None),
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """All prompts, then `new` steps of a token each: the most likely ones, or those that are told; and all logits."""
    slots = KVSlot.together(len(prompts), 64)
    pieces = [Chunk(*given, greedy=True) for given in zip(slots, prompts, (0, 0, 0), adapters, strict=True)]
    tokens, logits = list[list[int]](), list[torch.Tensor]()
    for step in range(new + 1):
        found = [one for one in forward.run(pieces) if one is not None]
        logits.append(torch.stack([one.logits for one in found]).float().cpu())
        tokens.append([one.token for one in found if one.token is not None] if told is None else told[step])
        pieces = [
            Chunk(slot, [token], slot.length, adapter, greedy=True)
            for slot, token, adapter in zip(slots, tokens[-1], adapters, strict=True)
        ]
    return tokens, logits


def test_reason_for_no_graphs_names_device_or_switch(
    placed: tuple[EngineHarness, Placement], monkeypatch: pytest.MonkeyPatch
) -> None:
    placed_harness, placement = placed
    assert "on cpu, not on one GPU" in why_not(placed_harness.forward, placement)
    monkeypatch.setenv("KT_GRAPHS", "experts,attention")
    assert why_not(placed_harness.forward, placement) == "KT_GRAPHS does not name decode"
