"""Latent attention over slots that hold latents: logits of the stock model, in every way of computing them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers import _core
from ktransformers.adapters import LoraPair, adapter_from_tensors
from ktransformers.ground import system
from ktransformers.nn import load_model
from ktransformers.quantized import dense_layers
from ktransformers.quantized.weight import QuantizedWeight, quantize_linear
from ktransformers.quantized.widened import WidenedWeight
from ktransformers.serve.attention import latent
from ktransformers.serve.attention.latent import LATENT_ATTRIBUTE, LatentProjection, head_products
from ktransformers.serve.cache.kv_cache import KVCache, KVSlot
from ktransformers.serve.scheduler.forward import Chunk, Forward, make_forward
from ktransformers.serve.scheduler.head import collect_rows
from ktransformers.serve.scheduler.lora import LoadedAdapter, LoraModules
from tests.support.tiny_models import build, save

RANK, ROPE, NOPE, VALUE, HEADS = 32, 16, 32, 64, 4
# Sizes that the core multiplies; those of the other models are too small.
SIZES = {
    "kv_lora_rank": RANK,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "head_dim": ROPE,
}
PROMPTS = [[(7 * at + 3) % 96 for at in range(60)], [(11 * at + 5) % 96 for at in range(43)]]
FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1")


def computed_in_chunks(forward: Forward, adapters: tuple[LoadedAdapter | None, ...] = (None, None)) -> list[Any]:
    """Logits of both prompts: a chunk without earlier tokens, a short one with many, and single tokens in one batch."""
    slots = KVSlot.together(2, 64)
    logits: list[list[torch.Tensor]] = [[], []]
    steps = [
        ((0, 0, 50), (1, 0, 38)),
        ((0, 50, 53), (1, 38, 40)),
        *(((0, a, a + 1), (1, a - 13, a - 12)) for a in (53, 54)),
    ]
    steps += [((0, 55, 60),), ((1, 42, 43),)]
    for step in steps:
        forward.run([Chunk(slots[i], PROMPTS[i][a:b], a, adapters[i], collect_rows(logits[i])) for i, a, b in step])
    return [torch.cat(rows).float() for rows in logits]


def stock_logits(model: Any) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in PROMPTS]


def error(measured: list[Any], expected: list[Any]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(measured, expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_slots_hold_latents(family: str) -> None:
    model: Any = build(family)
    forward, config = Forward(model), model.config
    width = config.kv_lora_rank + config.qk_rope_head_dim
    assert forward.check_against_stock() == config.num_hidden_layers * width * 4
    slot = KVSlot.alone(64)
    forward.run([Chunk(slot, PROMPTS[0][:5], 0, None)])
    parts = slot.memory.parts
    assert not parts["values"] and all(keys.shape == (1, 1, 64, width) for keys in parts["keys"].values())


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_new_tokens_equal_stock(family: str) -> None:
    expected = stock_logits(build(family))
    assert error(computed_in_chunks(Forward(build(family))), expected) < 1e-5


@pytest.mark.parametrize("absorbed", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_ways_equal_stock(dtype: torch.dtype, absorbed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks absorbed or expanded, and heads in groups of one; new tokens by the core."""
    expected = stock_logits(build("deepseek_v3", **SIZES).to(dtype))
    monkeypatch.setattr(LatentProjection, "prefers_absorbed", lambda self, rows, keys: absorbed)
    monkeypatch.setattr(LatentProjection, "head_groups", lambda self, keys: [(at, at + 1) for at in range(self.heads)])
    measured = computed_in_chunks(Forward(build("deepseek_v3", **SIZES).to(dtype)))
    assert error(measured, expected) < (1e-5 if dtype == torch.float32 else 0.03)


def test_the_way_with_fewer_products_is_taken() -> None:
    projection = LatentProjection(torch.nn.Linear(512, 16 * 256, bias=False), 16, 512, 128, 64, 128)
    assert projection.prefers_absorbed(8, 4096) and not projection.prefers_absorbed(2048, 4096)
    assert not projection.prefers_absorbed(64, 64)  # a prompt without earlier tokens
    assert projection.head_groups(1 << 16) == [(at, min(at + 1, 16)) for at in range(16)]
    assert projection.head_groups(100) == [(0, 16)]


def test_adapters_of_kv_b_proj_by_request() -> None:
    """Beside rows of the base in one batch, in all ways, as if each were merged into the weights."""
    generator = torch.Generator().manual_seed(0)

    def adapted(model: Any, scaling: float) -> dict[str, LoraPair]:
        pairs = {}
        for layer, module in enumerate(model.model.layers):
            linear = module.self_attn.kv_b_proj
            a = torch.randn(4, linear.in_features, generator=generator) * 0.2
            b = torch.randn(linear.out_features, 4, generator=generator) * 0.2
            pairs[f"model.layers.{layer}.self_attn.kv_b_proj"] = LoraPair(a, b, scaling)
        return pairs

    model: Any = build("deepseek_v3", **SIZES)
    pairs = adapted(model, 0.5)
    forward, modules = Forward(model), LoraModules(model)
    adapter = modules.bind(adapter_from_tensors({}, pairs), "made", "made", 1)
    base, merged = build("deepseek_v3", **SIZES), build("deepseek_v3", **SIZES)
    with torch.no_grad():
        for name, pair in pairs.items():
            merged.get_submodule(name).weight += pair.scaling * pair.b @ pair.a  # type: ignore[operator]
    expected = [stock_logits(base)[0], stock_logits(merged)[1]]
    assert error([stock_logits(base)[1]], expected[1:]) > 0.01
    assert error(computed_in_chunks(forward, (None, adapter)), expected) < 1e-5
    assert error(computed_in_chunks(forward, (adapter, adapter)), stock_logits(merged)) < 1e-5


