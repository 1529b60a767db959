"""The experts of the tiny checkpoint of `sglang_files.py` in the other places and formats that `--kt-weight-path` may
name: GGUF, directories of `kt quant` and of kt-kernel's converter, and releases in other formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ktransformers.quant.convert import convert
from ktransformers.quant.kt_convert import convert_kt, plan_kt
from ktransformers.quant.origin import Origin
from ktransformers.quant.plan import make_plan, parse_formats
from tests.support.releases import KINDS, write_gguf
from tests.support.sglang_files import EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, Checkpoint

ROLES = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}


def _of_layers(path: Path, matrix: Callable[[int, int, str], Tensor]) -> Checkpoint:
    made = Checkpoint(path)
    for layer in range(LAYERS):
        made.experts.append([tuple(matrix(layer, expert, role) for role in ROLES) for expert in range(EXPERTS)])  # type: ignore[misc]
    return made


def gguf_folder(path: Path) -> Checkpoint:
    """A GGUF split into a file for each layer: gate and up in Q4_0, down in Q8_0."""
    import gguf

    plain, folder = Checkpoint.make(path / "plain"), path / "gguf"
    folder.mkdir()
    decoded: dict[tuple[int, str], Tensor] = {}
    for layer in range(LAYERS):
        tensors = {}
        for place, role in enumerate(ROLES):
            kind = "Q8_0" if role == "down" else "Q4_0"
            matrix = torch.stack([matrices[place] for matrices in plain.experts[layer]]).float()
            data = gguf.quants.quantize(matrix.numpy(), gguf.GGMLQuantizationType[kind])
            tensors[f"blk.{layer}.ffn_{role}_exps.weight"] = (data, kind)
            decoded[layer, role] = torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
        file = folder / f"model-{layer + 1:05}-of-{LAYERS:05}.gguf"
        fields = {"split.no": layer, "split.count": LAYERS, "split.tensors.count": 3 * LAYERS}
        write_gguf(file, "qwen3moe", fields, tensors)
    return _of_layers(folder, lambda layer, expert, role: decoded[layer, role][expert])


def packed_directory(path: Path) -> Checkpoint:
    plain = Checkpoint.make(path / "plain")
    convert(make_plan(plain.path, parse_formats("int8"), 2, None, "bf16"), path / "packed")
    return replace(plain, path=path / "packed")


def merged_files(path: Path, bits: int, parts: int) -> Checkpoint:
    """Safetensors of kt-kernel's converter."""
    plain = Checkpoint.make(path / "plain")
    convert_kt(plan_kt(Origin(plain.path), bits, parts), path / "merged")
    return replace(plain, path=path / "merged")


def release(path: Path, kind: str) -> Checkpoint:
    made = Checkpoint.make(path / "release")
    form, _, quantisation = KINDS[kind]
    tensors: dict[str, Tensor] = {}
    decoded: dict[tuple[int, int, str], Tensor] = {}
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for place, (role, shape) in enumerate(ROLES.items()):
                stored, decoded[layer, expert, role] = form(*shape, 100 * layer + 10 * expert + place)
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj"
                tensors |= {f"{stem}.{ending}": tensor for ending, tensor in stored.items()}
    save_file(tensors, str(made.path / "model.safetensors"))
    config = json.loads((made.path / "config.json").read_text())
    (made.path / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    return _of_layers(made.path, lambda *key: decoded[key])


@dataclass(frozen=True)
class ExpertPlace:
    """What `--kt-weight-path` names."""

    method: str  # --kt-method
    write: Callable[[Path], Checkpoint]  # experts are those that the files hold, or were quantised from
    tolerance: float = 0.01  # of outputs, with the error of the quantisation


PLACES = {
    "GGUF folder": ExpertPlace("LLAMAFILE", gguf_folder),
    "packed directory": ExpertPlace("AMXINT8", packed_directory, 0.02),
    "packed directory by any name": ExpertPlace("LLAMAFILE", packed_directory, 0.02),
    "merged INT8": ExpertPlace("AMXINT8", lambda path: merged_files(path, 8, 1), 0.02),
    "merged INT8 in two parts": ExpertPlace("AMXINT8", lambda path: merged_files(path, 8, 2), 0.02),
    "merged INT4": ExpertPlace("AMXINT4", lambda path: merged_files(path, 4, 1), 0.3),
    "int4 release": ExpertPlace("RAWINT4", lambda path: release(path, "compressed int4")),
    "fp8 by row": ExpertPlace("FP8_PERCHANNEL", lambda path: release(path, "fp8 rows")),
    "fp8 in blocks": ExpertPlace("FP8", lambda path: release(path, "fp8 blocks")),
}
