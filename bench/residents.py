"""Decoding with some experts on the GPU: tokens x share of residents x strategy, on routing that is skewed.

    python bench/residents.py --formats bf16,int4:32 --shares 0,0.1,0.25,0.5 --json residents.json

A step sends a few tokens through several layers, as a server does. Two policies alternate: under `resident` residents
are computed on the GPU, the rest by the CPU at the same time; `auto` has settled before it is timed, and the table says
on which mode. The time is per layer, tokens/s are those of `auto` in a model of 48 such layers and nothing else. Each
layer has its own popular experts: the popularity of rank n falls as 1 / n^skew. `frequency` chooses residents by counts
of other tokens from the same distribution, `uniform` without counts. Hits are the share of rows whose expert is
resident. The share 0 is the baseline. Needs CUDA.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import words
from place import BATCHES, LAYERS, engine_of, forget, mode_of, stores
from shapes import SHAPES, Shape
from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

MODEL_LAYERS = 48
COUNTED = 4096  # tokens that `frequency` has seen
POLICIES = ("resident", "auto")
WAKE, WARM = 2.0, 0.2  # seconds of steps before the first cell of a format, and before any other


def parse(argv: list[str] | None) -> argparse.Namespace:
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

    def __init__(self, shape: Shape, skew: float, layers: int = LAYERS) -> None:
        import torch

        self.shape, self.layers = shape, layers
        self._generator = torch.Generator().manual_seed(7)
        self._falling = torch.arange(1, shape.experts + 1).double() ** -skew
        self.move()

    def move(self) -> None:
        """Other experts become the popular ones."""
        import torch

        orders = [torch.randperm(self.shape.experts, generator=self._generator) for _ in range(self.layers)]
        self._weights = [self._falling[order] for order in orders]

    def draw(self, layer: int, tokens: int) -> torch.Tensor:
        import torch

        weights = self._weights[layer].expand(tokens, -1)
        return torch.multinomial(weights, self.shape.top_k, generator=self._generator)


def batch_of(routing: Routing, tokens: int, device: torch.device) -> tuple[Any, list[Any], Any]:
    """Hidden states, ids of every layer, routing weights."""
    import torch

    shape = routing.shape
    ids = [routing.draw(at, tokens).to(device) for at in range(routing.layers)]
    hidden = torch.randn(tokens, shape.hidden).bfloat16().to(device)
    return hidden, ids, torch.full((tokens, shape.top_k), 1 / shape.top_k, device=device)


def hit_rate(batches: Sequence[list[Any]], residents: Sequence[Collection[int]]) -> float:
    """The share of rows whose expert is resident; a batch is the ids of every layer."""
    rows = [(at, expert) for ids in batches for at, one in enumerate(ids) for expert in one.flatten().tolist()]
    return sum(expert in residents[at] for at, expert in rows) / len(rows)


def chosen(layers: list[Any], strategy: str, share: float, routing: Routing) -> list[tuple[int, ...]]:
    """The residents of every layer."""
    import numpy as np

    from ktransformers.place.residents import budget, choose

    first, count = layers[0].layer.packed.geometry, len(layers)
    seen = [np.bincount(routing.draw(at, COUNTED).flatten().numpy(), minlength=first.experts) for at in range(count)]
    total = budget(count, first.experts, first.expert_bytes, ratio=share) if share else 0
    return choose(strategy, total, count, first.experts, np.stack(seen))


def place(layers: list[Any], residents: list[tuple[int, ...]], registered: Any) -> None:
    """Fills the residents of every layer anew; what was measured with others is forgotten."""
    from ktransformers.place.gpu.expert_cache import ExpertCache

    engine = layers[0].engine
    for placed, experts in zip(layers, residents, strict=True):
        packed = placed.layer.packed
        engine.callbacks.drop_calls(packed.index)
        engine.executor.residents.pop(packed.index, None)
        if experts:
            engine.executor.residents[packed.index] = ExpertCache(
                packed.geometry, len(experts), engine.device, registered
            )
            engine.executor.residents[packed.index].fetch(packed.index, packed.source, experts)
    engine.dispatcher.forget()


def step(layers: list[Any], batch: Any) -> float:
    """Seconds per layer."""
    import torch

    from ktransformers.experts.operator import apply_experts

    x, ids, weights = batch
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    forget(layers)
    wait()
    start = time.perf_counter()
    for placed, routes in zip(layers, ids, strict=True):
        x = x + 0.1 * apply_experts(placed, x, routes, weights, retain=False)
    wait()
    return (time.perf_counter() - start) / len(layers)


def measure(engines: dict[str, list[Any]], batches: list[Any], warm: float, seconds: float = 1.0) -> dict[str, float]:
    """By policy the median of steps, per layer."""
    for layers in engines.values():
        spent, turns = 0.0, 0
        while turns < 3 or spent < warm:
            spent += LAYERS * step(layers, batches[turns % BATCHES])
            turns += 1
    taken: dict[str, list[float]] = {policy: [] for policy in engines}
    begun, turn = time.perf_counter(), 0
    while turn < 4 or (turn <= 2 * BATCHES and time.perf_counter() - begun < seconds):
        for policy, layers in engines.items():
            taken[policy].append(step(layers, batches[turn % BATCHES]))
        turn += 1
    return {policy: statistics.median(times) for policy, times in taken.items()}


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    os.environ.setdefault("KT_PLACE", "auto")  # the pool leaves a CPU to the thread that launches
    if not torch.cuda.is_available():
        print("residents.py: no CUDA device", file=sys.stderr)
        return 1
    from ktransformers.place.gpu.pinned import RegisteredMemory

    device, shape = torch.device("cuda:0"), SHAPES[args.shape]
    machine = describe_machine() | {"gpu": torch.cuda.get_device_name(device)}
    document: dict[str, Any] = {"bench": "residents", "machine": machine, "shape": shape.name, "skew": args.skew}
    document["cells"] = []
    head = [
        "format",
        "tokens",
        "strategy",
        "share",
        "hits",
        *(f"{policy} ms" for policy in POLICIES),
        "mode",
        "tokens/s",
    ]
    table = Table(head, [8, 6, 9, 5, 5, 11, 7, 8, 8])
    for spec in args.formats:
        made, registered, warm = stores(shape, spec), RegisteredMemory(1 << 62), WAKE
        engines = {policy: engine_of(made, policy, registered, device, shape.top_k) for policy in POLICIES}
        for tokens in map(int, args.tokens):
            routing = Routing(shape, args.skew)
            batches = [batch_of(routing, tokens, device) for _ in range(BATCHES)]
            for strategy in args.strategies:
                for share in map(float, args.shares):
                    if not share and strategy != args.strategies[0]:
                        continue
                    residents = chosen(engines["auto"], strategy, share, routing)
                    for layers in engines.values():
                        place(layers, residents, registered)
                    hits = hit_rate([ids for _, ids, _ in batches], residents)
                    with torch.inference_mode():
                        taken, warm = measure(engines, batches, warm), WARM
                    mode, rate = mode_of(engines["auto"][0].engine, tokens), tokens / (taken["auto"] * MODEL_LAYERS)
                    cell = {"format": spec, "tokens": tokens, "strategy": strategy, "share": share, "hits": hits}
                    cell |= {"layer_s": taken, "tokens_per_s": rate, "mode": mode}
                    document["cells"].append(cell)
                    times = [f"{1e3 * taken[policy]:.2f}" for policy in POLICIES]
                    table.row([spec, str(tokens), strategy, f"{share:.2f}", f"{hits:.2f}", *times, mode, f"{rate:.1f}"])
                    if args.json:
                        save(document, args.json)
        torch.cuda.synchronize()
        registered.close()
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
