"""A layer of experts under the placement engine: the `ExpertBackend` of tensors on its device.

What backward needs besides the batch is a copy of the ids in host memory, the rows that the CPU kept, and which experts
the CPU computed. Gradients of LoRA's factors are returned while they are still being copied to host memory."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ktransformers.experts.backend import ExpertBatch, ExpertGradients, Saved
from ktransformers.experts.store import ExpertStore
from ktransformers.place.dispatch import PlacedLayer
from ktransformers.place.engine import ExpertEngine, SavedForBackward


class PlacedExperts:
    copies_gradients = True

    def __init__(self, engine: ExpertEngine, layer: PlacedLayer) -> None:
        self.engine, self.layer = engine, layer

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def store(self) -> ExpertStore:
        return self.layer.store

    def infer(self, batch: ExpertBatch) -> Tensor:
        """A pass with gradients of which none reaches this layer is computed as those of training are."""
        if torch.is_grad_enabled() and batch.mixed is None:
            return self.forward(replace(batch, needs_grad=True), False)[0]
        with torch.no_grad():
            return self.engine.infer(self.layer, replace(batch, needs_grad=False))

    def forward(self, batch: ExpertBatch, retain: bool) -> tuple[Tensor, Saved]:
        out, saved = self.engine.forward(self.layer, batch, retain)
        return out, (saved.ids, saved.keep, saved.cpu)

    def backward(self, batch: ExpertBatch, grad_out: Tensor, saved: Saved, factor_grads: bool) -> ExpertGradients:
        with torch.no_grad():
            hidden, weights, factors, copies = self.engine.backward(
                self.layer, batch, grad_out, SavedForBackward(*saved), factor_grads
            )
        return ExpertGradients(hidden, weights, factors, None if copies is None else copies.finish)

    def residents(self) -> frozenset[int]:
        return self.engine.executor.resident_experts(self.layer.packed.index)
