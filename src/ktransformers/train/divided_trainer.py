"""What a Hugging Face trainer does otherwise for a model that several processes divide (FSDP2, expert parallelism):
gradients are clipped, adapters and optimizer states saved and loaded by `parallel/whole_state.py`, as those of one
process. A class with these methods goes before the trainer's own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from ktransformers.parallel import sharding as fsdp
from ktransformers.parallel.sharding import Sharding, ShardOptions
from ktransformers.parallel.whole_state import (
    clip_gradients,
    gradient_norm,
    is_divided,
    load_optimizer_state,
    whole_optimizer_state,
    whole_trained,
)
from ktransformers.train.checkpoints import STATE_FILES


class DividedModel:
    sharding: Sharding | None = None

    def _network(self: Any) -> Any:
        """The model without DDP around it."""
        return self.accelerator.unwrap_model(self.model)

    def shard(self: Any, options: ShardOptions) -> None:
        """Shard everything but the experts over all processes; called once, before an optimizer exists."""
        self.sharding = fsdp.shard_model(self.model, options, self.accelerator.device)
        # Autocast alone: the model reduces its gradients itself, and accelerate would wrap it in DDP.
        prepare = self.accelerator.prepare_model

        def prepare_without_ddp(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
            return prepare(model, device_placement=False, evaluation_mode=True)

        self.accelerator.prepare_model = prepare_without_ddp

    def create_optimizer(self: Any, model: Any = None) -> Any:
        is_new = self.optimizer is None
        optimizer = self.build_optimizer(model)
        if self.sharding is not None and is_new:
            fsdp.separate_steps(optimizer)
        return optimizer

    def build_optimizer(self: Any, model: Any) -> Any:
        return super().create_optimizer(model)  # type: ignore[misc]

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        network = self._network()
        if not is_divided(network):
            return super()._clip_grad_norm(model)  # type: ignore[misc]
        return clip_gradients(network, self.args.max_grad_norm)

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        network = self._network()
        if grad_norm is None and is_divided(network):
            grad_norm = gradient_norm(network)
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        network = self._network()
        if not is_divided(network):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
            return
        state = whole_trained(network)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        network, optimizer = self._network(), self.optimizer
        if not is_divided(network):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        state = whole_optimizer_state(network, optimizer)
        saved: Any = SimpleNamespace(state_dict=lambda: state)
        self.optimizer = saved
        try:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        finally:
            self.optimizer = optimizer

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        network = self._network()
        if checkpoint is None or not is_divided(network):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        files = [Path(checkpoint) / name for name in STATE_FILES]
        optimizer, scheduler = (torch.load(file, map_location="cpu", weights_only=True) for file in files)
        load_optimizer_state(network, self.optimizer, optimizer)
        self.lr_scheduler.load_state_dict(scheduler)
