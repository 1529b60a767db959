"""Time of one layer of experts in few bits over that of bf16, on one thread of a machine that other programs use too.

    python bench/format_ratios.py --isa avx512_vnni,avx512,avx2 --rows 8,32 --json formats-ratios.json

Every round calls all formats in turn, and a ratio is the median over rounds of a format's CPU time over that of bf16 in
the same round: what other programs take from this one is in both. Eight experts of the sizes of `--shape` have `--rows`
rows of the batch each. Forward is inference; with LoRA of rank 8, forward keeps gate and up, and backward uses them.
Formats of GGUF hold random blocks. For absolute times and roofs: `formats.py`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from arguments import numbers, words
from formats import BLOCK_SCALES, MODES, make_source
from shapes import SHAPES, make_weights
from sweeps import ALPHA, RANK, make_lora
from timing import Table, Watch, describe_machine, print_last_line, save

EXPERTS = 8
FORMATS = ("int8", "int4:32", "q4_k", "q6_k", "mxfp4", "fp8:128x128")
HEADS = ("isa", "rows", "mode", "format", "ms", "of bf16", "spread")
WIDTHS = (11, 4, 13, 13, 9, 7, 6)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(SHAPES))
    parser.add_argument("--isa", type=words, default=[""], help="CPU variants; default: the best one")
    parser.add_argument("--formats", type=words, default=list(FORMATS), help=f"default {','.join(FORMATS)}")
    parser.add_argument("--rows", type=numbers, default=[8, 32], help="of each expert, default 8,32")
    parser.add_argument("--modes", type=words, default=["forward", *MODES], help="forward, forward_lora, backward_lora")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    args = parser.parse_args(argv)
    if unknown := set(args.modes) - {"forward", *MODES}:
        parser.error(f"--modes: {', '.join(sorted(unknown))}, expected forward, {', '.join(MODES)}")
    if min([*args.rows, args.rounds]) < 1:
        parser.error("counts are at least 1")
    return args


class Layer:
    """Experts in one format with LoRA, and a batch of `rows` rows of each."""

    def __init__(self, pool: Any, shape: Any, weights: Any, isa: str, format: str) -> None:
        from ktransformers.experts.lora import ExpertLora, LoraPair, empty_gradients, packed_adapter
        from ktransformers.nn import ExpertStore

        sizes = (shape.experts, shape.hidden, shape.intermediate)
        self._store = ExpertStore(*sizes, pool=pool, isa=isa or None, formats=format)
        matrices = make_source(shape, weights, format, shape.experts).matrices
        given = {"gate": weights.gate, "up": weights.up, "down": weights.down} if matrices is None else matrices
        self._store.pack(**given)
        made = make_lora(shape)
        gate, up, down = (LoraPair(made[f"{n}_a"], made[f"{n}_b"], ALPHA / RANK) for n in ("gate", "up", "down"))
        factors = ExpertLora(gate=gate, up=up, down=down)
        self._gradients, targets = empty_gradients(factors)
        self._targets, self._adapters = [targets], [packed_adapter(self._store, factors)]
        self._factors = factors  # the adapter reads them

    def set_batch(self, shape: Any, rows: int) -> None:
        import torch

        tokens = rows * shape.experts
        self._hidden = torch.randn(tokens, shape.hidden, generator=torch.Generator().manual_seed(rows)).bfloat16()
        self._ids = torch.arange(tokens).view(-1, 1) % shape.experts
        self._weights, self._out = torch.ones(tokens, 1), torch.empty_like(self._hidden)
        self._keep = self._store.new_keep(tokens, 1)

    def call(self, mode: str) -> None:
        batch = (self._hidden, self._ids, self._weights)
        if mode == "forward":
            self._store.forward(*batch, out=self._out)
        elif mode == "forward_lora":
            self._store.forward(*batch, out=self._out, keep=self._keep, adapters=self._adapters)
        else:
            self._store.backward(self._out, *batch, keep=self._keep, adapters=self._adapters, factors=self._targets)

    def seconds(self, mode: str) -> float:
        start = time.thread_time()
        self.call(mode)
        return time.thread_time() - start


def measure(args: argparse.Namespace, layers: dict[str, Layer], isa: str, rows: int, mode: str) -> list[dict[str, Any]]:
    for layer in layers.values():
        for needed in ("forward_lora", mode):  # backward reads what forward kept
            layer.call(needed)
    watch, samples = Watch(), {format: list[float]() for format in layers}
    for _ in range(args.rounds):
        for format, layer in layers.items():
            samples[format].append(layer.seconds(mode))
    foreign, cells = watch.foreign(), []
    for format, seconds in samples.items():
        ratios = [own / other for own, other in zip(seconds, samples["bf16"], strict=True)]
        cells.append(
            {
                "isa": isa,
                "rows": rows,
                "mode": mode,
                "format": format,
                "ms": 1e3 * statistics.median(seconds),
                "ratio": statistics.median(ratios),
                "spread": max(ratios) - min(ratios),
                "foreign": foreign,
            }
        )
    return cells


def run(args: argparse.Namespace, document: dict[str, Any]) -> None:
    from ktransformers import _core

    shape = replace(SHAPES[args.shape], experts=EXPERTS)
    weights, pool, table = make_weights(shape), _core.Pool(threads=1), Table(HEADS, WIDTHS)
    for isa in args.isa:
        layers = {format: Layer(pool, shape, weights, isa, format) for format in ("bf16", *args.formats)}
        for rows in args.rows:
            for layer in layers.values():
                layer.set_batch(shape, rows)
            for mode in args.modes:
                for cell in measure(args, layers, isa or _core.isa(), rows, mode):
                    document["cells"].append(cell)
                    numbers_of_row = (f"{cell['ms']:.1f}", f"{cell['ratio']:.2f}", f"{cell['spread']:.2f}")
                    table.row((cell["isa"], str(rows), mode, cell["format"], *numbers_of_row))
                if args.json:
                    save(document, args.json)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    unknown = [format for format in args.formats if format.startswith(("q", "iq", "tq")) and format not in BLOCK_SCALES]
    if unknown:
        raise SystemExit(f"--formats: no blocks of {', '.join(unknown)} can be made up")
    document: dict[str, Any] = {
        "bench": "format_ratios",
        "machine": describe_machine(),
        "shape": args.shape,
        "experts": EXPERTS,
        "rank": RANK,
        "threads": 1,
        "rounds": args.rounds,
        "cells": [],
    }
    run(args, document)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
