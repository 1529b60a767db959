"""Deferred experts and dynamic expert update while decoding with residents: what they gain and what they cost.

    python bench/deferral.py --json deferral.json
    python bench/deferral.py --deferred 0,2 --shares 0.25 --update-shares ""  # the first part alone, shorter

Part one, deferred experts (`kt_max_deferred_experts_per_token`), through the server's own engine (`serve_graphs.py`
builds the model): for every share of residents, number of streams and number of deferred experts the median decoding
step, in alternating rounds. The yardsticks of the same run are no deferral in a CUDA
graph, which deferral rules out, and the bytes of a step over the rates of memory. Errors are those of a second pass in
which the same prompts and the same new tokens are given to the model (teacher forcing) with and without deferral:
relative error of every layer's output and of the logits, KL divergence of the next token's distribution, share of
equal most likely tokens. The row 0 is a repeated pass, so it shows what the order of sums contributes. Weights are
random: routing weights are nearly even, so the last experts of a token weigh more here than in a trained model.

Part two, dynamic update (`kt_enable_dynamic_expert_update`) against static placement, through layers of the same
model without attention (`residents.py`): a request is a prompt, streamed whole, and new tokens, one a step, whose
residents the GPU computes. Both placements start with the experts that were most frequent; the dynamic one takes the
busiest experts of each prompt. Routing is even, or Zipf (`--skew`) whose popular experts move every `--move-every`
requests. `pays from` is the number of new tokens of a request from which on the time that the update adds to the prompt
is made up for.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import serve_graphs
from arguments import fractions, numbers
from e2e_models import recipes
from place import engine_of
from residents import Routing, batch_of, chosen, hit_rate, place, step
from shapes import Shape
from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

ROUNDS = 2
PLACEMENTS = ("static", "dynamic")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(recipes()))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--format", default="int4:32", help="of the experts")
    parser.add_argument("--policy", default="resident", help="of the placement in part one")
    parser.add_argument("--device", default="cuda", help="cpu only shows that it runs")
    parser.add_argument("--shares", type=fractions, default=[0.0, 0.25, 0.5], help="default 0,0.25,0.5")
    parser.add_argument("--deferred", type=numbers, default=[0, 1, 2, 3, 4], help="default 0,1,2,3,4")
    parser.add_argument("--streams", type=numbers, default=[1, 4], help="default 1,4")
    parser.add_argument("--prompt", type=int, default=128, help="tokens before an answer, in part one")
    parser.add_argument("--steps", type=int, default=16, help="new tokens of a sequence that errors are taken over")
    parser.add_argument("--seconds", type=float, default=0.25, help="of timed steps of a cell in each round")
    parser.add_argument(
        "--update-shares",
        type=fractions,
        default=[0.1, 0.25, 0.4, 0.7],
        help="default 0.1,0.25,0.4,0.7; empty: none",
    )
    parser.add_argument("--update-layers", type=int, default=4, help="that part two goes through")
    parser.add_argument("--skew", type=float, default=1.2, help="popularity of rank n falls as 1 / n^skew")
    parser.add_argument("--requests", type=int, default=128, help="under skewed routing; under even routing a quarter")
    parser.add_argument("--move-every", type=int, default=64, help="requests after which other experts are popular")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt in part two")
    parser.add_argument("--new", type=int, default=8, help="new tokens of a request in part two")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    args = parser.parse_args(argv)
    if 0 not in args.deferred:
        parser.error("--deferred: expected 0 among them, which the others are compared with")
    if args.update_shares and args.update_layers > args.layers:
        parser.error(f"--update-layers: expected at most the {args.layers} of --layers")
    return args


# Part one: deferred experts.


def model_bench(args: argparse.Namespace) -> Any:
    """The model, its placement and the server's engine."""
    options = ["--shape", args.shape, "--layers", args.layers, "--vocabulary", args.vocabulary, "--format", args.format]
    options += ["--policy", args.policy, "--prompt", args.prompt, "--seconds", args.seconds, "--device", args.device]
    return serve_graphs.Bench(serve_graphs.parse([str(word) for word in options]))


