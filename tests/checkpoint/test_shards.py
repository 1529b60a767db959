"""Safetensors directories: single files, shards, broken ones; and the experts of a layer read from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ktransformers.checkpoint import ExpertShape, Shards, check_experts, find_experts, locate, read_experts
from ktransformers.ground.errors import InputError

ROOT = "model.layers.0.mlp.experts"
SHAPE = ExpertShape(num_experts=3, hidden=8, intermediate=6)


def layer(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    return {
        f"{ROOT}.{e}.{matrix}.weight": torch.randn(shape).to(dtype)
        for e in range(3)
        for matrix, shape in shapes.items()
    }


def write(directory: Path, tensors: dict[str, torch.Tensor], parts: int = 1) -> Path:
    if parts == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    home = {name: f"part-{number % parts}.safetensors" for number, name in enumerate(tensors)}
    for file in set(home.values()):
        save_file({name: tensor for name, tensor in tensors.items() if home[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    return directory


def verify(directory: Path, shape: ExpertShape = SHAPE) -> None:
    shards = Shards.of_directory(directory)
    check_experts(shards, locate(find_experts(shards.names), ROOT), shape)


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_per_expert_tensors_are_read(tmp_path: Path, parts: int, dtype: torch.dtype) -> None:
    tensors = layer(dtype)
    shards = Shards.of_directory(write(tmp_path, tensors, parts))
    assert sorted(shards.names) == sorted(tensors)
    assert f"{ROOT}.0.up_proj.weight" in shards and "lm_head.weight" not in shards
    actual = locate(find_experts(shards.names), ROOT)
    check_experts(shards, actual, SHAPE)
    shards.release()
    pieces = list(read_experts(shards, actual, SHAPE))
    assert [piece.first_expert for piece in pieces] == [0, 1, 2]
    for piece in pieces:
        assert not piece.fused and set(piece.tensors) == {"gate", "up", "down"}
        for role, tensor in piece.tensors.items():
            assert torch.equal(tensor, tensors[f"{ROOT}.{piece.first_expert}.{role}_proj.weight"])


@pytest.mark.parametrize("transposed", [False, True])
def test_fused_tensors_are_read(tmp_path: Path, transposed: bool) -> None:
    shape = ExpertShape(3, 8, 6, biased=True, transposed=transposed)
    assert shape.fused()["gate_up"] == ((3, 8, 12) if transposed else (3, 12, 8))
    names = {"gate_up": "gate_up_proj", "down": "down_proj", "gate_up_bias": "gate_up_proj_bias"}
    names["down_bias"] = "down_proj_bias"
    tensors = {f"{ROOT}.{names[role]}": torch.randn(size) for role, size in shape.fused().items()}
    shards = Shards.of_directory(write(tmp_path, tensors))
    actual = locate(find_experts(shards.names), ROOT)
    check_experts(shards, actual, shape)
    (piece,) = read_experts(shards, actual, shape)
    assert piece.fused
    assert all(torch.equal(tensor, tensors[f"{ROOT}.{names[role]}"]) for role, tensor in piece.tensors.items())
    with pytest.raises(InputError, match=r"down_proj_bias: given a tensor that these experts have no use for"):
        check_experts(shards, actual, ExpertShape(3, 8, 6, transposed=transposed))


def test_missing_and_misshapen_tensors_are_refused_by_name(tmp_path: Path) -> None:
    name = f"{ROOT}.1.up_proj.weight"
    tensors = layer()
    missing = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.experts\.1: up: given no such tensor"):
        verify(write(tmp_path, missing))
    with pytest.raises(InputError, match=r"experts\.1\.up_proj\.weight: given shape \[8, 6\], expected \[6, 8\]"):
        verify(write(tmp_path, tensors | {name: torch.zeros(8, 6)}))
    with pytest.raises(InputError, match=r"experts\.1\.up_proj\.weight: given F8_E4M3 \[6, 8\], expected BF16"):
        verify(write(tmp_path, tensors | {name: torch.zeros(6, 8).to(torch.float8_e4m3fn)}))
    with pytest.raises(InputError, match=r"up_proj\.weight_scale_inv: given a tensor that this format has no use"):
        verify(write(tmp_path, tensors | {f"{name}_scale_inv": torch.ones(1)}))
    with pytest.raises(InputError, match=r"experts\.2\.\w+\.weight: given expert 2, expected 2 experts"):
        verify(write(tmp_path, tensors), ExpertShape(2, 8, 6))
    with pytest.raises(InputError, match=r"experts\.3: gate: given no such tensor"):
        verify(write(tmp_path, tensors), ExpertShape(4, 8, 6))
    with pytest.raises(InputError, match="two layouts"):
        verify(write(tmp_path, tensors | {f"{ROOT}.gate_up_proj": torch.zeros(3, 12, 8)}))


def test_broken_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        Shards.of_directory(tmp_path)
    write(tmp_path, layer(), parts=2)
    index = tmp_path / "model.safetensors.index.json"
    home = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": home | {"lm_head.weight": "part-0.safetensors"}}))
    with pytest.raises(InputError, match=r"lm_head\.weight: given no such tensor in .*part-0\.safetensors"):
        Shards.of_directory(tmp_path)
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(InputError, match="the name of a file in its directory"):
        Shards.of_directory(tmp_path)
    for words in ("{", "[]", '{"weight_map": 3}', "{}"):
        index.write_text(words)
        with pytest.raises(InputError, match="weight_map"):
            Shards.of_directory(tmp_path)
    index.write_text(json.dumps({"weight_map": home}))
    part = tmp_path / "part-1.safetensors"
    intact = part.read_bytes()
    part.write_bytes(intact[: len(intact) // 2])
    with pytest.raises(InputError, match=r"part-1\.safetensors: given a file that does not open"):
        Shards.of_directory(tmp_path)
    part.unlink()
    with pytest.raises(InputError, match=r"part-1\.safetensors: given no such file"):
        Shards.of_directory(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"expected a \.safetensors file"):
        Shards([tmp_path / "pytorch_model.bin"])
    save_file({"x": torch.zeros(1)}, tmp_path / "a.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "b.safetensors")
    with pytest.raises(InputError, match=r"x: given it in a\.safetensors and in b\.safetensors"):
        Shards([tmp_path / "a.safetensors", tmp_path / "b.safetensors"])


@pytest.mark.parametrize("spaces", range(8))
def test_header_of_any_length_is_read(spaces: int, tmp_path: Path) -> None:
    """Stock safetensors opens a file whose data begins at an odd address; kernels cannot compute from there."""
    tensors = {"a": torch.arange(6, dtype=torch.float32), "b": torch.arange(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip() + b" " * spaces
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    shards = Shards.of_directory(tmp_path)
    for name, expected in tensors.items():
        read = shards.read(name)
        assert torch.equal(read, expected) and read.data_ptr() % read.element_size() == 0


def test_tensor_with_an_endless_name_is_refused(tmp_path: Path) -> None:
    save_file({"x" * 5000: torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors: given a tensor with a name of 5000 characters"):
        Shards.of_directory(tmp_path)
