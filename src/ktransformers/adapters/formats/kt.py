"""kt-kernel's training output: `adapter_model.safetensors` for all modules but the experts,
`fused_expert_lora.safetensors` for the experts, and a manifest with sizes and checksums of the files.

The expert file has `layers.{L}.experts.{gate,up,down}_lora_{a,b}`, a `[E, r, in]` and b `[E, out, r]`, always in bf16:
values that bf16 cannot represent are refused, not rounded. Its names carry no prefix before `layers`, so the prefix is
taken from the other tensors' names or from our own manifest. One rank and one alpha, those of adapter_config.json,
apply to everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from ktransformers.adapters.config import AdapterConfig, build_config, compact_number, read_config
from ktransformers.adapters.content import Content, StoredTensor
from ktransformers.adapters.fit import make_uniform, refit_adapter, survives_dtype
from ktransformers.adapters.formats.adapter_format import MODEL_FILE, AdapterFormat, module_batches
from ktransformers.adapters.lora import ROLES, Adapter, Experts, PairForm
from ktransformers.adapters.names import KT_KERNEL_KEY, layers_prefix
from ktransformers.adapters.parse import (
    LoraTensors,
    ReadContext,
    add_prefix,
    build_extras,
    build_modules,
    pair_factors,
    stacked_experts,
)
from ktransformers.adapters.write import TensorBatch, TensorSpec, WrittenTensor, write_safetensors
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.checkpoint.tensorfile import sha256
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, short, validate, write_json

EXPERT_FILE = "fused_expert_lora.safetensors"
MANIFEST_FILE = "kt_adapter_manifest.json"


class _StoredArtifact(BaseModel):
    size: int | None = None
    sha256: str | None = None


class _StoredArtifacts(BaseModel):
    """What is read of kt-kernel's manifest."""

    status: Any = None
    artifacts: dict[str, _StoredArtifact] = {}


def matches(content: Content) -> bool:
    return any(KT_KERNEL_KEY.fullmatch(name) for name in content.tensors)


def read(content: Content, context: ReadContext) -> Adapter:
    check_manifest(content.directory)
    config, fields = read_config(content.directory, context.lora_alpha)
    fused = {stored.file for name, stored in content.tensors.items() if KT_KERNEL_KEY.fullmatch(name)}
    layers: dict[int, dict[str, StoredTensor]] = {}
    rest = []
    for name, stored in content.tensors.items():
        if match := KT_KERNEL_KEY.fullmatch(name):
            layers.setdefault(int(match["layer"]), {})[f"{match['role']}_{match['factor']}"] = stored
        elif stored.file in fused:
            raise InputError(
                name, "a name that kt-kernel does not write", "layers.{L}.experts.{gate,up,down}_lora_{a,b}"
            )
        else:
            rest.append(stored)
    factors, non_lora = pair_factors(rest)
    modules = build_modules(factors, config, context.naming)
    prefix, block = _experts_prefix(context, [module.name for module in modules])
    experts = tuple(
        _layer(f"{prefix}.{layer}.{block}", layer, tensors, config) for layer, tensors in sorted(layers.items())
    )
    extras = build_extras(non_lora, config)
    return Adapter(experts, modules, extras, naming=context.naming, config=fields, model=context.facts)


def _experts_prefix(context: ReadContext, names: list[str]) -> tuple[str, str]:
    """(prefix up to `layers`, block within the layer) of the experts."""
    roots = (context.manifest or {}).get("roots")
    if roots:
        return str(layers_prefix(roots[0])), split_layer_name(roots[0])[2]
    prefixes = {prefix for name in names if (prefix := layers_prefix(name)) and not split_layer_name(name)[0]}
    return (prefixes.pop() if len(prefixes) == 1 else "model.layers"), "mlp"


def _layer(root: str, layer: int, tensors: Mapping[str, StoredTensor], config: AdapterConfig) -> Experts:
    factors: dict[str, LoraTensors] = {}
    forms: dict[str, PairForm] = {}
    for role in ROLES:
        for factor in "ab":
            if f"{role}_{factor}" not in tensors:
                raise InputError(
                    f"layers.{layer}.experts.{role}_lora_{factor}",
                    "no such tensor",
                    "gate, up and down, a and b of each",
                )
        factors[role] = LoraTensors(tensors[f"{role}_a"], tensors[f"{role}_b"])
        rank, inputs, outputs = factors[role].sizes(3)
        if rank != config.r:
            raise InputError(factors[role].a.name, f"rank {rank}", f"{config.r}, as adapter_config.json says")
        forms[role] = PairForm(rank, inputs, outputs, factors[role].dtype, config.scaling(rank))
    return stacked_experts(root, layer, factors, forms)


