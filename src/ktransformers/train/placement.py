"""Where a trained model's parts are: layers over GPUs where rules or the plan want several, experts under the placement
engine, and residents that follow the routing of the last steps.

Residents are placed when the trainer stands, because its parameters are on the GPU by then and the plan says what is
still to come. A process of several (torchrun) has one GPU and never spreads its layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ktransformers.place.apply import (
    find_homes,
    in_words,
    needs_spreading,
    place,
    room_for_residents,
    settle_residents,
)
from ktransformers.place.device_map import DeviceMap, scatter
from ktransformers.place.free_memory import to_come
from ktransformers.place.options import PlacementOptions, read_options
from ktransformers.place.placement import Placement
from ktransformers.place.routing_counts import RoutingCounter
from ktransformers.plan import Plan
from ktransformers.train.arguments import device_of
from ktransformers.train.rules import from_name
from ktransformers.train.settings import TrainSettings


def wish_of(settings: TrainSettings) -> PlacementOptions:
    return read_options(settings.place.model_dump())


class ResidentUpdate(TrainerCallback):
    """Every so many steps the busiest experts of these steps become residents."""

    def __init__(self, placement: Placement, steps: int) -> None:
        self.placement, self.steps = placement, steps
        self.changed: list[int] = []  # experts, by renewal

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.steps == 0:
            self.changed.append(self.placement.renew_residents())


class TrainPlacement:
    """A run's wishes on their way: `loaded`, then `trained`, then `ended`."""

    def __init__(self, settings: TrainSettings, plan: Plan | None) -> None:
        self.wish, self._plan = wish_of(settings).as_planned(plan), plan
        self._device = device_of(settings)
        self.placement: Placement | None = None
        self._homes: DeviceMap | None = None
        self._recorder: RoutingCounter | None = None

    @property
    def gpus(self) -> int:
        """That layers are spread over: as the rule's name says or as the plan needs, of those that are here."""
        if self._device.type != "cuda" or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return 1
        rule = self.wish.kt_optimize_rule
        if rule is not None and not Path(rule).is_file():
            return max(1, min(from_name(rule).gpus, torch.cuda.device_count()))
        return max(1, self._plan.nearest.choice.gpus if self._plan is not None else 1)

    @property
    def loading_device(self) -> torch.device:
        """Host memory, where the model goes to several devices from there."""
        one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1
        spreads = self._device.type == "cuda" and not one_of_many and needs_spreading(self.wish, self.gpus)
        return torch.device("cpu") if spreads else self._device

    def loaded(self, model: nn.Module) -> None:
        if self._device.type == "cuda" and self.loading_device.type == "cpu":
            self._homes = find_homes(model, self.wish, self.gpus)
            scatter(model, self._homes)
        self.placement = place(model, self.wish, self._homes, learns=True)
        if self.placement is None and self.wish.kt_record_experts is not None:
            self._recorder = RoutingCounter(model)

    def trained(self, note: Callable[[str], None]) -> list[TrainerCallback]:
        """Residents, now that what is trained is where it belongs; the callbacks that the run needs."""
        if self.placement is None:
            return []
        later = {
            device: to_come(self._plan.nearest, at) if self._plan is not None else 0
            for at, device in enumerate(self.placement.devices())
        }
        room = room_for_residents(self.placement, later)
        note(in_words(self.placement, self.wish, settle_residents(self.placement, self.wish, self._homes, room)))
        if not self.wish.kt_enable_dynamic_expert_update:
            return []
        return [ResidentUpdate(self.placement, self.wish.kt_expert_update_steps)]

    def ended(self, note: Callable[[str], None]) -> None:
        path = self.wish.kt_record_experts
        source = self.placement or self._recorder
        if path is not None and source is not None and int(os.environ.get("RANK", "0")) == 0:
            source.save_statistics(path)
            note(f"counts of routed tokens are in {path}")