@contextmanager
def stock_attention(bench: Any) -> Iterator[None]:
    """The model is called as transformers does it, with a cache of transformers' own."""
    served = bench.model.config._attn_implementation
    bench.model.set_attn_implementation(bench.forward.stock_attention)
    try:
        yield
    finally:
        bench.model.set_attn_implementation(served)


@dataclass(frozen=True)
class Trace:
    """What a forced pass gave for every new token."""

    hidden: torch.Tensor  # [layers, tokens, H]: outputs of decoder layers, the last one normalised
    logits: torch.Tensor  # [tokens, V]


def forced(bench: Any, streams: int, deferred: int, prompt: int, steps: int) -> Trace:
    """Prompts without deferral, then the same new tokens in every pass, one a step for each sequence."""
    import torch
    from transformers import DynamicCache

    model, vocabulary = bench.model, bench.args.vocabulary
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(vocabulary, (streams, prompt + steps), generator=generator).to(bench.device)
    hidden, logits, cache = [], [], DynamicCache(config=model.config)
    with torch.inference_mode(), stock_attention(bench):
        bench.placement.defer(0)
        model(tokens[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
        bench.placement.defer(deferred)
        for at in range(prompt, prompt + steps):
            given = {"past_key_values": cache, "use_cache": True, "output_hidden_states": True}
            out = model(tokens[:, at : at + 1], **given)
            hidden.append(torch.stack([one[:, -1].float().cpu() for one in out.hidden_states[1:]]))
            logits.append(out.logits[:, -1].float().cpu())
        bench.placement.defer(0)
    return Trace(torch.cat(hidden, dim=1), torch.cat(logits))


def errors(got: Trace, want: Trace) -> dict[str, Any]:
    def relative(mine: torch.Tensor, exact: torch.Tensor) -> float:
        return float((mine - exact).norm() / exact.norm())

    exact, mine = want.logits.log_softmax(-1), got.logits.log_softmax(-1)
    layers = [relative(one, other) for one, other in zip(got.hidden, want.hidden, strict=True)]
    return {
        "layer_error": statistics.mean(layers),
        "layer_errors": layers,
        "logits_error": relative(got.logits, want.logits),
        "kl": float((exact.exp() * (exact - mine)).sum(-1).mean()),
        "top1_equal": float((mine.argmax(-1) == exact.argmax(-1)).float().mean()),
    }


def step_times(
    bench: Any, streams: int, deferred: list[int], graphs: Any
) -> tuple[dict[int, list[float]], list[float]]:
    """Seconds of decoding steps by deferred experts, and without deferral in a graph, in alternating rounds."""
    taken: dict[int, list[float]] = {count: [] for count in deferred}
    captured: list[float] = []
    for _ in range(ROUNDS):
        for count in deferred:
            bench.placement.defer(count)
            taken[count] += bench.step_seconds(streams, None)
        bench.placement.defer(0)
        captured += bench.step_seconds(streams, graphs)
    return taken, captured


def measure_deferral(bench: Any, args: argparse.Namespace, document: dict[str, Any]) -> None:
    host, gpu = bench.rates()
    document["read_bytes_per_s"] = {"host": host, "gpu": gpu}
    heads = ["residents", "streams", "deferred", "t/s", "ms/layer", "gain", "graph t/s", "roof t/s", "of roof"]
    heads += ["layer error", "logits error", "KL", "same top-1"]
    table = Table(heads, [9, 7, 8, 8, 8, 6, 9, 8, 7, 11, 12, 9, 10])
    for share in args.shares:
        bench.placement.place_residents(ratio=share)
        graphs = bench.graphs()
        for streams in args.streams:
            before = graphs.replayed
            times, captured = step_times(bench, streams, args.deferred, graphs)
            exact = forced(bench, streams, 0, args.prompt, args.steps)
            roof, in_graph = bench.roof_seconds(streams, share, host, gpu), statistics.median(captured)
            base = statistics.median(times[0])
            for deferred, taken in times.items():
                seconds = statistics.median(taken)
                cell: dict[str, Any] = {"share": share, "streams": streams, "deferred": deferred, "step_s": seconds}
                cell |= {"tokens_per_s": streams / seconds, "layer_s": seconds / args.layers, "gain": base / seconds}
                cell |= {"graph_tokens_per_s": streams / in_graph, "roof_tokens_per_s": streams / roof}
                cell["captured"] = graphs.replayed > before
                cell |= errors(forced(bench, streams, deferred, args.prompt, args.steps), exact)
                document["cells"].append(cell)
                table.row(
                    [
                        f"{share:.0%}",
                        str(streams),
                        str(deferred),
                        f"{cell['tokens_per_s']:.1f}",
                        f"{1e3 * cell['layer_s']:.3f}",
                        f"{cell['gain']:.2f}",
                        f"{cell['graph_tokens_per_s']:.1f}",
                        f"{cell['roof_tokens_per_s']:.0f}",
                        f"{roof / seconds:.0%}",
                        f"{cell['layer_error']:.4f}",
                        f"{cell['logits_error']:.4f}",
                        f"{cell['kl']:.2e}",
                        f"{cell['top1_equal']:.0%}",
                    ]
                )
                if args.json:
                    save(document, args.json)


# Part two: dynamic update against static placement.


@dataclass
class Phase:
    """Requests between two moves of the popular experts: what each placement took, per layer."""

    prefill: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PLACEMENTS})
    decode: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PLACEMENTS})
    hits: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PLACEMENTS})
    replaced: list[int] = field(default_factory=list)  # residents that a request has exchanged, of all layers

    def cell(self) -> dict[str, Any]:
        times = {
            what: {name: statistics.median(taken) for name, taken in by.items()}
            for what, by in (("prefill_s", self.prefill), ("decode_s", self.decode))
        }
        added = times["prefill_s"]["dynamic"] - times["prefill_s"]["static"]
        saved = times["decode_s"]["static"] - times["decode_s"]["dynamic"]
        pays = 0 if added <= 0 <= saved else math.ceil(added / saved) if saved > 0 else None
        hits = {name: statistics.mean(rates) for name, rates in self.hits.items()}
        return {**times, "hits": hits, "replaced": statistics.mean(self.replaced), "pays_from": pays}


