"""Experts of one layer, read from a module or from checkpoint files, in the forms that kt-kernel's functions return.

Reading is that of `ktransformers.checkpoint.sources`: files are mapped, tensors are found under all spellings of names,
fused and separate, and checked against the shape. bf16 sources come as three stacked tensors; native formats stay
quantized: block fp8 as lists of one expert each, 4-bit integers stacked. `load_block_fp8_weights` and its relatives of
the SFT object take these."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kt_kernel.sft.arch import MOEArchConfig, detect_fused_experts
from kt_kernel.sft.runtime import KTArtifactError
from kt_kernel.weights import LayerPlace, Weight, read_layer
from ktransformers.checkpoint import Encoded, decode
from ktransformers.checkpoint.encoded import stack
from ktransformers.checkpoint.experts import ExpertChunk
from ktransformers.checkpoint.kt_files import validate_int8_tree
from ktransformers.checkpoint.recode import split
from ktransformers.checkpoint.sources import LayerSource, open_source
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import Contract
from ktransformers.ground.errors import InputError
from ktransformers.modeling.prepare import read_checkpoint_facts

ROLES = ("gate", "up", "down")

# A tree that kt-kernel 0.7 trains on: its manifest, layers, shapes and files, with `verify_hashes` their contents too.
validate_persistent_int8_weights = validate_int8_tree


@dataclass(frozen=True)
class BlockFP8ExpertWeights:
    """E matrices each: `float8_e4m3fn` gate and up `[I, H]`, down `[H, I]`, and float32 scales of 128 x 128 blocks."""

    gate: list[Tensor]
    up: list[Tensor]
    down: list[Tensor]
    gate_scale: list[Tensor]
    up_scale: list[Tensor]
    down_scale: list[Tensor]


@dataclass(frozen=True)
class StackedExperts:
    gate: Tensor
    up: Tensor
    down: Tensor
    gate_scale: Tensor
    up_scale: Tensor
    down_scale: Tensor


class RAWINT4ExpertWeights(StackedExperts):
    """uint8 gate and up `[E, I, H/2]`, down `[E, H, I/2]`, two values in a byte, the even column low, stored plus 8;
    bf16 scales `[E, I, H/32]` and `[E, H, I/32]`."""


class INT8ExpertWeights(StackedExperts):
    """int8 gate and up `[E, I, H]`, down `[E, H, I]`, row-major, and one float32 scale for each row."""


def extract_moe_weights(moe_module: nn.Module, moe_config: MOEArchConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up `[E, I, H]` and down `[E, H, I]` of a block that still has its parameters, in their dtype."""
    experts: Any = getattr(moe_module, moe_config.experts_attr)
    if packed_experts(experts) is not None:
        remedy = "experts.kt.store.decode(matrix, expert) returns one matrix"
        raise InputError(type(experts).__name__, "packed experts", "experts that have their parameters", remedy)
    if not detect_fused_experts(experts):
        gate, up, down = (
            torch.stack([getattr(expert, name).weight.detach() for expert in experts])
            for name in moe_config.weight_names
        )
        return gate, up, down
    fused = {"gate_up": experts.gate_up_proj.detach(), "down": experts.down_proj.detach()}
    transposed = getattr(experts, "is_transposed", fused["gate_up"].shape[1] != 2 * moe_config.intermediate_size)
    interleaved = not getattr(experts, "is_concatenated", True)
    matrices = split(ExpertChunk(0, True, {**fused}), transposed=transposed, interleaved=interleaved)
    gate, up, down = (matrix.contiguous() for role in ROLES if isinstance(matrix := matrices[role], Tensor))
    return gate, up, down


