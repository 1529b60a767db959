"""Chooses the weights of linear layers and embeddings that stay in bf16 on a CPU without bf16 products.

`system.dense_products()` says how such a CPU multiplies; where it says "widened", `expect_stored_weights` asks
transformers, before weights are loaded, for the released bf16 numbers also if the model computes in float32, and
`attach_widened` turns them into `WidenedWeight` (`quantized/widened.py`). A weight that the files have in float32 or
float16 is loaded in the model's dtype, because bf16 would round it. Before the model is used, one weight of every shape
is multiplied both ways, forward and for the gradient of its input, and compared with torch in float32: a difference is
an error, not a fallback."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.ground import system
from ktransformers.ground.errors import KTError
from ktransformers.quantized.weight import QuantizedWeight
from ktransformers.quantized.widened import GEMV_PASSES, WidenedWeight, linear_product, product

MIN_WEIGHTS = 1 << 15  # of a matrix; a smaller one saves nothing
DTYPES = (torch.bfloat16, torch.float32)
# Norm of the difference to torch's float32 product over its norm. Both add K products in float32, in different orders;
# the output of a bf16 model is rounded to 9 bits, at most 2^-9 of each number.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}
CHECKED_OUTPUTS = 64  # at the beginning and at the end of a matrix
EXACT: Any = {"dtype": torch.float32, "device": "cpu"}  # whatever a program has set as the default


def expect_stored_weights(model: nn.Module, rest: Iterable[PlainTensor]) -> dict[str, torch.dtype]:
    """Gives the weights that can stay in bf16 that dtype, on the meta device: the dtype in which transformers then
    loads them. Returns their names with the dtype of the model."""
    if system.dense_products() != "widened":
        return {}
    released: dict[str, set[torch.dtype]] = {}  # by the end of the name: transformers renames prefixes
    for tensor in rest:
        released.setdefault(_end_of(tensor.name), set()).add(tensor.dtype)
    chosen = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        weight, name = module.weight, f"{prefix}.weight"
        if weight.device.type != "meta" or weight.dtype not in DTYPES or weight.numel() < MIN_WEIGHTS:
            continue
        if weight.dtype == torch.float32:
            if released.get(_end_of(name)) != {torch.bfloat16}:
                continue
            module.weight = nn.Parameter(weight.to(torch.bfloat16), requires_grad=weight.requires_grad)
        chosen[name] = weight.dtype
    return chosen


def _end_of(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def attach_widened(model: nn.Module, chosen: dict[str, torch.dtype]) -> int:
    """Replaces these weights where they were loaded in bf16, tied ones in all of their modules; returns how many."""
    widened: dict[int, nn.Parameter] = {}
    for name, dtype in chosen.items():
        weight = model.get_parameter(name)
        if isinstance(weight, QuantizedWeight):
            widened[id(weight)] = nn.Parameter(weight.with_dtype(dtype), requires_grad=False)
        elif weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.is_contiguous():
            widened[id(weight)] = nn.Parameter(WidenedWeight(weight.detach(), dtype), weight.requires_grad)
    multiplied: dict[tuple[int, ...], tuple[str, WidenedWeight]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            replacement = widened.get(id(parameter))
            if replacement is None:
                continue
            module.register_parameter(name, replacement)
            if isinstance(module, nn.Linear) and isinstance(replacement, WidenedWeight):
                multiplied.setdefault(tuple(replacement.shape), (f"{prefix}.{name}", replacement))
    with torch.no_grad():
        for name, checked in multiplied.values():
            check_products(name, checked)
    return len(widened)


def check_products(name: str, weight: WidenedWeight) -> None:
    """Compares products with a few rows and with many, and the gradient of the input, with torch in float32, over the
    outputs at both ends of the matrix; raises if they differ."""
    stored, generator = weight.stored, torch.Generator().manual_seed(0)
    outputs, columns = stored.shape
    ends = [*range(min(outputs, CHECKED_OUTPUTS)), *range(max(0, outputs - CHECKED_OUTPUTS), outputs)]
    picked = torch.tensor(sorted(set(ends)), device="cpu")
    sample = stored[picked].float()
    if not bool(sample.isfinite().all()):
        return  # damaged files, which are reported with the name of the tensor elsewhere
    for count in (1, GEMV_PASSES * _core.linear_rows() + 1):
        x = torch.randn(count, columns, generator=generator, **EXACT).to(weight.dtype)
        _compare(name, f"{count} rows", linear_product(x, stored)[:, picked], x.float() @ sample.t())
    grad = torch.zeros(2, outputs, dtype=weight.dtype, device="cpu")
    grad[:, picked] = torch.randn(2, len(picked), generator=generator, **EXACT).to(weight.dtype)
    _compare(name, "the gradient of its input", product(grad, stored), grad[:, picked].float() @ sample)


def _compare(name: str, what: str, given: Tensor, expected: Tensor) -> None:
    limit, norm = TOLERANCE[given.dtype], float(expected.norm())
    difference = float((given.float() - expected).norm())
    if not difference <= limit * norm:
        raise KTError(
            f"{name}: {what} of its bf16 weights differs from torch's by {difference / norm:.2g}, expected at most "
            f"{limit:g}; this is a defect of ktransformers or of the machine"
        )
