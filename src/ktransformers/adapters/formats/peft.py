"""PEFT's format for fused experts: two pairs per layer, the experts side by side in 2-D tensors.

`{root}.experts.base_layer` is gate_up (the inner wrapper), `{root}.experts` is down (the outer one); if only one of
them is adapted, it is at `{root}.experts`. A is `[E*r, in]`, experts outermost; B is `[out, r*E]`, experts *innermost*.
Rows of gate_up's B are gate then up, or alternate if the model interleaves them. Only the model family tells which, so
a file of an unknown model is refused rather than guessed. Older PEFT versions exchanged A and B for `[E, out, in]`
parameters; that is detected by the sizes and read too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ktransformers.adapters.config import AdapterConfig, build_config, read_config
from ktransformers.adapters.content import Content
from ktransformers.adapters.fit import most_common_scaling, refit_adapter, refit_form
from ktransformers.adapters.formats.adapter_format import AdapterFormat, module_batches, save_adapter
from ktransformers.adapters.lora import Adapter, Experts, Module, PairForm
from ktransformers.adapters.names import FUSED_EXPERTS, merge_names, order_targets, parse_factor
from ktransformers.adapters.parse import LoraTensors, ReadContext, add_prefix, build_extras, build_modules, pair_factors
from ktransformers.adapters.write import TensorBatch, TensorSpec, WrittenTensor
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.experts.lora import LoraPair
from ktransformers.ground.errors import InputError

# PEFT >= 0.19 interprets these target_modules as expert parameters, so linear layers of these names are targeted by
# their weight instead.
EXPERT_TARGET_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


@dataclass(frozen=True)
class _Fused:
    """One fused parameter: its two 2-D tensors, and whether A and B are exchanged."""

    parameter: str  # gate_up_proj, up_proj or down_proj
    factors: LoraTensors
    experts: int
    rank: int
    swapped: bool = False

    @property
    def sizes(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        sizes = self.factors.a.shape[1], self.factors.b.shape[0]
        return sizes[::-1] if self.swapped else sizes

    def read(self) -> tuple[Tensor, Tensor]:
        """a `[E, r, in]`, b `[E, out, r]`."""
        a = self.factors.a.read().reshape(self.experts, self.rank, -1)
        b = self.factors.b.read().reshape(-1, self.rank, self.experts)
        if self.swapped:
            return b.permute(2, 1, 0), a.transpose(1, 2)
        return a, b.permute(2, 0, 1)


def matches(content: Content) -> bool:
    return content.metadata is None and any(parse_factor(name) for name in content.tensors)


def read(content: Content, context: ReadContext) -> Adapter:
    config, fields = read_config(content.directory, context.lora_alpha)
    factors, non_lora = pair_factors(content.tensors.values())
    roots: dict[str, dict[str, LoraTensors]] = {}
    for name in list(factors):
        if match := FUSED_EXPERTS.fullmatch(name):
            roots.setdefault(match["root"], {})["inner" if match["inner"] else "outer"] = factors.pop(name)
    layers = tuple(_layer(root, wrapped, config, context) for root, wrapped in roots.items())
    modules = build_modules(factors, config, context.naming)
    extras = build_extras(non_lora, config)
    return Adapter(layers, modules, extras, naming=context.naming, config=fields, model=context.facts)


def _layer(root: str, wrapped: Mapping[str, LoraTensors], config: AdapterConfig, context: ReadContext) -> Experts:
    if "outer" not in wrapped:
        raise InputError(
            f"{root}.experts.lora_A.weight", "no such tensor", "the outer of two pairs, down_proj", "it was dropped"
        )
    if "inner" in wrapped:
        inner_shape = wrapped["inner"].b.shape[0], wrapped["inner"].a.shape[1]
        outer_shape = wrapped["outer"].b.shape[0], wrapped["outer"].a.shape[1]
        gated = sorted(inner_shape) != sorted(outer_shape)
        inner = _fused(root, "gate_up_proj" if gated else "up_proj", wrapped["inner"], config)
        down = _fused(root, "down_proj", wrapped["outer"], config)
        if inner.sizes[0] != down.sizes[1] and inner.sizes[1] == down.sizes[0]:
            inner, down = replace(inner, swapped=True), replace(down, swapped=True)
        parts = [inner, down]
    else:
        parts = [_fused(root, _single_target(root, config), wrapped["outer"], config)]
    if len({part.experts for part in parts}) != 1:
        counts = " and ".join(f"{part.experts} ({part.parameter})" for part in parts)
        raise InputError(f"{root}.experts", f"tensors of {counts} experts", "one number of experts")
    forms: dict[str, PairForm] = {}
    for part in parts:
        forms |= _forms(root, part, config)
    interleaved = _interleaved(root, context) if "gate" in forms else False

    def read_layer() -> dict[str, LoraPair]:
        pairs: dict[str, LoraPair] = {}
        for part in parts:
            a, b = part.read()
            if part.parameter == "gate_up_proj":
                gate, up = (b[:, 0::2], b[:, 1::2]) if interleaved else b.chunk(2, dim=1)
                pairs |= {role: LoraPair(a, rows, forms[role].scaling) for role, rows in (("gate", gate), ("up", up))}
            else:
                role = part.parameter.removesuffix("_proj")
                pairs[role] = LoraPair(a, b, forms[role].scaling)
        return pairs

    spelled = [part.factors.spell(f"{root}.experts.{part.parameter}") for part in parts]
    return Experts(root, split_layer_name(root)[1], parts[0].experts, forms, read_layer, merge_names(spelled))


def _fused(root: str, parameter: str, factors: LoraTensors, config: AdapterConfig) -> _Fused:
    rank = config.rank(f"{root}.experts.{parameter}")
    a, b = factors.a.shape, factors.b.shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise InputError(factors.b.name, f"shape {list(b)} with A {list(a)}", "B [out, r*E] and A [E*r, in]")
    if a[0] % rank:
        raise InputError(factors.a.name, f"{a[0]} rows", f"a multiple of the rank {rank} that adapter_config.json says")
    return _Fused(parameter, factors, a[0] // rank, rank)


def _single_target(root: str, config: AdapterConfig) -> str:
    named = {target.rpartition(".")[2] for target in config.target_parameters or []}
    targets = named & {"gate_up_proj", "up_proj", "down_proj"}
    if len(targets) != 1:
        raise InputError(
            f"{root}.experts.lora_A.weight",
            f"one pair, and target_parameters {sorted(named)}",
            "a pair for each of them, or one target",
        )
    return targets.pop()


def _forms(root: str, part: _Fused, config: AdapterConfig) -> dict[str, PairForm]:
    inputs, outputs = part.sizes
    scaling = config.scaling(part.rank, f"{root}.experts.{part.parameter}")
    form = PairForm(part.rank, inputs, outputs, part.factors.dtype, scaling)
    if part.parameter != "gate_up_proj":
        return {part.parameter.removesuffix("_proj"): form}
    if outputs % 2:
        raise InputError(part.factors.b.name, f"{outputs} rows", "an even number, gate and up")
    half = replace(form, outputs=outputs // 2)
    return {"gate": half, "up": half}


def _interleaved(root: str, context: ReadContext) -> bool:
    if context.facts is None:
        raise InputError(
            f"{root}.experts",
            "gate and up in one tensor, of a model that is not known",
            "the model's config.json, which tells how they lie",
            "give --base-model-name-or-path DIR",
        )
    return context.facts.interleaved


def write(adapter: Adapter, directory: Path) -> list[WrittenTensor]:
    if adapter.experts and {"gate", "up"} <= set(adapter.experts[0].forms):
        scaling = most_common_scaling(adapter)
        rank = {role: max(layer.forms[role].rank for layer in adapter.experts) for role in adapter.experts[0].forms}
        adapter = refit_adapter(
            adapter, lambda role, form: refit_form(form, rank[role], scaling) if role in ("gate", "up") else form
        )
    batches = [_experts(layer, adapter) for layer in adapter.experts]
    batches += module_batches(adapter, add_prefix)
    return save_adapter(directory, batches, _config(adapter))


def _parameter_forms(layer: Experts, shared: bool) -> dict[str, PairForm]:
    """Parameter -> form, in the nesting order of PEFT's wrappers, innermost first."""
    forms = dict(layer.forms)
    by_parameter: dict[str, PairForm] = {}
    if "gate" in forms:
        if "up" not in forms:
            raise InputError(f"{layer.root}.experts", "LoRA on gate alone", "on gate and up", "PEFT holds them in one")
        gate, up = forms.pop("gate"), forms.pop("up")
        rank = gate.rank if shared else gate.rank + up.rank
        dtype = torch.promote_types(gate.dtype, up.dtype)
        by_parameter["gate_up_proj"] = replace(gate, rank=rank, outputs=gate.outputs + up.outputs, dtype=dtype)
    return by_parameter | {f"{role}_proj": forms[role] for role in ("up", "down") if role in forms}


