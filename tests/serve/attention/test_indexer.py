"""Families that select keys by an indexer, over slots: logits of the stock model, alone and in mixed batches."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from ktransformers.adapters import LoraPair, adapter_from_tensors
from ktransformers.ground.errors import InputError
from ktransformers.serve.attention import indexer as indexers
from ktransformers.serve.attention import selection
from ktransformers.serve.attention.indexer import SpanTensors
from ktransformers.serve.attention.selection import SelectedRows, attend_gathered, attend_masked
from ktransformers.serve.attention.step import Span
from ktransformers.serve.cache.kv_cache import KVCache, KVSlot
from ktransformers.serve.scheduler.forward import Chunk, Forward, SequentialForward, make_forward
from ktransformers.serve.scheduler.head import collect_rows
from ktransformers.serve.scheduler.lora import LoadedAdapter, LoraModules
from tests.support.serving import DATA, VOCABULARY, EngineHarness, random_prompt, same_completion
from tests.support.slow_cases import others_slow
from tests.support.tiny_models import build, save

MLA = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v32": MLA,
    "glm_moe_dsa": MLA,
    "axk2": {},
    "mistral_large4": {},
    "hy_v4": MLA,
}
SHARED = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "shared"]}
PROMPTS = [[(7 * at + 3) % 96 for at in range(60)], [(11 * at + 5) % 96 for at in range(43)]]


def made(family: str, **changes: Any) -> Any:
    return build(family, **FAMILIES[family] | changes)


def computed_in_chunks(forward: Any, adapters: tuple[LoadedAdapter | None, ...] = (None, None)) -> list[Tensor]:
    """Both prompts from a few tokens that are all selected to single new tokens beside chunks of the other."""
    slots = KVSlot.together(2, 64)
    logits: list[list[Tensor]] = [[], []]
    steps = [((0, 0, 6), (1, 0, 20)), ((0, 6, 40),), ((0, 40, 41), (1, 20, 38)), ((0, 41, 43), (1, 38, 39))]
    steps += [((0, at, at + 1), (1, at - 4, at - 3)) for at in (43, 44)]
    steps += [((1, 41, 43), (0, 45, 60))]
    for step in steps:
        forward.run([Chunk(slots[i], PROMPTS[i][a:b], a, adapters[i], collect_rows(logits[i])) for i, a, b in step])
    return [torch.cat(rows).float() for rows in logits]


def stock_logits(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in PROMPTS]


def error(measured: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a.log_softmax(-1) - b.log_softmax(-1)).abs().max()) for a, b in zip(measured, expected, strict=True)
    )


@pytest.mark.parametrize("family", others_slow(FAMILIES, ("deepseek_v32", "glm_moe_dsa")))
def test_batches_equal_stock(family: str) -> None:
    expected = stock_logits(made(family))
    forward = make_forward(made(family))
    assert isinstance(forward, Forward) and forward.indexers == 2
    forward.check_against_stock()
    measured = computed_in_chunks(forward)
    assert error(measured, expected) < 1e-4
    assert all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(measured, expected, strict=True))
    everything = stock_logits(made(family, index_topk=64))
    assert error(everything, expected) > 1e-2  # the selection matters


@pytest.mark.parametrize("family", ["glm_moe_dsa", "hy_v4", "mistral_large4"])
def test_selection_shared_between_layers(family: str) -> None:
    shared: Any = made(family, **SHARED, mlp_layer_types=["dense", "sparse", "sparse"])
    forward = make_forward(made(family, **SHARED, mlp_layer_types=["dense", "sparse", "sparse"]))
    assert isinstance(forward, Forward) and forward.indexers == 1
    assert error(computed_in_chunks(forward), stock_logits(shared)) < 1e-4


@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("latents", [True, False])
def test_both_ways_equal_stock(latents: bool, gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks with gathered keys, some rows at a time, or with masked ones; latents, or keys of all heads."""
    expected = stock_logits(made("deepseek_v32"))
    monkeypatch.setattr(selection, "_prefers_gathered", lambda span: gathered)
    monkeypatch.setattr(selection, "_prefers_absorbed", lambda latent, span: gathered)
    monkeypatch.setattr(selection, "MAX_GATHERED", 8 * 48 * 3)
    if not latents:
        monkeypatch.setattr("ktransformers.serve.attention.latent._projection_of", lambda module: None)
    forward = Forward(made("deepseek_v32"))
    slot = KVSlot.alone(64)
    forward.run([Chunk(slot, PROMPTS[0][:20], 0, None)])
    assert bool(slot.memory.parts["values"]) is not latents
    assert error(computed_in_chunks(forward), expected) < 1e-4


