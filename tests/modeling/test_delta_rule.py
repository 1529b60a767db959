"""The gated delta rule of one token: the kernel against transformers' function, and when it is used."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next import modeling_qwen3_next

from ktransformers.modeling import delta_rule
from tests.support.tiny_models import build

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICES = [
    pytest.param("cpu", id="interpreted", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter")),
    pytest.param("cuda:0", id="gpu", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [(3, 2, 32, 48), (1, 4, 20, 16), (5, 2, 128, 128)])
def test_kernel_equals_transformers(sizes: tuple[int, int, int, int], device: str) -> None:
    kernels = pytest.importorskip(delta_rule.TRITON)
    rows, heads, size, columns = sizes
    torch.manual_seed(0)
    query, key = (torch.randn(heads, rows, size).to(device).transpose(0, 1) for _ in range(2))
    value, state = torch.randn(rows, heads, columns).to(device), torch.randn(rows, heads, size, columns).to(device)
    decay, beta = -torch.rand(rows, heads).to(device), torch.rand(rows, heads).to(device)
    expected, kept = modeling_qwen3_next.torch_recurrent_gated_delta_rule(
        *(one[:, None] for one in (query, key, value)),
        g=decay[:, None],
        beta=beta[:, None],
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    before = state.clone()
    out, new_state = kernels.delta_step(query, key, value, decay, beta, state, normed=True)
    torch.testing.assert_close(out, expected[:, 0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(new_state, kept, rtol=1e-4, atol=1e-4)
    assert torch.equal(state, before)


def test_cpu_models_keep_the_stock_function() -> None:
    assert delta_rule.DELTA_RULE.apply(build("qwen3_next")) == 0
    assert not isinstance(modeling_qwen3_next.torch_recurrent_gated_delta_rule, functools.partial)


def test_other_calls_reach_the_stock_function() -> None:
    calls: list[Any] = []
    rule = functools.partial(delta_rule._delta_rule, lambda *args, **kwargs: (calls.append(kwargs), None))
    query, state = torch.zeros(2, 1, 3, 4), torch.zeros(2, 3, 4, 4)
    words = {"g": torch.zeros(2, 1, 3), "beta": torch.zeros(2, 1, 3), "initial_state": state}
    rule(query, query, query, **words)  # on the CPU
    rule(query, query, query, **words | {"initial_state": None})
    assert len(calls) == 2


@pytest.mark.gpu
def test_gpu_models_use_the_kernel() -> None:
    stock = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    try:
        assert delta_rule.DELTA_RULE.apply(build("qwen3_next").to("cuda:0")) == 1
        assert isinstance(modeling_qwen3_next.torch_recurrent_gated_delta_rule, functools.partial)
        assert not delta_rule.computes_the_same(
            lambda *a, **k: (2 * stock(*a, **k)[0], stock(*a, **k)[1]), torch.device("cuda:0")
        )
    finally:
        modeling_qwen3_next.torch_recurrent_gated_delta_rule = stock
