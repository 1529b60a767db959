"""Fused RMS norms for small batches: norms of stock families are recognised by what they compute, others unchanged."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeModel, Qwen3MoeRMSNorm

from ktransformers import _core
from ktransformers.modeling.norm import MAX_ELEMENTS, NORMS, TRITON


class Doubled(nn.Module):
    """Looks like a norm and is something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.weight


class Gated(Doubled):
    """A norm that also takes a gate, as those of linear attention do."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * gate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_is_patched_and_matches(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = Qwen3MoeRMSNorm(96).to(dtype)
    norm.weight.data = torch.rand(96).to(dtype)
    weight = norm.weight.clone()
    x = torch.randn(2, 5, 96).to(dtype)
    wanted = norm(x)
    assert NORMS.apply(norm) == 1 and NORMS.apply(norm) == 0
    assert torch.equal(norm.weight, weight)
    with torch.no_grad():
        actual = norm(x)
        many = torch.randn(MAX_ELEMENTS // 96 + 1, 96).to(dtype)
        assert norm(many).shape == many.shape
    assert actual.dtype == dtype
    apart = (actual.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    assert apart < (2**-7 if dtype == torch.bfloat16 else 1e-6)
    assert norm(x.requires_grad_()).requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [96, 128, 7168])
def test_rms_norm_on_a_gpu_rounds_as_stock(columns: int, dtype: torch.dtype) -> None:
    """In 16 bits almost all numbers are equal in bits: only sums are in another order."""
    torch.manual_seed(0)
    norm = Qwen3MoeRMSNorm(columns).to(dtype).cuda()
    norm.weight.data = torch.rand(columns, device="cuda").to(dtype)
    x = torch.randn(3, 5, columns, device="cuda").to(dtype)
    with torch.no_grad():
        wanted = norm(x)
        assert NORMS.apply(norm) == 1
        actual = norm(x)
    torch.testing.assert_close(actual, wanted, rtol=2**-7 if dtype != torch.float32 else 1e-6, atol=1e-6)
    assert dtype == torch.float32 or float((actual == wanted).float().mean()) > 0.99
    assert norm(x.requires_grad_()).requires_grad


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="no interpreter")
@pytest.mark.parametrize("columns", [96, 128])
def test_triton_kernel_matches_stock(columns: int) -> None:
    norm_triton = pytest.importorskip(TRITON)
    torch.manual_seed(0)
    norm = Qwen3MoeRMSNorm(columns)
    norm.weight.data = torch.rand(columns)
    x, out = torch.randn(7, columns), torch.empty(7, columns)
    norm_triton.rms_norm(x, norm.weight.detach(), out, norm.variance_epsilon)
    torch.testing.assert_close(out, norm(x).detach(), rtol=1e-6, atol=1e-6)


def test_other_norms_are_not_patched() -> None:
    gemma = Gemma3RMSNorm(32)
    gemma.weight.data.fill_(0.25)
    assert NORMS.apply(nn.ModuleList([gemma, Doubled(), Gated(), nn.LayerNorm(32)])) == 0


def test_all_norms_of_a_model_are_patched() -> None:
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
    )
    assert NORMS.apply(Qwen3MoeModel(config)) == 2 * 4 + 1


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    x, weight = torch.zeros(2, 32), torch.zeros(32)
    with pytest.raises(ValueError, match="weight"):
        _core.rms_norm(x, weight[:16], torch.zeros(2, 32), 1e-6)
    with pytest.raises(TypeError, match="out"):
        _core.rms_norm(x, weight, torch.zeros(2, 32).bfloat16(), 1e-6)
    with pytest.raises(ValueError, match="contiguous"):
        _core.rms_norm(torch.zeros(2, 64)[:, :32], weight, torch.zeros(2, 32), 1e-6)
