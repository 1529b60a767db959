"""kt-kernel's training classes, run by `bench/train_step.py --peers kt=/path/to/python kt_private=/path/to/python` in
BF16 and by `bench/formats.py` with weights that it quantises at load (`--kind`).

Its backward multiplies with transposed weights. `kt` is its default for training, one buffer that all layers share and
each fills again before its backward; `kt_private` (`--private`) holds a transposed copy for every layer. A backward
needs a forward that saved its activations, one for each layer (`max_cache_depth` 1), which is what a sweep does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from peers.kt import KtKernel, options
from peers.protocol import serve
from shapes import Shape, Weights, Work
from sweeps import ALPHA, FACTORS, RANK, Sweeper, Swept, grad_out, make_lora, sweep_steps, timed


def kt_name(factor: str) -> str:
    """`gate_a` is `gate_lora_a` there."""
    return factor.replace("_", "_lora_")


class KtTraining(KtKernel):
    CLASSES: ClassVar = {"bf16": "AMXBF16_SFT_MOE", "int8": "AMXInt8_SFT_MOE", "int4": "AMXInt4_SFT_MOE"}

    def __init__(self, threads: int, kind: str, private: bool) -> None:
        super().__init__(threads, kind)
        self._private = private

    def facts(self) -> dict[str, object]:
        return {**super().facts(), "backward": "private copy" if self._private else "shared buffer"}

    def configure(self, shape: Shape) -> Any:
        lora = {name: tensor.clone() for name, tensor in self._factors.items()}
        config = self._ext.moe.MOESFTConfig(shape.experts, shape.top_k, shape.hidden, shape.intermediate)
        config.max_cache_depth = 1
        config.share_backward_bb = not self._private
        config.share_cache_pool = False
        config.full_weight_grad = False
        config.lora_rank = RANK
        config.lora_alpha = ALPHA
        config.authoritative_optimizer_grads = True
        for name, tensor in lora.items():
            setattr(config, kt_name(name), tensor.data_ptr())
        self._lora.append(lora)  # read by address
        self._grads.append({name: torch.zeros_like(tensor) for name, tensor in lora.items()})
        return config

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        self._factors = make_lora(shape)
        self._lora: list[dict[str, torch.Tensor]] = []
        self._grads: list[dict[str, torch.Tensor]] = []
        return super().load(shape, weights, layers, max_tokens)

    def bind(self, work: Work) -> Callable[[int], Swept]:  # type: ignore[override] # sweeps, not calls
        layers = len(self._layers)
        count = torch.tensor([work.hidden.shape[0]], dtype=torch.int32)
        above = grad_out(work)
        outs = [torch.zeros_like(work.hidden) for _ in range(layers)]
        grad_hidden = [torch.zeros_like(work.hidden) for _ in range(layers)]
        grad_weights = [torch.zeros_like(work.weights) for _ in range(layers)]

        def forward(layer: int, ids: torch.Tensor) -> None:
            self._run(
                self._layers[layer].forward_sft_task(
                    count.data_ptr(),
                    self._shape.top_k,
                    ids.data_ptr(),
                    work.weights.data_ptr(),
                    work.hidden.data_ptr(),
                    outs[layer].data_ptr(),
                    True,  # save for backward
                )
            )

        def backward(layer: int) -> None:
            self._run(
                self._layers[layer].backward_task(
                    above.data_ptr(),
                    grad_hidden[layer].data_ptr(),
                    *(self._grads[layer][name].data_ptr() for name in FACTORS),
                    grad_weights[layer].data_ptr(),
                    0,  # none for gate, up and down: they are frozen
                    0,
                    0,
                )
            )

        def sweep(index: int) -> Swept:
            steps = sweep_steps(work, layers, index)
            seconds: dict[str, list[float]] = {}
            for layer, ids in steps:
                timed(seconds, "forward_lora", forward, layer, ids)
            for layer, _ in reversed(steps):
                timed(seconds, "backward_lora", backward, layer)
            first = steps[0][0]
            results = {"out": outs[first], "hidden": grad_hidden[first], "weights": grad_weights[first]}
            return Swept(seconds, {**results, **self._grads[first]})

        return sweep


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--private", action="store_true")
    args = parser.parse_args()
    serve(lambda: KtTraining(args.threads, args.kind, args.private), Sweeper)
    os._exit(0)  # its pool does not always come down


if __name__ == "__main__":
    main()
