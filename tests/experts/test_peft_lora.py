"""Expert LoRA by stock PEFT on packed experts: logits, gradients and files of the stock model; adding and switching
adapters."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft as peft_package
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from ktransformers.experts import interface as experts_module
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import select_implementation
from ktransformers.experts.peft_lora import lora_parameters
from ktransformers.experts.placeholder import Placeholder
from ktransformers.ground.errors import InputError
from ktransformers.nn import attach, load_model
from tests.support.peft_models import MODULES, PARAMETERS, TARGETS, adapt, gradients, packed_model
from tests.support.tiny_models import build, logits, save, tokens

EXACT = 1e-4
PEFT = tuple(map(int, peft_package.__version__.split(".")[:2]))
several = pytest.mark.skipif(PEFT < (0, 20), reason="PEFT 0.19 refuses a second adapter with target_parameters")
CASES = [
    *TARGETS.items(),
    ("qwen3_moe", {"target_modules": "all-linear"}),  # PEFT counts experts and router among them
    ("qwen3_moe", {"target_parameters": ["experts.down_proj"]}),
]


@pytest.fixture(autouse=True)
def _calm() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*_pattern keys did not match.*")
        yield


@pytest.mark.parametrize(("family", "targets"), CASES)
def test_expert_lora_matches_the_stock_model(family: str, targets: dict[str, Any]) -> None:
    """With the same seed and adapter, against the stock model with PEFT's own arithmetic."""
    ours, theirs = adapt(packed_model(family), **targets), adapt(build(family), **targets)
    layers = [layer for layer in ours.modules() if isinstance(layer, ParamWrapper)]
    assert layers and all(isinstance(layer.get_param(), Placeholder) for layer in layers if layer.num_experts > 1)
    names = [name for name, _ in theirs.named_parameters() if not name.endswith("_bias")]  # biases have no ghost
    assert [name for name, _ in ours.named_parameters()] == names
    got, want = logits(ours), logits(theirs)
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)
    with theirs.disable_adapter():
        assert (logits(theirs) - want).abs().max() > 100 * EXACT, "the adapter does nothing"
    mine, stock = gradients(ours), gradients(theirs)
    assert mine.keys() == stock.keys()
    for name, gradient in stock.items():
        error = (mine[name] - gradient).norm() / gradient.norm().clamp(min=1e-6)
        assert error < 1e-4, name


def test_bf16_gradients_are_near_float32() -> None:
    """Gradients within 2 % of what float32 gives; PEFT keeps the adapter itself in float32."""
    ours, exact = adapt(packed_model("qwen3_moe").bfloat16(), **MODULES), adapt(build("qwen3_moe"), **MODULES)
    assert {parameter.dtype for parameter in lora_parameters(ours).values()} == {torch.float32}
    mine, stock = gradients(ours), gradients(exact)
    for name in lora_parameters(ours):
        assert (mine[name].float() - stock[name]).norm() / stock[name].norm() < 2e-2, name


def test_model_without_expert_lora_is_the_base_model() -> None:
    model = packed_model("qwen3_moe")
    base = logits(model)
    peft = adapt(model, **MODULES)
    assert not torch.equal(logits(peft), base)
    with peft.disable_adapter():
        assert torch.equal(logits(peft), base)
    fresh = get_peft_model(packed_model("qwen3_moe"), LoraConfig(**MODULES))  # B is zero
    torch.testing.assert_close(logits(fresh), base, rtol=1e-5, atol=1e-5)
    merged = adapt(packed_model("qwen3_moe"), target_modules=["q_proj"])  # attention alone can be merged
    want = logits(merged)
    torch.testing.assert_close(logits(merged.merge_and_unload()), want, rtol=1e-5, atol=1e-5)


