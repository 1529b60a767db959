"""Which experts of which layer are on the GPU, for all layers of a model at once: a budget spent by a strategy
(`place/residents.py`). Every tensor-parallel rank computes the same masks from the same options and files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ktransformers.adapters.model import ModelFacts, find_facts
from ktransformers.ground.errors import InputError
from ktransformers.place import residents
from ktransformers.serve.sglang.options import ServerOptions


@dataclass(frozen=True)
class ExpertPlacement:
    """Experts on the GPU by decoder layer, in ascending order."""

    layers: int  # decoder layers of the model
    experts: int  # of a layer
    on_gpu: dict[int, tuple[int, ...]]

    def slots(self, layer: int) -> list[int]:
        """For each expert its place among the weights on the GPU, or -1."""
        slots = [-1] * self.experts
        for slot, expert in enumerate(self.on_gpu[layer]):
            slots[expert] = slot
        return slots

    def uses_cpu(self, layer: int) -> bool:
        return layer in self.on_gpu and len(self.on_gpu[layer]) < self.experts

    def may_defer(self, layer: int) -> bool:
        """Whether the next decoder layer computes experts on the CPU, to whose output deferred ones are added."""
        return self.uses_cpu(layer + 1)


def place_experts(options: ServerOptions) -> ExpertPlacement:
    facts = _facts(options.model_path)
    sparse, experts = facts.sparse_layers, facts.experts
    if not sparse or not experts or facts.layers is None:
        expected = "a model whose config.json or index says which layers have experts"
        raise InputError("--model-path", options.model_path, expected)
    total = residents.budget(
        len(sparse), experts, 1, count=options.num_gpu_experts or 0, ratio=options.gpu_experts_ratio or 0.0
    )
    if options.gpu_experts_ratio is not None and not options.gpu_experts_ratio:
        total = 0
    counts = None
    if options.placement_strategy == "frequency":
        names = [f"model.layers.{layer}.mlp.experts" for layer in sparse]
        counts = np.stack(residents.load_counts(Path(options.activation_counts), names, experts))
    chosen = residents.choose(options.placement_strategy, total, len(sparse), experts, counts)
    return ExpertPlacement(facts.layers, experts, dict(zip(sparse, chosen, strict=True)))


def _facts(model_path: str) -> ModelFacts:
    facts = find_facts(model_path)
    if facts is None:
        raise InputError("--model-path", model_path, "a directory with config.json", "download the model first")
    return facts
