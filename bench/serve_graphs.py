"""Decoding through the server's own engine, in CUDA graphs and kernel by kernel, experts on the CPU and resident.

    python bench/serve_graphs.py --shares 0,0.25,0.5,1 --streams 1,4,16 --json serve_graphs.json

A model of real layer sizes is made in memory (`e2e_models.py`); no HTTP, no tokenizer. Sequences of `--prompt` tokens
are read, then new tokens are drawn greedily, one a step for each stream; a cell's rate is that of its median step. The
yardstick, kernel by kernel, is measured beside it. `roof` is what memory allows: experts that a step asks for, as many
as differ under even routing, over the rates at which the CPU and the GPU read their memory now, the slower of the two,
and everything else of the model over the GPU's. `pp` is a prompt of `--chunk` tokens, which is never in a graph.

`--adapters N`: streams take turns between N adapters of random numbers, rank 8 on attention and experts, and the base.
All layers have the same numbers, as the experts do. The roof knows nothing of them.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e_models import build_packed, recipes
from timing import Table, describe_machine, print_last_line, save

READ = 1 << 31  # bytes of the GPU that are read to learn its rate
RANK = 8
HEADS = ("residents", "streams", "launched t/s", "graph t/s", "ratio", "graph ms", "roof t/s", "of roof", "note")


def numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(recipes()))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--format", default="int4:32", help="of the experts")
    parser.add_argument("--policy", default="auto", help="of the placement; auto is the server's own")
    parser.add_argument("--shares", type=numbers, default=[0, 0.25, 0.5, 1], help="of residents; default 0,0.25,0.5,1")
    parser.add_argument("--streams", type=numbers, default=[1, 4, 16], help="default 1,4,16")
    parser.add_argument(
        "--adapters", type=int, default=0, metavar="N", help="that streams have beside the base; default 0"
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens before an answer")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prompt that is measured")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a cell and way")
    parser.add_argument(
        "--disable-overlap-schedule", action="store_true", help="launch a step when the one before has been read"
    )
    parser.add_argument("--device", default="cuda", help="cpu: everything is computed again in place of graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


class Mute:
    """Nobody reads the answers."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "." * len(tokens)


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from ktransformers.place import attach
        from ktransformers.serve.scheduler.forward import make_forward

        self.args, self.device = args, torch.device(args.device)
        recipe = replace(recipes()[args.shape], layers=args.layers, vocabulary=args.vocabulary)
        self.model = build_packed(recipe, self.device, args.format)
        self.forward = make_forward(self.model)
        given = "cpu" if self.device.type == "cpu" else None
        placement = attach(self.model, policy=args.policy, device=given)
        assert placement is not None and not placement.left, placement
        self.placement = placement
        self.experts = placement.layers[0].packed.geometry.experts
        self.top_k = int(self.model.config.num_experts_per_tok)
        self.expert_bytes = placement.layers[0].packed.geometry.expert_bytes
        self.adapters = [self.adapter(recipe.attention, seed) for seed in range(args.adapters)]
        parts = [one for name, one in self.model.named_parameters() if ".experts." not in name]
        embedding = self.model.get_input_embeddings().weight
        self.rest_bytes = sum(one.numel() * one.element_size() for one in parts if one is not embedding)

    def adapter(self, attention: tuple[str, ...], seed: int) -> Any:
        import torch

        from ktransformers.adapters import LoraPair, adapter_from_tensors
        from ktransformers.experts.contract import expert_modules
        from ktransformers.serve.scheduler.lora import LoraModules

        drawn = torch.Generator().manual_seed(seed)

        @functools.cache
        def pair(outputs: int, inputs: int, *experts: int) -> LoraPair:
            a = torch.randn(*experts, RANK, inputs, generator=drawn) * inputs**-0.5
            return LoraPair(a, torch.randn(*experts, outputs, RANK, generator=drawn) * 0.02, 2.0)

        if seed == 0:
            self.places = LoraModules(self.model)
        sizes = self.placement.layers[0].packed.geometry
        wide = pair(sizes.intermediate, sizes.hidden, self.experts)
        roles = {"gate": wide, "up": wide, "down": pair(sizes.hidden, sizes.intermediate, self.experts)}
        experts = {name.removesuffix(".experts"): roles for name in expert_modules(self.model)}
        linears = {
            name: pair(module.out_features, module.in_features)
            for name, module in self.model.named_modules()
            if name.rpartition(".")[2] in attention
        }
        return self.places.bind(adapter_from_tensors(experts, linears), "random", f"a{seed}", 1)

    def graphs(self) -> Any:
        from ktransformers.serve.graphs.step_graphs import Compute, StepGraphs

        def record(compute: Compute) -> Compute:
            def again() -> Any:
                with self.placement.capture_warmup():
                    return compute()

            return again

        overlap = not self.args.disable_overlap_schedule
        return StepGraphs(self.model, self.placement, record if self.device.type == "cpu" else None, overlap=overlap)

    def engine(self, streams: int, new: int) -> Any:
        from ktransformers.serve.sampling.sampling import Sampling
        from ktransformers.serve.scheduler.engine import ServeEngine
        from ktransformers.serve.scheduler.scheduler import Limits
        from ktransformers.serve.scheduler.sequence import Event, GenerationRequest, Sequence

        def hear(event: Event) -> None:
            if event.error:
                raise SystemExit(event.error)

        room = self.args.chunk + self.args.prompt + new + 64
        engine = ServeEngine(self.forward, Limits(streams, streams, self.args.chunk, streams * 2 * room, room))
        vocabulary, length = self.args.vocabulary, self.args.prompt if new else self.args.chunk
        for stream in range(streams):
            prompt = tuple((stream * 7919 + 31 * at * at + at) % vocabulary for at in range(length))
            adapter = [*self.adapters, None][stream % (len(self.adapters) + 1)]
            ask = GenerationRequest(prompt, max(1, new), Sampling(temperature=0), adapter=adapter)
            engine.submit([Sequence(ask, Mute(), hear)])
        return engine

    def prompt_rate(self) -> float:
        """Tokens/s of one prompt."""
        taken = []
        for _ in range(3):
            engine, begun = self.engine(1, 0), time.perf_counter()
            while engine.busy:
                engine.step()
            taken.append(time.perf_counter() - begun)
        return float(self.args.chunk / min(taken[1:]))

    def step_seconds(self, streams: int, graphs: Any) -> list[float]:
        """Of steps in which every stream has a new token."""
        self.forward.graphs = graphs
        engine, taken, warm = self.engine(streams, 4096), list[float](), 8
        while any(not one.prompt_computed for one in engine.running) or not engine.running:
            engine.step()
        begun = time.perf_counter()
        while len(taken) < warm + 4 or time.perf_counter() - begun < self.args.seconds:
            start = time.perf_counter()
            engine.step()
            taken.append(time.perf_counter() - start)
            if len(taken) == warm:
                begun = time.perf_counter()
        self.forward.graphs = None
        if graphs is not None:
            graphs.drop_ahead()
        return taken[warm:]

    def rates(self) -> tuple[float, float]:
        """Bytes/s that the CPU and the GPU read."""
        import torch

        from ktransformers.ground.pool import default_pool

        pool = default_pool()
        host = max(pool.rate("read", 0.2, threads=pool.threads, bytes=(1 << 30) // pool.threads) for _ in range(2))
        if self.device.type == "cpu":
            return host, host
        data = torch.zeros(READ // 4, dtype=torch.float32, device=self.device)
        taken = []
        for _ in range(5):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            data.sum()
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - begun)
        return host, READ / min(taken)

    def roof_seconds(self, streams: int, share: float, host: float, gpu: float) -> float:
        wanted = self.experts * (1 - (1 - self.top_k / self.experts) ** streams) * self.expert_bytes
        layer = max(wanted * (1 - share) / host, wanted * share / gpu)
        return layer * len(self.placement.layers) + self.rest_bytes / gpu


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        print("serve_graphs.py: no CUDA device; --device cpu only shows that it runs", file=sys.stderr)
        return 1
    begun = time.perf_counter()
    bench = Bench(args)
    host, gpu = bench.rates()
    document: dict[str, Any] = {
        "bench": "serve_graphs",
        "command": shlex.join(["python", "bench/serve_graphs.py", *(sys.argv[1:] if argv is None else argv)]),
        "machine": describe_machine(),
        "shape": args.shape,
        "layers": args.layers,
        "format": args.format,
        "adapters": args.adapters,
        "overlap": not args.disable_overlap_schedule,
        "read_bytes_per_s": {"host": host, "gpu": gpu},
        "seconds_to_build": time.perf_counter() - begun,
        "prompts": [],
        "cells": [],
    }
    if bench.device.type == "cuda":
        document["machine"]["gpu"] = torch.cuda.get_device_name(bench.device)
    print(f"host reads {host / 1e9:.0f} GB/s, GPU {gpu / 1e9:.0f} GB/s; built in {document['seconds_to_build']:.0f} s")
    table = Table(HEADS, [9, 7, 12, 9, 6, 8, 8, 7, 20])
    for share in args.shares:
        bench.placement.place_residents(ratio=share)
        graphs = bench.graphs()
        rate = bench.prompt_rate()
        document["prompts"].append({"share": share, "tokens": args.chunk, "tokens_per_second": rate})
        table.row([f"{share:.0%}", "1", f"pp{args.chunk}: {rate:.0f}", *[""] * 6])
        for streams in map(int, args.streams):
            before = graphs.replayed
            ways = {"launched": bench.step_seconds(streams, None), "graph": bench.step_seconds(streams, graphs)}
            middle = {way: statistics.median(taken) for way, taken in ways.items()}
            roof = bench.roof_seconds(streams, share, host, gpu)
            captured = graphs.replayed - before >= len(ways["graph"])
            row = {"share": share, "streams": streams, "captured": captured, "roof_tokens_per_s": streams / roof}
            row |= {f"{way}_seconds": taken for way, taken in middle.items()}
            row |= {f"{way}_tokens_per_s": streams / taken for way, taken in middle.items()}
            document["cells"].append(row)
            rates = [f"{streams / middle[way]:.1f}" for way in ways]
            words = [f"{middle['launched'] / middle['graph']:.2f}", f"{1e3 * middle['graph']:.2f}"]
            words += [f"{streams / roof:.0f}", f"{roof / middle['graph']:.0%}", "" if captured else "not captured"]
            table.row([f"{share:.0%}", str(streams), *rates, *words])
            if args.json:
                save(document, args.json)
    document["seconds"] = time.perf_counter() - begun
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
