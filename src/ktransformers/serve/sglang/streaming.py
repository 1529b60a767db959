"""Layerwise prefill: for large batches all experts that the batch uses are copied to the GPU and computed there.

The packed experts of a `KTMoEWrapper` are streamed by the placement engine (`place/engine.py`, policy `stream`), which
decodes them on the device and multiplies in bf16: so it works for every format that the CPU computes, and needs one
expert cache for all layers instead of a layer of weights in SGLang's layout. It waits for the ids on the host, so it
cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers.experts.backend import ExpertBatch
from ktransformers.experts.gate import Gate
from ktransformers.experts.store import NO_DROPOUT, ExpertStore
from ktransformers.ground.log import logger
from ktransformers.place.dispatch import PlacedLayer
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.pinned import RegisteredMemory
from ktransformers.place.placement import cache_size, geometry_of, new_layer
from ktransformers.plan.modes import STREAM
from ktransformers.quantized.gpu.layout import Geometry

_log = logger(__name__)


@dataclass(frozen=True)
class StreamedLayer:
    engine: ExpertEngine
    layer: PlacedLayer
    threshold: int  # tokens
    wrapper: Any

    def takes(self, hidden: Tensor) -> bool:
        """Whether a batch is streamed. Experts with LoRA stay with the CPU."""
        if hidden.shape[0] < self.threshold or self.wrapper.adapters:
            return False
        return not (hidden.is_cuda and torch.cuda.is_current_stream_capturing())

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        with torch.no_grad():
            return self.engine.infer(self.layer, ExpertBatch(hidden, ids.long(), weights, None, NO_DROPOUT, None))


class LayerStreams:
    """The engines of this process: one for each device and geometry, shared by all layers. `threshold` 0: none."""

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold
        self._engines: dict[tuple[torch.device, Geometry], ExpertEngine] = {}
        self._registered = RegisteredMemory(1 << 62)

    def add(self, wrapper: Any, device: torch.device) -> StreamedLayer | None:
        """`wrapper` has loaded its weights."""
        if not self._threshold:
            return None
        store: ExpertStore = wrapper.moe
        sizes = geometry_of(store)
        engine = self._engines.get((device, sizes))
        if engine is None:
            registered = self._registered if device.type == "cuda" else None
            cache = ExpertCache(sizes, cache_size(sizes, device, None), device, registered)
            engine = self._engines[device, sizes] = ExpertEngine(device, STREAM, cache)
            engine.dispatcher.top_k = wrapper.num_experts_per_tok
            _log.info("layerwise prefill from %d tokens on, expert cache of %d experts", self._threshold, cache.count)
        gate = Gate("swiglu_oai" if wrapper.swiglu_alpha else "silu", wrapper.swiglu_limit, wrapper.swiglu_alpha)
        layer = new_layer(engine, len(engine.layers), store, gate, sizes)
        engine.layers[layer.packed.index] = layer
        return StreamedLayer(engine, layer, self._threshold, wrapper)