def _experts(layer: Experts, adapter: Adapter) -> TensorBatch:
    parameters = _parameter_forms(layer, adapter.shared)
    interleaved = adapter.model is not None and adapter.model.interleaved
    paths = dict(zip(parameters, [".base_layer", ""][-len(parameters) :], strict=True))
    entries = []
    for parameter, form in parameters.items():
        name, count = f"{add_prefix(layer.root)}.experts{paths[parameter]}", layer.experts
        entries.append(TensorSpec(f"{name}.lora_A.weight", (count * form.rank, form.inputs), form.dtype))
        entries.append(TensorSpec(f"{name}.lora_B.weight", (form.outputs, form.rank * count), form.dtype))

    def read_layer() -> list[Tensor]:
        pairs = dict(layer.read())
        if "gate_up_proj" in parameters:
            pairs["gate_up"] = join_gate_up(pairs.pop("gate"), pairs.pop("up"), adapter.shared, interleaved)
        tensors = []
        for parameter in parameters:
            pair = pairs[parameter.removesuffix("_proj")]
            tensors.append(pair.a.reshape(-1, pair.a.shape[-1]))
            tensors.append(pair.b.permute(1, 2, 0).reshape(pair.b.shape[1], -1))
        return tensors

    return TensorBatch(tuple(entries), read_layer)


