"""A batch of new tokens through all decoder layers of a model on the CPU, without the model's own `forward`.

Where the core computes every layer of a model (`decode_layer.py`), what is left of a step is the model's Python code
around the layers: masks that serving does not use, output classes, hooks of modules. Here the model's embedding, its
rotary embedding, its last norm and its output matrix are called, and the layers between them.
The first batch for which every layer is the core's is computed both ways: if the logits differ, because a family scales
its embeddings or caps its logits, the model's own `forward` computes every batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.nn.fused_check import matches
from ktransformers.serve.engine.attention import Span
from ktransformers.serve.engine.decode_layer import CoreDecodeLayer, fits_core

PARTS = ("embed_tokens", "rotary_emb", "norm")  # of the body of a model


class DecodeStack:
    def __init__(self, model: Any) -> None:
        self._body, self._head = model.base_model, model.get_output_embeddings()
        self._model = model
        parts = [getattr(self._body, name, None) for name in PARTS]
        self._complete = all(isinstance(part, nn.Module) for part in (*parts, self._head))
        self._layers: list[CoreDecodeLayer] = []
        self._compared = not self._complete
        self._matches = False

    def logits(self, tokens: Sequence[int], positions: Sequence[int], spans: Sequence[Span]) -> Tensor | None:
        """`[T, V]` of new tokens; None: this batch or this model is left to the model's own code."""
        return self._compute(tokens, positions, spans) if self._matches and self._fits(spans) else None

    def trial(self, tokens: Sequence[int], positions: Sequence[int], spans: Sequence[Span]) -> Tensor | None:
        """The same for the first batch that fits, before the model computes it and writes its own keys and values."""
        if self._compared or not self._find_layers() or not self._fits(spans):
            return None
        self._compared = True
        try:
            return self._compute(tokens, positions, spans)
        except (TypeError, ValueError, RuntimeError):
            return None

    def judge(self, trial: Tensor, expected: Tensor) -> None:
        """Compare with the model's logits of the same batch."""
        self._matches = matches(trial, expected)

    def _find_layers(self) -> bool:
        layers = getattr(self._body, "layers", [])
        self._layers = [layer.forward for layer in layers if isinstance(layer.forward, CoreDecodeLayer)]
        return bool(self._layers) and len(self._layers) == len(layers)

    def _fits(self, spans: Sequence[Span]) -> bool:
        if any(span.adapter is not None for span in spans) or not fits_core(spans):
            return False
        models = (self._model, self._body)
        if any(model._forward_hooks or model._forward_pre_hooks for model in models):
            return False
        return all(layer.computes_whole_layer for layer in self._layers)

    def _compute(self, tokens: Sequence[int], positions: Sequence[int], spans: Sequence[Span]) -> Tensor:
        with torch.inference_mode():
            hidden = self._body.embed_tokens(torch.tensor([tokens], device="cpu"))
            cos, sin = self._body.rotary_emb(hidden, position_ids=torch.tensor([positions], device="cpu"))
            rows, cos, sin = hidden[0].contiguous(), cos[0].contiguous(), sin[0].contiguous()
            for layer in self._layers:
                rows = layer.compute(rows, spans, cos, sin)
            logits: Tensor = self._head(self._body.norm(rows[None]))[0]
            return logits
