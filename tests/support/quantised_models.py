"""A tiny DeepSeek-V3 in the formats of releases, with the logits of stock transformers on the dequantised weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.support.loaded_models import MLA, SIZES
from tests.support.releases import KINDS
from tests.support.tiny_models import build, logits, save


def edit(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def stock(directory: Path, tensors: dict[str, Tensor]) -> Tensor:
    """Logits of the stock model on these numbers; leaves them in the directory."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager")
    return logits(model)


def release(directory: Path, kind: str, only: str = "") -> Tensor:
    """Write a DeepSeek-V3 in this format, every linear layer of it or those that match; the logits it must have."""
    make, _, words = KINDS[kind]
    save(build("deepseek_v3", **SIZES, **MLA), directory)
    written, numbers = {}, {}
    for seed, (name, tensor) in enumerate(load_file(directory / "model.safetensors").items()):
        if tensor.dim() == 2 and name.endswith("_proj.weight") and re.search(only, name):
            parts, value = make(*tensor.shape, seed)
            written |= {f"{name.removesuffix('.weight')}.{ending}": part for ending, part in parts.items()}
            numbers[name] = value.bfloat16().float()
        else:
            written[name] = numbers[name] = tensor
    want = stock(directory, numbers)
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, directory / "model.safetensors")
    edit(directory, quantization_config=words)
    return want
