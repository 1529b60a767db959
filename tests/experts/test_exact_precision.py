"""Precisions f32 and f64 under autograd: finite differences in float64, LoRA and dropout against float64, and a model
whose weights bf16 cannot represent against the stock model with stock PEFT."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ktransformers.experts.lora import ExpertLora, LoraPair, empty_gradients, packed_adapter
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.store import Dropout
from ktransformers.nn import attach, load_model
from tests.support.lora_cases import (
    LORA_FORMS,
    LoraForm,
    apply_lora,
    factor_tensors,
    make_lora,
    reference_lora,
    reference_with_dropout,
)
from tests.support.operator_cases import PACKED_DTYPES, OperatorCase, relative_error
from tests.support.peft_models import MODULES, adapt, gradients
from tests.support.tiny_models import build, logits, save, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*_pattern keys did not match.*")
ACTIVATIONS: list[dict[str, Any]] = [
    {"activation": "silu"},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "gated": False},
    {"activation": "swiglu_oai", "alpha": 1.702, "limit": 0.9},
]


def lora_of(form: dict[str, Any], tensors: tuple[Tensor, ...]) -> ExpertLora:
    """Copies, because gradcheck writes through `.data`, which the packed factors' version count does not see."""
    halves = [LoraPair(a.clone(), b.clone(), 0.7) for a, b in zip(tensors[0::2], tensors[1::2], strict=True)]
    if not form.get("gated", True):
        return ExpertLora(up=halves[0], down=halves[1])
    if len(halves) == 2:
        return ExpertLora(gate_up=halves[0], down=halves[1])
    return ExpertLora(gate=halves[0], up=halves[1], down=halves[2])


@pytest.mark.parametrize("retain", [True, False], ids=["retain", "recompute"])
@pytest.mark.parametrize("form", ACTIVATIONS, ids=lambda form: form["activation"])
def test_float64_experts_pass_gradcheck(form: dict[str, Any], retain: bool) -> None:
    """Every derivative (hidden states, routing weights, all factors) against finite differences in float64."""
    case = OperatorCase("generic", tokens=4, hidden=7, intermediate=5, bias=True, precision="f64", **form)
    gated = form.get("gated", True)
    ranks = LoraForm(up=2, down=3, gated=False) if not gated else LoraForm(gate=1, up=3, down=2)
    if form["activation"] == "silu":
        ranks = LoraForm(shared=3, down=2)
    given = factor_tensors(make_lora(case, replace(ranks, dtype=torch.float64, rounded=False)))

    def layer(hidden: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
        lora = lora_of(form, factors)
        return apply_experts(case.backend, hidden, case.ids, weights, lora=lora, retain=retain)

    assert torch.autograd.gradcheck(layer, (case.hidden, case.weights, *given))


def test_float64_experts_pass_gradcheck_with_dropout() -> None:
    case = OperatorCase("generic", tokens=3, hidden=7, intermediate=5, precision="f64")
    given = factor_tensors(make_lora(case, LoraForm(gate=2, up=2, down=2, dtype=torch.float64, rounded=False)))

    def layer(hidden: Tensor, weights: Tensor, *factors: Tensor) -> Tensor:
        torch.manual_seed(11)
        lora = replace(lora_of({}, factors), dropout=0.4)
        return apply_experts(case.backend, hidden, case.ids, weights, lora=lora)

    assert torch.autograd.gradcheck(layer, (case.hidden, case.weights, *given))


@pytest.mark.parametrize("name", ["shared", "split", "uneven", "no_gate"])
def test_exact_lora_matches_float64(exact: tuple[str, str], name: str) -> None:
    isa, precision = exact
    form = replace(LORA_FORMS[name], dtype=PACKED_DTYPES[precision], rounded=False)
    case = OperatorCase(isa, tokens=37, gated=form.gated, precision=precision)
    lora = make_lora(case, form)
    expected_out, expected = reference_lora(case, lora)
    for retain in (True, False):
        out, grads = apply_lora(case, lora, retain)
        assert relative_error(out, expected_out) < case.tolerance()
        for got, want in zip(grads, expected, strict=True):
            assert got.dtype == PACKED_DTYPES[precision]
            assert relative_error(got, want.double()) < 2 * case.tolerance()


def test_exact_dropout_matches_float64(exact: tuple[str, str]) -> None:
    isa, precision = exact
    drop = Dropout(0.3, 0x123456789ABCDEF)
    case = OperatorCase(isa, tokens=19, precision=precision)
    lora = make_lora(case, replace(LORA_FORMS["split"], dtype=PACKED_DTYPES[precision], rounded=False))
    factors = lora
    adapters = [packed_adapter(case.store, factors)]
    out = case.store.forward(case.hidden, case.ids, case.weights, adapters=adapters, dropout=drop)
    grads, views = empty_gradients(factors)
    given = case.grad, case.hidden.detach(), case.ids, case.weights.detach()
    both = case.store.backward(*given, adapters=adapters, factors=[views], dropout=drop)
    expected_out, expected = reference_with_dropout(case, lora, drop)
    assert relative_error(out, expected_out) < case.tolerance()
    for got, want in zip((*both, *grads), expected, strict=True):
        assert relative_error(got, want.double()) < 2 * case.tolerance()


def fine(model: Any, seed: int = 5) -> Any:
    """The same model with numbers that bf16 does not hold; LoRA's among them."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 and not parameter.is_meta:
                parameter.mul_(1 + 0.01 * torch.rand(parameter.shape, generator=random))
    return model


def shifted(peft: Any) -> Any:
    """LoRA's numbers off the grid of bf16, the same in every model."""
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.0037)
    return peft


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(fine(build("qwen3_moe")), tmp_path_factory.mktemp("fine"))


def stock() -> PreTrainedModel:
    model: PreTrainedModel = fine(build("qwen3_moe"))
    return model


def test_float32_model_matches_the_stock_model(exact: tuple[str, str], directory: Path) -> None:
    """Logits, gradients and greedy tokens of the stock model with stock PEFT, all in float32."""
    isa, precision = exact
    ours = load_model(directory, dtype=torch.float32, isa=isa, precision=precision)
    assert (logits(ours) - logits(stock())).abs().max() < 2e-5
    rounded = load_model(directory, dtype=torch.float32)
    assert (logits(rounded) - logits(stock())).abs().max() > 1e-3, "numbers that bf16 holds show nothing"

    kt_model, stock_model = shifted(adapt(ours, **MODULES)), shifted(adapt(stock(), **MODULES))
    assert (logits(kt_model) - logits(stock_model)).abs().max() < 2e-5
    got, want = gradients(kt_model), gradients(stock_model)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert (got[name] - gradient).norm() / gradient.norm().clamp(min=1e-6) < 1e-5, name
    options = {"input_ids": tokens()[:, :5], "max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(kt_model.generate(**options), stock_model.generate(**options))


def test_attach_uses_the_given_precision() -> None:
    model = stock()
    want = logits(model)
    attach(model, free=True, precision="f32")
    assert (logits(model) - want).abs().max() < 2e-5
    assert model.hf_quantizer is not None
    assert model.hf_quantizer.quantization_config.to_dict() == {"quant_method": "kt", "precision": "f32"}
