"""Where a layer of experts is best computed: tokens x policy x format, and auto beside the best fixed policy.

    python bench/place.py --formats bf16,int4:32 --tokens 1,512,8192 --json place.json

A step runs forward through several layers, more than the GPU's cache of streamed experts holds, as a server does, and
with `--backward` back through them with LoRA of rank 8, as training does; the time is per layer. Few tokens are routed
differently in every step and find no expert in the cache: with four layers both the GPU's cache and the CPU's caches
would hold the same few experts from step to step, which a model does not do. `auto` decides its mode before the first
step (`plan/modes.py`). Policies take turns within a round, so that drift of the machine affects all of them; in its
turn a policy takes one step untimed and then several in a row. A step ends when its results are there: copies queued
for the next one go on, as they do between steps of training, and count where they are used. The table shows each
policy's median, auto over the best fixed mode, `constant` over it too (a rule without predictions: host_callback up to
32 tokens, else split, in training stream), the bare kernels on tensors in host memory (forward alone), and the
floors: all bytes over PCIe, and all touched bytes out of memory, at the rates measured in the same run; then the mode
of `auto` and the split of a layer in its last pass with known ids: resident experts, streamed, on the CPU. Needs CUDA.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapes import SHAPES, Shape, make_weights
from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

    from ktransformers.nn import ExpertStore
    from ktransformers.place.engine import ExpertEngine
    from ktransformers.place.placed_experts import PlacedExperts

LAYERS = 4
BATCHES = 24  # of few tokens, so that the routing differs from step to step
POLICIES = ("cpu", "stream", "split", "host_callback", "auto")
FORWARD_ALONE = ("split", "host_callback")  # policies that passes with gradients do not have
RANK = 8
SLACK, SLACK_SECONDS = 1.05, 0.2e-3  # auto may be that much slower than the best fixed policy
WARM = 4  # steps before a cell is timed, at least: graphs are captured in the third
WAKE = 0.2  # seconds of them at least: a machine that did nothing takes a while
TURN = 0.06  # seconds of timed steps in one turn, two steps at least


@dataclass(frozen=True)
class Load:
    hidden: torch.Tensor
    routes: list[list[torch.Tensor]]  # ids of each layer, a step each
    weights: torch.Tensor


def parse(argv: list[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b")
    parser.add_argument("--formats", type=words, default=["bf16", "int8", "int4:32"])
    parser.add_argument("--tokens", type=words, default=["1", "16", "128", "512", "2048", "8192", "16384"])
    parser.add_argument(
        "--policies", type=words, default=list(POLICIES), help="of cpu, stream, split, host_callback, auto"
    )
    parser.add_argument("--backward", action="store_true", help="forward and backward with LoRA, else forward alone")
    parser.add_argument("--pin", choices=["map", "stage"], default="map")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a cell, two rounds at least")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


def stores(shape: Shape, spec: str, layers: int = LAYERS) -> list[ExpertStore]:
    from ktransformers.checkpoint.encoder import encode
    from ktransformers.nn import ExpertStore

    found = []
    for seed in range(layers):
        weights = make_weights(shape, seed)
        matrices: dict[str, Any] = {"gate": weights.gate, "up": weights.up, "down": weights.down}
        if spec != "bf16":
            matrices = {name: encode(matrix, spec) for name, matrix in matrices.items()}
        store = ExpertStore(shape.experts, shape.hidden, shape.intermediate, formats=spec)
        store.pack(**matrices)
        found.append(store)
    return found


def engine_of(
    made: list[ExpertStore], policy: str, registered: Any, device: torch.device, top_k: int
) -> list[PlacedExperts]:
    from ktransformers.experts.gate import Gate
    from ktransformers.place.engine import ExpertEngine
    from ktransformers.place.gpu.expert_cache import ExpertCache
    from ktransformers.place.gpu.layer_costs import measured_costs
    from ktransformers.place.placed_experts import PlacedExperts
    from ktransformers.place.placement import CACHED_LAYERS as LAYERS_OF_ROOM
    from ktransformers.place.placement import geometry_of, new_layer

    sizes = geometry_of(made[0])
    cache = ExpertCache(sizes, int(LAYERS_OF_ROOM * sizes.experts), device, registered)
    engine = ExpertEngine(device, policy, cache)
    engine.dispatcher.top_k = top_k
    found = []
    for index, store in enumerate(made):
        layer = new_layer(engine, index, store, Gate("silu"), sizes)
        if not index and policy in ("auto", "split"):
            layer.costs, cache.link_rate = measured_costs(
                layer.packed, store, engine.executor, remeasure=policy == "auto"
            )
            engine.dispatcher.costs = layer.costs
        engine.layers[index] = layer
        found.append(PlacedExperts(engine, layer))
    return found


def load_of(shape: Shape, tokens: int, device: torch.device) -> Load:
    import torch

    from ktransformers.plan.modes import MAX_DECODE_TOKENS

    generator = torch.Generator().manual_seed(tokens)

    def ids() -> torch.Tensor:
        return torch.rand(tokens, shape.experts, generator=generator).topk(shape.top_k).indices.to(device)

    routes = [[ids() for _ in range(LAYERS)] for _ in range(BATCHES if tokens <= MAX_DECODE_TOKENS else 1)]
    hidden = torch.randn(tokens, shape.hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, shape.top_k, generator=generator).softmax(-1)
    return Load(hidden.to(device), routes, weights.to(device))


def lora_of(shape: Shape) -> Any:
    import torch

    from ktransformers.experts.lora import ExpertLora, LoraPair

    def random(*sizes: int) -> torch.Tensor:
        return (torch.randn(*sizes) / sizes[-1] ** 0.5).pin_memory().requires_grad_()

    e, h, i = shape.experts, shape.hidden, shape.intermediate
    wide = LoraPair(random(e, RANK, h), random(e, 2 * i, RANK), 1.0)
    return ExpertLora(gate_up=wide, down=LoraPair(random(e, RANK, i), random(e, h, RANK), 1.0))


def step(layers: list[PlacedExperts], load: Load, factors: Any, backward: bool, turn: int) -> float:
    """Seconds per layer, until the results are there."""
    import torch

    from ktransformers.experts.operator import apply_experts

    routes = load.routes[turn % len(load.routes)]
    if len(load.routes) > 1:
        forget(layers)
    begun = time.perf_counter()
    hidden = load.hidden.detach().requires_grad_(backward)
    with torch.set_grad_enabled(backward):
        x = hidden
        for layer, ids in zip(layers, routes, strict=True):
            x = x + 0.1 * apply_experts(layer, x, ids, load.weights, lora=factors if backward else None)
        if backward:
            x.backward(load.hidden)
    torch.cuda.current_stream().synchronize()
    return (time.perf_counter() - begun) / len(layers)


def forget(layers: list[PlacedExperts]) -> None:
    """What is in the slots, as if there had been many layers since."""
    for placed in layers:
        placed.engine.cache.evict_layer(placed.layer.packed.index)


def rates(layers: list[PlacedExperts]) -> dict[str, float]:
    from ktransformers.place.gpu.layer_costs import link_rate, memory_rate

    first = layers[0]
    return {"link": link_rate(first.layer.packed, first.engine.executor), "memory": memory_rate()}


def bare(made: list[ExpertStore], load: Load) -> float:
    """Seconds per layer of the stores alone, on tensors in host memory, without gradients."""
    hidden, weights = load.hidden.cpu(), load.weights.cpu()
    taken = []
    for turn in range(max(4, len(load.routes))):
        ids = [one.cpu() for one in load.routes[turn % len(load.routes)]]
        begun = time.perf_counter()
        for store, routes in zip(made, ids, strict=True):
            store.forward(hidden, routes, weights)
        taken.append((time.perf_counter() - begun) / len(made))
    return statistics.median(taken[1:])


def mode_of(engine: ExpertEngine, tokens: int, backward: bool = False) -> str:
    """That `auto` has decided for batches of this size."""
    return engine.dispatcher.decision(tokens, backward).mode


def cell(engines: dict[str, list[PlacedExperts]], load: Load, factors: Any, args: argparse.Namespace) -> dict[str, Any]:
    import torch

    warm: dict[str, list[float]] = {policy: [] for policy in engines}
    tokens = load.hidden.shape[0]
    for policy, layers in engines.items():  # kernels are loaded, graphs captured, memory allocated
        times = warm[policy]
        torch.cuda.synchronize()
        while len(times) < WARM or LAYERS * sum(times) < WAKE:
            times.append(step(layers, load, factors, args.backward, len(times)))
    taken: dict[str, list[float]] = {policy: [] for policy in engines}
    begun = time.perf_counter()
    for turn in range(args.rounds):
        if turn >= 2 and time.perf_counter() - begun > args.seconds:
            break
        for policy, layers in engines.items():
            torch.cuda.synchronize()  # the link is nobody's
            step(layers, load, factors, args.backward, turn)
            spent: list[float] = []
            while len(spent) < 2 or LAYERS * sum(spent) < TURN:
                spent.append(step(layers, load, factors, args.backward, turn + len(spent)))
            taken[policy] += spent
    found: dict[str, Any] = {policy: statistics.median(times) for policy, times in taken.items()}
    if "auto" in engines:
        name = "backward" if args.backward else "forward"
        last = [one.layer.last_split.get(name) for one in engines["auto"]]
        splits = [None if one is None else [len(one.resident), len(one.streamed), len(one.cpu)] for one in last]
        found["divisions"], found["division"] = splits, splits[LAYERS // 2]  # the first had a pause before it
        decision = engines["auto"][0].engine.dispatcher.decision(tokens, args.backward)
        found |= {"mode": decision.mode, "predicted": dict(decision.predicted)}
        found["warm"], found["timed"] = warm["auto"], taken["auto"]
    return found


def constant_policy(tokens: int, backward: bool) -> str:
    from ktransformers.plan.modes import MAX_DECODE_TOKENS

    if backward:
        return "stream"
    return "host_callback" if tokens <= MAX_DECODE_TOKENS else "split"


def columns(policies: list[str]) -> list[str]:
    return [
        "format",
        "tokens",
        *(f"{policy} ms" for policy in policies),
        "auto/best",
        "",
        "constant",
        "bare ms",
        "PCIe ms",
        "DRAM ms",
        "steps",
        "mode",
        "division",
    ]


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    os.environ.setdefault("KT_PLACE", "auto")  # the pool leaves a CPU to the thread that launches, for all policies
    if not torch.cuda.is_available():
        print("place.py: no CUDA device", file=sys.stderr)
        return 1
    from ktransformers.ground.pool import default_pool
    from ktransformers.place.gpu.pinned import RegisteredMemory

    device, shape = torch.device("cuda:0"), SHAPES[args.shape]
    document: dict[str, Any] = {
        "bench": "place",
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name(device), "threads": default_pool().threads},
        "shape": shape.name,
        "direction": "both" if args.backward else "forward",
        "pin": args.pin,
        "cells": [],
    }
    policies = [
        policy for policy in POLICIES if policy in args.policies and not (args.backward and policy in FORWARD_ALONE)
    ]
    head = columns(policies)
    table = Table(head, [10, 6, *[8] * len(policies), 8, 4, 8, 7, 7, 7, 5, 13, 12])
    factors = lora_of(shape) if args.backward else None
    for spec in args.formats:
        made = stores(shape, spec)
        registered = RegisteredMemory(1 << 62) if args.pin == "map" else None
        engines = {policy: engine_of(made, policy, registered, device, shape.top_k) for policy in policies}
        measured = rates(next(iter(engines.values())))
        for tokens in map(int, args.tokens):
            load = load_of(shape, tokens, device)
            times = cell(engines, load, factors, args) | {"bare": bare(made, load)}
            touched = statistics.mean(len(set(ids.flatten().tolist())) for routes in load.routes for ids in routes)
            moved = touched * engines[policies[0]][0].layer.packed.geometry.expert_bytes * (2 if args.backward else 1)
            row = {"format": spec, "tokens": tokens, **times, "rates": measured}
            row |= {"pcie": moved / measured["link"], "dram": moved / measured["memory"]}
            fixed = [times[policy] for policy in policies if policy != "auto"]
            if "auto" in times and fixed:
                row["ratio"] = times["auto"] / min(fixed)
                row["within"] = times["auto"] <= max(SLACK * min(fixed), min(fixed) + SLACK_SECONDS)
            if (always := constant_policy(tokens, args.backward)) in times and fixed:
                row["constant"] = times[always] / min(fixed)
            document["cells"].append(row)
            ratio, within, constant = row.get("ratio"), row.get("within"), row.get("constant")
            table.row(
                [
                    spec,
                    str(tokens),
                    *(f"{1e3 * times[policy]:.2f}" for policy in policies),
                    "" if ratio is None else f"{ratio:.2f}",
                    "" if within is None else "ok" if within else "slow",
                    "" if constant is None else f"{constant:.2f}",
                    f"{1e3 * times['bare']:.2f}",
                    f"{1e3 * row['pcie']:.2f}",
                    f"{1e3 * row['dram']:.2f}",
                    str(len(times.get("warm", ()))),
                    times.get("mode", ""),
                    "" if times.get("division") is None else "/".join(map(str, times["division"])),
                ]
            )
            if args.json:
                save(document, args.json)
        if registered is not None:
            torch.cuda.synchronize()
            registered.close()
        del engines, made
        gc.collect()
        torch.cuda.empty_cache()
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
