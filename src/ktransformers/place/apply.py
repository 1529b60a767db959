"""Placement options carried out on a loaded model, for `kt serve` and `kt train` alike: layers to their devices, then
the engine, then residents, when it is known what else needs GPU memory, then the modes of the batch sizes to come.

Without a GPU nothing is done and one line says so (`attach`); the options then have no effect, and the CPU computes all
experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktransformers.ground import system
from ktransformers.ground.options.placement import DEFAULT_POLICIES, DEFAULT_POLICY, PlacementOptions
from ktransformers.ground.out_of_memory import free_bytes
from ktransformers.operators.plan import OperatorPlan, plan_operators
from ktransformers.operators.rules import Rule, devices_of, find_rules
from ktransformers.place.device_map import DeviceMap, find_decoder_layers, move_to_devices, spread_layers, visible_gpus
from ktransformers.place.placement import Placement, attach
from ktransformers.place.residents import RoutingCounter, Row, save_counts
from ktransformers.place.rule_devices import devices_by_rules, devices_of_modules
from ktransformers.plan.modes import CPU, RESIDENT
from ktransformers.plan.planner import GPU_MEMORY_SHARE, RESIDENT_POLICIES, Candidate, Plan
from ktransformers.quantized.weight import check_on_device

# Rows of the plan's memory table that a loaded model and its engine have already allocated, or that
# `Placement.working_bytes` counts.
ALLOCATED = ("weights", "context", "residents", "slots", "groups")


def bytes_to_allocate(candidate: Candidate | None, place: int) -> int:
    """Bytes that the plan still expects to be allocated on one GPU; 0 without a plan."""
    if candidate is None or place >= len(candidate.memory.gpus):
        return 0
    return sum(size for name, size in candidate.memory.gpus[place].items() if name not in ALLOCATED)


def resident_bytes(free: int, later: int) -> int:
    return max(0, int(GPU_MEMORY_SHARE * free) - later)


def rules_of(options: PlacementOptions) -> tuple[Rule, ...]:
    """Those of the file, for the GPUs of this process; a name without a file has none."""
    file = find_rules(options.kt_optimize_rule)
    return () if file is None else file.on_machine(_gpus_here())[0]


def _gpus_here() -> int:
    return len(system.gpus())


def plan_rules(
    model: nn.Module, options: PlacementOptions, gpus: int, *, cpu_asked: bool = False
) -> tuple[OperatorPlan | None, list[str]]:
    """What rules make of a model, which may be a skeleton, and lines that say what a reader of the rules would not
    expect. `gpus` that layers are spread over; 0: the run is on the CPU, with `cpu_asked` by request."""
    file = find_rules(options.kt_optimize_rule)
    if file is None:
        return None, []
    rules, line = file.on_machine(_gpus_here(), cpu_only=cpu_asked)
    devices = devices_of_modules(model, find_device_map(model, options, gpus)) if gpus else {}
    plan = plan_operators(model, rules, devices)
    return plan, [*filter(None, [line]), *(f"rules: {note}" for note in plan.notes)]


def as_planned(options: PlacementOptions, plan: Plan | None) -> PlacementOptions:
    """The options with the policy that a plan for `policies` has chosen. A plan without a GPU does not override a given
    policy; the run then warns that there is no GPU."""
    if plan is None:
        return options
    chosen: Any = plan.nearest.choice
    if chosen.gpus:
        return replace(options, kt_place=chosen.policy)
    return replace(options, kt_place=DEFAULT_POLICY) if options.policies == DEFAULT_POLICIES else options


def needs_spreading(options: PlacementOptions, gpus: int) -> bool:
    """Whether a model is loaded into host memory first and moved from there; a rule that names a GPU which torch does
    not see is refused now."""
    rules = rules_of(options)
    visible_gpus(_wanted(rules, gpus))
    return gpus > 1 or bool(rules)


def _wanted(rules: tuple[Rule, ...], gpus: int) -> int:
    named = [int(device.removeprefix("cuda:")) + 1 for device in devices_of(rules)]
    return max(gpus, *named, 1)


def find_device_map(model: nn.Module, options: PlacementOptions, gpus: int) -> DeviceMap:
    """By rules, else by plan: layers in equal runs over so many GPUs."""
    rules = rules_of(options)
    devices = visible_gpus(_wanted(rules, gpus))[: max(gpus, 1)]
    if rules:
        return devices_by_rules(model, rules, devices)
    return DeviceMap(tuple(spread_layers(find_decoder_layers(model).count, devices)), devices[0], devices[0], {})


def attach_engine(
    model: nn.Module,
    options: PlacementOptions,
    device_map: DeviceMap | None = None,
    *,
    device: torch.device | str | None = None,
) -> Placement | None:
    """The engine with everything but residents; None: the CPU computes all experts."""
    policy = options.policy
    if policy == "cpu" and device_map is not None and device_map.resident_layers:
        policy = "resident"  # a rule wants experts on a GPU
    placement = attach(
        model, policy=policy, device=device, device_by_layer=None if device_map is None else device_map.experts
    )
    if placement is None or not placement.layers:  # or a model that is on the CPU of a machine with a GPU
        return None
    placement.stream_from(options.kt_gpu_prefill_token_threshold or 0)
    return placement


def resident_budget(placement: Placement, later: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Bytes by device that residents may take: free memory, less what the plan and the engines will still allocate."""
    return {
        device: resident_bytes(free_bytes(device), later.get(device, 0) + placement.working_bytes(device))
        for device in placement.devices()
        if device.type == "cuda"
    }


