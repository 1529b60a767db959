"""Compares the expert kernel with plain torch on a small layer.

Packs 16 random experts, runs batches of several sizes, and prints for each the time of the kernel, the time of the same
layer in plain torch (a loop over experts, like transformers' eager path), and the error of both against float64, as |y
- y64| / |y64| over the whole output. torch uses bf16 or float32, whichever is faster on this machine: without bf16
instructions its bf16 products are hundreds of times slower.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from ktransformers import _core
from ktransformers.nn import ExpertStore

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 16, 1024, 512, 4
TOKENS = (1, 4, 16, 64, 256, 1024)


def eager(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = torch.where(ids == expert)
        rows = x[token]
        inner = torch.nn.functional.silu(rows @ gate[expert].T) * (rows @ up[expert].T)
        out.index_add_(0, token, (inner @ down[expert].T) * weights[token, slot, None].to(x.dtype))
    return out


def best_ms(call: Callable[[], object], seconds: float = 0.3) -> float:
    call()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def faster_dtype(rows: torch.Tensor, weights: torch.Tensor) -> torch.dtype:
    """The dtype in which torch multiplies faster on this machine."""

    def product_ms(dtype: torch.dtype) -> float:
        left, right = rows.to(dtype), weights.to(dtype)
        return best_ms(lambda: left @ right.T, seconds=0.05)

    with warnings.catch_warnings(action="ignore"):  # torch warns about missing bf16 instructions
        return min((torch.bfloat16, torch.float32), key=product_ms)


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def main() -> None:
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(EXPERTS, rows, columns) / columns**0.5).bfloat16()

    gate, up, down = matrix(INTERMEDIATE, HIDDEN), matrix(INTERMEDIATE, HIDDEN), matrix(HIDDEN, INTERMEDIATE)
    store = ExpertStore(EXPERTS, HIDDEN, INTERMEDIATE)
    store.pack(gate=gate, up=up, down=down)

    dtype = faster_dtype(torch.randn(16, HIDDEN), gate[0])
    plain = [weight.to(dtype) for weight in (gate, up, down)]

    print(f"{_core.machine()['cpu']}: variant {_core.isa()}, {_core.Pool().threads} threads")
    print(f"{EXPERTS} experts, top {TOP_K}, hidden {HIDDEN}, intermediate {INTERMEDIATE}, bf16; torch in {dtype}\n")
    print(f"{'tokens':>6}  {'ms':>8}  {'torch ms':>8}  {'speed-up':>8}  {'error':>8}  {'torch error':>11}")
    with torch.inference_mode():
        for tokens in TOKENS:
            x = torch.randn(tokens, HIDDEN).bfloat16()
            weights, ids = torch.randn(tokens, EXPERTS).softmax(-1).topk(TOP_K)
            exact = eager(x.double(), ids, weights, gate.double(), up.double(), down.double())
            kernel_ms = best_ms(lambda x=x, i=ids, w=weights: store.forward(x, i, w))
            x_plain = x.to(dtype)
            torch_ms = best_ms(lambda x=x_plain, i=ids, w=weights: eager(x, i, w, *plain))
            kernel_error = error(store.forward(x, ids, weights), exact)
            torch_error = error(eager(x_plain, ids, weights, *plain), exact)
            ratio = torch_ms / kernel_ms
            errors = f"{kernel_error:>8.1e}  {torch_error:>11.1e}"
            print(f"{tokens:>6}  {kernel_ms:>8.3f}  {torch_ms:>8.3f}  {ratio:>7.1f}x  {errors}")


if __name__ == "__main__":
    main()
