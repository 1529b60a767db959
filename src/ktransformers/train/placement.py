"""GPU memory of a training run: layers over several GPUs where rules or the plan want them, experts under the placement
engine.

Residents are placed when the trainer exists: trained parameters are on the GPU by then, and the plan says what is still
to come. A process of several (torchrun) has one GPU and never spreads its layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch import nn

from ktransformers.ground import system
from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.operators.plan import OperatorPlan
from ktransformers.operators.rules import find_rules, summary_of_name
from ktransformers.parallel.distributed import host_group
from ktransformers.place.apply import (
    ModelPlacement,
    as_planned,
    bytes_to_allocate,
    find_device_map,
    needs_spreading,
    plan_rules,
)
from ktransformers.place.placement import Placement
from ktransformers.place.residents import Row
from ktransformers.plan import Plan
from ktransformers.plan.workload import check_training_policy
from ktransformers.train.arguments import device_of
from ktransformers.train.settings import TrainSettings


def options_of(settings: TrainSettings) -> PlacementOptions:
    """Raises for a policy that training does not have; `kt_place` has been checked, KT_PLACE has not."""
    options = settings.place
    check_training_policy("KT_PLACE", options.policy)
    return options


class TrainPlacement:
    """The placement of one run: `model_loaded`, then `trainer_built`, then `run_ended`."""

    def __init__(self, settings: TrainSettings, plan: Plan | None) -> None:
        self.options, self._plan = as_planned(options_of(settings), plan), plan
        self._device = device_of(settings)
        self._cpu_asked = settings.trainer.get("use_cpu") is True
        self._placement = ModelPlacement(self.options, training=True)

    @property
    def placement(self) -> Placement | None:
        return self._placement.placement

    @property
    def gpus(self) -> int:
        """GPUs that layers are spread over: as the rule's name says or as the plan needs, of those that are here."""
        if self._device.type != "cuda" or int(os.environ.get("WORLD_SIZE", "1")) > 1:
            return 1
        rule = self.options.kt_optimize_rule
        if rule is not None and find_rules(rule) is None:
            return max(1, min(summary_of_name(rule).gpus, len(system.gpus())))
        return max(1, self._plan.nearest.choice.gpus if self._plan is not None else 1)

    @property
    def loading_device(self) -> torch.device:
        """Host memory where the model goes to several devices from there."""
        one_of_many = int(os.environ.get("WORLD_SIZE", "1")) > 1
        spreads = self._device.type == "cuda" and not one_of_many and needs_spreading(self.options, self.gpus)
        return torch.device("cpu") if spreads else self._device

    @property
    def later_gpus(self) -> int:
        """GPUs that layers are moved to from host memory; 0: the model is loaded where it stays."""
        return self.gpus if self._device.type == "cuda" and self.loading_device.type == "cpu" else 0

    def gpus_of_layers(self, model: nn.Module) -> tuple[str, ...]:
        """Those that layers of `model`, which may be a skeleton, are moved to from host memory."""
        return find_device_map(model, self.options, self.gpus).gpus if self.later_gpus else ()

    def plan_operators(self, model: nn.Module) -> tuple[OperatorPlan | None, list[str]]:
        """What rules make of the modules of `model`, a skeleton, and lines to note."""
        on_gpu = self._device.type == "cuda"
        return plan_rules(model, self.options, self.gpus if on_gpu else 0, cpu_asked=self._cpu_asked)

    def model_loaded(self, model: nn.Module) -> None:
        if gpus := self.later_gpus:
            self._placement.move_layers(model, gpus)
        self._placement.attach(model)

    def trainer_built(self, note: Callable[[str], None], sizes: Collection[int] = ()) -> None:
        """Residents, now that trained parameters are where they belong, and the modes of batches of `sizes` tokens."""
        plan = self._plan

        def later(place: int, device: torch.device) -> int:
            return bytes_to_allocate(plan.nearest, place) if plan is not None else 0

        for line in (*self.options.notes, *self._placement.fill(later, sizes)):
            note(line)

    def run_ended(self, note: Callable[[str], None]) -> None:
        """A collective call of all processes."""
        several = dist.is_initialized() and dist.get_world_size() > 1
        writes = int(os.environ.get("RANK", "0")) == 0
        line = self._placement.save_counts(_sum_over_ranks if several else None, writes=writes)
        if line is not None and writes:
            note(line)


def _sum_over_ranks(row: Row) -> Row:
    total = torch.from_numpy(row.copy())
    dist.all_reduce(total, group=host_group(dist.group.WORLD))
    summed: Row = total.numpy()
    return summed
