"""Fused attention inputs against the stock modules of several families, and modules that are left alone. Without a GPU
the kernel runs in Triton's interpreter if TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ktransformers.serve.attention import fused_attention
from ktransformers.serve.attention.attention import ATTENTION_NAME, use_attention
from ktransformers.serve.attention.fused_attention import FUSED_ATTENTION, FusedAttention
from ktransformers.serve.attention.spec import AttentionSpec
from ktransformers.serve.attention.windows import WINDOW_ATTRIBUTE
from ktransformers.serve.scheduler.lora import use_linear_lora
from tests.support.triton_devices import triton_devices

SIZES: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
SIZES |= {"intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 64, "pad_token_id": None}
SIZES |= {"max_position_embeddings": 128, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 16},
    "qwen2_moe": {"shared_expert_intermediate_size": 32},
    "mixtral": {"sliding_window": 8},
    "gpt_oss": {"head_dim": 16, "layer_types": ["sliding_attention"], "sliding_window": 8},
    "glm4_moe": {"head_dim": 16, "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1},
}


def attention_of(family: str, device: str, dtype: torch.dtype, **words: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(SIZES | EXPERTS | FAMILIES.get(family, {}) | words))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith(("bias", "sinks")):
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.model.layers[0].self_attn, model.model.rotary_emb


class Recorder:
    """An attention function that keeps what it is given and returns the same numbers every time."""

    def __init__(self) -> None:
        self.calls: list[tuple[AttentionSpec, Tensor, Tensor, Tensor]] = []

    def __call__(self, spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls.append((spec, query.clone(), key.clone(), value.clone()))
        shape = (query.shape[1], query.shape[0], value.shape[2])
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(query)


def call(forward: Any, rotary: Any, rows: int, device: str, dtype: torch.dtype) -> tuple[Any, Tensor]:
    torch.manual_seed(rows)
    hidden = torch.randn(1, rows, SIZES["hidden_size"]).to(device, dtype)
    positions = torch.arange(5, 5 + 3 * rows, 3, device=device)[None]
    recorder = Recorder()
    with torch.no_grad(), use_attention(recorder), use_linear_lora(None):
        embeddings = rotary(hidden, positions)
        out, _ = forward(hidden_states=hidden, position_embeddings=embeddings, attention_mask=None)
    return recorder.calls[-1], out


def assert_near(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    tolerance = 1e-5 if actual.dtype == torch.float32 else 4e-3
    assert (actual.double() - expected.double()).norm() <= tolerance * expected.double().norm()


@triton_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_modules_compute_what_the_stock_code_computes(family: str, dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bf16")
    module, rotary = attention_of(family, device, dtype)
    expected = {rows: call(module.forward, rotary, rows, device, dtype) for rows in (1, 5)}
    weights = [module.q_proj.weight.clone(), module.v_proj.weight.clone()]
    fused = FusedAttention(module)
    for rows, ((spec, *inputs), out) in expected.items():
        (fused_spec, *fused_inputs), fused_out = call(fused, rotary, rows, device, dtype)
        assert fused._spec is not None, "it was left to the stock code"
        assert (fused_spec.layer, fused_spec.scale, fused_spec.window) == (spec.layer, spec.scale, spec.window)
        assert fused_spec.sinks is spec.sinks
        for actual, wanted in zip(fused_inputs, inputs, strict=True):
            assert_near(actual, wanted)
        assert_near(fused_out, out)
    assert torch.equal(module.q_proj.weight, weights[0]) and torch.equal(module.v_proj.weight, weights[1])
    assert module.q_proj.weight.untyped_storage().data_ptr() == module.v_proj.weight.untyped_storage().data_ptr()


@triton_devices
def test_the_window_is_that_of_the_module_now(device: str) -> None:
    """Modules are compared during the check at start, while windows are a few tokens long."""
    module, rotary = attention_of("mixtral", device, torch.float32)
    fused = FusedAttention(module)
    for window in (8, 4096, None):
        setattr(module, WINDOW_ATTRIBUTE, window)
        (spec, *_), _ = call(fused, rotary, 2, device, torch.float32)
        assert fused._spec is not None and spec.window == window


@triton_devices
def test_a_module_that_computes_something_else_is_left_alone(device: str) -> None:
    """OLMoE normalises all heads together; a module whose output is scaled afterwards."""
    module, rotary = attention_of("olmoe", device, torch.float32)
    fused = FusedAttention(module)
    (_, *inputs), out = call(module.forward, rotary, 2, device, torch.float32)
    (_, *actual), fused_out = call(fused, rotary, 2, device, torch.float32)
    assert fused._spec is None and torch.equal(fused_out, out)
    assert all(torch.equal(a, b) for a, b in zip(actual, inputs, strict=True))
    scaled, rotary = attention_of("qwen3_moe", device, torch.float32)
    stock = scaled.forward
    scaled.forward = lambda hidden_states, **words: (2 * stock(hidden_states, **words)[0], None)
    fused = FusedAttention(scaled)
    actual, expected = (call(forward, rotary, 2, device, torch.float32)[1] for forward in (fused, scaled.forward))
    assert torch.equal(actual, expected)
    assert fused._spec is None


@triton_devices
def test_rows_with_lora_and_long_chunks_go_through_the_modules(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, rotary = attention_of("qwen3_moe", device, torch.float32)
    fused = FusedAttention(module)
    call(fused, rotary, 1, device, torch.float32)
    called: list[str] = []
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(module, name).register_forward_hook(lambda *_, name=name: called.append(name))
    call(fused, rotary, 2, device, torch.float32)
    assert not called
    monkeypatch.setattr(fused_attention, "current_linear_lora", lambda: lambda *_: None)
    call(fused, rotary, 2, device, torch.float32)
    assert called == ["q_proj", "k_proj", "v_proj"]
    monkeypatch.setattr(fused, "_inputs", None)


def test_models_on_the_cpu_are_not_patched() -> None:
    module, _ = attention_of("qwen3_moe", "cpu", torch.float32)
    assert FUSED_ATTENTION.apply(module) == 0
