"""Decoder layers that the core computes for new tokens: the logits of the stock code, for which families and halves the
core is chosen, and batches that are left to the stock code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.ground import system
from ktransformers.nn import load_model
from ktransformers.serve.attention.decode_layer import CoreDecodeLayer
from ktransformers.serve.attention.windows import MAX_UNREDUCED_WINDOW
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.scheduler.forward import Chunk, make_forward
from tests.support.tiny_models import build, save

PROMPTS = ([5, 9, 2, 7, 1], [3, 3, 8], [4])
NEW = ([11, 12], [13, 14], [15, 16])
SIZES = {"hidden_size": 256, "head_dim": 64}  # large enough for weights that are kept in bf16
FAMILIES: dict[str, tuple[dict[str, Any], bool, bool]] = {  # changes, whether attention and experts are the core's
    "qwen3_moe": ({}, True, True),
    "mixtral": ({}, True, True),
    "olmoe": ({}, False, True),  # norms of all heads together
    "qwen2_moe": ({}, True, False),  # biases of projections; a shared expert
    "glm4_moe": ({}, True, False),  # scores of a sigmoid, shared experts
    "gpt_oss": ({}, True, True),  # sinks, windows, biases of projections, router and experts, cosines of half a head
}


@pytest.fixture(autouse=True)
def bf16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any CPU the weights of linear layers stay in bf16, also where the model computes in float32."""
    monkeypatch.setattr(system, "dense_products", lambda: "widened")


def layers_of(model: Any) -> list[CoreDecodeLayer]:
    return [layer.forward for layer in model.model.layers]


def open_model(tmp_path: Path, family: str, dtype: torch.dtype, **changes: Any) -> Any:
    model: Any = build(family, **(SIZES | changes))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        if name.endswith(("bias", "sinks")):
            nn.init.normal_(parameter)
    return make_forward(load_model(save(model.bfloat16(), tmp_path / family), dtype=dtype))


def decode(forward: Any, adapter: Any = None, **slot: Any) -> list[Tensor]:
    """Logits of two steps of three sequences of other lengths."""
    slots = KVSlot.together(len(PROMPTS), 16, **slot)
    forward.run([Chunk(one, prompt, 0, None) for one, prompt in zip(slots, PROMPTS, strict=True)])
    logits = []
    for step in range(2):
        chunks = [
            Chunk(one, [new[step]], len(prompt) + step, adapter)
            for one, prompt, new in zip(slots, PROMPTS, NEW, strict=True)
        ]
        logits += [result.logits.float().clone() for result in forward.run(chunks)]
    return logits


