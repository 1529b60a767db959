"""Decoding with some experts on the GPU: tokens x share of residents x strategy, on routing that is skewed.

    python bench/residents.py --formats bf16,int4:32 --shares 0,0.1,0.25,0.5 --json residents.json

A step sends a few tokens through several layers under policy `resident`: residents are computed on the GPU, the rest by
the CPU at the same time; the time is per layer, tokens/s are those of a model of 48 such layers and nothing else. Each
layer has its own popular experts: the popularity of rank n falls as 1 / n^skew. `frequency` chooses residents by counts
of other tokens from the same distribution, `uniform` without looking. Hits are the share of rows that met a resident.
Needs CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from place import LAYERS, engine_of, stores
from shapes import SHAPES, Shape
from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

MODEL_LAYERS = 48
BATCHES = 24  # that a cell walks through, so that the routing differs from step to step
COUNTED = 4096  # tokens that `frequency` has seen


def parse(argv: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b")
    parser.add_argument("--formats", type=words, default=["bf16", "int4:32"])
    parser.add_argument("--tokens", type=words, default=["1", "8"])
    parser.add_argument("--shares", type=words, default=["0", "0.1", "0.25", "0.5"])
    parser.add_argument("--strategies", type=words, default=["uniform", "frequency"])
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


class Routing:
    """Draws experts for tokens of each layer, without replacement, by popularity."""

    def __init__(self, shape: Shape, skew: float) -> None:
        import torch

        self.shape = shape
        self._generator = torch.Generator().manual_seed(7)
        falling = torch.arange(1, shape.experts + 1).double() ** -skew
        self._weights = [falling[torch.randperm(shape.experts, generator=self._generator)] for _ in range(LAYERS)]

    def draw(self, layer: int, tokens: int) -> torch.Tensor:
        import torch

        weights = self._weights[layer].expand(tokens, -1)
        return torch.multinomial(weights, self.shape.top_k, generator=self._generator)


def place(layers: list[Any], strategy: str, share: float, routing: Routing, registered: Any) -> list[frozenset[int]]:
    """Fills the residents of every layer anew."""
    import numpy as np

    from ktransformers.place.gpu.slots import Slots
    from ktransformers.place.residents import budget, choose

    first = layers[0].layer.packed.geometry
    seen = [np.bincount(routing.draw(at, COUNTED).flatten().numpy(), minlength=first.experts) for at in range(LAYERS)]
    total = budget(LAYERS, first.experts, first.expert_bytes, ratio=share) if share else 0
    found = choose(strategy, total, LAYERS, first.experts, np.stack(seen))
    side = layers[0].engine.side
    side.residents.clear()
    for placed, experts in zip(layers, found, strict=True):
        if experts:
            index = placed.layer.packed.index
            side.residents[index] = Slots(first, len(experts), side.device, registered)
            side.residents[index].fetch(index, placed.layer.packed.source, experts)
    return [frozenset(experts) for experts in found]


def measure(layers: list[Any], batches: list[Any], seconds: float = 1.0) -> float:
    """The median of steps, per layer."""
    import torch

    from ktransformers.nn.store import NO_DROPOUT

    taken: list[float] = []
    begun = time.perf_counter()
    with torch.inference_mode():
        for turn in range(10_000):
            hidden, ids, weights = batches[turn % len(batches)]
            torch.cuda.synchronize()
            start = time.perf_counter()
            x = hidden
            for placed, routes in zip(layers, ids, strict=True):
                x = x + 0.1 * placed(x, routes, weights, None, NO_DROPOUT, False)
            torch.cuda.synchronize()
            taken.append((time.perf_counter() - start) / len(layers))
            if turn > 2 * len(batches) or time.perf_counter() - begun > seconds:
                break
    return statistics.median(taken[len(taken) // 4 :])


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if not torch.cuda.is_available():
        print("residents.py: no CUDA device", file=sys.stderr)
        return 1
    from ktransformers.place.gpu.pinned import Registered

    device, shape = torch.device("cuda:0"), SHAPES[args.shape]
    machine = describe_machine() | {"gpu": torch.cuda.get_device_name(device)}
    document: dict[str, Any] = {"bench": "residents", "machine": machine, "shape": shape.name, "skew": args.skew}
    document["cells"] = []
    table = Table(["format", "tokens", "strategy", "share", "hits", "ms/layer", "tokens/s"], [8, 6, 9, 5, 5, 8, 8])
    for spec in args.formats:
        made, registered = stores(shape, spec), Registered(1 << 62)
        layers = engine_of(made, "resident", registered, device)
        for tokens in map(int, args.tokens):
            routing = Routing(shape, args.skew)
            batches = []
            for _ in range(BATCHES):
                ids = [routing.draw(at, tokens) for at in range(LAYERS)]
                hidden = torch.randn(tokens, shape.hidden).bfloat16().to(device)
                weights = torch.full((tokens, shape.top_k), 1 / shape.top_k, device=device)
                batches.append((hidden, [one.to(device) for one in ids], weights))
            for strategy in args.strategies:
                for share in map(float, args.shares):
                    if not share and strategy != args.strategies[0]:
                        continue
                    there = place(layers, strategy, share, routing, registered)
                    rows = [
                        (at, e) for _, ids, _ in batches for at in range(LAYERS) for e in ids[at].flatten().tolist()
                    ]
                    hits = sum(e in there[at] for at, e in rows) / len(rows)
                    taken = measure(layers, batches)
                    cell = {"format": spec, "tokens": tokens, "strategy": strategy, "share": share, "hits": hits}
                    cell |= {"layer_s": taken, "tokens_per_s": tokens / (taken * MODEL_LAYERS)}
                    document["cells"].append(cell)
                    numbers = [f"{share:.2f}", f"{hits:.2f}", f"{1e3 * taken:.2f}", f"{cell['tokens_per_s']:.1f}"]
                    table.row([spec, str(tokens), strategy, *numbers])
                    if args.json:
                        save(document, args.json)
        torch.cuda.synchronize()
        registered.close()
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
