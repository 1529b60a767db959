"""Routers in one kernel against the stock modules. Without a GPU the kernel runs in Triton's interpreter if
TRITON_INTERPRET=1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from ktransformers.modeling import router as router_module
from ktransformers.modeling.router import MAX_ROWS, TRITON
from tests.support.triton_devices import triton_devices

SIZES = {"hidden_size": 64, "num_experts_per_tok": 3, "num_experts": 40, "num_local_experts": 40}
ROUTERS = {
    "qwen3_moe": (Qwen3MoeTopKRouter, {"norm_topk_prob": True}),
    "not normalised": (Qwen3MoeTopKRouter, {"norm_topk_prob": False}),
    "mixtral": (MixtralTopKRouter, {}),
    "gpt_oss": (GptOssTopKRouter, {}),
}


class Sigmoid(nn.Module):
    """Scores that are no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.top_k = nn.Parameter(torch.randn(40, 64)), 3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(x, self.weight)
        scores, ids = logits.sigmoid().topk(self.top_k)
        return logits, scores, ids


def router_of(name: str, dtype: torch.dtype) -> Any:
    router, words = ROUTERS[name]
    model_type = "qwen3_moe" if router is Qwen3MoeTopKRouter else name
    module = router(AutoConfig.for_model(model_type, **SIZES, **words))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    return module.to(dtype)


@triton_devices
@pytest.mark.parametrize("experts", [1, 40, 128, 512])
@pytest.mark.parametrize("normalise", [False, True])
def test_selection_matches_softmax_and_top_k(normalise: bool, experts: int, device: str) -> None:
    kernels = pytest.importorskip(TRITON)
    torch.manual_seed(0)
    logits, top_k = torch.randn(5, experts).to(device), min(6, experts)
    scores, ids = kernels.select(logits, top_k, normalise, torch.float32)
    expected, expected_ids = logits.softmax(-1).topk(top_k)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    assert torch.equal(ids, expected_ids) and torch.allclose(scores, expected, rtol=1e-5)


@triton_devices
def test_of_equal_logits_the_lower_index_is_selected(device: str) -> None:
    kernels = pytest.importorskip(TRITON)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]], device=device)
    assert kernels.select(logits, 3, True, torch.float32)[1].tolist() == [[1, 3, 2]]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_stock_routers_are_patched_and_match(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router = router_of(name, dtype).cuda()
    x = torch.randn(16, 64, device="cuda", dtype=dtype)
    with torch.no_grad():
        logits, scores, ids = router(x)
        assert router_module.ROUTERS.apply(router) == 1 and router_module.ROUTERS.apply(router) == 0
        fused_logits, fused_scores, fused_ids = router(x)
        assert router(x.repeat(MAX_ROWS, 1))[1].shape == (16 * MAX_ROWS, 3)
    assert torch.equal(fused_logits, logits) and fused_scores.dtype == scores.dtype
    assert torch.equal(logits.gather(1, fused_ids), logits.gather(1, ids))
    assert torch.allclose(fused_scores.float(), scores.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    assert router(x.requires_grad_())[1].requires_grad


def select_by_torch(logits: Tensor, top_k: int, normalise: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    scores, ids = logits.float().softmax(-1).topk(top_k)
    return (scores / scores.sum(-1, keepdim=True) if normalise else scores).to(dtype), ids


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("normalise", [False, True])
def test_normalisation_is_recognised_whatever_the_size_of_the_weights(
    normalise: bool, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large weights would make one score of every row equal to one, with and without normalisation."""
    monkeypatch.setattr(router_module, "select", select_by_torch)
    torch.manual_seed(0)
    router = router_of("qwen3_moe" if normalise else "not normalised", torch.bfloat16)
    with torch.no_grad():
        router.weight *= scale
    assert router_module._normalises(router) == (normalise, torch.bfloat16)


def test_a_router_that_its_bias_decides_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "select", select_by_torch)
    router = router_of("gpt_oss", torch.bfloat16)
    with torch.no_grad():
        router.bias.copy_(100 * torch.arange(40))
    assert router_module._normalises(router) is None


@pytest.mark.gpu
def test_other_scores_are_left_alone() -> None:
    assert router_module.ROUTERS.apply(Sigmoid().cuda()) == 0


def test_routers_on_the_cpu_are_left_alone() -> None:
    assert router_module.ROUTERS.apply(router_of("mixtral", torch.float32)) == 0
