"""A layer of experts under the placement engine, as `experts/operator.py` calls it: training through autograd,
inference with one adapter or several."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.experts.lora_factors import LoraFactors
from ktransformers.experts.mixed_lora import MixedLora
from ktransformers.experts.store import NO_DROPOUT, Dropout
from ktransformers.place.autograd import apply_placed, register
from ktransformers.place.dispatch import PlacedLayer
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.executor import ExpertBatch
from ktransformers.place.gpu.multi_lora import MultiLora


class PlacedStore:
    """What `experts.operator.place_store` is given for the store of one layer: the layer under its engine."""

    def __init__(self, engine: ExpertEngine, layer: PlacedLayer) -> None:
        self.engine, self.layer = engine, layer
        self._handle = register(self)

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def __call__(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, dropout: Dropout, retain: bool
    ) -> Tensor:
        if torch.is_grad_enabled():
            return apply_placed(self._handle, hidden, ids, weights, factors, dropout, retain)
        return self._infer(hidden, ids, weights, factors, None)

    def forward_mixed(self, hidden: Tensor, ids: Tensor, weights: Tensor, lora: MixedLora) -> Tensor:
        with torch.no_grad():
            return self._infer(hidden, ids, weights, None, MultiLora(lora, self.device))

    def _infer(
        self, hidden: Tensor, ids: Tensor, weights: Tensor, factors: LoraFactors | None, multi_lora: MultiLora | None
    ) -> Tensor:
        rows, top_k = hidden.reshape(-1, hidden.shape[-1]), ids.shape[-1]
        ids, weights = ids.reshape(-1, top_k), weights.reshape(-1, top_k)
        batch = ExpertBatch(rows, ids, weights, factors, NO_DROPOUT, multi_lora)
        return self.engine.infer(self.layer, batch).view(hidden.shape)

    def residents(self) -> frozenset[int]:
        return self.engine.executor.resident_experts(self.layer.packed.index)
