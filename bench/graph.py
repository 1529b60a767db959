"""Decoding with experts on the CPU and on the GPU: synchronising on expert ids, host callbacks, and a CUDA graph.

    python bench/graph.py --tokens 1,4,16 --shares 0,0.25,0.5 --json graph.json

A step sends a few tokens through 8 layers: a router on the GPU, experts under policy `resident`, a residual sum. Three
modes alternate within a round. `asked`: the host synchronises on every layer's ids and dispatches in Python.
`callbacks`: the stream starts the CPU's share by host callbacks, and Python only enqueues. `graph`: the same, captured
once and replayed. The time is per layer; tokens/s are those of the 8 layers alone. `cpu ms` is the core alone on the
experts that are not resident, hidden states in host memory: a lower bound of every mode. `apart` is the largest
difference between the results of two modes, relative to their norm. Needs CUDA.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import words
from place import stores
from shapes import SHAPES, Shape
from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

    from ktransformers.nn import ExpertStore

LAYERS = 8
BATCHES = 12  # hidden states that a cell rotates over, so that the routing differs from step to step


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b")
    parser.add_argument("--formats", type=words, default=["bf16"])
    parser.add_argument("--tokens", type=words, default=["1", "4", "16"])
    parser.add_argument("--shares", type=words, default=["0", "0.25", "0.5"])
    parser.add_argument("--seconds", type=float, default=1.5, help="of a cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


class Step:
    """Tokens through all layers, from a static input."""

    def __init__(self, shape: Shape, stores: list[ExpertStore], device: torch.device, spec: str) -> None:
        import torch

        from ktransformers.experts.gate import Gate
        from ktransformers.place.engine import ExpertEngine
        from ktransformers.place.gpu.expert_cache import ExpertCache
        from ktransformers.place.placed_experts import PlacedExperts
        from ktransformers.place.placement import geometry_of, new_layer

        self.shape, self.stores, sizes = shape, stores, geometry_of(stores[0])
        self.engine = ExpertEngine(device, "resident", ExpertCache(sizes, 4, device, None))
        self.layers: list[PlacedExperts] = []
        for index, store in enumerate(stores):
            self.engine.layers[index] = new_layer(self.engine, index, store, Gate("silu"), sizes)
            self.layers.append(PlacedExperts(self.engine, self.engine.layers[index]))
        generator = torch.Generator().manual_seed(3)
        routers = torch.randn(len(stores), shape.experts, shape.hidden, generator=generator) / shape.hidden**0.5
        self.routers = list(routers.bfloat16().to(device))

    def place_residents(self, share: float) -> None:
        """The first experts of every layer are its residents."""
        from ktransformers.place.gpu.expert_cache import ExpertCache

        count = round(share * self.shape.experts)
        for placed in self.layers:
            packed = placed.layer.packed
            self.engine.callbacks.drop_calls(packed.index)
            self.engine.executor.residents.pop(packed.index, None)
            if count:
                room = ExpertCache(packed.geometry, count, self.engine.device, None)
                room.fetch(packed.index, packed.source, range(count))
                self.engine.executor.residents[packed.index] = room

    def route(self, at: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = (x @ self.routers[at].t()).float().softmax(-1)
        weights, ids = logits.topk(self.shape.top_k)
        return ids, weights / weights.sum(-1, keepdim=True)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        from ktransformers.experts.operator import apply_experts

        for at, placed in enumerate(self.layers):
            ids, weights = self.route(at, x)
            x = x + 0.1 * apply_experts(placed, x, ids, weights)
        return x

    def alone(self, x: torch.Tensor, share: float) -> float:
        """Seconds per layer of the core on the experts that are not resident."""
        import torch

        skip = torch.zeros(self.shape.experts, dtype=torch.bool)
        skip[: round(share * self.shape.experts)] = True
        inputs = [tuple(t.cpu() for t in (x, *self.route(at, x))) for at in range(len(self.stores))]
        taken = []
        for _ in range(8):
            begun = time.perf_counter()
            for store, (hidden, ids, weights) in zip(self.stores, inputs, strict=True):
                store.forward(hidden, ids, weights, skip=skip)
            taken.append((time.perf_counter() - begun) / len(self.stores))
        return statistics.median(taken[2:])


def modes_of(step: Step, static: torch.Tensor, out: dict[str, torch.Tensor]) -> dict[str, Callable[[], None]]:
    """Each computes from `static` into `out`; a mode that this format does not support is left out."""
    import torch

    from ktransformers.ground.errors import InputError

    def queued(asked: bool) -> None:
        step.engine.dispatcher.forced = "resident" if asked else "host_callback"
        out["asked" if asked else "callbacks"] = step.run(static)

    modes: dict[str, Callable[[], None]] = {"asked": lambda: queued(True), "callbacks": lambda: queued(False)}
    for mode in modes.values():  # kernels are loaded, buffers made
        mode()
        mode()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out["graph"] = step.run(static)
    except InputError as error:
        print(f"graph.py: {error}", file=sys.stderr)
        del modes["callbacks"]
        return modes
    modes["graph"] = graph.replay
    return modes


def cell(step: Step, tokens: int, seconds: float, share: float) -> dict[str, Any]:
    import torch

    device = step.engine.device
    generator = torch.Generator().manual_seed(tokens)
    inputs = torch.randn(BATCHES, tokens, step.shape.hidden, generator=generator).bfloat16().to(device)
    static = inputs[0].clone()
    out: dict[str, torch.Tensor] = {}
    modes = modes_of(step, static, out)
    taken: dict[str, list[float]] = {name: [] for name in modes}
    apart, turn, begun = 0.0, 0, time.perf_counter()
    while turn < 4 or time.perf_counter() - begun < seconds:
        results = []
        for name, mode in modes.items():
            static.copy_(inputs[turn % BATCHES])
            torch.cuda.synchronize()
            start = time.perf_counter()
            mode()
            torch.cuda.synchronize()
            taken[name].append((time.perf_counter() - start) / LAYERS)
            results.append(out[name].float())
        first = results[0]
        apart = max(apart, *(float((one - first).norm() / first.norm()) for one in results))
        turn += 1
    row: dict[str, Any] = {name: statistics.median(times[1:]) for name, times in taken.items()}
    return row | {"steps": turn, "apart": apart, "cpu": step.alone(inputs[1], share)}


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if not torch.cuda.is_available():
        print("graph.py: no CUDA device", file=sys.stderr)
        return 1
    device, shape = torch.device("cuda:0"), SHAPES[args.shape]
    document: dict[str, Any] = {
        "bench": "graph",
        "command": shlex.join(["python", "bench/graph.py", *(sys.argv[1:] if argv is None else argv)]),
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name(device)},
        "shape": shape.name,
        "layers": LAYERS,
        "cells": [],
    }
    names = ("asked", "callbacks", "graph")
    heads = ["format", "tokens", "share", *(f"{name} ms" for name in names), "cpu ms", *(f"{n} t/s" for n in names)]
    table = Table([*heads, "apart"], [8, 6, 5, 8, 12, 8, 7, 9, 13, 9, 8])
    for spec in args.formats:
        step = Step(shape, stores(shape, spec, LAYERS), device, spec)
        for share in map(float, args.shares):
            step.place_residents(share)
            for tokens in map(int, args.tokens):
                with torch.inference_mode():
                    row = {"format": spec, "tokens": tokens, "share": share}
                    row |= cell(step, tokens, args.seconds, share)
                row["tokens_per_s"] = {name: tokens / (row[name] * LAYERS) for name in names if name in row}
                document["cells"].append(row)
                times = [f"{1e3 * row[name]:.3f}" if name in row else "" for name in names]
                rates = [f"{row['tokens_per_s'][name]:.0f}" if name in row else "" for name in names]
                numbers = [*times, f"{1e3 * row['cpu']:.3f}", *rates, f"{row['apart']:.1e}"]
                table.row([spec, str(tokens), f"{share:.2f}", *numbers])
                if args.json:
                    save(document, args.json)
        torch.cuda.synchronize()
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