def join_gate_up(gate: LoraPair, up: LoraPair, shared: bool, interleaved: bool) -> LoraPair:
    """One pair for gate_up: A as it is if shared, else both A stacked and B block-diagonal."""
    upper, lower, a = gate.b, up.b, gate.a
    if not shared:
        a = torch.cat([gate.a, up.a], dim=1)
        upper = torch.cat([gate.b, gate.b.new_zeros(*gate.b.shape[:2], up.rank)], dim=2)
        lower = torch.cat([up.b.new_zeros(*up.b.shape[:2], gate.rank), up.b], dim=2)
    if interleaved:
        return LoraPair(a, torch.stack([upper, lower], dim=2).flatten(1, 2), gate.scaling)
    return LoraPair(a, torch.cat([upper, lower], dim=1), gate.scaling)


def _config(adapter: Adapter) -> dict[str, object]:
    named: dict[str, PairForm] = {}
    for layer in adapter.experts:
        for parameter, form in _parameter_forms(layer, adapter.shared).items():
            named[f"{layer.root}.experts.{parameter}"] = form
    parameters = parameter_targets(adapter, set(named))
    modules, weights = module_targets(adapter)
    for module in adapter.modules:
        named[f"{module.name}.weight" if leaf_name(module) in EXPERT_TARGET_NAMES else module.name] = module.form
    return build_config(
        adapter,
        most_common_form([module.form for module in adapter.modules] or list(named.values())),
        named,
        target_modules=modules,
        target_parameters=[*parameters, *weights] or None,
    )


def _count_pairs(layer: Experts) -> int:
    return len(_parameter_forms(layer, shared=False))


def most_common_form(forms: list[PairForm]) -> PairForm:
    return Counter(forms).most_common(1)[0][0]


def leaf_name(module: Module) -> str:
    return module.name.rpartition(".")[2]


def parameter_targets(adapter: Adapter, names: set[str]) -> list[str]:
    """`mlp.experts.down_proj` if every sparse layer is adapted, else the full names of the layers."""
    layers, facts = {layer.layer for layer in adapter.experts}, adapter.model
    expected = set(facts.sparse_layers) if facts is not None and facts.sparse_layers is not None else layers
    return sorted({split_layer_name(name)[2] for name in names} if layers == expected else names)


def module_targets(adapter: Adapter) -> tuple[list[str], list[str]]:
    """(target_modules, target_parameters) of the modules that are not routed experts."""
    plain = {leaf_name(module) for module in adapter.modules} - EXPERT_TARGET_NAMES
    weights = {
        f"{split_layer_name(module.name)[2]}.weight"
        for module in adapter.modules
        if leaf_name(module) in EXPERT_TARGET_NAMES
    }
    return order_targets(plain), sorted(weights)


ADAPTER_FORMAT = AdapterFormat("peft", "PEFT, experts fused in 3-D parameters", matches, read, write, _count_pairs)
