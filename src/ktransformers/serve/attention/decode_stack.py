"""A batch of new tokens through all decoder layers of a model on the CPU, without the model's own `forward`.

Where the core computes every layer of a model (`decode_layer.py`), what is left of a step is the model's Python code
around the layers: masks that serving does not use, output classes, hooks of modules. Here the model's embedding, its
rotary embedding, its last norm and its output matrix are called, and the layers between them in one call of the core.
The first batch for which every layer is the core's is computed both ways: if the logits differ, because a family scales
its embeddings or caps its logits, the model's own `forward` computes every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.modeling.substitute import attempt, matches
from ktransformers.serve.attention.decode_layer import CoreDecodeLayer, compute_layers, fits_core, repeated
from ktransformers.serve.attention.step import BatchStep

PARTS = ("embed_tokens", "rotary_emb", "norm")  # of the body of a model
ROTARY_BLOCK = 64  # positions whose cosines and sines are computed together
ROTARY_BLOCKS = 256  # that are kept
STATIC_ROPE = ("default", "linear", "yarn", "llama3")  # whose frequencies do not depend on the length of a sequence


class RotaryRows:
    """Cosines and sines of positions, as a model's rotary embedding computes them: some positions at a time, because
    its dozen of operators takes longer than a product of one token."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._static = getattr(module, "rope_type", None) in STATIC_ROPE
        self._blocks: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self.repeats = False  # set before the first call: the layers want each cosine and sine twice

    def at(self, positions: Sequence[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, r]` each, in the dtype of the hidden states `[1, T, H]`."""
        if not self._static:
            return self._computed(list(positions), hidden)
        rows = [(self._block(position // ROTARY_BLOCK, hidden), position % ROTARY_BLOCK) for position in positions]
        if len(rows) == 1:
            (cos, sin), row = rows[0]
            return cos[row : row + 1], sin[row : row + 1]
        return torch.stack([block[0][row] for block, row in rows]), torch.stack([block[1][row] for block, row in rows])

    def _block(self, index: int, hidden: Tensor) -> tuple[Tensor, Tensor]:
        block = self._blocks.get((index, hidden.dtype))
        if block is None:
            if len(self._blocks) >= ROTARY_BLOCKS:
                del self._blocks[next(iter(self._blocks))]
            positions = range(index * ROTARY_BLOCK, (index + 1) * ROTARY_BLOCK)
            block = self._blocks[index, hidden.dtype] = self._computed(list(positions), hidden)
        return block

    def _computed(self, positions: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._module(hidden, position_ids=torch.tensor([positions], device="cpu"))
        if self.repeats:
            return repeated(cos[0]), repeated(sin[0])
        return cos[0].contiguous(), sin[0].contiguous()


class DecodeStack:
    def __init__(self, model: Any) -> None:
        self._body, self._head = model.base_model, model.get_output_embeddings()
        self._model = model
        parts = [getattr(self._body, name, None) for name in PARTS]
        self._complete = all(isinstance(part, nn.Module) for part in (*parts, self._head))
        self._layers: list[CoreDecodeLayer] = []
        self._rotary = RotaryRows(getattr(self._body, "rotary_emb", None))
        self._compared = not self._complete
        self._matches = False

    def logits(
        self, tokens: Sequence[int], positions: Sequence[int], step: BatchStep, stock: Callable[[], Tensor]
    ) -> Tensor:
        """`[T, V]` of new tokens; `stock` computes it by the model's own code."""
        if not self._compared and self._find_layers() and self._fits(step):
            return self._compare(tokens, positions, step, stock)
        return self._compute(tokens, positions, step) if self._matches and self._fits(step) else stock()

    def _compare(
        self, tokens: Sequence[int], positions: Sequence[int], step: BatchStep, stock: Callable[[], Tensor]
    ) -> Tensor:
        """The stock logits of the first batch that fits. Ours are computed before them: the model then writes its own
        keys and values."""
        self._compared = True
        repeats = {layer.repeats_rotary for layer in self._layers}
        self._rotary.repeats = repeats.pop()
        ours = None if repeats else attempt(lambda: self._compute(tokens, positions, step))
        expected = stock()
        self._matches = ours is not None and matches(ours, expected)
        return expected

    def _find_layers(self) -> bool:
        layers = getattr(self._body, "layers", [])
        self._layers = [layer.forward for layer in layers if isinstance(layer.forward, CoreDecodeLayer)]
        return bool(self._layers) and len(self._layers) == len(layers)

    def _fits(self, step: BatchStep) -> bool:
        if any(span.adapter is not None for span in step.spans) or not fits_core(step):
            return False
        models = (self._model, self._body)
        if any(model._forward_hooks or model._forward_pre_hooks for model in models):
            return False
        return all(layer.computes_whole_layer for layer in self._layers)

    def _compute(self, tokens: Sequence[int], positions: Sequence[int], step: BatchStep) -> Tensor:
        with torch.inference_mode():
            hidden = self._body.embed_tokens(torch.tensor([tokens], device="cpu"))
            cos, sin = self._rotary.at(positions, hidden)
            rows = compute_layers(self._layers, hidden[0].contiguous(), step, cos, sin)
            logits: Tensor = self._head(self._body.norm(rows[None]))[0]
            return logits
