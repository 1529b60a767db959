"""Tiny checkpoints, their conversion, and access to the results, for tests of `kt quant`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ktransformers.checkpoint.encoded import Encoded
from ktransformers.checkpoint.encoder import encode
from ktransformers.experts.contract import new_store
from ktransformers.experts.interface import attach_store
from ktransformers.quant.convert import Converted, convert
from ktransformers.quant.plan import make_plan, parse_formats
from tests.support.tiny_models import build, save

# Columns that every format can take: multiples of 256 for the K formats would make nothing tiny.
SIZES: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64}


def tiny(directory: Path, family: str = "qwen3_moe", **changes: Any) -> Path:
    return save(build(family, **SIZES | changes), directory)


def pack(source: Path, out: Path, word: str = "int4", **options: Any) -> Converted:
    group, down = options.pop("group", None), options.pop("down", None)
    experts = options.pop("experts", None)
    plan = make_plan(source, parse_formats(word, group, down), options.pop("threads", 2), experts)
    return convert(plan, out, **options)


def repack(model: PreTrainedModel, formats: dict[str, str]) -> None:
    """Put into every layer of a model in bf16 a store of other formats, encoded in one go from what it holds."""
    for module in expert_modules_with_stores(model):
        old: Any = module.kt.store
        made = new_store(module.kt.contract, formats=formats)
        for expert in range(old.num_experts):
            matrices: dict[str, Any] = {}
            for role, word in formats.items():
                plain = old.decode(role, expert)
                matrices[role] = plain if word == "bf16" else encode(plain, word)
            made.pack(**matrices, first_expert=expert)
        attach_store(module, module.kt.contract, made, {})


def expert_modules_with_stores(model: PreTrainedModel) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "kt")]


def as_fp8(source: Path) -> Path:
    """The experts and projections of a directory as DeepSeek releases them: e4m3 with a scale for each 128 x 128."""
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        coded = encode(tensors.pop(name), "fp8:128x128")
        assert isinstance(coded, Encoded) and coded.scales is not None
        tensors[name] = coded.qweight[0].view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = coded.scales[0].contiguous()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    words = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit(source, quantization_config=words)
    return source


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def contents(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory's safetensors."""
    actual: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        actual |= load_file(file)
    return actual


def mapped_pages(process: int, directory: Path) -> tuple[int, int]:
    """(Rss, Pss) in bytes of the directory's packed files in the memory of a process."""
    sizes, inside = {"Rss": 0, "Pss": 0}, False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0] and not fields[0].endswith(":"):
            inside = str(directory / "packed-") in line
        elif inside and fields[0].removesuffix(":") in sizes:
            sizes[fields[0].removesuffix(":")] += int(fields[1]) * 1024
    return sizes["Rss"], sizes["Pss"]
