"""Random adapters for the tests: small, of any rank, scaling and dtype, with or without a shared A."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters import Adapter, LoraPair, ModelFacts, adapter_from_tensors, facts_from_config

HIDDEN, WIDE, HEADS, KV_HEADS, HEAD = 8, 6, 2, 1, 4
ATTENTION = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD),
    "self_attn.o_proj": (HEADS * HEAD, HIDDEN),
    "mlp.gate": (HIDDEN, 3),
}


@dataclass(frozen=True)
class Recipe:
    """What a sample is like."""

    family: str = "qwen3_moe"
    layers: int = 2
    experts: int = 3
    ranks: tuple[int, int, int] = (2, 2, 2)  # gate, up, down
    rank: int = 2  # of attention
    scalings: tuple[float, float] = (2.0, 2.0)  # of experts, of attention
    shared: bool = False
    dtype: torch.dtype = torch.bfloat16
    zero_b: bool = False
    seed: int = 0


def model_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "model_type": recipe.family,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": WIDE,
        "intermediate_size": WIDE,
        "num_hidden_layers": recipe.layers,
        "num_experts": recipe.experts,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
    }


def write_model_config(recipe: Recipe, directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model_config(recipe)))
    return str(directory)


def facts(recipe: Recipe) -> ModelFacts:
    return facts_from_config(model_config(recipe))


def sample(recipe: Recipe = Recipe()) -> Adapter:  # noqa: B008 (frozen)
    generator = torch.Generator().manual_seed(recipe.seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(recipe.dtype)

    def pair(rank: int, inputs: int, outputs: int, scaling: float, *lead: int) -> LoraPair:
        b = numbers(*lead, outputs, rank)
        return LoraPair(numbers(*lead, rank, inputs), torch.zeros_like(b) if recipe.zero_b else b, scaling)

    experts, modules = {}, {}
    router = "mlp.router" if recipe.family == "gpt_oss" else "mlp.gate"
    for layer in range(recipe.layers):
        sizes = ((HIDDEN, WIDE), (HIDDEN, WIDE), (WIDE, HIDDEN))
        gate, up, down = (
            pair(rank, *size, recipe.scalings[0], recipe.experts)
            for rank, size in zip(recipe.ranks, sizes, strict=True)
        )
        if recipe.shared:
            up = LoraPair(gate.a, numbers(recipe.experts, WIDE, gate.rank), recipe.scalings[0])
        experts[f"model.layers.{layer}.mlp"] = {"gate": gate, "up": up, "down": down}
        for path, (inputs, outputs) in ATTENTION.items():
            name = f"model.layers.{layer}.{path.replace('mlp.gate', router)}"
            modules[name] = pair(recipe.rank, inputs, recipe.experts if "mlp" in path else outputs, recipe.scalings[1])
    return adapter_from_tensors(experts, modules, model=facts(recipe))


def deltas(adapter: Adapter) -> Iterator[tuple[str, Tensor]]:
    """Every matrix's delta in float64, by a name that does not depend on the adapter format."""
    for layer in adapter.experts:
        for role, pair in layer.read().items():
            yield f"{layer.root}.experts.{role}", pair.delta()
    for module in adapter.modules:
        yield module.name, module.read().delta()


def same_deltas(one: Adapter, two: Adapter, tolerance: float = 0.0) -> None:
    first, second = dict(deltas(one)), dict(deltas(two))
    assert set(first) == set(second)
    for name, delta in first.items():
        limit = tolerance * float(delta.abs().max())
        assert float((delta - second[name]).abs().max()) <= limit, name


def ranks(adapter: Adapter) -> dict[str, int]:
    found = {
        f"{layer.root}.experts.{role}": form.rank for layer in adapter.experts for role, form in layer.forms.items()
    }
    return found | {module.name: module.form.rank for module in adapter.modules}
