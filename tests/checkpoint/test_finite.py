"""NaN and infinite numbers in safetensors are errors that name the file and the tensor: weights of experts, their codes
and scales in every format that has codes for them, and LoRA factors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktransformers.adapters import read_adapter
from ktransformers.checkpoint.finite import all_finite
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from tests.support.packing import as_fp8, pack, tiny
from tests.support.serving import write_sample_adapter
from tests.support.tiny_models import build, save

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats(dtype: torch.dtype, value: float) -> None:
    numbers = torch.randn(300, 7).to(dtype)
    assert all_finite(numbers) and all_finite(numbers.T)
    numbers[299, 6] = value
    assert not all_finite(numbers) and not all_finite(numbers.T) and all_finite(numbers[:299])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_largest_numbers_are_finite(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    assert all_finite(torch.tensor([limits.max, limits.min, limits.tiny, 0.0, -0.0], dtype=dtype))
    assert all_finite(torch.empty(0, dtype=dtype)) and all_finite(torch.empty(3, 0, dtype=torch.float8_e8m0fnu))


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [
        (torch.float8_e4m3fn, {0x7F, 0xFF}),
        (torch.float8_e5m2, {0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF}),
        (torch.float8_e8m0fnu, {0xFF}),
        (torch.uint8, set()),
    ],
)
def test_every_byte(dtype: torch.dtype, bad: set[int]) -> None:
    every = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    assert {n for n in range(256) if not all_finite(every[n].view(dtype))} == bad
    assert {n for n in range(256) if not all_finite(every[n], e8m0=True)} == {255}


def spoil(file: Path, name: str, change: Callable[[Tensor], None]) -> None:
    tensors = load_file(file)
    tensor = tensors[name].clone()
    change(tensor)
    save_file(tensors | {name: tensor}, file, metadata={"format": "pt"})


def set_last(value: float) -> Callable[[Tensor], None]:
    return lambda tensor: tensor.view(-1)[-1:].fill_(value).sum().item() and None


def set_byte(value: int) -> Callable[[Tensor], None]:
    return lambda tensor: tensor.view(torch.uint8).view(-1)[-1:].fill_(value) and None


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("finite")
    mxfp4 = {"hidden_size": 64, "intermediate_size": 64}
    return {
        "bf16": tiny(root / "bf16"),
        "fused": save(build("gpt_oss", **mxfp4), root / "fused"),
        "fp8": as_fp8(tiny(root / "fp8", hidden_size=128, moe_intermediate_size=128)),
    }


FP8 = "model.layers.1.mlp.experts.3.up_proj.weight"
CASES = {
    "bf16": ("bf16", "model.layers.1.mlp.experts.3.down_proj.weight", set_last(NAN)),
    "bf16-infinite": ("bf16", "model.layers.0.mlp.experts.0.gate_proj.weight", set_last(INF)),
    "fused": ("fused", "model.layers.1.mlp.experts.gate_up_proj", set_last(NAN)),
    "fused-bias": ("fused", "model.layers.0.mlp.experts.down_proj_bias", set_last(NAN)),
    "fp8-scale": ("fp8", f"{FP8}_scale_inv", set_last(NAN)),
    "fp8-code": ("fp8", FP8, set_byte(0x7F)),
}


@pytest.mark.parametrize("case", CASES)
def test_experts(case: str, originals: dict[str, Path], tmp_path: Path) -> None:
    """When a model is loaded, and when it is quantised."""
    kind, name, change = CASES[case]
    model = tmp_path / "model"
    model.mkdir()
    for file in originals[kind].iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    load_model(model, dtype=torch.float32)
    spoil(model / "model.safetensors", name, change)
    message = rf"{model}/model\.safetensors: {name}: given NaN or infinite numbers"
    with pytest.raises(InputError, match=message):
        load_model(model, dtype=torch.float32)
    with pytest.raises(InputError, match=message):
        pack(model, tmp_path / "out", "int8")


def test_lora_factors(originals: dict[str, Path], tmp_path: Path) -> None:
    adapter = write_sample_adapter(tmp_path / "adapter", originals["bf16"], rank=4, seed=1, experts=False)
    file = adapter / "adapter_model.safetensors"
    name = next(name for name in load_file(file) if "layers.1.self_attn.v_proj.lora_B" in name)
    spoil(file, name, set_last(INF))
    with pytest.raises(InputError, match=rf"{file}: .*v_proj.lora_B.*: given NaN or infinite numbers"):
        for module in read_adapter(adapter).modules:
            module.read()