def load_experts_from_checkpoint_files(
    files: Sequence[str | Path],
    sharded_metadata: Mapping[str, Any] | None,
    layers_prefix: str,
    moe_config: MOEArchConfig,
    layer_idx: int,
    block_size: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up `[E, I, H]` and down `[E, H, I]` in bf16; quantised matrices are dequantised. `sharded_metadata` is
    not needed: the headers of the files say where a tensor is."""
    matrices = _stacked(*_open_layer(files, layers_prefix, moe_config, layer_idx, _hidden_size(files)))
    gate, up, down = (
        (decode(matrix) if isinstance(matrix, Encoded) else matrix).to(torch.bfloat16) for matrix in matrices
    )
    return gate, up, down


def load_block_fp8_experts_from_checkpoint_files(
    files: Sequence[str | Path],
    sharded_metadata: Mapping[str, Any] | None,
    layers_prefix: str,
    moe_config: MOEArchConfig,
    layer_idx: int,
    hidden_size: int,
    block_size: tuple[int, int] = (128, 128),
) -> BlockFP8ExpertWeights:
    """The experts of an fp8 checkpoint with scales of 128 x 128 blocks, as they are stored."""
    if tuple(block_size) != (128, 128):
        raise KTArtifactError("block_size", tuple(block_size), "(128, 128)")
    qweight, scales = _native(*_open_layer(files, layers_prefix, moe_config, layer_idx, hidden_size), "fp8:128x128")
    matrices = [list(matrix.view(torch.float8_e4m3fn).unbind(0)) for matrix in qweight]
    return BlockFP8ExpertWeights(*matrices, *(list(scale.unbind(0)) for scale in scales))


def load_rawint4_experts_from_checkpoint_files(
    files: Sequence[str | Path],
    sharded_metadata: Mapping[str, Any] | None,
    layers_prefix: str,
    moe_config: MOEArchConfig,
    layer_idx: int,
    hidden_size: int,
    group_size: int = 32,
) -> RAWINT4ExpertWeights:
    """The experts of a compressed-tensors checkpoint in groups of 32, as they are stored."""
    qweight, scales = _native(
        *_open_layer(files, layers_prefix, moe_config, layer_idx, hidden_size), f"int4:{group_size}"
    )
    return RAWINT4ExpertWeights(*qweight, *scales)


def load_experts_from_kt_weight_path(
    path: str | Path, layer_idx: int, num_experts: int, hidden_size: int, intermediate_size: int
) -> INT8ExpertWeights:
    """The int8 experts of kt-kernel's converter, tiles undone; a row of down with several scales (more than one NUMA
    part) has no such form."""
    place = LayerPlace(layer_idx, num_experts, hidden_size, intermediate_size)
    return INT8ExpertWeights(*itertools.chain(*_native(*read_layer(open_source(path), place), "int8")))


def _hidden_size(files: Sequence[str | Path]) -> int:
    from ktransformers.modeling.load import load_config

    text: Any = load_config(Path(files[0]).parent).get_text_config(decoder=True)
    return int(text.hidden_size)


def _open_layer(
    files: Sequence[str | Path], layers_prefix: str, moe_config: MOEArchConfig, layer_idx: int, hidden: int
) -> tuple[Contract, LayerSource]:
    if not files:
        raise KTArtifactError("files", "an empty list", "the safetensors files of a checkpoint")
    directory = Path(files[0]).parent
    source = open_source(directory, read_checkpoint_facts(directory).rest, files=[str(file) for file in files])
    name = f"{layers_prefix}.{layer_idx}.{moe_config.moe_layer_attr}.{moe_config.experts_attr}"
    sizes = (moe_config.expert_num, hidden, moe_config.intermediate_size)
    return read_layer(source, LayerPlace(layer_idx, *sizes, name=name))


def _stacked(contract: Contract, layer: LayerSource) -> list[Weight]:
    """Gate, up and down of all experts, each stacked."""
    transposed = contract.shape.transposed
    chunks = [split(chunk, transposed=transposed, interleaved=False) for chunk in layer.chunks()]
    return [_join([chunk[role] for chunk in chunks]) for role in ROLES]


def _join(parts: list[Weight]) -> Weight:
    encoded = [part for part in parts if isinstance(part, Encoded)]
    return stack(encoded) if encoded else torch.cat([part for part in parts if isinstance(part, Tensor)])


def _native(contract: Contract, layer: LayerSource, spec: str) -> tuple[list[Tensor], list[Tensor]]:
    """Quantized weights and scales of gate, up and down, all of one format."""
    for role in ROLES:
        if layer.formats[role] != spec:
            raise KTArtifactError(role, f"experts in {layer.formats[role]}", spec, "load_weights takes every format")
    qweight, scales = [], []
    for matrix in _stacked(contract, layer):
        assert isinstance(matrix, Encoded) and matrix.scales is not None
        qweight.append(matrix.qweight)
        scales.append(matrix.scales)
    return qweight, scales
