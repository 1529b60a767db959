"""Loading of one rank's experts: the others' bytes are neither read nor packed, in every kind of file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.partition import ExpertPartition, ExpertShard, by_experts, by_layers
from ktransformers.experts.placeholder import Placeholder
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from tests.support.packing import pack
from tests.support.tiny_models import build, save, tokens

EXPERTS, LAYERS = 8, 2
ODD = ExpertPartition(((1, 0, 0, 1, 1, 0, 0, 1),) * LAYERS, 2)


def modules(model: Any) -> list[Any]:
    return list(expert_modules(model).values())


def damage_safetensors(directory: Path, spared: Sequence[int]) -> None:
    """NaN in every expert that is not spared, in separate tensors or in fused ones."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." not in name:
            continue
        words = name.split(".experts.")[1].split(".")
        if words[0].isdigit():
            if int(words[0]) not in spared:
                tensors[name] = torch.full_like(tensor, torch.nan)
        else:
            for expert in set(range(EXPERTS)) - set(spared):
                tensor[expert] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


def damage_packed(directory: Path, spared: Sequence[int]) -> None:
    manifest = json.loads((directory / "kt_packed.json").read_text())
    from ktransformers.checkpoint.tensorfile import read_layout

    for layer in manifest["layers"]:
        file = directory / layer["file"]
        content = bytearray(file.read_bytes())
        slots = read_layout(file).slots
        for tensor in layer["tensors"].values():
            size = slots[tensor].bytes // EXPERTS
            for expert in set(range(EXPERTS)) - set(spared):
                start = slots[tensor].offset + expert * size
                content[start : start + size] = b"\xff" * size
        file.write_bytes(bytes(content))


def separate(path: Path) -> Path:
    save(build("qwen3_moe", num_experts=EXPERTS), path)
    return path


def fused(path: Path) -> Path:
    save(build("gpt_oss", num_local_experts=EXPERTS), path)
    return path


def packed(path: Path) -> Path:
    save(build("qwen3_moe", num_experts=EXPERTS), path / "model")
    pack(path / "model", path / "packed", "int4")
    return path / "packed"


@pytest.mark.parametrize("partition", [by_experts(LAYERS, EXPERTS, 2), ODD], ids=["range", "odd"])
@pytest.mark.parametrize(
    ("write", "damage"),
    [(separate, damage_safetensors), (fused, damage_safetensors), (packed, damage_packed)],
    ids=["separate", "fused", "packed"],
)
def test_a_rank_reads_and_packs_its_experts_alone(
    write: Callable[[Path], Path],
    damage: Callable[[Path, Sequence[int]], None],
    partition: ExpertPartition,
    tmp_path: Path,
) -> None:
    path = write(tmp_path)
    whole = load_model(path, dtype=torch.float32)
    shard = ExpertShard(partition, 1)
    ids = shard.layer(0).experts
    matrices = {role for module in modules(whole) for role in module.kt.store.formats}
    expected = [
        {(role, expert): module.kt.store.decode(role, expert).clone() for role in matrices for expert in ids}
        for module in modules(whole)
    ]
    sizes = [module.kt.store.packed_bytes for module in modules(whole)]
    del whole
    damage(path, ids)
    part = load_model(path, dtype=torch.float32, shard=shard)
    for module, values, size in zip(modules(part), expected, sizes, strict=True):
        store = module.kt.store
        assert store.num_experts == len(ids) and store.packed_bytes == size * len(ids) // EXPERTS
        store.verify(list(range(len(ids))))
        for (role, expert), value in values.items():
            assert torch.equal(store.decode(role, ids.index(expert)), value), (role, expert)
        placeholders = [parameter for parameter in module.parameters() if isinstance(parameter, Placeholder)]
        assert len(placeholders) == 2 and all(parameter.shape[0] == EXPERTS for parameter in placeholders)
    if damage is damage_safetensors:
        with pytest.raises(InputError, match="NaN"):
            load_model(path, dtype=torch.float32)
    else:
        whole = load_model(path, dtype=torch.float32)
        with pytest.raises(Exception, match="checksum"):
            whole(tokens())


def test_a_rank_without_experts_of_a_layer_has_no_store(tmp_path: Path) -> None:
    path = separate(tmp_path)
    model = load_model(path, shard=ExpertShard(by_layers(LAYERS, EXPERTS, 2), 1))
    first, second = modules(model)
    assert first.kt.store is None and second.kt.store.num_experts == EXPERTS
    with pytest.raises(InputError, match="connect"):
        model(tokens())


def test_partition_of_another_model_is_refused(tmp_path: Path) -> None:
    path = separate(tmp_path)
    with pytest.raises(InputError, match="3 layers"):
        load_model(path, shard=ExpertShard(by_experts(3, EXPERTS, 2), 0))
    with pytest.raises(InputError, match="6 experts"):
        load_model(path, shard=ExpertShard(by_experts(LAYERS, 6, 2), 0))


def test_mapped_range_of_a_packed_file_is_not_copied(tmp_path: Path) -> None:
    path = packed(tmp_path)
    model = load_model(path, shard=ExpertShard(by_experts(LAYERS, EXPERTS, 2), 1))
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if "packed-" in line]
    for module in modules(model):
        for role in ("gate_up", "down"):
            address = module.kt.store.memory()[role].data_ptr()
            assert any(int(start, 16) <= address < int(end, 16) for start, end in ranges)
    with pytest.raises(InputError, match="pages"):
        load_model(path, shard=ExpertShard(by_experts(LAYERS, EXPERTS, 2), 1), pages="prefault")
