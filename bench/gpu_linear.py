"""Linear layers in packed codes on a GPU, against memory bandwidth and against bf16.

    python bench/gpu_linear.py --formats fp8:128x128,int4:32 --json gpu-linear.json

Layers of DeepSeek-V3 and Qwen3-30B-A3B. Calls rotate over copies of a weight that are together larger than the
second-level cache and are timed in CUDA graphs. `share` is the rate at which the bytes of the codes are read, divided
by the rate of a device-to-device copy in the same run; `bf16` is the time of torch's product with as many copies of the
weight in bf16, and `ratio` the time with codes divided by it. The time of a kernel that does nothing, one program a
multiprocessor in the same kind of graph, is printed first: small layers take little more. The bytes are random: speed
alone is measured here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import words
from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

LAYERS = {
    "v3.q_a": (1536, 7168),
    "v3.q_b": (24576, 1536),
    "v3.kv_a": (576, 7168),
    "v3.kv_b": (32768, 512),
    "v3.o": (7168, 16384),
    "v3.shared.up": (2048, 7168),
    "v3.shared.down": (7168, 2048),
    "v3.dense.up": (18432, 7168),
    "v3.dense.down": (7168, 18432),
    "v3.head": (129280, 7168),
    "qwen3.q": (4096, 2048),
    "qwen3.k": (512, 2048),
    "qwen3.o": (2048, 4096),
    "qwen3.head": (151936, 2048),
}
CACHE_BYTES = 256 << 20  # of all copies together, at least
BUFFER_BYTES = 4 << 30
MAX_COPIES = 256


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", type=words, default=["fp8:128x128", "int4:32", "int8", "mxfp4", "q4_k"])
    parser.add_argument("--layers", type=words, default=list(LAYERS))
    parser.add_argument("--rows", type=words, default=["1", "4", "16", "32", "64", "256", "512", "1024", "2048"])
    parser.add_argument("--seconds", type=float, default=0.01, help="for each number")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    return parser.parse_args(argv)


def copy_rate(buffer: torch.Tensor) -> float:
    """Bytes read and written a second."""
    import torch

    half = buffer.numel() // 2
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        buffer[:half].copy_(buffer[half:])
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * half / min(times)


def seconds_of(calls: list[Callable[[], object]], seconds: float) -> float:
    """Of one call: all of them in one graph, which is replayed."""
    import torch

    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    best, spent = float("inf"), 0.0
    while spent < seconds:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        taken = start.elapsed_time(end) / 1e3
        best, spent = min(best, taken), spent + taken
    return best / len(calls)


def launch_seconds(seconds: float) -> float:
    """Of a kernel that does nothing, in a graph."""
    import torch
    from empty_kernel_triton import launch

    flag = torch.zeros(1, device="cuda")
    processors = torch.cuda.get_device_properties(flag.device).multi_processor_count
    return seconds_of([lambda: launch(flag, processors)] * MAX_COPIES, seconds)


def coded_calls(buffer: torch.Tensor, shape: tuple[int, int], spec: str, x: torch.Tensor) -> tuple[list[Any], int]:
    """Products with copies of a weight, and the bytes of one."""
    import torch

    from ktransformers.quantized.gpu.linear import GpuLinearWeight, packed_linear
    from ktransformers.quantized.gpu.words import word_layout

    matrix = packed_linear(*shape, spec)
    layout = word_layout(matrix)
    assert layout is not None, "a format whose codes are multiplied"
    size, words = 4 * layout.words, buffer.view(torch.int32).split(layout.words)
    copies = [GpuLinearWeight(words[at], matrix, layout) for at in range(count_copies(size))]
    return [lambda codes=codes: codes.multiply(x) for codes in copies], size


def bf16_calls(buffer: torch.Tensor, shape: tuple[int, int], x: torch.Tensor) -> list[Any]:
    import torch
    import torch.nn.functional as F

    size = shape[0] * shape[1]
    numbers = buffer.view(torch.bfloat16)
    weights = [numbers[at * size : (at + 1) * size].view(shape) for at in range(count_copies(2 * size))]
    return [lambda weight=weight: F.linear(x, weight) for weight in weights]


def count_copies(size: int) -> int:
    return max(1, min(MAX_COPIES, -(-CACHE_BYTES // size), BUFFER_BYTES // size))


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if not torch.cuda.is_available():
        print("gpu_linear.py: no CUDA device", file=sys.stderr)
        return 1
    buffer = torch.randint(0, 256, (BUFFER_BYTES,), dtype=torch.uint8, device="cuda")
    rate = copy_rate(buffer)
    floor = launch_seconds(args.seconds)
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, device-to-device copy {rate / 1e9:.0f} GB/s, empty kernel {1e6 * floor:.1f} us", flush=True)
    table = Table(["layer", "format", "rows", "us", "share", "bf16 us", "ratio"], [14, 11, 4, 8, 5, 8, 5])
    cells = []
    with torch.inference_mode():
        for name in args.layers:
            for rows in map(int, args.rows):
                x = torch.randn(rows, LAYERS[name][1], device="cuda").bfloat16()
                plain = seconds_of(bf16_calls(buffer, LAYERS[name], x), args.seconds)
                for spec in args.formats:
                    calls, size = coded_calls(buffer, LAYERS[name], spec, x)
                    taken = seconds_of(calls, args.seconds)
                    share, ratio = size / taken / rate, taken / plain
                    cell = {"layer": name, "format": spec, "rows": rows, "us": 1e6 * taken, "share": share}
                    cells.append(cell | {"bf16_us": 1e6 * plain, "ratio": ratio})
                    times = [f"{1e6 * taken:.1f}", f"{share:.2f}", f"{1e6 * plain:.1f}", f"{ratio:.2f}"]
                    table.row([name, spec, str(rows), *times])
    machine = describe_machine() | {"gpu": gpu, "copy_rate": rate, "empty_kernel_us": 1e6 * floor}
    document = {"bench": "gpu_linear", "machine": machine, "cells": cells}
    if args.json:
        save(document, args.json)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
