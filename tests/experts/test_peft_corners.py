"""Corners of PEFT on packed experts, as docs/lora.md lists them: dropout, rsLoRA, and what reaches the operator."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from ktransformers.experts import interface as experts_module
from ktransformers.experts.lora import ExpertLora
from ktransformers.experts.peft_lora import lora_parameters
from ktransformers.ground.errors import InputError
from ktransformers.nn import set_lora_dropout
from tests.support.peft_models import MODULES, TARGETS, adapt, packed_model
from tests.support.tiny_models import logits, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*_pattern keys did not match.*")


def applied_lora(peft: PeftModel, monkeypatch: pytest.MonkeyPatch) -> list[ExpertLora]:
    seen: list[ExpertLora] = []
    stock = experts_module.apply_experts

    def watch(*args: Any, lora: ExpertLora | None, **options: Any) -> Tensor:
        assert lora is not None
        seen.append(lora)
        return stock(*args, lora=lora, **options)

    monkeypatch.setattr(experts_module, "apply_experts", watch)
    logits(peft)
    return seen


def test_rslora_scale_of_fused_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the pair that PEFT fuses, alpha / sqrt(r) is of 2 alpha and 2 r: sqrt(2) more than on two matrices apart."""
    for family, fused in (("qwen3_moe", True), ("gpt_oss", False)):
        layers = applied_lora(adapt(packed_model(family), use_rslora=True, **TARGETS[family]), monkeypatch)
        assert len(layers) == 2
        for layer in layers:
            assert layer.down is not None and layer.down.scaling == pytest.approx(8 / math.sqrt(4))
            first = layer.gate_up or layer.gate
            assert first is not None
            assert first.scaling == pytest.approx(16 / math.sqrt(8) if fused else 8 / math.sqrt(4))
            assert first.a.shape[1] == (8 if fused else 4)


def test_factors_are_views_of_peft_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator's factors are views of PEFT's parameters; interleaved rows are split, with one shared A."""
    peft = adapt(packed_model("gpt_oss"), **TARGETS["gpt_oss"])
    memory = {parameter.untyped_storage().data_ptr() for parameter in lora_parameters(peft).values()}
    for layer in applied_lora(peft, monkeypatch):
        assert layer.gate_up is None and layer.gate is not None and layer.up is not None and layer.down is not None
        assert layer.gate.a is layer.up.a
        for factor in (layer.gate, layer.up, layer.down):
            assert {t.untyped_storage().data_ptr() for t in (factor.a, factor.b)} <= memory
        assert layer.gate.b.shape == layer.up.b.shape == (4, 48, 4) and layer.down.b.shape == (4, 64, 4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_peft_refuses_lora_dropout_on_parameters(family: str, tmp_path: Path) -> None:
    """When an adapter is built and when it is loaded."""
    with pytest.raises(ValueError, match="does not work with lora_dropout != 0"):
        adapt(packed_model(family), lora_dropout=0.1, **TARGETS[family])
    adapt(packed_model(family), **TARGETS[family]).save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_dropout": 0.1}))
    with pytest.raises(ValueError, match="does not work with lora_dropout != 0"):
        PeftModel.from_pretrained(packed_model(family), tmp_path)


def test_set_lora_dropout_drops_inputs_in_training() -> None:
    """In training only, from torch's generator."""
    peft = adapt(packed_model("qwen3_moe"), **MODULES).train()
    set_lora_dropout(peft, 0.5)
    torch.manual_seed(0)
    first, second = peft(input_ids=tokens()).logits, peft(input_ids=tokens()).logits
    torch.manual_seed(0)
    assert torch.equal(peft(input_ids=tokens()).logits, first) and not torch.equal(first, second)


def test_set_lora_dropout_is_off_in_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator gets it only with gradients in training mode; PEFT's configuration is unchanged."""
    peft = adapt(packed_model("qwen3_moe"), **MODULES)
    set_lora_dropout(peft, 0.5)
    seen = applied_lora(peft.train(), monkeypatch)
    peft(input_ids=tokens())
    peft.eval()(input_ids=tokens())
    assert [layer.dropout for layer in seen] == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0]
    assert peft.peft_config["default"].lora_dropout == 0
    for share in (1.0, -0.1, math.nan):
        with pytest.raises(InputError, match="dropout: given"):
            set_lora_dropout(peft, share)
