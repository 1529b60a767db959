"""Plain PyTorch in bf16 (`bench/moe.py --peers torch`): tokens sorted by expert, three `linear` calls for each one."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from peers.protocol import serve
from shapes import Shape, Weights, Work


def forward(weights: Weights, hidden: torch.Tensor, ids: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    """hidden [T, H], ids and routing [T, k] -> [T, H], summed in f32."""
    order = ids.flatten().argsort(stable=True)
    tokens = order // ids.shape[1]
    counts = torch.bincount(ids.flatten(), minlength=weights.gate.shape[0]).tolist()
    outputs = []
    for expert, rows in enumerate(torch.split(hidden[tokens], counts)):
        if len(rows):
            inner = F.silu(F.linear(rows, weights.gate[expert])) * F.linear(rows, weights.up[expert])
            outputs.append(F.linear(inner, weights.down[expert]))
    scaled = torch.cat(outputs).float() * routing.flatten()[order, None]
    return torch.zeros(hidden.shape).index_add_(0, tokens, scaled).to(hidden.dtype)


class TorchLoop:
    def __init__(self, threads: int) -> None:
        if threads:
            torch.set_num_threads(threads)

    def facts(self) -> dict[str, Any]:
        return {"version": torch.__version__, "threads": torch.get_num_threads()}

    def load(self, shape: Shape, weights: Weights, layers: int, max_tokens: int) -> list[float]:
        copies = [Weights(weights.gate.clone(), weights.up.clone(), weights.down.clone()) for _ in range(layers - 1)]
        self._layers = [weights, *copies]
        return []

    def bind(self, work: Work) -> Callable[[int], torch.Tensor]:
        @torch.inference_mode()
        def call(step: int) -> torch.Tensor:
            layer, ids = work.step(step)
            return forward(self._layers[layer], work.hidden, ids, work.weights)

        return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    serve(lambda: TorchLoop(args.threads))


if __name__ == "__main__":
    main()