@several
def test_several_active_adapters_match_the_stock_model() -> None:
    ours, theirs = (
        adapt(adapt(model, name="one", **MODULES), seed=2, name="two", r=2, lora_alpha=8, **MODULES)
        for model in (packed_model("qwen3_moe"), build("qwen3_moe"))
    )
    seen = []
    for names in ("one", "two", ["one", "two"]):
        for model in (ours, theirs):
            model.base_model.set_adapter(names)
        seen.append(logits(ours))
        torch.testing.assert_close(seen[-1], logits(theirs), rtol=EXACT, atol=EXACT)
        mine, stock = gradients(ours), gradients(theirs)
        for name, gradient in stock.items():
            torch.testing.assert_close(mine[name], gradient, rtol=1e-3, atol=1e-5, msg=name)
        for model in (ours, theirs):
            model.zero_grad()
    assert not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
    ours.delete_adapter("two")
    ours.set_adapter("one")
    assert torch.equal(logits(ours), seen[0])


class Largest(TorchDispatchMode):
    """The largest tensor of floats that any operation of torch returns, outside of the experts' own."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        actual = func(*args, **(kwargs or {}))
        for tensor in actual if isinstance(actual, (list, tuple)) else [actual]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.numel = max(self.numel, tensor.numel())
        return actual


def test_no_dense_weight_difference_is_built() -> None:
    """Forward and backward with one and two active adapters: no tensor as large as the smallest expert matrix."""
    sizes = {"hidden_size": 96, "moe_intermediate_size": 80, "num_experts": 16}
    options = MODULES | {"r": 2}
    peft = adapt(packed_model("qwen3_moe", **sizes), name="one", **options)
    if PEFT >= (0, 20):
        peft = adapt(peft, seed=2, name="two", **options)
    dense = 16 * 96 * 80
    for names in [["one"], list(peft.peft_config)]:
        peft.base_model.set_adapter(names)
        with Largest() as largest:
            gradients(peft)
        assert 16 * 4 * 96 <= largest.numel < dense / 2  # the factors' gradients at least
    stock = adapt(build("qwen3_moe", **sizes), **options)
    with Largest() as largest:
        gradients(stock)
    assert largest.numel >= dense  # the measure sees what stock PEFT builds


PLAIN = """
import json, sys, torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
peft = PeftModel.from_pretrained(model, sys.argv[2]).eval()
assert not [name for name in sys.modules if name.startswith("ktransformers")]
with torch.no_grad():
    save_file({"logits": peft(torch.tensor(json.loads(sys.argv[3]))).logits}, sys.argv[4])
"""


@pytest.mark.skipif(
    PEFT < (0, 20), reason="PEFT 0.19 cannot read its own expert adapters with transformers 5.6 or later"
)
def test_adapter_files_are_interchangeable_with_stock(tmp_path: Path) -> None:
    """Saved with packed experts and loaded by a process without ktransformers; and the reverse."""
    save(build("qwen3_moe"), tmp_path / "model")
    ours = adapt(load_model(tmp_path / "model", dtype=torch.float32), **MODULES)
    ours.save_pretrained(tmp_path / "ours")
    want = logits(ours)
    words = json.dumps(tokens().tolist())
    program = [sys.executable, "-c", PLAIN, *map(str, (tmp_path / "model", tmp_path / "ours")), words]
    subprocess.run([*program, str(tmp_path / "logits")], check=True, capture_output=True)
    torch.testing.assert_close(load_file(tmp_path / "logits")["logits"], want, rtol=EXACT, atol=EXACT)

    theirs = adapt(build("qwen3_moe"), **MODULES)
    theirs.save_pretrained(tmp_path / "theirs")
    mine, stock = (load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs"))
    assert mine.keys() == stock.keys() and all(torch.equal(mine[name], stock[name]) for name in stock)
    back = PeftModel.from_pretrained(load_model(tmp_path / "model", dtype=torch.float32), tmp_path / "theirs")
    assert torch.equal(logits(back), want)
    trainable = PeftModel.from_pretrained(
        load_model(tmp_path / "model", dtype=torch.float32), tmp_path / "ours", is_trainable=True
    )
    assert len([p for p in lora_parameters(trainable).values() if p.requires_grad]) == 8
    assert torch.equal(logits(trainable), want)


@several
def test_second_adapter_is_loaded_from_files(tmp_path: Path) -> None:
    first, second = adapt(packed_model("qwen3_moe"), **MODULES), adapt(build("qwen3_moe"), seed=2, **MODULES)
    second.save_pretrained(tmp_path)
    first.load_adapter(tmp_path, adapter_name="second", low_cpu_mem_usage=True)
    first.set_adapter("second")
    torch.testing.assert_close(logits(first), logits(second), rtol=EXACT, atol=EXACT)


def test_gpt_oss_adapter_files_are_interchangeable_with_stock(tmp_path: Path) -> None:
    """Interleaved and transposed experts: the adapter file is the stock one."""
    adapt(packed_model("gpt_oss"), **TARGETS["gpt_oss"]).save_pretrained(tmp_path)
    stock, ours = build("gpt_oss"), packed_model("gpt_oss")
    loaded = [logits(PeftModel.from_pretrained(model, tmp_path)) for model in (ours, stock)]
    torch.testing.assert_close(*loaded, rtol=EXACT, atol=EXACT)


def test_attached_experts_work_with_eager_and_kt() -> None:
    """`attach` without `free`: PEFT's own arithmetic with "eager", the factors with "kt"."""
    model = build("qwen3_moe")
    attach(model)
    peft = adapt(model, **MODULES)
    want = logits(peft)
    select_implementation(model)
    torch.testing.assert_close(logits(peft), want, rtol=EXACT, atol=EXACT)
    with pytest.raises(InputError, match="given packed experts"):
        peft.merge_and_unload()
    model.set_experts_implementation("eager")
    assert torch.equal(logits(peft), want)