def placements_of(bench: Any, args: argparse.Namespace, registered: Any) -> dict[str, list[Any]]:
    """Two engines over the first layers of the model; prompts are streamed, new tokens use the residents."""
    made = [layer.store for layer in bench.placement.layers[: args.update_layers]]
    placements = {
        name: engine_of(made, "resident", registered, bench.device, bench.placement.engines[0].dispatcher.top_k)
        for name in PLACEMENTS
    }
    for name, layers in placements.items():
        layers[0].engine.dispatcher.threshold = args.chunk
        for placed in layers:
            placed.updates_residents = name == "dynamic"
    return placements


def serve_request(placements: dict[str, list[Any]], routing: Routing, args: argparse.Namespace, phase: Phase) -> None:
    """One prompt and its new tokens through both placements, one after the other."""
    device = next(iter(placements.values()))[0].device
    prompt = batch_of(routing, args.chunk, device)
    tokens = [batch_of(routing, 1, device) for _ in range(args.new)]
    for name, layers in placements.items():
        before = [placed.residents() for placed in layers]
        phase.prefill[name].append(step(layers, prompt))
        phase.decode[name] += [step(layers, token) for token in tokens]
        after = [placed.residents() for placed in layers]
        phase.hits[name].append(hit_rate([ids for _, ids, _ in tokens], after))
        if name == "dynamic":
            phase.replaced.append(sum(len(new - old) for new, old in zip(after, before, strict=True)))


