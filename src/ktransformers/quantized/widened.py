"""Dense (non-expert) linear layers on CPUs without bf16 products: bf16 weights are multiplied in float32.

There torch multiplies bf16 many times slower than float32, and float32 copies of bf16 weights take twice their memory,
which decoding a token reads whole. `WidenedWeight` is a `FrozenWeight` stored in bf16, as it was released. `F.linear`
for a few rows multiplies bf16 weights as they lie, by the core's GEMV (`csrc/kernels/gemv.h`); products of more rows,
and the gradient of the input, widen `PANEL` weights at a time to float32 and call torch's GEMM, so one copy of the
weights exists. Widening is exact: in float32 the results are those of a float32 copy, up to the order of sums. In bf16,
if a user asks for that dtype, sums are in float32 and rounded once.

Views (slices, transposes) stay widened. `quantized/dense_layers.py` chooses the weights and compares the products with
torch's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.ground.pool import default_pool
from ktransformers.quantized.frozen_weight import FrozenWeight

PANEL = 1 << 20  # weights that are widened at a time, 4 MB in float32: they stay in the last-level cache
COLUMN_MULTIPLE = 32  # of K, in the core's GEMV
# Calls of the core's GEMV, of 8 rows each without bf16 products, up to which they take less time than widening the
# weights: at 24 rows 10 to 25 % less on Neoverse-N1, at 32 as much.
GEMV_PASSES = 3
DTYPES = (torch.bfloat16, torch.float32)  # of the rows that are multiplied
VIEWS = {"alias", "detach", "slice", "t", "transpose"}  # operators that return a view of the same numbers

_scratch = threading.local()


class WidenedWeight(FrozenWeight):
    """A tensor of float32 or bf16 whose values are stored in bf16 (`stored`) and multiplied in float32. Unlike a
    quantized weight it may have a gradient."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> WidenedWeight:
        tensor: WidenedWeight = Tensor._make_wrapper_subclass(
            cls, stored.shape, strides=stored.stride(), dtype=dtype, device=stored.device
        )
        tensor.stored = stored
        return tensor

    def __init__(self, stored: Tensor, dtype: torch.dtype) -> None:
        """Everything is set by `__new__`."""

    @property
    def identity(self) -> object:
        return self.stored.data_ptr()

    @property
    def stored_as(self) -> str:
        return str(self.stored.dtype)

    def dense(self) -> Tensor:
        return self.stored.to(self.dtype, copy=True)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        return _linear(x, self, bias) if _multiplies(x, self) else None

    @classmethod
    def own_operator(cls, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in VIEWS:
            return cls(func(args[0].stored, *args[1:], **kwargs), args[0].dtype)
        if name == "_to_copy" and _changes_dtype_alone(kwargs):
            return cls(args[0].stored, kwargs["dtype"])
        if name == "embedding":
            return func(args[0].stored, *args[1:], **kwargs).to(args[0].dtype)
        if name == "mm" and isinstance(args[1], cls) and _multiplies(args[0], args[1]):
            return _mm(args[0], args[1], kwargs.get("out"))
        if name == "addmm_" and isinstance(args[2], cls) and _accumulates(args, kwargs):
            return add_product(args[0], args[1], args[2].stored)
        return NotImplemented


def stored_weight(weight: Tensor) -> Tensor:
    """The bf16 numbers of a widened weight, another tensor as it is."""
    return weight.stored if isinstance(weight, WidenedWeight) else weight


def _multiplies(rows: Any, weight: WidenedWeight) -> bool:
    """Whether this file multiplies them; torch does otherwise, with a copy of the weight."""
    return type(rows) is not WidenedWeight and rows.dtype == weight.dtype and weight.dtype in DTYPES and rows.is_cpu


def _accumulates(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an addmm_ is `sums += a @ weight` in float32."""
    return not kwargs and len(args) == 3 and all(given.dtype == torch.float32 for given in args)


def _changes_dtype_alone(kwargs: Mapping[str, Any]) -> bool:
    """Into a dtype that holds every bf16 number."""
    others = {name for name, value in kwargs.items() if value is not None} - {"dtype", "non_blocking"}
    return kwargs.get("dtype") in (*DTYPES, torch.float64) and not others


class WidenedLinear(torch.autograd.Function):
    """x `[..., K]` times weight `[N, K]` transposed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: WidenedWeight) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight = weight
        return linear_product(x, weight.stored)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, (x,) = grads[0], ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        input_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = product(rows, ctx.weight.stored).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            weight_grad = (rows.t().float() @ x.reshape(-1, x.shape[-1]).float()).to(grad.dtype)
        return input_grad, weight_grad


def _linear(x: Tensor, weight: WidenedWeight, bias: Tensor | None) -> Tensor:
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    out: Tensor = WidenedLinear.apply(x, weight) if needs_grad else linear_product(x, weight.stored)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias.to(out.dtype)


def linear_product(x: Tensor, stored: Tensor) -> Tensor:
    """x `[..., K]` times stored `[N, K]` transposed, in x's dtype."""
    rows = x.reshape(-1, x.shape[-1])
    if fits_gemv(rows, stored):
        out = torch.empty(rows.shape[0], stored.shape[0], dtype=x.dtype, device="cpu")
        dense, step = rows.detach().contiguous(), _core.linear_rows()
        for start in range(0, rows.shape[0], step):
            default_pool().linear(dense[start : start + step], [stored], [out[start : start + step]])
    else:
        out = product(rows, stored.t())
    return out.view(*x.shape[:-1], stored.shape[0])


def fits_gemv(rows: Tensor, stored: Tensor) -> bool:
    """Whether the core's kernel for few rows takes this product."""
    few = 0 < rows.shape[0] <= GEMV_PASSES * _core.linear_rows()
    return few and stored.is_contiguous() and stored.shape[1] % COLUMN_MULTIPLE == 0


def product(rows: Tensor, stored: Tensor) -> Tensor:
    """rows `[M, K]` times stored bf16 `[K, N]`, rounded to the dtype of the rows."""
    out = torch.empty(rows.shape[0], stored.shape[1], dtype=torch.float32, device="cpu")
    return _mm_into(rows.float(), stored, out).to(rows.dtype)


def _mm(rows: Tensor, weight: WidenedWeight, out: Tensor | None) -> Tensor:
    if out is None or out.dtype != torch.float32 or rows.dtype != torch.float32:
        result = product(rows, weight.stored)
        return result if out is None else out.copy_(result)
    return _mm_into(rows, weight.stored, out.resize_(rows.shape[0], weight.shape[1]))


def _mm_into(rows: Tensor, stored: Tensor, out: Tensor) -> Tensor:
    """Both in float32. A weight `[N, K]` comes transposed and its panels are columns of the output; the gradient of an
    input gets it as it is, and panels are added."""
    if stored.stride(0) != 1 or stored.shape[0] == 1:
        return add_product(out.zero_(), rows, stored)
    for start, panel in _panels(stored.t()):
        columns = out[:, start : start + panel.shape[0]]
        if columns.is_contiguous():
            torch.mm(rows, panel.t(), out=columns)
        else:  # on Arm torch takes twice as long for an output with gaps between its rows as for a dense one
            dense = _buffer("columns", columns.numel()).view(columns.shape)
            columns.copy_(torch.mm(rows, panel.t(), out=dense))
    return out


def add_product(sums: Tensor, rows: Tensor, stored: Tensor) -> Tensor:
    """sums `[M, N]` += rows `[M, K]` times stored bf16 `[K, N]`, all but `stored` in float32."""
    if stored.stride(0) == 1 and stored.shape[0] > 1:
        return sums.add_(_mm_into(rows, stored, torch.empty_like(sums)))
    for start, panel in _panels(stored):
        sums.addmm_(rows[:, start : start + panel.shape[0]], panel)
    return sums


def _panels(weight: Tensor) -> Iterable[tuple[int, Tensor]]:
    """(first row, rows in float32) of a matrix `[N, K]`; a panel is valid until the next one."""
    count, columns = weight.shape
    height = max(1, PANEL // max(1, columns))
    for start in range(0, count, height):
        part = weight[start : start + height]
        yield start, _buffer("panel", part.numel()).view(part.shape).copy_(part)


def _buffer(name: str, size: int) -> Tensor:
    """Scratch of the calling thread. A fresh tensor of this size would fault all of its pages in."""
    buffer: Tensor | None = getattr(_scratch, name, None)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside of it
            buffer = torch.empty(size, dtype=torch.float32, device="cpu")
        setattr(_scratch, name, buffer)
    return buffer[:size]
