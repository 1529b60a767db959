"""Grouped products of expert passes on a GPU: ours in Triton beside torch's, which is one kernel on Hopper and
Blackwell servers alone.

    python bench/grouped_product.py --shapes qwen3-30b,gpt-oss --tokens 512,2048,8192 --json grouped.json

Rows are routed evenly at random and sorted by expert. `first` and `down` are the products of a forward pass, `grad_h`
and `grad_x` those of the gradients of the activation and of the rows. A time is the fastest of some rounds of five
launches; TFLOPS count the rows that exist. Needs CUDA.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import words
from shapes import SHAPES, Shape
from timing import Table, describe_machine, print_last_line, save

LAUNCHES, ROUNDS = 5, 5
MODELS = SHAPES | {"gpt-oss": Shape("gpt-oss", 2880, 2880, 32, 4)}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=words, default=["qwen3-30b", "gpt-oss"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--tokens", type=words, default=["512", "2048", "8192"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


def products(shape: Shape) -> dict[str, tuple[int, int, bool]]:
    """K, N, and whether the matrices are stored transposed, of each product."""
    hidden, inner = shape.hidden, shape.intermediate
    forward = {"first": (hidden, 2 * inner, True), "down": (inner, hidden, True)}
    return forward | {"grad_h": (hidden, inner, False), "grad_x": (2 * inner, hidden, False)}


def seconds(launch: Callable[[], Any]) -> float:
    import torch

    launch()
    torch.cuda.synchronize()
    fastest = float("inf")
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(LAUNCHES):
            launch()
        end.record()
        torch.cuda.synchronize()
        fastest = min(fastest, start.elapsed_time(end) / LAUNCHES / 1e3)
    return fastest


def measure(shape: Shape, tokens: int, name: str) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    from ktransformers.place.gpu import grouped_product_triton

    torch.manual_seed(0)
    (inner, columns, transposed), count = products(shape)[name], tokens * shape.top_k
    ids = torch.randint(shape.experts, (count,), device="cuda")
    ends = torch.bincount(ids, minlength=shape.experts).cumsum(0).to(torch.int32)
    rows = torch.randn(count, inner, device="cuda", dtype=torch.bfloat16)
    size = (shape.experts, columns, inner) if transposed else (shape.experts, inner, columns)
    stored = torch.randn(size, device="cuda", dtype=torch.bfloat16)
    matrices = stored.transpose(1, 2) if transposed else stored
    theirs = seconds(lambda: F.grouped_mm(rows, matrices, offs=ends))
    ours = seconds(lambda: grouped_product_triton.product(rows, matrices, ends))
    flops = 2 * count * inner * columns
    cell = {"shape": shape.name, "tokens": tokens, "product": name, "torch_seconds": theirs, "seconds": ours}
    return cell | {"ratio": theirs / ours, "tflops": flops / ours / 1e12}


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if not torch.cuda.is_available():
        print("grouped_product.py: no CUDA device", file=sys.stderr)
        return 1
    line = ["python", "bench/grouped_product.py", *(sys.argv[1:] if argv is None else argv)]
    machine = describe_machine() | {"gpu": torch.cuda.get_device_name()}
    document: dict[str, Any] = {"bench": "grouped_product", "command": shlex.join(line), "machine": machine}
    document["cells"] = []
    table = Table(
        ["shape", "tokens", "product", "torch us", "ours us", "torch / ours", "TFLOPS"], [10, 6, 8, 9, 8, 12, 7]
    )
    for shape in (MODELS[name] for name in args.shapes):
        for tokens in map(int, args.tokens):
            for name in products(shape):
                cell = measure(shape, tokens, name)
                document["cells"].append(cell)
                times = [f"{1e6 * cell['torch_seconds']:.0f}", f"{1e6 * cell['seconds']:.0f}", f"{cell['ratio']:.2f}"]
                table.row([shape.name, str(tokens), name, *times, f"{cell['tflops']:.0f}"])
                if args.json:
                    save(document, args.json)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
