"""Latent attention of captured steps: the fused kernel against torch, and which modules are recognised."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from ktransformers.serve.graphs import latent_inputs
from ktransformers.serve.graphs.latent_inputs import FUSED_LATENTS, STYLES, FusedLatentAttention, RotaryStyle
from ktransformers.serve.graphs.step_graphs import StepGraphs
from ktransformers.serve.scheduler.forward import make_forward
from tests.serve.graphs.test_step_graphs import decode
from tests.support.tiny_models import build

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param(
        "cpu", torch.float32, id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter")
    ),
    pytest.param("cuda:0", torch.float32, id="gpu-float32", marks=pytest.mark.gpu),
    pytest.param("cuda:0", torch.bfloat16, id="gpu-bfloat16", marks=pytest.mark.gpu),
]
FUSED: dict[str, tuple[dict[str, Any], RotaryStyle]] = {
    "deepseek_v3": ({"rope_interleave": True}, STYLES[0]),
    "glm4_moe_lite": ({"rope_interleave": False}, STYLES[1]),
    "deepseek_v2": ({}, STYLES[2]),
}


@pytest.mark.parametrize(("device", "dtype"), DEVICES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("sizes", [(3, 20, 32, 16, 48), (1, 128, 128, 64, 512)])
def test_kernel_equals_torch(
    sizes: tuple[int, int, int, int, int], style: RotaryStyle, device: str, dtype: torch.dtype
) -> None:
    kernels = pytest.importorskip(latent_inputs.TRITON)
    rows, heads, nope, rope, rank = sizes
    torch.manual_seed(0)
    query, latent = torch.randn(rows, heads, nope + rope).to(dtype), torch.randn(rows, rank + rope).to(dtype)
    weight, turns = torch.randn(rank).to(dtype), torch.rand(rows, rope // 2) * 6
    angles = tuple(one.to(dtype) if style.rounded else one for one in (turns.cos(), turns.sin()))
    expected = torch.zeros(heads, rows, rank + rope, dtype=dtype), torch.zeros(rows, rank + rope, dtype=dtype)
    latent_inputs.write_inputs(query, latent, weight, 1e-6, angles, style, *expected)
    given = [one.to(device) for one in (query, latent, weight)]
    actual = [torch.zeros_like(one, device=device) for one in expected]
    kernels.write_inputs(*given, 1e-6, *(one.to(device) for one in angles), style, *actual)
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=limit, atol=limit)
    assert not bool(actual[0][..., :rank].any())  # the product with kv_b_proj writes it


@pytest.mark.parametrize("family", FUSED)
def test_steps_equal_the_stock_module(family: str) -> None:
    changes, style = FUSED[family]
    model: Any = build(family, **changes)
    forward: Any = make_forward(model)
    prompts = [[(seed + 7 * at) % 90 for at in range(9)] for seed in (3, 4, 5)]
    with torch.inference_mode():
        told, wanted = decode(forward, prompts, 5)
        forward.graphs = StepGraphs(model, None, record=lambda compute: compute)
        assert FUSED_LATENTS.apply(model) == len(model.model.layers)
        forwards = [layer.self_attn.forward for layer in model.model.layers]
        assert all(isinstance(one, FusedLatentAttention) and one.style == style for one in forwards)
        calls: list[int] = []
        for one in forwards:
            object.__setattr__(
                one, "stock", lambda *args, stock=one.stock, **kwargs: calls.append(1) or stock(*args, **kwargs)
            )
        _, measured = decode(forward, prompts, 5, told)
    assert forward.graphs.replayed > 0
    # The stock module runs for the prompts and for steps before the capture only.
    assert len(calls) == len(forwards) * (6 - forward.graphs.replayed)
    for one, other in zip(measured, wanted, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-4


def test_modules_that_compute_something_else_stay_stock() -> None:
    model: Any = build("deepseek_v3")
    forward: Any = make_forward(model)
    assert forward.batched
    attention = model.model.layers[1].self_attn
    stock = attention.forward

    def scaled(hidden_states: torch.Tensor, position_embeddings: Any, **kwargs: Any) -> Any:
        output, weights = stock(hidden_states=hidden_states, position_embeddings=position_embeddings, **kwargs)
        return 2 * output, weights

    attention.forward = scaled
    assert FUSED_LATENTS.apply(model) == len(model.model.layers) - 1
    assert attention.forward is scaled
