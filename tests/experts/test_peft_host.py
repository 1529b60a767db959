"""Expert LoRA, its gradients and its optimiser state stay in host memory when the model is moved to a GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.peft_lora import _without_device_move
from ktransformers.experts.placeholder import Placeholder
from ktransformers.nn import attach, load_model, lora_parameters
from tests.support.tiny_models import build, save, tokens

TARGETS = ["q_proj", "gate_proj", "up_proj", "down_proj"]
pytestmark = pytest.mark.filterwarnings("ignore")


def adapted() -> PeftModel:
    model = build("qwen3_moe")
    attach(model, free=True)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS))


def loss(model: nn.Module, device: str = "cpu") -> torch.Tensor:
    batch = tokens().to(device)
    actual: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return actual


def test_moving_the_model_leaves_expert_lora_on_the_host() -> None:
    peft = adapted()
    loss(peft).backward()
    lora = lora_parameters(peft)
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in lora.items()}
    peft.to("meta")
    assert len(before) == 8 and lora_parameters(peft).keys() == before.keys()
    for name, (parameter, value) in before.items():
        assert lora_parameters(peft)[name] is parameter  # an optimiser made before still trains it
        assert torch.equal(parameter, value)
        assert parameter.grad is not None and parameter.grad.device.type == "cpu"
    others = [parameter for name, parameter in peft.named_parameters() if name not in before]
    assert {parameter.device.type for parameter in others if not isinstance(parameter, Placeholder)} == {"meta"}
    assert {parameter.device.type for parameter in others if isinstance(parameter, Placeholder)} == {"cpu"}


def test_casts_apply_to_expert_lora() -> None:
    peft = adapted()
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        peft.to(dtype)
        assert {parameter.dtype for parameter in peft.parameters()} == {dtype}
    peft.float()
    value = next(iter(lora_parameters(peft).values())).detach().clone()
    peft.to("meta", torch.bfloat16)
    parameter = next(iter(lora_parameters(peft).values()))
    assert parameter.dtype == torch.bfloat16 and torch.equal(parameter, value.bfloat16())


def test_only_device_moves_are_suppressed() -> None:
    """Functions that change or create tensors without a move still apply."""
    tensor = torch.randn(3)
    assert torch.equal(_without_device_move(lambda t: t * 2)(tensor), tensor * 2)
    assert _without_device_move(lambda t: t.to("meta"))(tensor) is tensor
    empty = _without_device_move(lambda t: torch.empty_like(t, device="cpu"))(torch.empty(3, device="meta"))
    assert empty.device.type == "cpu" and empty.shape == (3,)


def test_attention_lora_moves_with_the_model() -> None:
    """Only expert LoRA stays on the host."""
    peft = adapted().to("meta")
    moved = [p for name, p in peft.named_parameters() if "self_attn" in name and "lora_" in name]
    assert moved and all(parameter.is_meta for parameter in moved)


def test_copied_model_shares_packed_experts() -> None:
    """Packed experts are frozen, so a copy of a model shares them; its adapters are copied."""
    peft = adapted()
    twin = copy.deepcopy(peft)
    stores = [module.kt.store for module in expert_modules(peft).values()]
    assert [module.kt.store for module in expert_modules(twin).values()] == stores and len(stores) == 2
    before = loss(peft).item()
    assert loss(twin).item() == before
    mine, theirs = lora_parameters(peft), lora_parameters(twin)
    assert mine.keys() == theirs.keys() and all(mine[name] is not theirs[name] for name in mine)
    with torch.no_grad():
        for parameter in theirs.values():
            parameter.normal_(0, 0.5)
    assert loss(twin).item() != before and loss(peft).item() == before


def test_expert_lora_of_a_stock_model_moves() -> None:
    """The patched PEFT class behaves as before for a stock model in the same process."""
    stock = get_peft_model(build("qwen3_moe"), LoraConfig(r=4, target_modules=TARGETS)).to("meta")
    assert all(parameter.is_meta for parameter in stock.parameters())


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield save(build("qwen3_moe"), tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["load", "to", "cuda"])
def test_training_with_attention_on_a_gpu_matches_the_cpu(directory: Path, way: str) -> None:
    """Five steps: expert LoRA in pinned host memory, losses as on the CPU."""
    losses = []
    for device in ("cpu", "cuda"):
        model = load_model(directory, dtype=torch.float32, device=device if way == "load" else None)
        torch.manual_seed(1)
        peft = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS))
        if device == "cuda" and way != "load":
            peft = peft.to("cuda") if way == "to" else peft.cuda()
        trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses.append([])
        for _ in range(5):
            step = loss(peft, device)
            step.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            losses[-1].append(step.item())
        lora = lora_parameters(peft).values()
        for parameter in lora:
            assert parameter.device.type == "cpu" and parameter.grad.device.type == "cpu"
            assert optimizer.state[parameter]["exp_avg"].device.type == "cpu"
            assert parameter.is_pinned() == (device == "cuda")
        rest = {
            p.device.type for p in peft.parameters() if not isinstance(p, Placeholder) and all(p is not q for q in lora)
        }
        assert rest == {device}
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.gpu
def test_adapter_loaded_to_a_gpu_model_stays_on_the_host(directory: Path, tmp_path: Path) -> None:
    """PEFT reads adapters to the GPU first; they end in host memory."""
    model = load_model(directory, dtype=torch.float32, device="cuda")
    get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS)).save_pretrained(tmp_path / "adapter")
    for low in (False, True):
        fresh = load_model(directory, dtype=torch.float32, device="cuda")
        peft = PeftModel.from_pretrained(fresh, tmp_path / "adapter", low_cpu_mem_usage=low)
        assert {parameter.device.type for parameter in lora_parameters(peft).values()} == {"cpu"}
        assert loss(peft, "cuda").isfinite()
        assert all(parameter.is_pinned() for parameter in lora_parameters(peft).values())


@pytest.mark.gpu
def test_grad_scaler_with_parameters_on_two_devices(directory: Path) -> None:
    """fp16 with a scaler of CUDA over parameters on both devices."""
    model = load_model(directory, dtype=torch.float16, device="cuda")
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=TARGETS)).cuda()
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer, scaler = torch.optim.AdamW(trained, lr=1e-2), torch.amp.GradScaler("cuda", init_scale=128)
    before = [parameter.detach().clone() for parameter in trained]
    scaler.scale(loss(peft, "cuda")).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert any(not torch.equal(old, new) for old, new in zip(before, trained, strict=True))
