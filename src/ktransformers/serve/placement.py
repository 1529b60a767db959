"""GPU memory of a served model: its layers and experts placed as the launch line asks, and what is left of each GPU
shared between the KV cache and residents.

The check of a family against the stock model runs with all experts on the CPU, because it compares passes of different
sizes and the engine may compute these in different modes. Then the engine is attached, so that its buffers are
allocated before free memory is counted; then the cache gets its share, and residents what remains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ktransformers.experts.w8a8 import use_w8a8
from ktransformers.ground import system
from ktransformers.ground.options.placement import PlacementOptions, read_options
from ktransformers.ground.out_of_memory import free_bytes
from ktransformers.modeling.load import meta_model
from ktransformers.operators.plan import OperatorPlan
from ktransformers.operators.rules import require_rules
from ktransformers.place.apply import ModelPlacement, bytes_to_allocate, find_device_map, needs_spreading, plan_rules
from ktransformers.place.device_map import find_decoder_layers, visible_gpus
from ktransformers.plan import Plan
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import Target

DECODE_SIZES = (1, 2, 4, 8, 16, 32)  # rows of steps outside of CUDA graphs
MAX_HOST_SHARE = 0.8  # of free host memory for the KV cache: --mem-fraction-static is chosen for GPUs
KV_CACHE = "KV cache"  # row of the plan

Say = Callable[[str], None]


def options_of(launch: Launch, target: Target) -> PlacementOptions:
    """The flags of the launch line, then the keys of the YAML file that it names. A server needs the file of rules."""
    options = read_options(launch.place, target.keys)
    if options.kt_optimize_rule is not None:
        require_rules(options.kt_optimize_rule)
    return options


def gpus_of(launch: Launch, plan: Plan | None) -> int:
    """As many as are asked for, of those that are here; else as many as the plan needs."""
    here = len(system.gpus())
    if launch.gpus is not None:
        return max(1, min(launch.gpus, here))
    return max(1, plan.nearest.choice.gpus if plan is not None else 1)


def spreads_layers(options: PlacementOptions, launch: Launch, plan: Plan | None) -> bool:
    return needs_spreading(options, gpus_of(launch, plan))


def gpus_of_layers(options: PlacementOptions, target: Target, gpus: int) -> tuple[str, ...]:
    """Those that layers go to, by the plan's number of GPUs or by rules."""
    if options.kt_optimize_rule is None:
        return tuple(visible_gpus(gpus))
    return find_device_map(meta_model(target.model), options, gpus).gpus


def plan_operators(
    options: PlacementOptions, launch: Launch, target: Target, plan: Plan | None, device: str, say: Say
) -> OperatorPlan | None:
    """What rules make of the model, checked on its skeleton."""
    if options.kt_optimize_rule is None:
        return None
    gpus = 0 if device == "cpu" else gpus_of(launch, plan)
    operators, lines = plan_rules(meta_model(target.model), options, gpus, cpu_asked=launch.device == "cpu")
    for line in lines:
        say(line)
    return operators


def cache_tokens(model: nn.Module, launch: Launch, device: str, bytes_per_token: int, state_bytes: int) -> int:
    """Tokens whose keys and values fit into the share of free memory with `state_bytes` of states: of host memory, or
    of every GPU, where a layer's lie where the layer is."""
    if device == "cpu":
        available = system.memory().available * min(launch.memory, MAX_HOST_SHARE)
        return max(0, int(available) - state_bytes) // bytes_per_token
    layers: Any = model.get_submodule(find_decoder_layers(model).name)
    counts: dict[torch.device, int] = {}
    for layer in layers:
        place = next((p.device for p in layer.parameters() if p.is_cuda), torch.device("cpu"))
        counts[place] = counts.get(place, 0) + 1
    tokens = [
        max(0, int(free_bytes(place) * launch.memory) * len(layers) // count - state_bytes) // bytes_per_token
        for place, count in counts.items()
        if place.type == "cuda"
    ]
    return min(tokens, default=2**31)  # a rule may have every layer on the CPU


def attach_experts(model: nn.Module, placement: ModelPlacement, say: Say, graphs: bool) -> None:
    options = placement.options
    for line in options.notes:
        say(line)
    if options.kt_w8a8:
        layers, linears = use_w8a8(model)
        say(f"8-bit activations in {layers} layers of experts and {linears} linear layers: an approximation")
    placement.attach(model, graphs=graphs)
    if (placement.placement is None or placement.cpu_only) and options.wants_gpu:
        say("no GPU: all experts are computed on the CPU, exactly")


def fill_gpus(
    placement: ModelPlacement, cache_bytes: int, prefill: int, plan: Plan | None, graphs: bool, say: Say
) -> dict[str, int | str]:
    """Residents that fit with a KV cache of so many bytes, and the modes of prompts in pieces of `prefill` tokens; the
    approximations that answers now have."""
    options, engine = placement.options, placement.placement
    approximations: dict[str, int | str] = {"kt_w8a8": True} if options.kt_w8a8 else {}
    if engine is None or placement.cpu_only:
        return approximations
    devices = engine.devices()

    def later(place: int, device: torch.device) -> int:
        captured = engine.captured_bytes(device) if graphs else 0
        return cache_bytes // len(devices) + _planned_activations(plan, place) + captured

    for line in placement.fill(later, (*DECODE_SIZES, prefill)):
        say(line)
    return approximations


def _planned_activations(plan: Plan | None, place: int) -> int:
    """What the plan expects on a GPU besides the KV cache, which is measured here."""
    if plan is None:
        return 0
    tables = plan.nearest.memory.gpus
    return bytes_to_allocate(plan.nearest, place) - (tables[place].get(KV_CACHE, 0) if place < len(tables) else 0)
