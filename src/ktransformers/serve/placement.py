"""Where a served model's parts are: layers on their devices, experts placed as the launch line asks, room for the cache
and residents in what is left of each GPU.

The order: the family's check runs with all experts on the CPU, because it compares passes of different sizes and the
engine may compute them in different places; then the engine, so that its buffers are taken before free memory is
counted; then the cache gets its share, and residents what remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktransformers.nn.w8a8 import use_w8a8
from ktransformers.place.apply import (
    find_homes,
    in_words,
    needs_spreading,
    place,
    room_for_residents,
    settle_residents,
)
from ktransformers.place.device_map import DeviceMap, find_stack, scatter
from ktransformers.place.free_memory import free_bytes, to_come
from ktransformers.place.options import PlacementOptions, read_options
from ktransformers.place.placement import Placement, attach
from ktransformers.place.routing_counts import RoutingCounter
from ktransformers.plan import Plan
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import Target

Say = Callable[[str], None]


def wish_of(launch: Launch, target: Target) -> PlacementOptions:
    """The line's words, then those of the YAML file that it names."""
    return read_options(launch.place, target.keys)


def gpus_of(launch: Launch, plan: Plan | None) -> int:
    """As many as are asked for, of those that are here; else as many as the plan needs."""
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if launch.gpus is not None:
        return max(1, min(launch.gpus, here))
    return max(1, plan.nearest.choice.gpus if plan is not None else 1)


def wants_several(wish: PlacementOptions, launch: Launch, plan: Plan | None) -> bool:
    return needs_spreading(wish, gpus_of(launch, plan))


def spread_model(model: nn.Module, wish: PlacementOptions, launch: Launch, plan: Plan | None, say: Say) -> DeviceMap:
    """From host memory to the devices."""
    homes = find_homes(model, wish, gpus_of(launch, plan))
    scatter(model, homes)
    devices = list(dict.fromkeys(homes.layers))
    say("layers: " + ", ".join(f"{homes.layers.count(device)} on {device}" for device in devices))
    return homes


def cache_room(model: nn.Module, launch: Launch, per_token: int) -> int:
    """Tokens whose keys and values fit into the share of every GPU's free memory; a layer's lie where it is."""
    layers: Any = model.get_submodule(find_stack(model).name)
    counts: dict[torch.device, int] = {}
    for layer in layers:
        device = next((p.device for p in layer.parameters() if p.is_cuda), torch.device("cpu"))
        counts[device] = counts.get(device, 0) + 1
    rooms = [
        int(free_bytes(device) * launch.memory) * len(layers) // (count * per_token)
        for device, count in counts.items()
        if device.type == "cuda"
    ]
    return min(rooms, default=2**31)  # a rule may have every layer on the CPU


class ServedPlacement:
    """The experts of a served model, and the record of who was asked for. `bare`: the CPU is to have all of them, and
    the engine is there because graphs go through it."""

    def __init__(
        self,
        wish: PlacementOptions,
        homes: DeviceMap | None,
        placement: Placement | None,
        recorder: RoutingCounter | None,
        graphs: bool = False,
        bare: bool = False,
    ) -> None:
        self.wish, self.homes, self.placement, self._recorder = wish, homes, placement, recorder
        self._graphs, self._bare = graphs, bare

    def fill(self, cache: int, plan: Plan | None, say: Say) -> dict[str, int]:
        """Residents, beside a cache of so many bytes; the approximations that answers now have."""
        rounded: dict[str, int] = {"kt_w8a8": True} if self.wish.kt_w8a8 else {}
        if self.placement is None or self._bare:
            return rounded
        devices = self.placement.devices()
        later = {device: cache // len(devices) + self._activations(plan, at) for at, device in enumerate(devices)}
        if self._graphs:
            later = {device: size + self.placement.captured_bytes(device) for device, size in later.items()}
        room: Mapping[torch.device, int] = room_for_residents(self.placement, later)
        say(in_words(self.placement, self.wish, settle_residents(self.placement, self.wish, self.homes, room)))
        late = self.wish.kt_max_deferred_experts_per_token
        return rounded | ({"kt_max_deferred_experts_per_token": late} if late else {})

    def _activations(self, plan: Plan | None, at: int) -> int:
        """The plan's cache is counted as it is here."""
        if plan is None:
            return 0
        tables = plan.nearest.memory.gpus
        return to_come(plan.nearest, at) - (tables[at].get("KV cache", 0) if at < len(tables) else 0)

    def record(self, say: Say) -> None:
        """Write the statistics where the line says."""
        path = self.wish.kt_record_experts
        source = self.placement or self._recorder
        if path is not None and source is not None:
            source.save_statistics(Path(path))
            say(f"counts of routed tokens are in {path}")


def place_experts(
    model: nn.Module, wish: PlacementOptions, homes: DeviceMap | None, say: Say, graphs: bool = False
) -> ServedPlacement:
    """`graphs`: new tokens are to be computed in CUDA graphs, for which the CPU alone needs an engine, too."""
    if wish.kt_w8a8:
        say(f"8-bit activations in {use_w8a8(model)} layers: an approximation")
    placement = place(model, wish, homes)
    if placement is None and wish.wants_gpu:
        say("no GPU: all experts are computed on the CPU, exactly")
    if placement is None and graphs and wish.policy == "cpu" and homes is None:
        bare = attach(model, policy="resident", streams=False)
        if bare is None or not bare.left or wish.kt_record_experts is None:
            return ServedPlacement(wish, homes, bare, None, graphs, bare=True)
        bare.detach()  # layers that an engine leaves alone are to be counted, too
    recorder = RoutingCounter(model) if placement is None and wish.kt_record_experts is not None else None
    return ServedPlacement(wish, homes, placement, recorder, graphs)
