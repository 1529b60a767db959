"""A `PlacementOptions` made true on a loaded model, in the order in which a server and a trainer can: layers to their
devices, then the engine, and residents at last, when it is known what else wants memory.

Without a GPU nothing is done and it is said once (`attach`); what was wished for then has no effect, and experts are
computed by the CPU as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from ktransformers.errors import InputError
from ktransformers.place.device_map import DeviceMap, find_stack, spread, visible
from ktransformers.place.free_memory import free_bytes, resident_bytes
from ktransformers.place.options import PlacementOptions
from ktransformers.place.placement import Placement, attach
from ktransformers.place.rules import Rule, devices_of, homes_by, read_rules

WITH_RESIDENTS = ("auto", "resident")  # policies for which free memory is filled by itself


def rules_of(wish: PlacementOptions) -> tuple[Rule, ...]:
    """Those of the file; a name without a file has none."""
    path = wish.kt_optimize_rule
    return read_rules(path) if path is not None and Path(path).is_file() else ()


def needs_spreading(wish: PlacementOptions, gpus: int) -> bool:
    """Whether a model has to be loaded into host memory first, to be moved from there; GPUs that a rule names and that
    are not here are refused now."""
    rules = rules_of(wish)
    visible(_wanted(rules, gpus))
    return gpus > 1 or bool(rules)


def _wanted(rules: tuple[Rule, ...], gpus: int) -> int:
    named = [int(device.removeprefix("cuda:")) + 1 for device in devices_of(rules)]
    return max(gpus, *named, 1)


def find_homes(model: nn.Module, wish: PlacementOptions, gpus: int) -> DeviceMap:
    """By rules, else by plan: layers in equal runs over so many GPUs."""
    rules = rules_of(wish)
    devices = visible(_wanted(rules, gpus))[: max(gpus, 1)]
    if rules:
        return homes_by(model, rules, devices)
    return DeviceMap(tuple(spread(find_stack(model).count, devices)), devices[0], devices[0], {})


def place(
    model: nn.Module,
    wish: PlacementOptions,
    homes: DeviceMap | None = None,
    *,
    device: torch.device | str | None = None,
    learns: bool = False,
) -> Placement | None:
    """The engine with everything but residents; None: the CPU has all experts. In training (`learns`) residents are
    renewed by whoever counts the steps, not after a batch."""
    policy = wish.policy
    if policy == "cpu" and homes is not None and homes.whole:
        policy = "resident"  # a rule wants experts on a GPU
    if wish.kt_enable_dynamic_expert_update and not learns and not wish.kt_gpu_prefill_token_threshold:
        given = "on, without kt_gpu_prefill_token_threshold"
        raise InputError(
            "kt_enable_dynamic_expert_update", given, "a threshold beside it", "batches above it are counted"
        )
    placement = attach(model, policy=policy, device=device, homes=None if homes is None else homes.experts)
    if placement is None or not placement.layers:  # or a model that is on the CPU, beside a GPU
        return None
    placement.stream_from(wish.kt_gpu_prefill_token_threshold or 0)
    placement.follow_routing(wish.kt_enable_dynamic_expert_update and not learns)
    if wish.kt_max_deferred_experts_per_token:
        placement.defer(wish.kt_max_deferred_experts_per_token)
    return placement


def room_for_residents(placement: Placement, later: Mapping[torch.device, int]) -> dict[torch.device, int]:
    """Bytes by device: what is free, less what is still to come there and what the engines themselves will take."""
    return {
        device: resident_bytes(free_bytes(device), later.get(device, 0) + placement.working_bytes(device))
        for device in placement.devices()
        if device.type == "cuda"
    }


def settle_residents(
    placement: Placement, wish: PlacementOptions, homes: DeviceMap | None, room: Mapping[torch.device, int]
) -> list[tuple[int, ...]]:
    """Residents of each layer as the wish has them: a count, a share, or as many bytes as there is room for."""
    whole = homes.whole if homes is not None else []
    size: Mapping[torch.device, int] = room if wish.by_bytes and placement.policy in WITH_RESIDENTS else {}
    if homes is not None and whole and wish.policy == "cpu":
        size = {}  # nothing but what the rule says
    return placement.place_residents(
        count=wish.kt_num_gpu_experts or 0,
        ratio=wish.kt_gpu_experts_ratio or 0.0,
        size=size,
        strategy=wish.strategy,
        statistics=wish.init_expert_location,
        whole=whole,
    )


def in_words(placement: Placement, wish: PlacementOptions, residents: list[tuple[int, ...]]) -> str:
    """What became of the wish, for a log line."""
    counts = [len(row) for row in residents]
    taken = sum(
        layer.packed.geometry.expert_bytes * count for layer, count in zip(placement.layers, counts, strict=True)
    )
    span = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    where = ", ".join(str(device) for device in placement.devices())
    parts = [f"policy {placement.policy}", f"{span} residents in each of {len(counts)} layers ({taken / 1e9:.2f} GB)"]
    if wish.kt_gpu_prefill_token_threshold:
        parts.append(f"batches from {wish.kt_gpu_prefill_token_threshold} tokens on streamed whole")
    if wish.kt_enable_dynamic_expert_update:
        parts.append("residents follow the routing")
    if wish.kt_max_deferred_experts_per_token:
        parts.append(f"up to {wish.kt_max_deferred_experts_per_token} experts of a token deferred: an approximation")
    if placement.left:
        parts.append(f"{len(placement.left)} layers left to the CPU")
    return f"experts on {where}: " + "; ".join(parts)
