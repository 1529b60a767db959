"""One pair for each matrix of each expert, with PEFT's prefix: `{root}.experts.7.gate_proj.lora_A.weight` `[r, in]` and
`lora_B` `[out, r]`. Read by stock PEFT (for families with per-expert checkpoints), SGLang and vLLM.

PEFT fuses such files while loading and gives gate_up twice the configuration's r, whatever the tensors' rank. So r is
the rank of gate and up, which are padded to the same rank, and everything else gets a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.config import AdapterConfig, build_config, compact_number, read_config
from ktransformers.adapters.content import Content
from ktransformers.adapters.fit import most_common_scaling, refit_adapter, refit_form
from ktransformers.adapters.formats.adapter_format import AdapterFormat, module_batches, save_adapter
from ktransformers.adapters.formats.peft import EXPERT_TARGET_NAMES, leaf_name, module_targets, most_common_form
from ktransformers.adapters.lora import ROLES, Adapter, Experts, PairForm
from ktransformers.adapters.names import (
    EXPERT_MODULE,
    PREFIX,
    PROJ_NAMING,
    W123_NAMING,
    ExpertNaming,
    merge_names,
    name_in_checkpoint,
    name_in_model,
    order_targets,
    parse_factor,
)
from ktransformers.adapters.parse import (
    LoraTensors,
    ReadContext,
    add_prefix,
    adopt_prefix,
    build_extras,
    build_modules,
    pair_factors,
)
from ktransformers.adapters.write import TensorBatch, TensorSpec, WrittenTensor
from ktransformers.checkpoint.layout import MATRICES, split_layer_name
from ktransformers.experts.lora import LoraPair
from ktransformers.ground.errors import InputError


def is_expert_key(key: str) -> bool:
    parsed = parse_factor(key)
    return parsed is not None and EXPERT_MODULE.fullmatch(parsed[0]) is not None


def matches(content: Content) -> bool:
    return any(is_expert_key(name) and name.startswith(PREFIX) for name in content.tensors)


def read(content: Content, context: ReadContext) -> Adapter:
    config, fields = read_config(content.directory, context.lora_alpha)
    factors, non_lora = pair_factors(content.tensors.values())
    config.prefetch(factors)
    roots: dict[str, dict[int, dict[str, LoraTensors]]] = {}
    naming = context.naming
    for name in list(factors):
        if match := EXPERT_MODULE.fullmatch(name):
            role = MATRICES[match["matrix"]]
            naming = W123_NAMING if match["matrix"] in W123_NAMING.matrices.values() else naming
            expert = roots.setdefault(match["root"], {}).setdefault(int(match["expert"]), {})
            if role in expert:
                raise InputError(factors[name].a.name, f"given together with {expert[role].a.name}", "one of them")
            expert[role] = factors.pop(name)
    modules = build_modules(factors, config, naming)
    names = [module.name for module in modules]
    layers = tuple(
        _layer(root, adopt_prefix(name_in_model(root, naming), names), experts, config, context, naming)
        for root, experts in roots.items()
    )
    extras = build_extras(non_lora, config)
    return Adapter(layers, modules, extras, naming=naming, config=fields, model=context.facts)


def _layer(
    written_root: str,
    root: str,
    experts: Mapping[int, Mapping[str, LoraTensors]],
    config: AdapterConfig,
    context: ReadContext,
    naming: ExpertNaming,
) -> Experts:
    count = max(experts) + 1
    if context.facts is not None and context.facts.experts is not None:
        count = max(count, context.facts.experts)
    roles = [role for role in ROLES if any(role in matrices for matrices in experts.values())]
    forms: dict[str, PairForm] = {}
    for expert in range(count):
        for role in roles:
            name = f"{written_root}.experts.{expert}.{naming.matrix(role)}"
            if role not in experts.get(expert, {}):
                raise InputError(f"{name}.lora_A.weight", "no such tensor", f"one for each of {count} experts")
            form = _form(name, experts[expert][role], config)
            first = forms.setdefault(role, form)
            if form != first:
                raise InputError(
                    f"{name}.lora_A.weight",
                    f"{form.outputs} by {form.inputs}, rank {form.rank}, scaling {form.scaling:g}, {form.dtype}",
                    f"{first.outputs} by {first.inputs}, {first.rank}, {first.scaling:g}, {first.dtype} as expert 0",
                )

    def stacked(role: str) -> LoraPair:
        factors = [experts[expert][role] for expert in range(count)]
        a = torch.stack([matrices.a.read() for matrices in factors])
        return LoraPair(a, torch.stack([matrices.b.read() for matrices in factors]), forms[role].scaling)

    spelled = [
        factors.spell(f"{root}.experts.{expert}.{PROJ_NAMING.matrix(role)}")
        for expert, matrices in experts.items()
        for role, factors in matrices.items()
    ]
    layer = split_layer_name(root)[1]
    return Experts(root, layer, count, forms, lambda: {role: stacked(role) for role in roles}, merge_names(spelled))


def _form(name: str, factors: LoraTensors, config: AdapterConfig) -> PairForm:
    rank, inputs, outputs = factors.sizes()
    expected = config.rank(name)
    if rank != expected:
        raise InputError(factors.a.name, f"rank {rank}", f"{expected}, as adapter_config.json says")
    return PairForm(rank, inputs, outputs, factors.dtype, config.scaling(rank, name))


def expert_batch(layer: Experts, root: str, naming: ExpertNaming) -> TensorBatch:
    """All tensors of one layer, expert by expert."""
    entries = []
    for expert in range(layer.experts):
        for role, form in layer.forms.items():
            name = f"{root}.experts.{expert}.{naming.matrix(role)}"
            entries.append(TensorSpec(f"{name}.lora_A.weight", (form.rank, form.inputs), form.dtype))
            entries.append(TensorSpec(f"{name}.lora_B.weight", (form.outputs, form.rank), form.dtype))

    def read_layer() -> list[Tensor]:
        pairs = layer.read()
        return [
            tensor[expert]
            for expert in range(layer.experts)
            for role in layer.forms
            for tensor in (pairs[role].a, pairs[role].b)
        ]

    return TensorBatch(tuple(entries), read_layer)


def count_pairs(layer: Experts) -> int:
    return layer.experts * len(layer.forms)


def write(adapter: Adapter, directory: Path) -> list[WrittenTensor]:
    if adapter.experts:
        scaling = most_common_scaling(adapter)
        ranks = {role: max(layer.forms[role].rank for layer in adapter.experts) for role in adapter.experts[0].forms}
        inner = max((rank for role, rank in ranks.items() if role != "down"), default=0)
        ranks = {role: rank if role == "down" else inner for role, rank in ranks.items()}
        adapter = refit_adapter(adapter, lambda role, form: refit_form(form, ranks[role], scaling) if role else form)

    def spell(name: str) -> str:
        return add_prefix(name_in_checkpoint(name, adapter.naming))

    batches = [expert_batch(layer, spell(layer.root), adapter.naming) for layer in adapter.experts]
    return save_adapter(directory, [*batches, *module_batches(adapter, spell)], _config(adapter))


def _config(adapter: Adapter) -> dict[str, Any]:
    named = {
        f"{module.name}.weight" if leaf_name(module) in EXPERT_TARGET_NAMES else module.name: module.form
        for module in adapter.modules
    }
    forms = adapter.experts[0].forms if adapter.experts else {}
    default = forms.get("gate") or forms.get("up") or forms.get("down") or most_common_form(list(named.values()))
    targets, weights = module_targets(adapter)
    config = build_config(adapter, default, named, target_modules=targets, target_parameters=weights or None)
    config["target_modules"] = order_targets({*targets, *(adapter.naming.matrix(role) for role in forms)})
    down = forms.get("down", default)
    names = "|".join(sorted({re.escape(adapter.naming.matrix("down")), re.escape(PROJ_NAMING.matrix("down"))}))
    if down.rank != default.rank:  # matches the fused parameter of the loaded model and the names in the file
        config["rank_pattern"] |= {rf"experts\.(\d+\.)?({names})": down.rank}
    if down.alpha != default.alpha:
        config["alpha_pattern"] |= {rf"experts\.(\d+\.)?({names})": compact_number(down.alpha)}
    return config


ADAPTER_FORMAT = AdapterFormat(
    "per-expert", "PEFT and vLLM, one pair for each expert", matches, read, write, count_pairs
)