def measure_update(bench: Any, shape: Shape, args: argparse.Namespace, document: dict[str, Any]) -> None:
    import torch

    from ktransformers.place.gpu.pinned import RegisteredMemory

    registered = RegisteredMemory(1 << 62) if bench.device.type == "cuda" else None
    placements = placements_of(bench, args, registered)
    heads = ["routing", "residents", "requests", "prefill ms", "dynamic", "decode ms", "dynamic", "gain", "hits"]
    heads += ["dynamic", "replaced", "pays from"]
    table = Table(heads, [9, 9, 9, 10, 7, 9, 7, 5, 5, 7, 8, 9])
    kinds = {"even": (0.0, max(1, args.requests // 4)), f"Zipf {args.skew:g}": (args.skew, args.requests)}
    for kind, (skew, requests) in kinds.items():
        for share in args.update_shares:
            routing = Routing(shape, skew, args.update_layers)
            residents = chosen(placements["static"], "frequency", share, routing)
            for layers in placements.values():
                place(layers, residents, registered)
            with torch.inference_mode():
                serve_request(placements, routing, args, Phase())  # kernels are loaded, buffers are at hand
                for first in range(0, requests, args.move_every):
                    last, phase = min(requests, first + args.move_every), Phase()
                    if first:
                        routing.move()
                    for _ in range(first, last):
                        serve_request(placements, routing, args, phase)
                    cell = {"routing": kind, "share": share, "first": first, "requests": last - first, **phase.cell()}
                    document["updates"].append(cell)
                    before, after = cell["prefill_s"], cell["decode_s"]
                    times = [f"{1e3 * by[name]:.2f}" for by in (before, after) for name in PLACEMENTS]
                    hits = [f"{cell['hits'][name]:.2f}" for name in PLACEMENTS]
                    pays = "never" if cell["pays_from"] is None else str(cell["pays_from"])
                    row = [kind, f"{share:.0%}", f"{first}-{last - 1}", *times]
                    row += [f"{after['static'] / after['dynamic']:.2f}", *hits, f"{cell['replaced']:.1f}", pays]
                    table.row(row)
                    if args.json:
                        save(document, args.json)
    if registered is not None:
        torch.cuda.synchronize()
        registered.close()


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        print("deferral.py: no CUDA device; --device cpu only shows that it runs", file=sys.stderr)
        return 1
    os.environ.setdefault("KT_PLACE", "resident")  # the pool leaves a CPU to the thread that launches
    begun = time.perf_counter()
    bench = model_bench(args)
    document: dict[str, Any] = {
        "bench": "deferral",
        "command": shlex.join(["python", "bench/deferral.py", *(sys.argv[1:] if argv is None else argv)]),
        "machine": describe_machine(),
        **{key: getattr(args, key) for key in ("shape", "layers", "format", "policy", "prompt", "steps")},
        **{key: getattr(args, key) for key in ("update_layers", "skew", "move_every", "chunk", "new")},
        "seconds_to_build": time.perf_counter() - begun,
        "cells": [],
        "updates": [],
    }
    if bench.device.type == "cuda":
        document["machine"]["gpu"] = torch.cuda.get_device_name(bench.device)
    print(f"{args.layers} layers of {args.shape} in {args.format}, built in {document['seconds_to_build']:.0f} s")
    measure_deferral(bench, args, document)
    bench.forward.graphs = None
    bench.placement.detach()  # host memory is registered with the driver once
    gc.collect()
    if args.update_shares:
        print()
        sizes = bench.placement.layers[0].packed.geometry
        shape = Shape(args.shape, sizes.hidden, sizes.intermediate, sizes.experts, bench.top_k)
        measure_update(bench, shape, args, document)
    document["seconds"] = time.perf_counter() - begun
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
