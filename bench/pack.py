"""How fast weights are encoded and packed: formats x threads, beside what the memory reads in the same run.

    python bench/pack.py --formats bf16,int4:32,q4_k --threads 1,2 --json pack.json

A cell holds some experts of one layer. `encode` converts their bf16 weights as `kt quant` does (`recode`: codes, scales
and the error that they add), one matrix at a time on each thread; its rate counts bytes of bf16. `fresh` packs them
into the memory of a new store, which the kernel has to map and clear, `again` into the same memory once more; their
rates count the bytes of the source in its own format. `read` is the rate at which the same threads read memory, taken
before every format, and the columns behind the rates are their shares of it. Packing reads every byte once and writes
it once, and fresh memory is written twice. Formats without an encoder are packed from random blocks.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import numbers, words
from shapes import SHAPES, Shape, make_weights
from timing import READ_BYTES, Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

    from ktransformers import _core
    from ktransformers.checkpoint.recode import Weight

DEFAULT_FORMATS = (
    "bf16", "int8", "int4:32", "int4:128", "fp8:128x128", "fp8:row", "mxfp8", "mxfp4", "nvfp4", "q8_0", "q4_0", "q4_1",
    "q5_0", "q5_1", "tq1_0", "tq2_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq3_s",
)  # fmt: skip
HEADS = ("format", "threads", "encode GB/s", "of read", "fresh GB/s", "of read", "again GB/s", "of read", "read GB/s")
RATES = ("encode", "fresh", "again")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b")
    parser.add_argument("--formats", type=words, default=list(DEFAULT_FORMATS))
    parser.add_argument("--threads", type=numbers, default=[], help="default: one, and all of the default pool")
    parser.add_argument("--experts", type=int, default=16, help="packed at a time")
    parser.add_argument("--encoded", type=int, default=2, help="experts that are encoded; the others repeat them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def written(spec: str) -> bool:
    from ktransformers import _core

    return bool(_core.format(spec)["written"])


def encode_seconds(plain: dict[str, torch.Tensor], spec: str, threads: int, rounds: int) -> float:
    """The median of rounds, in each of which every matrix of `plain` is encoded."""
    from ktransformers.checkpoint.recode import recode, single_threaded_workers

    matrices = [matrix[e : e + 1] for matrix in plain.values() for e in range(len(matrix))]
    with single_threaded_workers(threads, "pack") as workers:
        list(workers.map(lambda matrix: recode(matrix, spec, "warm-up"), matrices[:threads]))
        taken = [
            seconds(lambda: list(workers.map(lambda matrix: recode(matrix, spec, "matrix"), matrices)))
            for _ in range(rounds)
        ]
    return statistics.median(taken)


def made_up(spec: str, plain: dict[str, torch.Tensor], experts: int) -> dict[str, Weight]:
    """All experts in the format, in memory of their own: the first ones as encoded, the others repeat them."""
    from formats import random_blocks, repeated

    from ktransformers.checkpoint.encoder import encode

    if spec == "bf16":
        return {role: matrix.repeat(-(-experts // len(matrix)), 1, 1)[:experts] for role, matrix in plain.items()}
    few = {
        role: encode(matrix, spec) if written(spec) else random_blocks(spec, len(matrix), *matrix.shape[1:])
        for role, matrix in plain.items()
    }
    return {role: repeated(matrix, experts) for role, matrix in few.items()}


def pack_seconds(
    shape: Shape, spec: str, matrices: dict[str, Weight], pool: _core.Pool, rounds: int
) -> tuple[float, float]:
    """(into fresh memory, into the same memory again), medians of rounds."""
    from ktransformers.nn import ExpertStore

    experts = next(iter(matrices.values())).shape[0] if spec == "bf16" else matrices["up"].experts  # type: ignore[union-attr]
    fresh, again = [], []
    for _ in range(rounds):
        store = ExpertStore(experts, shape.hidden, shape.intermediate, pool=pool, formats=spec)
        fresh.append(seconds(lambda store=store: store.pack(**matrices)))  # type: ignore[misc, arg-type]
        again.append(seconds(lambda store=store: store.pack(**matrices)))  # type: ignore[misc, arg-type]
    return statistics.median(fresh), statistics.median(again)


def measure(
    shape: Shape, spec: str, plain: dict[str, torch.Tensor], pool: _core.Pool, args: argparse.Namespace
) -> dict[str, Any]:
    read = pool.rate("read", 0.1, bytes=READ_BYTES // 4 // pool.threads) / 1e9
    cell: dict[str, Any] = {"format": spec, "threads": pool.threads, "read_gbs": read}
    if spec != "bf16" and written(spec):
        size = sum(matrix.nbytes for matrix in plain.values())
        cell["encode_gbs"] = size / encode_seconds(plain, spec, pool.threads, args.rounds) / 1e9
    matrices = made_up(spec, plain, args.experts)
    size = sum(matrix.nbytes if spec == "bf16" else matrix.bytes for matrix in matrices.values())  # type: ignore[union-attr]
    fresh, again = pack_seconds(shape, spec, matrices, pool, args.rounds)
    cell |= {"bytes": size, "fresh_gbs": size / fresh / 1e9, "again_gbs": size / again / 1e9}
    return cell | {f"{name}_ratio": cell[f"{name}_gbs"] / read for name in RATES if f"{name}_gbs" in cell}


def main(argv: list[str] | None = None) -> int:
    from ktransformers import _core
    from ktransformers.ground.pool import default_pool

    args = parse(argv)
    shape = SHAPES[args.shape]
    threads = args.threads or sorted({1, default_pool().threads})
    few = Shape(shape.name, shape.hidden, shape.intermediate, args.encoded, 1)
    weights = make_weights(few)
    plain = {"gate": weights.gate, "up": weights.up, "down": weights.down}
    document: dict[str, Any] = {"bench": "pack", "machine": describe_machine(), "shape": shape.name}
    document |= {"experts": args.experts, "cells": []}
    table = Table(HEADS, [11, 7, 11, 7, 10, 7, 10, 7, 9])
    for count in threads:
        pool = _core.Pool(threads=count, groups=1)
        for spec in args.formats:
            cell = measure(shape, spec, plain, pool, args)
            document["cells"].append(cell)
            rates = [
                text
                for name in RATES
                for text in (f"{cell.get(f'{name}_gbs', 0):.2f}", f"{100 * cell.get(f'{name}_ratio', 0):.0f} %")
            ]
            table.row([spec, str(count), *rates, f"{cell['read_gbs']:.1f}"])
            if args.json:
                save(document, args.json)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