def test_cached_prefix_of_latents_is_shared_and_grows() -> None:
    model: Any = build("deepseek_v3")
    forward, cache = Forward(model), KVCache(1024)
    first = cache.allocate(None, PROMPTS[0][:30])
    assert first is not None
    forward.run([Chunk(first, PROMPTS[0][:30], 0, None)])
    second = cache.allocate(None, PROMPTS[0][:20] + PROMPTS[1])
    assert second is not None and second.length == 20 and not cache.memory.parts["values"]
    assert second.blocks[0] != first.blocks[0]  # both write to their first block
    for layer in cache.memory.layers:
        assert torch.equal(*(slot.read("keys", layer, 0, 20, torch.float32) for slot in (first, second)))
    held = {layer: first.read("keys", layer, 0, 30, torch.float32).clone() for layer in cache.memory.layers}
    assert cache.grow(first, 200) and first.capacity >= 200
    for layer, keys in held.items():
        assert torch.equal(first.read("keys", layer, 0, 30, torch.float32), keys)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_head_products(dtype: torch.dtype, rows: int) -> None:
    """Of views too, and of more rows than the core takes at a time."""
    torch.manual_seed(0)
    weights = torch.randn(3, 96, 64).bfloat16()[:, 32:]
    x = torch.randn(3, rows, 96).to(dtype)[..., :64]
    assert rows < 40 or rows > _core.linear_rows()
    expected = torch.bmm(x.double(), weights.double().transpose(1, 2))
    measured = head_products(x, weights)
    assert measured.dtype == dtype and error([measured.double()], [expected]) < (
        1e-6 if dtype == torch.float32 else 5e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_new_tokens_read_codes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kv_b_proj` in codes: logits of the stock model with the numbers that they stand for. New tokens decode nothing,
    and no copy of the keys' part is made."""
    stock: Any = build("deepseek_v3", **SIZES).to(dtype)
    model: Any = build("deepseek_v3", **SIZES).to(dtype)
    for plain, layer in zip(stock.model.layers, model.model.layers, strict=True):
        quantize_linear("kv_b_proj", layer.self_attn.kv_b_proj, "int4:32")
        numbers = layer.self_attn.kv_b_proj.weight.with_dtype(torch.float32).decoded(0, HEADS * (NOPE + VALUE))
        plain.self_attn.kv_b_proj.weight = torch.nn.Parameter(numbers.to(dtype), requires_grad=False)
    forward = Forward(model)
    assert error(computed_in_chunks(forward), stock_logits(stock)) < (1e-4 if dtype == torch.float32 else 0.03)
    slots = KVSlot.together(2, 64)
    forward.run([Chunk(slot, prompt[:40], 0, None) for slot, prompt in zip(slots, PROMPTS, strict=True)])
    for name in ("decoded", "gathered"):
        monkeypatch.setattr(QuantizedWeight, name, lambda *_: pytest.fail("codes were decoded"))
    forward.run([Chunk(slot, prompt[40:41], 40, None) for slot, prompt in zip(slots, PROMPTS, strict=True)])
    assert all("_numbers_of_keys" not in vars(getattr(x.self_attn, LATENT_ATTRIBUTE)) for x in model.model.layers)


def test_released_bf16_weights_are_expanded_as_they_are_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs without bf16 products: `kv_b_proj` is a widened weight, of which chunks multiply the rows of some
    heads."""
    monkeypatch.setattr(system, "forced_dense_products", "widened")
    monkeypatch.setattr(dense_layers, "MIN_WEIGHTS", HEADS * (NOPE + VALUE) * 4 * RANK)
    monkeypatch.setattr(latent, "MAX_EXPANDED", 50 * (NOPE + ROPE + VALUE) * 2)  # two heads at a time
    stock: Any = build("deepseek_v3", **SIZES | {"kv_lora_rank": 4 * RANK})  # a longer latent is expanded
    expected = stock_logits(stock)
    model: Any = load_model(save(stock.bfloat16(), tmp_path), dtype=torch.float32)
    assert isinstance(model.model.layers[0].self_attn.kv_b_proj.weight, WidenedWeight)
    forward = make_forward(model)
    assert isinstance(forward, Forward) and forward.check_against_stock() == 4 * 2 * (4 * RANK + ROPE)
    assert error(computed_in_chunks(forward), expected) < 1e-3
