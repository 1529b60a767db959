"""Groups LoRA tensors by module; shared by the readers of all safetensors formats.

Every factor must have a partner of matching shape, and a name that belongs to no module is an error that names the
tensor: a silently skipped tensor is the most common way to lose a fine-tuned adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktransformers.adapters.config import AdapterConfig
from ktransformers.adapters.content import StoredTensor
from ktransformers.adapters.lora import Experts, Extra, Module, PairForm
from ktransformers.adapters.model import ModelFacts
from ktransformers.adapters.names import (
    PREFIX,
    PROJ_NAMING,
    ExpertNaming,
    layers_prefix,
    merge_names,
    name_in_model,
    parse_factor,
    strip_prefixes,
)
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.experts.lora import LoraPair
from ktransformers.ground.errors import InputError

# PEFT adds them if the vocabulary was resized.
SAVED_WITH_NEW_TOKENS = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class ReadContext:
    """What the caller provides besides the adapter's files."""

    facts: ModelFacts | None = None
    lora_alpha: float | None = None
    manifest: Mapping[str, Any] | None = None

    @property
    def naming(self) -> ExpertNaming:
        return self.facts.naming if self.facts else PROJ_NAMING


@dataclass(frozen=True)
class LoraTensors:
    """The two factors of a matrix, or of one matrix of all experts of a layer, in their file."""

    a: StoredTensor
    b: StoredTensor

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.a.dtype, self.b.dtype)

    def spell(self, module: str) -> dict[str, str]:
        """Tensor of the file -> its name in the model."""
        return {self.a.name: f"{module}.lora_A", self.b.name: f"{module}.lora_B"}

    def sizes(self, dimensions: int = 2) -> tuple[int, int, int]:
        """(rank, inputs, outputs); with three dimensions of stacked experts."""
        a, b = self.a.shape, self.b.shape
        if len(a) != dimensions or len(b) != dimensions or a[:-2] != b[:-2] or a[-2] != b[-1]:
            expected = "B [out, r] and A [r, in]" if dimensions == 2 else "b [E, out, r] and a [E, r, in]"
            raise InputError(self.b.name, f"shape {list(b)} with A {list(a)}", expected)
        return a[-2], a[-1], b[-2]

    def pair(self, scaling: float) -> LoraPair:
        return LoraPair(self.a.read(), self.b.read(), scaling)


def pair_factors(
    tensors: Iterable[StoredTensor], parse: Callable[[str], tuple[str, str] | None] = parse_factor
) -> tuple[dict[str, LoraTensors], list[StoredTensor]]:
    """(module -> its two factors, tensors that are not LoRA factors). A factor without its partner is an error. `parse`
    makes of a tensor's name (module, "A" or "B"), or None."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    non_lora: list[StoredTensor] = []
    for stored in tensors:
        parsed = parse(stored.name)
        if parsed is None:
            non_lora.append(stored)
            continue
        half = halves.setdefault(parsed[0], {})
        if parsed[1] in half:
            raise InputError(
                stored.name, f"given together with {half[parsed[1]].name}", "one of them: they name the same matrix"
            )
        half[parsed[1]] = stored
    for half in halves.values():
        for present, missing in (("A", "B"), ("B", "A")):
            if missing not in half:
                name = half[present].name
                partner = name.replace(f"lora_{present}", f"lora_{missing}")
                partner = partner.replace(f"lora_{present.lower()}", f"lora_{missing.lower()}")
                raise InputError(partner, "no such tensor", f"the partner of {name}", "it was dropped")
    return {module: LoraTensors(half["A"], half["B"]) for module, half in halves.items()}, non_lora


def stacked_experts(
    root: str, layer: int, tensors: Mapping[str, LoraTensors], forms: Mapping[str, PairForm]
) -> Experts:
    """A layer whose files have one tensor for all experts: role -> its factors, a `[E, r, in]` and b `[E, out, r]`."""
    counts = {role: factors.a.shape[0] for role, factors in tensors.items()}
    if len(set(counts.values())) != 1:
        raise InputError(next(iter(tensors.values())).a.name, f"{counts} experts", "one number of experts")
    spelled = [factors.spell(f"{root}.experts.{role}_proj") for role, factors in tensors.items()]

    def read() -> dict[str, LoraPair]:
        return {role: factors.pair(forms[role].scaling) for role, factors in tensors.items()}

    return Experts(root, layer, next(iter(counts.values())), forms, read, merge_names(spelled))


def build_module(name: str, factors: LoraTensors, config: AdapterConfig) -> Module:
    rank, inputs, outputs = factors.sizes()
    expected = config.rank(name, f"{name}.weight")
    if rank != expected:
        raise InputError(factors.a.name, f"rank {rank}", f"{expected}, as adapter_config.json says")
    scaling = config.scaling(rank, name, f"{name}.weight")
    return Module(
        name,
        PairForm(rank, inputs, outputs, factors.dtype, scaling),
        lambda: factors.pair(scaling),
        factors.spell(name),
    )


def build_modules(
    factors_by_module: Mapping[str, LoraTensors], config: AdapterConfig, naming: ExpertNaming
) -> tuple[Module, ...]:
    """Modules from the tensors that remain after the experts were removed; expert names must not be among them."""
    modules = []
    config.prefetch(factors_by_module)
    for name, factors in factors_by_module.items():
        if ".experts." in f"{name}." or ".base_layer" in name:
            raise InputError(factors.a.name, "a name that no format has", "...experts.0.gate_proj, or ...experts")
        if not (config.targets(name) or config.targets(name_in_model(name))):
            raise InputError(
                factors.a.name, "LoRA on a module that target_modules does not name", f"{config.target_modules}"
            )
        modules.append(build_module(name_in_model(name, naming), factors, config))
    return tuple(modules)


def build_extras(tensors: Iterable[StoredTensor], config: AdapterConfig) -> tuple[Extra, ...]:
    saved_modules = config.modules_to_save or []
    extras = []
    for stored in tensors:
        name = strip_prefixes(stored.name)
        saved_module = any(f".{module}." in f".{name}" for module in saved_modules) or name.endswith(
            SAVED_WITH_NEW_TOKENS
        )
        bias = name.endswith(".bias") and (config.model_extra or {}).get("bias", "none") != "none"
        if ".lora_embedding_" in name:
            raise InputError(stored.name, "LoRA on an embedding", "on linear layers and experts", "it is not converted")
        if not (saved_module or bias):
            raise InputError(stored.name, "a tensor that is no LoRA factor", "one that modules_to_save names")
        extras.append(Extra(name, stored.shape, stored.dtype, stored.read, {stored.name: name}))
    return tuple(extras)


def adopt_prefix(root: str, modules: Iterable[str]) -> str:
    """The root under the model's prefix as the other modules show it: files for SGLang always say `model.layers`."""
    prefixes = {
        prefix
        for name in modules
        if (prefix := layers_prefix(name)) and split_layer_name(name)[0] == split_layer_name(root)[0]
    }
    if len(prefixes) != 1:
        return root
    return f"{prefixes.pop()}.{split_layer_name(root)[1]}.{split_layer_name(root)[2]}"