def check_manifest(directory: Path) -> None:
    """Checks files against kt-kernel's own manifest, if there is one."""
    file = directory / MANIFEST_FILE
    if not file.is_file():
        return
    document = validate(_StoredArtifacts, read_json_object(file, "what kt-kernel wrote"), str(file))
    if document.status != "ready":
        raise InputError(str(file), f"status {short(document.status)}", "'ready'", "the save was not finished")
    for name, artifact in document.artifacts.items():
        artifact_path = directory / name
        if Path(name).name != name or not artifact_path.is_file():
            raise InputError(str(artifact_path), "no such file", f"what {MANIFEST_FILE} lists")
        size = artifact_path.stat().st_size
        if artifact.size is not None and artifact.size != size:
            raise InputError(str(artifact_path), f"{size} bytes", f"{artifact.size}, as {MANIFEST_FILE} says")
        if artifact.sha256 is not None and sha256(artifact_path) != artifact.sha256:
            raise InputError(
                str(artifact_path), "other bytes", f"the sha256 of {MANIFEST_FILE}", "the file was changed"
            )


def write(adapter: Adapter, directory: Path) -> list[WrittenTensor]:
    for layer in adapter.experts:
        if set(layer.forms) != set(ROLES):
            raise InputError(f"{layer.root}.experts", f"LoRA on {', '.join(layer.forms)}", "on gate, up and down")
    adapter = make_uniform(adapter)
    for layer in adapter.experts:
        _check_bf16(layer)
    adapter = refit_adapter(adapter, lambda role, form: replace(form, dtype=torch.bfloat16) if role else form)
    records: list[WrittenTensor] = []
    if adapter.modules or adapter.extras:
        records += write_safetensors(directory / MODEL_FILE, list(module_batches(adapter, add_prefix)))
    if adapter.experts:
        records += write_safetensors(directory / EXPERT_FILE, [_experts(layer) for layer in adapter.experts])
    default = next(adapter.forms())
    config = build_config(adapter, default, {}, target_modules=adapter.target_names(), target_parameters=None)
    config["lora_dropout"] = adapter.config.get("lora_dropout", 0.0)
    write_json(directory / "adapter_config.json", config)
    counts = {"adapter_config.json": 0} | Counter(record.file for record in records)
    base = adapter.config.get("base_model_name_or_path")
    options: Any = {"base": base, "rank": default.rank, "alpha": default.alpha, "weight_format": "bf16"}
    write_json(directory / MANIFEST_FILE, build_manifest(directory, counts, **options))
    return records


def _check_bf16(layer: Experts) -> None:
    if all(form.dtype == torch.bfloat16 for form in layer.forms.values()):
        return
    for role, pair in layer.read().items():
        for factor, tensor in (("A", pair.a), ("B", pair.b)):
            if not survives_dtype(tensor, torch.bfloat16):
                raise InputError(
                    f"{layer.root}.experts: lora_{factor} of {role}",
                    f"numbers in {layer.forms[role].dtype} that bf16 cannot hold",
                    "bf16, the one dtype of kt-kernel's expert file",
                    "--dtype bfloat16 rounds them",
                )


def _experts(layer: Experts) -> TensorBatch:
    count = layer.experts
    entries: list[TensorSpec] = []
    for role in ROLES:
        form, name = layer.forms[role], f"layers.{layer.layer}.experts.{role}_lora"
        entries.append(TensorSpec(f"{name}_a", (count, form.rank, form.inputs), torch.bfloat16))
        entries.append(TensorSpec(f"{name}_b", (count, form.outputs, form.rank), torch.bfloat16))

    def read_layer() -> list[Tensor]:
        pairs = layer.read()
        return [tensor for role in ROLES for tensor in (pairs[role].a, pairs[role].b)]

    return TensorBatch(tuple(entries), read_layer)


def build_manifest(
    directory: Path, counts: Mapping[str, int], *, base: str | None, rank: int, alpha: float, weight_format: str
) -> dict[str, Any]:
    """kt-kernel's manifest of the files in `counts`, file -> tensors in it."""
    return {
        "version": 1,
        "status": "ready",
        "expert_weight_format": weight_format,
        "base": {"model_name_or_path": base},
        "lora": {"rank": rank, "alpha": compact_number(alpha)},
        "artifacts": {
            name: {
                "size": (directory / name).stat().st_size,
                "sha256": sha256(directory / name),
                "tensor_count": counts[name],
            }
            for name in sorted(counts)
        },
    }


ADAPTER_FORMAT = AdapterFormat(
    "kt",
    "kt-kernel's training output, experts in a file of their own",
    matches,
    read,
    write,
    lambda layer: len(layer.forms),
)