def place_residents(
    placement: Placement,
    options: PlacementOptions,
    device_map: DeviceMap | None,
    free_bytes_by_device: Mapping[torch.device, int],
) -> list[tuple[int, ...]]:
    """Residents of each layer by the options: a count, a share, or as many bytes as there is room for."""
    whole = device_map.resident_layers if device_map is not None else []
    size: Mapping[torch.device, int] = (
        free_bytes_by_device if options.by_bytes and placement.policy in RESIDENT_POLICIES else {}
    )
    if device_map is not None and whole and options.policy == "cpu":
        size = {}  # nothing but what the rule says
    return placement.place_residents(
        count=options.kt_num_gpu_experts or 0,
        ratio=options.kt_gpu_experts_ratio or 0.0,
        size=size,
        strategy=options.strategy,
        statistics=options.init_expert_location,
        whole=whole,
    )


def describe(placement: Placement, options: PlacementOptions, residents: list[tuple[int, ...]]) -> str:
    """What became of the options, for a log line."""
    counts = [len(row) for row in residents]
    taken = sum(
        layer.packed.geometry.expert_bytes * count for layer, count in zip(placement.layers, counts, strict=True)
    )
    span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    where = ", ".join(str(device) for device in placement.devices())
    parts = [f"policy {placement.policy}", f"{span} residents in each of {len(counts)} layers ({taken / 1e9:.2f} GB)"]
    if options.kt_gpu_prefill_token_threshold:
        parts.append(f"batches from {options.kt_gpu_prefill_token_threshold} tokens on streamed whole")
    if placement.left:
        parts.append(f"{len(placement.left)} layers left to the CPU")
    return f"experts on {where}: " + "; ".join(parts)


class ModelPlacement:
    """The placement of one model, from its options to its statistics: `move_layers`, `attach`, `fill`, `save_counts`,
    in this order. `cpu_only`: the CPU computes all experts, and the engine is there because CUDA graphs go through
    it."""

    def __init__(self, options: PlacementOptions, *, training: bool = False) -> None:
        self.options, self._training = options, training
        self.device_map: DeviceMap | None = None
        self.placement: Placement | None = None
        self.cpu_only = False
        self._counter: RoutingCounter | None = None

    def move_layers(self, model: nn.Module, gpus: int) -> str:
        """From host memory to the devices; a line that says where they are."""
        self.device_map = find_device_map(model, self.options, gpus)
        move_to_devices(model, self.device_map)
        check_on_device(model)
        devices = list(dict.fromkeys(self.device_map.layers))
        return "layers: " + ", ".join(f"{self.device_map.layers.count(device)} on {device}" for device in devices)

    def attach(self, model: nn.Module, *, graphs: bool = False) -> None:
        """`graphs`: decode steps are to be captured in CUDA graphs, for which even the CPU alone needs an engine."""
        self.placement = attach_engine(model, self.options, self.device_map)
        if self.placement is None and graphs and self.options.policy == CPU and self.device_map is None:
            bare = attach(model, policy=RESIDENT, streams=False)
            if bare is not None and bare.left and self.options.kt_record_experts is not None:
                bare.detach()  # layers without an engine have to be counted too
            else:
                self.placement, self.cpu_only = bare, True
        if self.placement is None and not self.cpu_only and self.options.kt_record_experts is not None:
            self._counter = RoutingCounter(model)

    def fill(self, bytes_to_come: Callable[[int, torch.device], int], sizes: Collection[int]) -> list[str]:
        """Residents in the GPU memory that `bytes_to_come` of each device leaves, by its place and itself; then the
        modes of batches of these `sizes`. Lines that say what was done."""
        if self._counter is not None:
            self._counter.reset()  # passes that found the modules to train, or the reference of pairs, count nothing
        if self.placement is None or self.cpu_only:
            return []
        later = {device: bytes_to_come(place, device) for place, device in enumerate(self.placement.devices())}
        budget = resident_budget(self.placement, later)
        residents = place_residents(self.placement, self.options, self.device_map, budget)
        modes = self.placement.tune(sizes, training=self._training)
        return [describe(self.placement, self.options, residents), *(f"experts, {line}" for line in modes)]

    def save_counts(self, total: Callable[[Row], Row] | None = None, *, writes: bool = True) -> str | None:
        """Write counts of routed tokens where the options name a file; a line that says so. With several processes
        `total` adds the counts of all, and one of them writes."""
        path, source = self.options.kt_record_experts, self.placement or self._counter
        if path is None or source is None:
            return None
        names, counts = source.statistics()
        counts = counts if total is None else [total(row) for row in counts]
        if writes:
            save_counts(Path(path), names, counts)
        return f"counts of routed tokens are in {path}"
