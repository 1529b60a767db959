"""Quantized weights for the dense (non-expert) linear layers and for embeddings.

A decode step reads every weight once, so bytes are time: in int8 a layer takes half of what bf16 takes, in int4 a
third. `QuantizedWeight` is a `FrozenWeight` packed as the core multiplies it (`csrc/moe/coded_linear.h`). `F.linear`
multiplies the packed weight, `F.embedding` dequantizes the rows that it looks up, and the gradient of the input
dequantizes a panel of the weight at a time. Dequantized values are exact in float32 models. In bf16 models they are
rounded once, except where a CPU multiplies few rows of bf16 with the packed weight. `to` moves the packed
weight between the CPU and a GPU (`quantized/gpu/linear.py`, in a layout of its own), where it is used in bf16 models.

`load_quantized` keeps quantized weights of a checkpoint packed; they are never dequantized in full. `quantize_linears`
rounds loaded weights to a format, so results change by what rounding costs (docs/quant.md); embeddings are not rounded.
Routers and gates of experts, whose choices rounding could change, and indexers stay dense. A matrix that is multiplied
into others instead of being called (`kv_b_proj` of latent attention) is quantized too; `multiply_heads` reads it.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.checkpoint.encoded import LOSSLESS, Encoded, EncodedFormat, decode, format_of, in_own_order
from ktransformers.checkpoint.encoder import encode
from ktransformers.checkpoint.mapped import read_only_tensor
from ktransformers.checkpoint.recode import rows_of
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.linear_storage import ONE_PLANE_VARIANTS
from ktransformers.ground.pool import default_pool
from ktransformers.quantized.eligible_modules import quantizable_linears, quantizable_modules
from ktransformers.quantized.frozen_weight import FrozenWeight
from ktransformers.quantized.gpu.head_products import HeadRows, check_heads, multiply_heads
from ktransformers.quantized.gpu.linear import GpuLinearWeight, packed_linear
from ktransformers.quantized.host_rows import HostRows
from ktransformers.quantized.widened import stored_weight

# Quantizing a matrix with fewer weights saves nothing.
MIN_WEIGHTS = 1 << 15
# Weights that are dequantized at a time.
PANEL = 1 << 22
# Products of heads with at most this many rows of x read the packed weight; more rows dequantize it for the product.
HEAD_ROWS = 64
# Rows that are compared with the checkpoint after packing; as many as share a scale of fp8:128x128.
CHECKED_ROWS = 128
DTYPES = (torch.bfloat16, torch.float32)
# Operators that return the same values.
SAME = {"alias", "detach"}


@dataclass(eq=False)
class CpuPacked:
    """A packed weight in host memory. The core's object is dropped when Python ends: torch would keep the
    tensors of a model beyond that, and with them the core's threads."""

    core: _core.CodedLinear | None
    order: Tensor | None = None  # int64 [K]: packed column i is column order[i] of the weight
    identity: object = field(default_factory=object)  # the same for all copies of the values, wherever they are moved

    @property
    def linear(self) -> _core.CodedLinear:
        assert self.core is not None, "Python is ending"
        return self.core

    @property
    def bytes(self) -> int:
        return self.linear.packed_bytes

    @property
    def location(self) -> torch.device:
        return torch.device("cpu")

    def decoded(self, weight: QuantizedWeight, first: int, last: int) -> Tensor:
        out = torch.empty(last - first, weight.shape[1], dtype=weight.decoded_dtype, device="cpu")
        self.linear.decode(first, out)
        return self._ordered(out)

    def gathered(self, weight: QuantizedWeight, rows: Tensor) -> Tensor:
        out = torch.empty(rows.numel(), weight.shape[1], dtype=weight.decoded_dtype, device="cpu")
        self.linear.gather(rows, out)
        return self._ordered(out)

    def multiply(self, weight: QuantizedWeight, x: Tensor) -> Tensor:
        rows = x.contiguous() if self.order is None else x.index_select(1, self.order)
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype, device="cpu")
        self.linear.forward(rows, out)
        return out

    def multiply_transposed(self, weight: QuantizedWeight, grad: Tensor) -> Tensor:
        rows, columns, numbers = grad.float(), weight.shape[1], weight.with_dtype(grad.dtype)
        total = torch.zeros(rows.shape[0], columns, dtype=torch.float32, device="cpu")
        height = max(1, PANEL // columns)
        for first in range(0, weight.shape[0], height):
            last = min(first + height, weight.shape[0])
            total.addmm_(rows[:, first:last], numbers.decoded(first, last).float())
        return total.to(grad.dtype)

    def multiply_heads(self, weight: QuantizedWeight, x: Tensor, rows: HeadRows, along_rows: bool, out: Tensor) -> None:
        if x.shape[1] > HEAD_ROWS or x.dtype not in DTYPES or x.stride(2) != 1 or out.stride(2) != 1:
            self._multiply_decoded(weight, x, rows, along_rows, out)
        elif self.order is None:
            self.linear.multiply_heads(x, out, rows.first, rows.count, rows.step, along_rows)
        elif along_rows:
            made = out.new_empty(out.shape)
            self.linear.multiply_heads(x, made, rows.first, rows.count, rows.step, True)
            out.copy_(self._ordered(made))
        else:
            self.linear.multiply_heads(x.index_select(2, self.order), out, rows.first, rows.count, rows.step)

    def _multiply_decoded(
        self, weight: QuantizedWeight, x: Tensor, rows: HeadRows, along_rows: bool, out: Tensor
    ) -> None:
        """For many rows of x: the rows of some heads at a time are dequantized for this product."""
        heads, numbers = max(1, PANEL // (rows.count * weight.shape[1])), weight.with_dtype(x.dtype)
        of_heads = torch.arange(x.shape[0])[:, None] * rows.step + torch.arange(rows.first, rows.first + rows.count)
        for first in range(0, x.shape[0], heads):
            part = slice(first, first + heads)
            decoded = numbers.gathered(of_heads[part].reshape(-1)).to(x.dtype).view(-1, rows.count, weight.shape[1])
            out[part] = torch.bmm(x[part], decoded if along_rows else decoded.transpose(1, 2))

    def _ordered(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else in_own_order(rows, self.order)


@dataclass(eq=False)
class GpuPacked:
    """A packed weight in the memory of a GPU. Values are rounded to bf16, whatever the dtype of the model."""

    device: GpuLinearWeight
    order: Tensor | None = None
    identity: object = field(default_factory=object)

    @property
    def bytes(self) -> int:
        return self.device.bytes

    @property
    def location(self) -> torch.device:
        return self.device.packed.device

    def decoded(self, weight: QuantizedWeight, first: int, last: int) -> Tensor:
        return self._ordered(self.device.decoded(first, last))

    def gathered(self, weight: QuantizedWeight, rows: Tensor) -> Tensor:
        return self._ordered(self.device.gathered(rows))

    def multiply(self, weight: QuantizedWeight, x: Tensor) -> Tensor:
        return self.device.multiply(x if self.order is None else x.index_select(1, self.order))

    def multiply_transposed(self, weight: QuantizedWeight, grad: Tensor) -> Tensor:
        return self._ordered(self.device.multiply_transposed(grad))

    def _ordered(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else in_own_order(rows, self.order)


WeightImpl = CpuPacked | GpuPacked | HostRows
_packed: weakref.WeakSet[CpuPacked] = weakref.WeakSet()


@atexit.register
def _drop_cores() -> None:
    for impl in _packed:
        impl.core = None


class QuantizedWeight(FrozenWeight):
    impl: WeightImpl
    spec: str

    @staticmethod
    def __new__(cls, impl: WeightImpl, spec: str, shape: Sequence[int], dtype: torch.dtype) -> QuantizedWeight:
        tensor: QuantizedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=impl.location)
        tensor.impl, tensor.spec = impl, spec
        return tensor

    def __init__(self, impl: WeightImpl, spec: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Everything is set by `__new__`."""

    @property
    def identity(self) -> object:
        return self.impl.identity

    @property
    def stored_as(self) -> str:
        return self.spec

    def dense(self) -> Tensor:
        return self.decoded(0, self.shape[0]).to(self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        if x.dtype not in DTYPES or x.device != self.device:
            return None
        self._check_frozen()
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        out: Tensor = QuantizedProduct.apply(x, self) if needs_grad else _product(x, self)  # type: ignore[no-untyped-call]
        return out if bias is None else out + bias.to(out.dtype)

    @classmethod
    def own_operator(cls, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if name in SAME:
            return args[0].with_dtype(args[0].dtype)
        if name == "_to_copy" and _moves_alone(kwargs):
            return args[0].moved(kwargs.get("device")).with_dtype(kwargs.get("dtype") or args[0].dtype)
        if name == "embedding":  # of a frozen weight, padding and frequencies concern gradients alone
            weight, ids = args[:2]
            weight._check_frozen()
            rows = weight.gathered(ids.reshape(-1).to(torch.int64).contiguous())
            return rows.to(weight.dtype).view(*ids.shape, weight.shape[1])
        return NotImplemented

    def _check_frozen(self) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            expected = "a frozen weight: quantized weights have no gradient"
            raise InputError(
                "weight", "one that requires a gradient", expected, "train adapters, or load the model in bf16"
            )

    def untyped_storage(self) -> Any:
        """`save_pretrained` asks for it."""
        remedy = "save the adapter, which is all that training changes"
        raise InputError("weight", f"packed {self.spec} without dense storage", "a dense weight", remedy)

    def with_dtype(self, dtype: torch.dtype) -> QuantizedWeight:
        return QuantizedWeight(self.impl, self.spec, self.shape, dtype)

    def moved(self, device: torch.device | str | None) -> QuantizedWeight:
        """The same packed weight in the memory of a device."""
        target = self.device if device is None else torch.device(device)
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        if target == self.device:
            return self
        impl = self.impl
        if isinstance(impl, HostRows):
            return QuantizedWeight(impl.moved(target), self.spec, self.shape, self.dtype)
        order = None if impl.order is None else impl.order.to(target)
        if target.type == "cpu":
            assert isinstance(impl, GpuPacked)
            core = _core.CodedLinear(default_pool(), self.shape[0], self.shape[1], self.spec)
            core.adopt(impl.device.packed_on_host())
            moved = weight_from_core(core, self.spec, self.shape, self.dtype, order)
            moved.impl.identity = impl.identity
            return moved
        if isinstance(impl, GpuPacked):
            on_device = impl.device.moved(target)
        else:
            packed = read_only_tensor(impl.linear.memory()).view(-1).to(target)
            on_device = GpuLinearWeight.of(packed, packed_linear(self.shape[0], self.shape[1], self.spec))
        return QuantizedWeight(GpuPacked(on_device, order, impl.identity), self.spec, self.shape, self.dtype)

    def decoded(self, first: int, last: int) -> Tensor:
        """Dequantized rows first .. last - 1: in bf16 if that is the dtype, else in float32, where they are not
        rounded."""
        return self.impl.decoded(self, first, last)

    def gathered(self, rows: Tensor) -> Tensor:
        """Dequantized rows by index, which may repeat: int64 `[n]`."""
        return self.impl.gathered(self, rows)

    def multiply_heads(
        self, x: Tensor, rows: HeadRows, *, along_rows: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Products of x, head by head, with rows of each head: by the core (`csrc/moe/coded_linear.h`), or on a GPU by
        `quantized/gpu/head_products.py`."""
        impl = self.impl
        if isinstance(impl, CpuPacked):
            made = x.new_empty(*x.shape[:2], self.shape[1] if along_rows else rows.count) if out is None else out
            impl.multiply_heads(self, x, rows, along_rows, made)
            return made
        assert isinstance(impl, GpuPacked), "a table of an embedding is looked up alone"
        if impl.order is None:
            return multiply_heads(impl.device, x, rows, along_rows=along_rows, out=out)
        if not along_rows:
            return multiply_heads(impl.device, x.index_select(2, impl.order), rows, out=out)
        result = in_own_order(multiply_heads(impl.device, x, rows, along_rows=True), impl.order)
        return result if out is None else out.copy_(result)

    def check_heads(self, rows: HeadRows) -> None:
        """Compare products of heads with the packed weight on a GPU with those of dequantized rows."""
        if isinstance(self.impl, GpuPacked):
            check_heads(self.impl.device, rows)

    @property
    def decoded_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32


def _moves_alone(kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy differs in dtype and device alone, and the device has memory."""
    given = {key for key, value in kwargs.items() if value not in (None, torch.strided, torch.preserve_format)}
    return given <= {"dtype", "non_blocking", "device"} and torch.device(kwargs.get("device") or "cpu").type != "meta"


class QuantizedProduct(torch.autograd.Function):
    """x `[..., K]` times weight `[N, K]` transposed; the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        if isinstance(weight.impl, CpuPacked) and weight.impl.linear.w8a8:
            raise InputError("w8a8", "on", "off where gradients are wanted", "training computes with all bits")
        ctx.weight = weight
        return _product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        rows = ctx.weight.impl.multiply_transposed(ctx.weight, grad.reshape(-1, grad.shape[-1]))
        return rows.view(*grad.shape[:-1], ctx.weight.shape[1]), None


def _product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    out = weight.impl.multiply(weight, x.detach().reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], weight.shape[0])


def rest_format(spec: str) -> EncodedFormat:
    """The format of `--rest`, if `quantize_linears` takes it."""
    form = format_of(spec)
    if not form.written or form.element == LOSSLESS:
        raise InputError("rest", spec, "keep, bf16, or a format that `kt quant` rounds to, such as int8 or int4:32")
    return form


def quantize_linears(model: nn.Module, spec: str, pool: _core.Pool | None = None, *, left: Collection[str] = ()) -> int:
    """Quantize the weights of all suitable linear layers on the CPU but those `left` by name, and release the memory of
    each; returns how many."""
    form, count = rest_format(spec), 0
    for name, linear in _suitable(model):
        if name not in left and linear.weight.shape[1] % form.multiple == 0:
            quantize_linear(name, linear, spec, pool=pool)
            count += 1
    return count


def quantize_linear(
    name: str, linear: nn.Linear, spec: str, released: Encoded | None = None, pool: _core.Pool | None = None
) -> None:
    """Quantize the weight of one layer; where its files have that format, it is kept."""
    same = released is not None and released.format.partition(":")[0] == spec.partition(":")[0]
    if not (same and keep_quantized_linear(name, linear, released, pool)):
        _replace(linear, encode(stored_weight(linear.weight).detach(), spec), pool)


def keep_quantized_linears(
    model: nn.Module, tensors: Iterable[PlainTensor], pool: _core.Pool | None = None, *, left: Collection[str] = ()
) -> int:
    """Give suitable linear layers on the CPU but those `left` by name the quantized weights of their files; returns how
    many. A head that shares the embedding's weight takes a copy of it."""
    released = {tensor.name: tensor.quantized for tensor in tensors if tensor.quantized is not None}
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # of a shared one, the first
    kept = 0
    for name, linear in _suitable(model):
        if name in left:
            continue
        read = released.get(f"{name}.weight") or released.get(names[id(linear.weight)])
        matrix = None if read is None else read()
        kept += keep_quantized_linear(name, linear, matrix if isinstance(matrix, Encoded) else None, pool)
    return kept


def load_quantized(
    tensor: PlainTensor, pool: _core.Pool | None = None, *, verify: bool = True
) -> QuantizedWeight | None:
    """The matrix of a file, packed; None if the tensor is dense, or if dense is faster on this CPU. `verify`: matrices
    of a packed directory are compared with their checksum."""
    if not is_quantized(tensor) or (_core.isa() in ONE_PLANE_VARIANTS and _planes(tensor.format) > 1):
        return None
    if tensor.packed is not None:
        mapped = tensor.packed(pool or default_pool(), verify)
        return weight_from_core(mapped.core, mapped.format, tensor.shape, tensor.dtype, mapped.order)
    matrix = None if tensor.quantized is None else tensor.quantized()
    if not isinstance(matrix, Encoded):
        return None
    weight = quantized_weight(matrix, tensor.dtype, pool)
    checked = rows_of(matrix, 0, min(CHECKED_ROWS, matrix.rows))
    assert isinstance(checked, Encoded)
    if not torch.equal(weight.with_dtype(torch.float32).decoded(0, checked.rows), decode(checked)[0]):
        raise KTError(f"{tensor.name}: the packed {matrix.format} weight differs from the file; a defect")
    return weight


def is_quantized(tensor: PlainTensor) -> bool:
    """Whether the file has a quantized matrix that is large enough."""
    return bool(tensor.format) and len(tensor.shape) == 2 and torch.Size(tensor.shape).numel() >= MIN_WEIGHTS


def quantizable_names(model: nn.Module) -> set[str]:
    """Names of the weights that `quantize_linears` would quantize, of a model on any device."""
    return {f"{name}.weight" for name, linear in quantizable_linears(model) if linear.weight.numel() >= MIN_WEIGHTS}


def dequantize_unsuitable(model: nn.Module) -> int:
    """Dequantize the weights of modules that need dense values; returns how many."""
    suitable = {id(module.weight) for _, module in quantizable_modules(model)}
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, QuantizedWeight) and id(parameter) not in suitable:
                dense = replaced.setdefault(
                    id(parameter), nn.Parameter(parameter.dense(), requires_grad=parameter.requires_grad)
                )
                module.register_parameter(name, dense)
            elif isinstance(parameter, QuantizedWeight):
                parameter.requires_grad_(False)
    return len(replaced)


def keep_quantized_linear(name: str, linear: nn.Linear, matrix: Encoded | None, pool: _core.Pool | None = None) -> bool:
    """Give one layer the quantized weight of its files, which must have the values that were loaded. Returns False if
    the files have none that this CPU multiplies."""
    if matrix is None or (_core.isa() in ONE_PLANE_VARIANTS and _planes(matrix.format) > 1):
        return False
    if (matrix.qweight.shape[1], matrix.columns) != tuple(linear.weight.shape):
        return False
    loaded = stored_weight(linear.weight)[:CHECKED_ROWS].detach().to(torch.bfloat16, copy=True)
    quantized = _replace(linear, matrix, pool)
    if not torch.equal(quantized.with_dtype(torch.bfloat16).decoded(0, loaded.shape[0]), loaded):
        raise KTError(f"{name}: the packed {matrix.format} weight differs from the loaded values; a defect")
    return True


def _planes(spec: str) -> int:
    return len(_core.format(spec)["planes"])


def _replace(linear: nn.Linear, matrix: Encoded, pool: _core.Pool | None) -> QuantizedWeight:
    quantized = quantized_weight(matrix, linear.weight.dtype, pool)
    linear.weight = nn.Parameter(quantized, requires_grad=False)
    return quantized


def quantized_weight(matrix: Encoded, dtype: torch.dtype, pool: _core.Pool | None = None) -> QuantizedWeight:
    """`[1, N, K]` of a checkpoint as a weight `[N, K]`."""
    core = _core.CodedLinear(pool or default_pool(), matrix.rows, matrix.columns, matrix.format)
    core.pack(matrix.packable)
    return weight_from_core(core, matrix.format, (matrix.rows, matrix.columns), dtype, matrix.order)


def weight_from_core(
    core: _core.CodedLinear, spec: str, shape: Sequence[int], dtype: torch.dtype, order: Tensor | None = None
) -> QuantizedWeight:
    impl = CpuPacked(core, order)
    _packed.add(impl)
    return QuantizedWeight(impl, spec, shape, dtype)


def keep_embedding_on_host(model: Any, *, pin: bool = True) -> bool:
    """Give the input embedding of a model on the CPU a table that stays in host memory when the model is moved, if it
    has none yet. Returns False if its weight is quantized, is used by another module too, or is none of a plain
    embedding."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return False
    weight = embedding.weight
    owners = sum(one is weight for _, one in model.named_parameters(remove_duplicate=False))
    stored = stored_weight(weight)
    if isinstance(stored, QuantizedWeight) and isinstance(stored.impl, HostRows):
        return True
    if owners != 1 or isinstance(stored, QuantizedWeight) or stored.device.type != "cpu" or stored.dtype not in DTYPES:
        return False
    numbers = stored.detach().contiguous()
    rows = HostRows(numbers.pin_memory() if pin else numbers)
    held = QuantizedWeight(rows, str(stored.dtype).removeprefix("torch."), numbers.shape, stored.dtype)
    embedding.weight = nn.Parameter(held, requires_grad=False)
    return True


def check_on_device(model: nn.Module) -> None:
    """Compares products with packed weights on a GPU with those of dequantized weights, for one weight of every format
    and shape on each GPU."""
    checked: set[tuple[str, torch.Size, torch.device]] = set()
    for weight in model.parameters():
        if not isinstance(weight, QuantizedWeight):
            continue
        if isinstance(weight.impl, HostRows):
            weight.impl.check(weight)
        elif isinstance(weight.impl, GpuPacked):
            kind = (weight.spec, weight.shape, weight.device)
            if kind not in checked and weight.impl.device.check():
                checked.add(kind)


def describe_quantized(model: nn.Module) -> str:
    """How many layers are quantized, in which formats and bytes, in words; empty if there are none."""
    quantized = [parameter for parameter in model.parameters() if isinstance(parameter, QuantizedWeight)]
    held = [weight for weight in quantized if not isinstance(weight.impl, HostRows)]
    if not held:
        return ""
    formats = ", ".join(sorted({weight.spec for weight in held}))
    size = sum(weight.impl.bytes for weight in held) / 2**30
    on_host = sum(weight.impl.bytes for weight in quantized if isinstance(weight.impl, HostRows)) / 2**30
    embedding = f"; the embedding in host memory: {on_host:.2f} GiB" if on_host else ""
    return f"{len(held)} quantized dense linear layers ({formats}): {size:.2f} GiB{embedding}"


def _suitable(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers to be quantized, with their names."""
    return ((name, linear) for name, linear in quantizable_linears(model) if _fits(linear.weight))


def _fits(weight: Tensor) -> bool:
    stored = stored_weight(weight)
    plain = stored.device.type == "cpu" and stored.dtype in DTYPES and not isinstance(stored, QuantizedWeight)
    return plain and stored.numel() >= MIN_WEIGHTS
