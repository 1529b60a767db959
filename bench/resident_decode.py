"""Resident experts of one layer for a few tokens, kernel by kernel: gate and up, down, and the sum of a token's slots.

    python bench/resident_decode.py --formats bf16,int4:32,fp8:128x128 --streams 1,4,16 --json resident_decode.json

Packed bytes are random, tokens take different experts at random; a CUDA graph holds calls with several routings, more
bytes than the L2 cache has. `share` is the time of reading the experts that a call touches, at the rate at which a sum
reads memory in the same run, over the time of the call. `--tiles` W/S: warps of a program, rows of bf16 words of a
warp in a step.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from timing import Table, describe_machine, print_last_line, save

SHAPES = {"qwen3-30b": (128, 2048, 768, 8), "v2-lite": (64, 2048, 1408, 6), "gpt-oss-20b": (32, 2880, 2880, 4)}
HEADS = ("format", "tile", "streams", "experts", "group us", "gate+up us", "down us", "all us", "share")
ROUTINGS = 8  # of one graph


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(SHAPES))
    parser.add_argument("--formats", default="bf16,int4:32,fp8:128x128")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--tiles", default="", help="comma-separated W/S; default: what the server takes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


class Layer:
    def __init__(self, shape: str, spec: str) -> None:
        import torch

        from ktransformers.quantized.gpu.layout import geometry

        experts, hidden, intermediate, self.top_k = SHAPES[shape]
        self.geometry = geometry(experts, hidden, intermediate, True, dict.fromkeys(("gate", "up", "down"), spec))
        sizes = {"dtype": torch.uint8, "device": "cuda"}
        self.first, self.down = (
            torch.randint(0, 255, (experts, matrix.expert_bytes), **sizes)
            for matrix in (self.geometry.first, self.geometry.down)
        )
        self.slot_of = torch.arange(experts, dtype=torch.int32, device="cuda")
        self.counts = torch.zeros(experts, dtype=torch.int32, device="cuda")

    def routings(self, tokens: int) -> list[Any]:
        import torch

        drawn = torch.Generator().manual_seed(tokens)
        experts = self.geometry.experts
        ids = [
            torch.stack([torch.randperm(experts, generator=drawn)[: self.top_k] for _ in range(tokens)])
            for _ in range(ROUTINGS)
        ]
        return [one.cuda() for one in ids]


def seconds_of_graph(call: Any) -> float:
    """Of one replay, the median of 20."""
    import torch

    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    taken = []
    for _ in range(22):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken[2:])


def read_rate() -> float:
    """Bytes/s at which a sum reads the GPU's memory."""
    import torch

    data = torch.zeros(1 << 29, dtype=torch.float32, device="cuda")
    return data.numel() * data.element_size() / seconds_of_graph(data.sum)


def cell(layer: Layer, tokens: int, rate: float) -> dict[str, Any]:
    import torch

    from ktransformers.place.gpu import resident_decode_triton as kernels
    from ktransformers.place.gpu.epilogue import SILU

    sizes, routings = layer.geometry, layer.routings(tokens)
    x = torch.randn(tokens, sizes.hidden, device="cuda").bfloat16()
    h = torch.randn(tokens * layer.top_k, sizes.intermediate, device="cuda").bfloat16()
    weights = torch.rand(tokens, layer.top_k, device="cuda")

    def group(ids: Any) -> Any:
        return kernels.group_routes(ids, layer.slot_of, layer.counts, sizes.first, sizes.down)

    groups = [group(ids) for ids in routings]

    def first() -> None:
        for ids, one in zip(routings, groups, strict=True):
            kernels.first(x, ids, layer.slot_of, layer.first, None, sizes.first, SILU, None, None, one)

    def down() -> None:
        for ids, one in zip(routings, groups, strict=True):
            kernels.down(h, ids, weights, layer.slot_of, layer.down, None, sizes.down, None, torch.bfloat16, one)

    def everything() -> None:
        for ids in routings:
            one = group(ids)
            y = kernels.first(x, ids, layer.slot_of, layer.first, None, sizes.first, SILU, None, None, one)
            kernels.down(y, ids, weights, layer.slot_of, layer.down, None, sizes.down, None, torch.bfloat16, one)

    grouping = seconds_of_graph(lambda: [group(ids) for ids in routings]) if groups[0] is not None else 0.0
    parts = {"group": grouping, "first": seconds_of_graph(first), "down": seconds_of_graph(down)}
    parts["all"] = seconds_of_graph(everything)
    touched = statistics.mean(len(ids.unique()) for ids in routings)
    roof = touched * sizes.expert_bytes / rate
    row = {f"{name}_us": 1e6 * taken / ROUTINGS for name, taken in parts.items()}
    return {"streams": tokens, "experts": touched, "roof_us": 1e6 * roof, **row, "share": 1e6 * roof / row["all_us"]}


@contextmanager
def tile_taken(tile: str) -> Iterator[None]:
    """Other sizes of programs; "" leaves them."""
    from ktransformers.place.gpu import block_products_triton as products

    tile_of = products.tile_of
    if tile:
        warps, rows = map(int, tile.split("/"))
        products.tile_of = lambda tokens: products.Tile(warps, rows)
    try:
        yield
    finally:
        products.tile_of = tile_of


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if not torch.cuda.is_available():
        print("resident_decode.py: no CUDA device", file=sys.stderr)
        return 1
    begun, rate = time.perf_counter(), read_rate()
    document: dict[str, Any] = {
        "bench": "resident_decode",
        "command": shlex.join(["python", "bench/resident_decode.py", *(sys.argv[1:] if argv is None else argv)]),
        "machine": describe_machine() | {"gpu": torch.cuda.get_device_name()},
        "shape": args.shape,
        "read_bytes_per_s": rate,
        "cells": [],
    }
    print(f"the GPU reads {rate / 1e9:.0f} GB/s", flush=True)
    table = Table(HEADS, [12, 7, 7, 7, 8, 10, 8, 8, 6])
    for spec in args.formats.split(","):
        layer = Layer(args.shape, spec)
        for tile in args.tiles.split(","):
            for streams in map(int, args.streams.split(",")):
                try:
                    with tile_taken(tile):
                        row = cell(layer, streams, rate)
                except Exception as error:  # a tile that does not compile leaves the others
                    print(f"{spec} {tile} {streams}: {error!r}"[:300], flush=True)
                    continue
                document["cells"].append({"format": spec, "tile": tile, **row})
                times = [f"{row[name]:.1f}" for name in ("group_us", "first_us", "down_us", "all_us")]
                words = [spec, tile, str(streams), f"{row['experts']:.0f}", *times, f"{row['share']:.0%}"]
                table.row(words)
                if args.json:
                    save(document, args.json)
        del layer
        torch.cuda.empty_cache()
    document["seconds"] = time.perf_counter() - begun
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