def test_scores_of_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than a few rows of scores exist, and the selection is the same."""
    expected = stock_logits(made("glm_moe_dsa"))
    monkeypatch.setattr(indexers, "MAX_SCORES", 3 * 16 * 43)
    scored: list[int] = []
    stock_topk = SpanTensors.topk

    def topk(self: SpanTensors, k: int, dim: int = -1, **options: Any) -> Any:
        scored.extend(part.numel() * 16 for part in self.parts)
        return stock_topk(self, k, dim, **options)

    monkeypatch.setattr(SpanTensors, "topk", topk)
    assert error(computed_in_chunks(Forward(made("glm_moe_dsa"))), expected) < 1e-4
    assert 0 < max(scored) <= 3 * 16 * 43


def test_short_sequences_take_the_ordinary_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit the logits of a model that selects everything; nothing is scored."""
    monkeypatch.setattr(SpanTensors, "_apply", lambda self, *_: pytest.fail("scored") if self.spans else self)
    logits: list[list[Tensor]] = [[], []]
    for topk, rows in zip((8, 64), logits, strict=True):
        forward, slots = Forward(made("deepseek_v32", index_topk=topk)), KVSlot.together(2, 64)
        for first, last in ((0, 7), (7, 8)):
            forward.run([Chunk(slot, PROMPTS[0][first:last], first, None, collect_rows(rows)) for slot in slots])
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_adapters_of_indexers_by_request() -> None:
    """Beside rows of the base in one batch, as if each were merged into the weights."""
    generator = torch.Generator().manual_seed(0)
    model = made("deepseek_v32")
    pairs: dict[str, LoraPair] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.endswith(
            ("wq_b", "wk", "weights_proj", "kv_b_proj", "q_b_proj")
        ):
            a = torch.randn(4, module.in_features, generator=generator) * 0.2
            pairs[name] = LoraPair(a, torch.randn(module.out_features, 4, generator=generator) * 0.2, 0.5)
    forward, modules = Forward(model), LoraModules(model)
    adapter = modules.bind(adapter_from_tensors({}, pairs), "made", "made", 1)
    base, merged = made("deepseek_v32"), made("deepseek_v32")
    with torch.no_grad():
        for name, pair in pairs.items():
            merged.get_submodule(name).weight += pair.scaling * pair.b @ pair.a
    expected = [stock_logits(base)[0], stock_logits(merged)[1]]
    assert error(computed_in_chunks(forward, (None, adapter)), expected) < 1e-4
    assert error(computed_in_chunks(forward, (adapter, adapter)), stock_logits(merged)) < 1e-4


def test_cached_prefix_has_its_index_keys() -> None:
    forward, cache = Forward(made("deepseek_v32")), KVCache(1024)
    first = cache.allocate(None, PROMPTS[0][:30])
    assert first is not None
    forward.run([Chunk(first, PROMPTS[0][:30], 0, None)])
    second = cache.allocate(None, PROMPTS[0][:40])  # copied, because `first` is in use
    assert second is not None and second.length == 30
    rows: list[Tensor] = []
    forward.run([Chunk(second, PROMPTS[0][30:40], 30, None, collect_rows(rows))])
    assert cache.grow(second, 200)
    forward.run([Chunk(second, PROMPTS[0][40:41], 40, None, collect_rows(rows))])
    assert error([torch.cat(rows)], [stock_logits(made("deepseek_v32"))[0][30:41]]) < 1e-4