def check_complete(
    experts: tuple[Experts, ...], modules: tuple[Module, ...], facts: ModelFacts | None, partial: bool
) -> None:
    """Checks that all layers have the same matrices and sizes, and that no layer is missing if the model is known."""
    if experts:
        _check_layers_alike(experts)
    if facts is None:
        return
    for layer in experts:
        _check_model_sizes(layer, facts)
    if partial:
        return
    if experts and facts.sparse_layers is not None:
        layers_with_lora = {layer.layer for layer in experts if not split_layer_name(layer.root)[0]}
        _check_layer_set(f"{experts[0].root}.experts", layers_with_lora, set(facts.sparse_layers))
    blocks: dict[str, set[int]] = {}
    for module in modules:
        outer, number, path = split_layer_name(module.name)
        if number >= 0 and not outer:
            blocks.setdefault(path, set()).add(number)
    for path, layers in blocks.items():
        expected = facts.attention_layers(path.partition(".")[0])
        if expected is not None:
            _check_layer_set(path, layers, set(expected))


def _check_layers_alike(experts: tuple[Experts, ...]) -> None:
    first = experts[0]
    sizes = {role: (form.inputs, form.outputs) for role, form in first.forms.items()}
    for layer in experts:
        if layer.experts != first.experts:
            raise InputError(
                f"{layer.root}.experts", f"{layer.experts} experts", f"{first.experts}, as {first.root} has"
            )
        for role in {*sizes, *layer.forms}:
            if role not in layer.forms or role not in sizes:
                lacking, complete = (layer, first) if role in sizes else (first, layer)
                raise InputError(f"{lacking.root}.experts", f"no LoRA on {role}", f"one, as {complete.root} has")
        for role, form in layer.forms.items():
            if (form.inputs, form.outputs) != sizes[role]:
                raise InputError(
                    f"{layer.root}.experts: {role}",
                    f"{form.outputs} by {form.inputs}",
                    f"{sizes[role][1]} by {sizes[role][0]}, as {first.root} has",
                )


def _check_model_sizes(layer: Experts, facts: ModelFacts) -> None:
    if facts.experts is not None and layer.experts != facts.experts:
        raise InputError(f"{layer.root}.experts", f"{layer.experts} experts", f"{facts.experts}, as config.json says")
    if facts.hidden is None or not facts.intermediates:
        return
    for role, form in layer.forms.items():
        wide, narrow = (form.inputs, form.outputs) if role == "down" else (form.outputs, form.inputs)
        if narrow != facts.hidden or wide not in facts.intermediates:
            sizes = " or ".join(str(size) for size in facts.intermediates)
            raise InputError(
                f"{layer.root}.experts: {role}",
                f"{form.outputs} by {form.inputs}",
                f"hidden size {facts.hidden} and intermediate size {sizes}, as config.json says",
            )


def _check_layer_set(name: str, layers: set[int], expected: set[int]) -> None:
    if layers - expected:
        raise InputError(
            name, f"LoRA in layer {min(layers - expected)}", "no such layer of this kind, says config.json"
        )
    if expected - layers:
        missing = sorted(expected - layers)
        raise InputError(
            name,
            f"no LoRA in layer {missing[0]} ({len(missing)} layers lack it)",
            f"it in {len(expected)} layers, as config.json says",
            "tensors were dropped; where that was meant, adapter_config.json has layers_to_transform",
        )


def add_prefix(name: str) -> str:
    return PREFIX + name