@contextmanager
def stock_layers(forward: Any) -> Iterator[None]:
    layers, stack = forward.model.model.layers, forward._decode_stack
    patched, used = [layer.forward for layer in layers], stack._matches
    stack._matches = False
    for layer, native in zip(layers, patched, strict=True):
        layer.forward = native._stock
    try:
        yield
    finally:
        stack._matches = used
        for layer, native in zip(layers, patched, strict=True):
            layer.forward = native


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((one - other).norm() / other.norm()) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_core_computes_what_the_stock_layers_compute(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    changes, attends, routes = FAMILIES[family]
    forward = open_model(tmp_path, family, dtype, **changes)
    actual = decode(forward)
    for layer in layers_of(forward.model):
        assert (layer._spec is not None, layer._store is not None) == (attends, routes)
    with stock_layers(forward):
        expected = decode(forward)
    assert error(actual, expected) <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert forward._decode_stack._matches == (attends and routes)


@pytest.mark.parametrize("kind", ["q8_0", "int4:32"])
def test_linear_layers_in_codes(kind: str, tmp_path: Path) -> None:
    from ktransformers.quantized.weight import quantize_linears

    model = load_model(save(build("qwen3_moe", **SIZES), tmp_path / "model"), dtype=torch.float32)
    quantize_linears(model, kind)
    forward: Any = make_forward(model)
    actual = decode(forward)
    assert all(layer._spec is not None and layer._store is not None for layer in layers_of(model))
    with stock_layers(forward):
        assert error(actual, decode(forward)) <= 1e-4  # activations are rounded to int16


def test_cache_in_codes(tmp_path: Path) -> None:
    forward = open_model(tmp_path, "qwen3_moe", torch.float32)
    actual = decode(forward, fp8=True)
    with stock_layers(forward):
        assert error(actual, decode(forward, fp8=True)) <= 1e-3  # a rounding may fall on the other side of a code


class CountedCalls:
    """How often the core computes attention."""

    def __init__(self, forward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        cache = CoreDecodeLayer.cache

        def counted(layer: CoreDecodeLayer, *args: Any) -> Any:
            self.count += 1
            return cache(layer, *args)

        monkeypatch.setattr(CoreDecodeLayer, "cache", counted)
        self._forward = forward

    def during(self, **slot: Any) -> int:
        self.count = 0
        decode(self._forward, **slot)
        return self.count


def test_batches_that_are_left_to_the_stock_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = open_model(tmp_path, "qwen3_moe", torch.float32)
    calls, layers = CountedCalls(forward, monkeypatch), forward.model.model.layers
    assert calls.during() > 2 * len(layers)  # and once more for the comparison of the model
    assert calls.during() == 2 * len(layers)
    assert calls.during(rounded=True) == 0
    handle = layers[0].mlp.gate.register_forward_hook(lambda *_: None)
    assert calls.during() == 2 * (len(layers) - 1)
    handle.remove()
    layers[0].input_layernorm.weight = nn.Parameter(2 * layers[0].input_layernorm.weight.detach())
    assert calls.during() == 2 * (len(layers) - 1)
    assert not any(layer._changed() for layer in layers_of(forward.model)[1:])


def test_layer_that_does_more_than_add_its_halves_is_left_alone(tmp_path: Path) -> None:
    forward = open_model(tmp_path, "qwen3_moe", torch.float32)
    layer = forward.model.model.layers[0]
    stock = layer.forward._stock
    layer.forward._stock = lambda hidden, **kwargs: 0.5 * stock(hidden, **kwargs)
    decode(forward)
    core = layers_of(forward.model)
    assert core[0]._core is None and core[1]._core is not None


@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_halves_that_are_small_beside_the_hidden_states_are_compared_too(part: str, tmp_path: Path) -> None:
    """In a sum of bf16 numbers what is added would be lost, and any other computation would match."""
    model: Any = build("qwen3_moe", **SIZES)
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj")):
            nn.init.normal_(parameter, std=1e-3)
    forward = make_forward(load_model(save(model.bfloat16(), tmp_path / "small"), dtype=torch.bfloat16))
    layers = forward.model.model.layers
    stock = getattr(layers[0], part).forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        out = stock(*args, **kwargs)
        return (2 * out[0], *out[1:]) if isinstance(out, tuple) else 2 * out

    getattr(layers[0], part).forward = doubled
    decode(forward)
    first, second = layers_of(forward.model)
    assert (first._spec is None, first._store is None) == (part == "self_attn", part == "mlp")
    assert second._spec is not None and second._store is not None


def test_model_with_scaled_embeddings_keeps_its_own_forward(tmp_path: Path) -> None:
    """Every layer is the core's, but what is around the layers is more than the parts that are called."""
    forward = open_model(tmp_path, "qwen3_moe", torch.float32)
    body = forward.model.model
    stock = body.forward

    def scaled(input_ids: Tensor, inputs_embeds: Tensor | None = None, **kwargs: Any) -> Any:
        return stock(inputs_embeds=2 * body.embed_tokens(input_ids), **kwargs)

    body.forward = scaled
    actual = decode(forward)
    stack = forward._decode_stack
    assert stack._compared and not stack._matches and all(layer.computes_whole_layer for layer in stack._layers)
    with stock_layers(forward):
        assert error(actual, decode(forward)) <= 1e-5


def test_stack_computes_batches_of_new_tokens_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = open_model(tmp_path, "qwen3_moe", torch.float32)
    decode(forward)
    calls: list[int] = []
    compute = forward._decode_stack._compute
    monkeypatch.setattr(forward._decode_stack, "_compute", lambda *args: calls.append(1) or compute(*args))
    decode(forward)
    assert len(calls) == 2  # not the prompts
    handle = forward.model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: None)
    decode(forward)
    assert len(calls) == 2
    handle.remove()
    slots = KVSlot.together(2, 16)
    forward.run([Chunk(slots[0], [1], 0, None), Chunk(slots[1], [1, 2], 0, None)])
    forward.run([Chunk(slots[0], [3], 1, None, wants_logits=False)])
    assert len(calls) == 2
    assert decode(forward)[0].shape == (forward.model.config.vocab_size,) and len(calls) == 4


def test_scores_over_all_experts(tmp_path: Path) -> None:
    forward = open_model(tmp_path, "qwen3_moe", torch.float32, norm_topk_prob=False)
    actual = decode(forward)
    assert all(layer._store is not None for layer in layers_of(forward.model))
    with stock_layers(forward):
        assert error(actual, decode(forward)) <= 1e-5


@pytest.mark.parametrize(("experts", "top_k"), [(4, 2), (40, 3), (128, 8), (128, 2), (512, 8)])
def test_of_equal_logits_those_are_selected_that_torch_selects(experts: int, top_k: int) -> None:
    """Down of expert e gives numbers by which the chosen experts are known; logits have few values."""
    pool = _core.Pool(threads=2, groups=1, spin_us=0, pin=False)
    store = _core.Experts(pool, experts, 64, 64)
    gate = torch.full((experts, 64, 64), 0.5)
    down = torch.zeros(experts, 64, 64)
    for expert in range(experts):
        down[expert, expert // 8] = 2.0 ** (expert % 8)  # a bit of an output
    store.pack(0, gate, gate, down)
    layer, x = _core.DecodeLayer(pool, 64), torch.ones(1, 64)
    for seed in range(20):
        values = torch.randint(0, 4, (experts, 1), generator=torch.Generator().manual_seed(seed)).float()
        router, out = (values / 64).repeat(1, 64), torch.empty(1, 64)
        layer.set_experts(torch.ones(64), 0.0, router, None, store, top_k, True)
        layer.route(x, out)
        scores, ids = torch.topk(torch.softmax(values[:, 0], 0), top_k)
        added = torch.zeros(64)
        for score, expert in zip(scores / scores.sum(), ids.tolist(), strict=True):
            added[expert // 8] += float(score) * 2.0 ** (expert % 8)
        found = out[0] - x[0]
        assert torch.allclose(found / found.sum(), added / added.sum(), rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_in_one_job_have_the_bits_of_single_calls(threads: int, dtype: torch.dtype) -> None:
    pool = _core.Pool(threads=threads, groups=1, spin_us=0, pin=False)
    random, rows, hidden, size = torch.Generator().manual_seed(1), 3, 64, 16

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    layers, caches = [], []
    for _ in range(4):
        experts, layer = _core.Experts(pool, 8, hidden, 32), _core.DecodeLayer(pool, hidden)
        experts.pack(0, numbers(8, 32, hidden) / 8, numbers(8, 32, hidden) / 8, numbers(8, hidden, 32) / 8)
        norms = [1 + 0.1 * numbers(n).to(dtype) for n in (hidden, size, size)]
        weights = [numbers(*shape).bfloat16() / 8 for shape in ((64, hidden), (32, hidden), (32, hidden), (hidden, 64))]
        biases = [None, *(numbers(weight.shape[0]).to(dtype) for weight in weights[1:])]
        layer.set_attention(*norms, [1e-6] * 3, weights, biases, numbers(4), size, 0.25)
        layer.set_experts(norms[0], 1e-6, numbers(8, hidden).bfloat16(), numbers(8).to(dtype), experts, 2, True)
        layers.append(layer)
        caches.append((numbers(rows, 2, 64, size).to(dtype), numbers(rows, 2, 64, size).to(dtype)))
    order = torch.arange(rows, dtype=torch.int32)
    sequences, windows = _core.StepSequences(order, order + 1, order[:, None]), [0, 2, 0, 2]
    x, cos, sin = numbers(rows, hidden).to(dtype), numbers(rows, size).to(dtype), numbers(rows, size).to(dtype)
    single, joint = x, torch.empty_like(x)
    for layer, cache, window in zip(layers, caches, windows, strict=True):
        attended, routed = torch.empty_like(x), torch.empty_like(x)
        layer.attend(single, attended, cos, sin, cache, sequences, window)
        layer.route(attended, routed)
        single = routed
    for _ in range(20):
        _core.decode_layers(layers, x, joint.zero_(), cos, sin, caches, windows, sequences, [False] * len(layers))
        assert torch.equal(joint, single)
    with pytest.raises(ValueError, match="a layer twice"):
        _core.decode_layers([layers[0]] * 4, x, joint, cos, sin, caches, windows, sequences, [False] * 4)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe"])
def test_windows_are_those_of_the_model_after_the_check(family: str, tmp_path: Path) -> None:
    """The check at start compares the layers while windows are 8 tokens long."""
    words = {"use_sliding_window": True, "max_window_layers": 2} if family == "qwen2_moe" else {}
    forward = open_model(tmp_path, family, torch.float32, sliding_window=12 + MAX_UNREDUCED_WINDOW, **words)
    forward.check_against_stock()
    assert any(layer._spec is not None for layer in layers_of(forward.model))

    def logits() -> list[Tensor]:
        slot, prompt = KVSlot.alone(48), [(11 * at + 5) % 90 + 3 for at in range(40)]
        forward.run([Chunk(slot, prompt, 0, None)])
        (result,) = forward.run([Chunk(slot, [7], 40, None)])
        return [result.logits.float().clone()]

    actual = logits()
    with stock_layers(forward):
        assert error(actual, logits()) <= 1e-5
