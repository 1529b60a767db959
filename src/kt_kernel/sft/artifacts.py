"""Adapter directories in kt-kernel's form, in addition to what PEFT saves: `fused_expert_lora.safetensors` with the
expert LoRA (`layers.{L}.experts.{gate,up,down}_lora_{a,b}`, bf16) and `kt_adapter_manifest.json` with sizes and
checksums.

Expert LoRA that PEFT owns is in PEFT's own files, and nothing is added to them. A directory in kt-kernel's form can be
loaded into either kind: into the six parameters of each layer, or into PEFT's wrappers, whose `gate_up_proj` with twice
the rank holds the two factors block-diagonally. Everything is checked before a number is written: keys, shapes, dtypes,
rank, and the manifest if there is one (kt-kernel 0.6 wrote none).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from kt_kernel.sft.base import LORA_NAMES
from kt_kernel.sft.full_experts import has_full_experts, read_bf16
from kt_kernel.sft.layer import KTMoELayerWrapper, wrapped_model
from kt_kernel.sft.lora import create_fused_lora
from kt_kernel.sft.runtime import KTArtifactError
from ktransformers.adapters.config import CONFIG_FILE, compact_number, read_config
from ktransformers.adapters.formats.adapter_format import MODEL_FILE
from ktransformers.adapters.formats.kt import EXPERT_FILE, MANIFEST_FILE, build_manifest, check_manifest
from ktransformers.adapters.formats.peft import join_gate_up
from ktransformers.adapters.write import TensorBatch, TensorSpec, write_safetensors
from ktransformers.checkpoint import Shards
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.interface import experts_of
from ktransformers.experts.lora import LoraPair
from ktransformers.experts.peft_lora import expert_adapters
from ktransformers.experts.placeholder import Placeholder
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, sync, write_json

ADDED_EXPERTS = ".lora_experts."  # part of the names of kt-kernel's GPU LoRA-experts
CONVERT = "`kt convert DIR OUT --to peft` writes it for PEFT"


@dataclass(frozen=True)
class KTAdapterManifest:
    """What `save_kt_adapter_artifacts` wrote; `document` is the contents of kt_adapter_manifest.json."""

    path: Path
    document: Mapping[str, Any]


def save_kt_adapter_artifacts(model: nn.Module, output_dir: str | Path) -> KTAdapterManifest | None:
    """Write the expert LoRA and the manifest next to the files that PEFT's `save_pretrained` wrote there; None if there
    is no expert LoRA but PEFT's own."""
    directory = Path(output_dir)
    records = save_kt_moe_to_adapter(model, directory)
    if not records:
        return None
    inner = wrapped_model(model)
    rank, alpha = _lora_form(inner._kt_wrappers[0])
    if not (directory / CONFIG_FILE).is_file():
        write_json(directory / CONFIG_FILE, _adapter_config(inner, rank, alpha))
    config, _ = read_config(directory)
    if (config.r, config.lora_alpha, config.use_rslora) != (rank, alpha, False):
        given = f"r {config.r}, lora_alpha {config.lora_alpha:g}, use_rslora {config.use_rslora}"
        expected = f"r {rank} and lora_alpha {alpha:g}, which the experts were trained with"
        raise KTArtifactError(str(directory / CONFIG_FILE), given, expected, "one of each applies to everything")
    counts = {EXPERT_FILE: records, CONFIG_FILE: 0}
    if (directory / MODEL_FILE).is_file():
        counts[MODEL_FILE] = len(Shards([directory / MODEL_FILE]).names)
    document = build_manifest(
        directory,
        counts,
        base=config.base_model_name_or_path or getattr(inner, "name_or_path", None),
        rank=rank,
        alpha=alpha,
        weight_format=str(inner._kt_expert_weight_format),
    )
    write_json(directory / MANIFEST_FILE, document)
    return KTAdapterManifest(directory / MANIFEST_FILE, document)