def test_packed_experts_cannot_be_merged_or_trained() -> None:
    model = packed_model("qwen3_moe")
    peft = adapt(model, **MODULES)
    want = logits(peft)
    for safe in (False, True):
        with pytest.raises(InputError, match=r"merge of .*mlp\.experts: given packed experts, expected a stock model"):
            peft.merge_and_unload(safe_merge=safe)
    with pytest.raises(InputError, match="given packed experts"):
        peft.merge_adapter()
    assert torch.equal(logits(peft), want)
    model.set_experts_implementation("eager")
    with pytest.raises(InputError, match="packed experts: given "):
        logits(peft)
    select_implementation(model)
    model.requires_grad_(True)
    with pytest.raises(InputError, match="Qwen3MoeExperts: given requires_grad on gate_up_proj"):
        logits(peft)


@pytest.mark.parametrize("fused", [False, True])
def test_factors_are_packed_again_after_every_optimiser_step(fused: bool) -> None:
    """Fused optimisers do not increment version counters; the factors are packed again nevertheless."""
    ours, theirs = adapt(packed_model("qwen3_moe"), **MODULES), adapt(build("qwen3_moe"), **MODULES)
    losses: list[list[float]] = []
    for model in (ours, theirs):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=fused)
        losses.append([])
        for _ in range(4):
            loss = model(input_ids=tokens(), labels=tokens()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    assert losses[1][-1] < losses[1][0] - 0.3


@pytest.mark.parametrize("family", ["granitemoe", "deepseek_v4", "minimax_m2"])
def test_families_without_a_peft_mapping(family: str) -> None:
    """PEFT finds gate_up_proj and down_proj in every family."""
    if family not in CONFIG_MAPPING or not expert_modules(build(family)):
        pytest.skip("this transformers does not dispatch its experts")
    ours, theirs = adapt(packed_model(family), **PARAMETERS), adapt(build(family), **PARAMETERS)
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=EXACT, atol=EXACT)


def test_failed_forward_pass_leaves_no_active_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of a forward pass that raises are not active in the next one."""
    model = packed_model("qwen3_moe")
    base = logits(model)
    peft = adapt(model, **MODULES)

    def fail(*args: Any, **options: Any) -> Tensor:
        raise RuntimeError("broke off")

    with monkeypatch.context() as patch:
        patch.setattr(experts_module, "apply_experts", fail)
        with pytest.raises(RuntimeError, match="broke off"):
            logits(peft)
    assert torch.equal(logits(peft.unload()), base)