def test_check_sees_a_wrong_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(made("deepseek_v32", index_topk=2048))
    assert forward.check_against_stock() == 2 * (48 + 16) * 4
    everything = lambda span, keys, device: torch.ones(1, span.rows, keys, dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(indexers, "_causal_mask", everything)
    with pytest.raises(InputError, match="whose logits differ"):
        forward.check_against_stock()


def test_check_sees_ignored_selections(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Forward(made("glm_moe_dsa", index_topk=2048))
    forward.check_against_stock()
    monkeypatch.setattr(indexers, "selects", lambda span, topk: False)
    with pytest.raises(InputError, match="whose logits differ"):
        forward.check_against_stock()


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_ties_are_no_difference(family: str, dtype: torch.dtype, seed: int) -> None:
    """With two heads a quarter of the scores is 0, and in bf16 many others are closer than a rounding."""
    model = build(family, seed, index_n_heads=2, index_head_dim=16, index_topk=8).to(dtype)
    make_forward(model).check_against_stock()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v4", {}),
        ("deepseek_v4", {"layer_types": ["sliding_attention", "compressed_sparse_attention"], "index_topk": 4}),
        ("minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4}),
        ("qwen4_exp_text", {}),
    ],
)
def test_other_indexes_are_computed_one_at_a_time(family: str, changes: dict[str, Any]) -> None:
    """Compressed or blocked indexes: transformers' own cache."""
    forward = make_forward(build(family, **changes))
    assert isinstance(forward, SequentialForward)
    forward.check_against_stock()


def test_gathered_equals_masked_with_sinks() -> None:
    torch.manual_seed(0)
    heads, n, d, rows, k = 4, 40, 16, 5, 8
    query, keys, values = torch.randn(heads, rows, d), torch.randn(2, n, d), torch.randn(2, n, d)
    selected = torch.stack([torch.randperm(n)[:k] for _ in range(rows)])
    span = SelectedRows(0, n - rows, keys, values, selected)
    expected = attend_masked(query, keys, values, span.mask(), 0.3)
    assert torch.allclose(attend_gathered(query, [span], 0.3, d), expected, atol=1e-6)
    sinks = torch.randn(heads)
    scores = (query @ keys.repeat_interleave(2, 0).transpose(1, 2) * 0.3).masked_fill(~span.mask(), -torch.inf)
    weights = torch.cat([scores, sinks.view(heads, 1, 1).expand(heads, rows, 1)], -1).softmax(-1)[..., :-1]
    by_hand = weights @ values.repeat_interleave(2, 0)
    assert torch.allclose(attend_gathered(query, [span], 0.3, d, sinks), by_hand, atol=1e-6)


def test_functions_of_span_tensors() -> None:
    torch.manual_seed(0)
    spans = [Span(KVSlot.alone(0), 0, 2, 10), Span(KVSlot.alone(0), 3, 4, 20)]
    parts, queries = [torch.randn(1, 12, 8), torch.randn(1, 21, 8)], torch.randn(1, 4, 3, 8)
    scores = torch.matmul(queries, SpanTensors(spans, parts.__getitem__, 4).transpose(-1, -2).unsqueeze(1)) * 2.0
    assert [part.shape for part in scores.parts] == [(1, 2, 3, 12), (1, 1, 3, 21)]
    assert torch.equal(scores.parts[1], queries[:, 3:4] @ parts[1].transpose(-1, -2).unsqueeze(1) * 2.0)
    assert [part.shape for part in torch.topk(scores, 5, dim=-1).indices.parts] == [(1, 2, 3, 5), (1, 1, 3, 5)]
    positive = SpanTensors(spans, [part > 0 for part in scores.parts].__getitem__, 4)
    masked = scores.masked_fill(~positive, -1.0)
    assert all(bool((part >= -1).all()) for part in masked.parts)


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_core_attends_to_gathered_keys(dtype: torch.dtype, values: bool) -> None:
    """Rows of two sequences; values of their own, or the beginning of the keys. The cache is not written to."""
    torch.manual_seed(0)
    heads, n, d, k, size = 4, 60, 48, 16, 32
    spans = []
    for first, rows in ((0, 3), (3, 1)):
        keys = torch.randn(1, n, d).to(dtype)
        selected = torch.stack([torch.randperm(n - 4)[:k] for _ in range(rows)])
        spans.append(
            SelectedRows(first, n - rows, keys, torch.randn(1, n, size).to(dtype) if values else None, selected)
        )
    query, cached = torch.randn(heads, 4, d).to(dtype), [span.keys.clone() for span in spans]
    expected = attend_gathered(query, spans, 0.2, size)
    measured = attend_gathered(query, spans, 0.2, size, native=True)
    assert float((measured - expected).float().norm() / expected.float().norm()) < (
        1e-5 if dtype is torch.float32 else 0.01
    )
    assert all(torch.equal(span.keys, keys) for span, keys in zip(spans, cached, strict=True))


@pytest.fixture(scope="module")
def indexed_harness(tmp_path_factory: pytest.TempPathFactory) -> EngineHarness:
    """A deepseek_v32 with a tokenizer and an adapter on its attention and indexers."""
    folder = tmp_path_factory.mktemp("deepseek_v32")
    save(made("deepseek_v32", vocab_size=VOCABULARY, max_position_embeddings=512), folder / "model")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, folder / "model" / file)
    base: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    config = LoraConfig(r=4, target_modules=["q_b_proj", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj"])
    peft: Any = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    peft.save_pretrained(str(folder / "adapter"))
    return EngineHarness(folder / "model", {"one": folder / "adapter"})


def test_engine_preempts_and_reuses_prefixes(indexed_harness: EngineHarness) -> None:
    """Sequences with and without the adapter, prompts in chunks beside new tokens: as each alone and uncached."""
    harness = indexed_harness
    prompts = [random_prompt(seed, 40 + seed) for seed in range(4)]
    names = [None, "one", None, "one"]
    created = [harness.sequence(prompt, name, max_tokens=60) for prompt, name in zip(prompts, names, strict=True)]
    engine = harness.engine(max_total_tokens=320, chunked_prefill_size=32)
    harness.run(engine, *(one for one, _ in created))
    assert engine.scheduler.preempted > 0
    alone = [harness.alone(prompt, name, max_tokens=60) for prompt, name in zip(prompts, names, strict=True)]
    assert all(same_completion(recorded, one) for (_, recorded), one in zip(created, alone, strict=True))
    assert alone[1].tokens != harness.alone(prompts[1], max_tokens=60).tokens
    again, recorded = harness.sequence(prompts[3] + random_prompt(9, 20), "one")
    harness.run(engine, again)
    assert recorded.events[-1].cached >= 40
    assert same_completion(recorded, harness.alone(prompts[3] + random_prompt(9, 20), "one"))


@pytest.mark.parametrize("adapter", [None, "one"])
def test_engine_equals_stock_transformers_and_peft(indexed_harness: EngineHarness, adapter: str | None) -> None:
    stock: Any = AutoModelForCausalLM.from_pretrained(
        indexed_harness.directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    if adapter is not None:
        stock = PeftModel.from_pretrained(stock, str(indexed_harness.directory.parent / "adapter")).eval()
    prompt, count = random_prompt(1, 43), 8
    recorded, ids = indexed_harness.alone(prompt, adapter, max_tokens=count), list(prompt)
    for token, score in zip(recorded.tokens, recorded.logprobs, strict=True):
        with torch.no_grad():
            scores = stock(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
        assert token == int(scores.argmax()) and score == pytest.approx(float(scores.max()), abs=1e-4)
        ids.append(token)