def save_kt_moe_to_adapter(model: nn.Module, output_dir: str | Path) -> int:
    """Write fused_expert_lora.safetensors; returns the number of its tensors, 0 if the model has no expert LoRA of its
    own and nothing was written."""
    layers = [layer for layer in wrapped_model(model)._kt_wrappers if layer.fused_expert_lora_params]
    if not layers:
        return 0
    directory = Path(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f".{EXPERT_FILE}.{os.getpid()}"
    try:
        records = write_safetensors(draft, [_batch(layer) for layer in layers])
        draft.rename(directory / EXPERT_FILE)
    finally:
        draft.unlink(missing_ok=True)
    sync(directory)
    return len(records)


def _batch(layer: KTMoELayerWrapper) -> TensorBatch:
    tensors = {_key(layer, name): layer.fused_expert_lora_params[name].detach() for name in LORA_NAMES}
    specs = tuple(TensorSpec(key, tuple(tensor.shape), torch.bfloat16) for key, tensor in tensors.items())
    return TensorBatch(specs, lambda: [tensor.to(torch.bfloat16) for tensor in tensors.values()])


def _key(layer: KTMoELayerWrapper, name: str) -> str:
    return f"layers.{layer.layer_idx}.experts.{name}"


def _lora_form(layer: KTMoELayerWrapper) -> tuple[int, float]:
    rank = layer.fused_expert_lora_params["gate_lora_a"].shape[1]
    lora: Any = experts_of(layer.experts).lora
    return rank, lora.gate.scaling * rank


def _adapter_config(inner: Any, rank: int, alpha: float) -> dict[str, Any]:
    """adapter_config.json of an adapter that has expert LoRA alone."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": getattr(inner, "name_or_path", None),
        "bias": "none",
        "r": rank,
        "lora_alpha": compact_number(alpha),
        "lora_dropout": 0.0,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
    }


def load_kt_adapter_artifacts(model: nn.Module, path: str | Path) -> None:
    """Load the expert LoRA of a directory in kt-kernel's form into the model, after checking its manifest. A directory
    without the expert file has its expert LoRA, if any, in PEFT's file, which PEFT loads."""
    directory = Path(path)
    if not directory.is_dir():
        raise KTArtifactError(str(directory), "no such directory", "an adapter that was saved")
    if (directory / MANIFEST_FILE).is_file():
        try:
            check_manifest(directory)
        except InputError as error:
            raise KTArtifactError(
                str(directory), f"files that their manifest contradicts ({error})", "what it lists"
            ) from None
    if has_full_experts(directory):
        given = "experts whose base weights were trained"
        remedy = "give the directory as kt_weight_path when the model is wrapped"
        raise KTArtifactError(str(directory), given, "LoRA of the experts", remedy)
    if (directory / MODEL_FILE).is_file():
        added = [name for name in Shards([directory / MODEL_FILE]).names if ADDED_EXPERTS in name]
        if added:
            given = f"{added[0]}, experts that were added to the model"
            raise KTArtifactError(str(directory / MODEL_FILE), given, "LoRA alone", "train without kt_use_lora_experts")
    if (directory / EXPERT_FILE).is_file():
        load_kt_moe_from_adapter(model, directory)


def load_kt_moe_from_adapter(model: nn.Module, path: str | Path) -> None:
    """Load fused_expert_lora.safetensors of a directory. A wrapped model without expert LoRA gets it, with the rank and
    alpha of adapter_config.json."""
    directory = Path(path)
    file = directory / EXPERT_FILE
    if not file.is_file():
        raise KTArtifactError(str(file), "no such file", "the expert LoRA that kt-kernel's training saves")
    config, _ = read_config(directory)
    inner = wrapped_model(model)
    layers: list[KTMoELayerWrapper] = inner._kt_wrappers
    tensors = _read(file, layers, config.r)
    scale = config.lora_alpha / config.r
    if adapters := expert_adapters(model):
        _load_into_peft(adapters, layers, tensors, scale, str(file))
        return
    if not layers[0].fused_expert_lora_params:
        create_fused_lora(model, config.r, config.lora_alpha)
    for layer in layers:
        rank, alpha = _lora_form(layer)
        if (rank, alpha) != (config.r, config.lora_alpha):
            given = f"rank {config.r} and alpha {config.lora_alpha:g}"
            raise KTArtifactError(
                str(file), given, f"rank {rank} and alpha {alpha:g}, those of the model's expert LoRA"
            )
    with torch.no_grad():
        for layer in layers:
            for name in LORA_NAMES:
                layer.fused_expert_lora_params[name].copy_(tensors[_key(layer, name)])


def _read(file: Path, layers: list[KTMoELayerWrapper], rank: int) -> dict[str, Tensor]:
    """Every tensor, after keys, shapes and dtypes have been compared with the model."""
    expected: dict[str, tuple[int, ...]] = {}
    for layer in layers:
        shape = layer.contract.shape
        for role, (rows, columns) in shape.matrices().items():
            expected[_key(layer, f"{role}_lora_a")] = (shape.num_experts, rank, columns)
            expected[_key(layer, f"{role}_lora_b")] = (shape.num_experts, rows, rank)
    return read_bf16(file, expected, "six tensors for each layer of this model's experts")


def _load_into_peft(
    adapters: Mapping[str, Any], layers: list[KTMoELayerWrapper], tensors: Mapping[str, Tensor], scale: float, file: str
) -> None:
    by_module = {id(layer.experts): layer for layer in layers}
    writes: list[tuple[nn.Parameter, Tensor]] = []
    for name, adapter in adapters.items():
        layer = by_module[id(adapter.get_base_layer())]
        active = list(adapter.active_adapters)
        if len(active) != 1 or active[0] not in adapter.lora_A:
            raise KTArtifactError(name, f"active adapters {active}", "one adapter of PEFT to load into")
        own = {role: tensors[_key(layer, role)] for role in LORA_NAMES}
        a_weight, b_weight = adapter.lora_A[active[0]].weight, adapter.lora_B[active[0]].weight
        rank = a_weight.shape[0] // layer.contract.shape.num_experts
        if float(adapter.scaling[active[0]]) != scale:
            given = f"alpha / rank {scale:g}"
            raise KTArtifactError(file, given, f"{adapter.scaling[active[0]]:g}, that of PEFT's adapter", CONVERT)
        a, b = _as_peft(layer, adapter.parameter_name, own, rank, file)
        writes += [(a_weight, a.reshape(a_weight.shape)), (b_weight, b.permute(1, 2, 0).reshape(b_weight.shape))]
    with torch.no_grad():
        for parameter, value in writes:
            parameter.copy_(value)
    increment_version([parameter for parameter, _ in writes])


def _as_peft(
    layer: KTMoELayerWrapper, parameter: str, own: Mapping[str, Tensor], rank: int, file: str
) -> tuple[Tensor, Tensor]:
    """A `[E, rank, in]` and B `[E, out, rank]` of one of the fused parameters."""
    gate, up, down = (LoraPair(own[f"{role}_lora_a"], own[f"{role}_lora_b"], 1.0) for role in ("gate", "up", "down"))
    if parameter == "down_proj":
        pair = down
    else:
        shared = rank == gate.rank and torch.equal(gate.a, up.a)
        pair = join_gate_up(gate, up, shared, layer.contract.interleaved)
    if pair.rank != rank:
        given = f"rank {pair.rank} for {parameter} of {layer.name}"
        raise KTArtifactError(file, given, f"{rank}, that of PEFT's adapter", CONVERT)
    return pair.a, pair.b


def is_kt_supported_moe_model(model: nn.Module) -> bool:
    """Whether the model has expert layers that can be packed."""
    return bool(expert_modules(model))


def is_kt_routed_expert_parameter_name(name: str) -> bool:
    """Whether a parameter's name is that of routed experts, fused or separate (`...experts.7.up_proj.weight`)."""
    path = name.split(".")
    return "experts" in path[:-1] and "shared_experts" not in path and "lora_" not in name


def is_kt_routed_expert_base_parameter(parameter: object) -> bool:
    """Whether a parameter stands for packed experts."""
    return isinstance(parameter, Placeholder)


def read_adapter_manifest(path: str | Path) -> KTAdapterManifest | None:
    """kt_adapter_manifest.json of a directory, None if it has none."""
    file = Path(path) / MANIFEST_FILE
    return KTAdapterManifest(file, read_json_object(file)) if file.is_file() else None


def __getattr__(name: str) -> object:
    """kt-kernel has other names of the package in this module too; those without a counterpart say what to use."""
    from kt_kernel import sft

    return getattr(sft, name)
