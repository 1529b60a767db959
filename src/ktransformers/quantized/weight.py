"""Linear layers outside of the experts in few bits: their weights become `CodedWeight`.

A decoded token reads every weight once, so bytes are time: in int8 a layer takes half of what bf16 takes, in int4 a
third. `CodedWeight` holds the codes, packed as the core multiplies them (`csrc/moe/coded_linear.h`), and is a tensor of
the model's dtype to everything else: PEFT sees an ordinary frozen weight of an ordinary `nn.Linear`. `F.linear`
multiplies with codes, `F.embedding` decodes the rows that it looks up, and the gradient of the input decodes a panel of
the weight at a time. A number is what the codes stand for in float32 models, and rounded once in bf16 models, except
where a CPU multiplies few rows of bf16 with codes as they lie. Any other operator gets a copy in the model's dtype, and
so does a copied module; what would write into the weight is refused. `to` moves the codes between the
CPU and a GPU (`quantized/gpu/linear.py`, in a layout of its own), where they are used in bf16 models.

`keep_codes` takes the codes of the files while a model is loaded, so that its quantised weights never exist as numbers:
the same values in fewer bytes. `encode_linears` takes the codes of a format nearest to the loaded numbers, so results
change by what rounding costs (docs/quant.md); embeddings are not rounded. Left as they are: routers and gates beside
experts, whose choices rounding could change, and indexers. A matrix that is multiplied into others instead of being
called (`kv_b_proj` of latent attention) has codes too, which `multiply_heads` reads.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ktransformers import _core
from ktransformers.checkpoint.encoded import LOSSLESS, Encoded, EncodedFormat, decode, format_of, in_own_order
from ktransformers.checkpoint.encoder import encode
from ktransformers.checkpoint.mapped import read_only_tensor
from ktransformers.checkpoint.recode import rows_of
from ktransformers.checkpoint.sources import PlainTensor
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.linear_storage import ONE_PLANE_VARIANTS
from ktransformers.ground.pool import default_pool
from ktransformers.quantized.eligible_modules import codable_modules, coded_candidates
from ktransformers.quantized.gpu.head_products import HeadRows, check_heads, multiply_heads
from ktransformers.quantized.gpu.linear import DeviceCodes, packed_linear
from ktransformers.quantized.host_rows import HostRows
from ktransformers.quantized.widened import stored_weight

MIN_WEIGHTS = 1 << 15  # of a matrix; a smaller one saves nothing
PANEL = 1 << 22  # weights that are decoded at a time
HEAD_ROWS = 64  # of x, for products of heads that read codes; more rows decode them for the product
CHECKED_ROWS = 128  # whose numbers are compared when codes are packed; as many as share a scale of fp8:128x128
DTYPES = (torch.bfloat16, torch.float32)
SAME = {"alias", "detach"}  # operators that return the same numbers


@dataclass(eq=False)
class PackedCodes:
    """The packed codes of a weight in host memory. The core's object is dropped when Python ends: torch would keep the
    tensors of a model beyond that, and with them the core's threads."""

    core: _core.CodedLinear | None
    order: Tensor | None = None  # int64 [K]: column i of the codes is column order[i] of the weight
    identity: object = field(default_factory=object)  # of the numbers, wherever they are moved

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

    def decoded(self, weight: CodedWeight, first: int, last: int) -> Tensor:
        out = torch.empty(last - first, weight.shape[1], dtype=weight.decoded_dtype, device="cpu")
        self.linear.decode(first, out)
        return self._ordered(out)

    def gathered(self, weight: CodedWeight, rows: Tensor) -> Tensor:
        out = torch.empty(rows.numel(), weight.shape[1], dtype=weight.decoded_dtype, device="cpu")
        self.linear.gather(rows, out)
        return self._ordered(out)

    def multiply(self, weight: CodedWeight, x: Tensor) -> Tensor:
        rows = x.contiguous() if self.order is None else x.index_select(1, self.order)
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype, device="cpu")
        self.linear.forward(rows, out)
        return out

    def multiply_transposed(self, weight: CodedWeight, grad: Tensor) -> Tensor:
        rows, columns, numbers = grad.float(), weight.shape[1], weight.with_dtype(grad.dtype)
        total = torch.zeros(rows.shape[0], columns, dtype=torch.float32, device="cpu")
        height = max(1, PANEL // columns)
        for first in range(0, weight.shape[0], height):
            last = min(first + height, weight.shape[0])
            total.addmm_(rows[:, first:last], numbers.decoded(first, last).float())
        return total.to(grad.dtype)

    def multiply_heads(self, weight: CodedWeight, x: Tensor, rows: HeadRows, along_rows: bool, out: Tensor) -> None:
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

    def _multiply_decoded(self, weight: CodedWeight, x: Tensor, rows: HeadRows, along_rows: bool, out: Tensor) -> None:
        """Many rows: the rows of some heads at a time are decoded for this product."""
        heads, numbers = max(1, PANEL // (rows.count * weight.shape[1])), weight.with_dtype(x.dtype)
        of_heads = torch.arange(x.shape[0])[:, None] * rows.step + torch.arange(rows.first, rows.first + rows.count)
        for first in range(0, x.shape[0], heads):
            part = slice(first, first + heads)
            decoded = numbers.gathered(of_heads[part].reshape(-1)).to(x.dtype).view(-1, rows.count, weight.shape[1])
            out[part] = torch.bmm(x[part], decoded if along_rows else decoded.transpose(1, 2))

    def _ordered(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else in_own_order(rows, self.order)


@dataclass(eq=False)
class GpuCodes:
    """The same in the memory of a GPU. Numbers are rounded to bf16, whatever the dtype of the model."""

    device: DeviceCodes
    order: Tensor | None = None
    identity: object = field(default_factory=object)

    @property
    def bytes(self) -> int:
        return self.device.bytes

    @property
    def location(self) -> torch.device:
        return self.device.packed.device

    def decoded(self, weight: CodedWeight, first: int, last: int) -> Tensor:
        return self._ordered(self.device.decoded(first, last))

    def gathered(self, weight: CodedWeight, rows: Tensor) -> Tensor:
        return self._ordered(self.device.gathered(rows))

    def multiply(self, weight: CodedWeight, x: Tensor) -> Tensor:
        return self.device.multiply(x if self.order is None else x.index_select(1, self.order))

    def multiply_transposed(self, weight: CodedWeight, grad: Tensor) -> Tensor:
        return self._ordered(self.device.multiply_transposed(grad))

    def _ordered(self, rows: Tensor) -> Tensor:
        return rows if self.order is None else in_own_order(rows, self.order)


Codes = PackedCodes | GpuCodes | HostRows
_packed: weakref.WeakSet[PackedCodes] = weakref.WeakSet()


@atexit.register
def _drop_codes() -> None:
    for codes in _packed:
        codes.core = None


class CodedWeight(Tensor):
    """A weight `[N, K]` whose numbers are codes."""

    codes: Codes
    spec: str

    @staticmethod
    def __new__(cls, codes: Codes, spec: str, shape: Sequence[int], dtype: torch.dtype) -> CodedWeight:
        tensor: CodedWeight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.location)
        tensor.codes, tensor.spec = codes, spec
        return tensor

    def __init__(self, codes: Codes, spec: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Everything is set by `__new__`."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.embedding:
                return _embedding(*args, **kwargs)
            if func is F.linear and isinstance(weight := args[1] if len(args) > 1 else kwargs.get("weight"), cls):
                x = args[0] if args else kwargs["input"]
                bias = args[2] if len(args) > 2 else kwargs.get("bias")
                if torch.is_autocast_enabled(x.device.type):
                    x = x.to(torch.get_autocast_dtype(x.device.type))
                if x.dtype in DTYPES and x.device == weight.device:
                    return _linear(x, weight, bias)
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        aliases = [argument.alias_info for argument in func._schema.arguments]
        if torch.is_inference_mode_enabled() and any(alias is not None and not alias.is_write for alias in aliases):
            with torch.inference_mode(False):  # torch accepts no view of inference mode of a tensor from outside of it
                return cls.__torch_dispatch__(func, types, args, kwargs)
        if name in SAME:
            return args[0].with_dtype(args[0].dtype)
        if name == "_to_copy" and _moves_alone(kwargs):
            return args[0].moved(kwargs.get("device")).with_dtype(kwargs.get("dtype") or args[0].dtype)
        for alias, value in zip(aliases, args, strict=False):
            if isinstance(value, cls) and alias is not None and alias.is_write:
                raise _written(name)
        if isinstance(kwargs.get("out"), cls):
            raise _written(name)
        return func(*tree_map(_decoded, tuple(args)), **tree_map(_decoded, kwargs))

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        """The same numbers in another dtype or on another device, which `nn.Module.to` sets; others would be lost."""
        if not isinstance(value, CodedWeight) or value.codes.identity is not self.codes.identity:
            raise _written("an assignment to .data")
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.codes = value.codes

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """An ordinary parameter: a module is copied to train the copy."""
        return nn.Parameter(_decoded(self), self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as an ordinary tensor."""
        return _decoded(self).__reduce_ex__(protocol)

    def untyped_storage(self) -> Any:
        """What `save_pretrained` asks for."""
        remedy = "save the adapter; the release has the weights"
        raise InputError("weight", "an access to its memory", "a weight with numbers; this one has codes", remedy)

    def with_dtype(self, dtype: torch.dtype) -> CodedWeight:
        return CodedWeight(self.codes, self.spec, self.shape, dtype)

    def moved(self, device: torch.device | str | None) -> CodedWeight:
        """The same codes in the memory of a device."""
        target = self.device if device is None else torch.device(device)
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        if target == self.device:
            return self
        codes = self.codes
        if isinstance(codes, HostRows):
            return CodedWeight(codes.moved(target), self.spec, self.shape, self.dtype)
        order = None if codes.order is None else codes.order.to(target)
        if target.type == "cpu":
            assert isinstance(codes, GpuCodes)
            core = _core.CodedLinear(default_pool(), self.shape[0], self.shape[1], self.spec)
            core.adopt(codes.device.packed_on_host())
            moved = weight_of_codes(core, self.spec, self.shape, self.dtype, order)
            moved.codes.identity = codes.identity
            return moved
        if isinstance(codes, GpuCodes):
            on_device = codes.device.moved(target)
        else:
            packed = read_only_tensor(codes.linear.memory()).view(-1).to(target)
            on_device = DeviceCodes.of(packed, packed_linear(self.shape[0], self.shape[1], self.spec))
        return CodedWeight(GpuCodes(on_device, order, codes.identity), self.spec, self.shape, self.dtype)

    def decoded(self, first: int, last: int) -> Tensor:
        """Rows first .. last - 1: in bf16 if that is the dtype, else in float32, where they are not rounded."""
        return self.codes.decoded(self, first, last)

    def gathered(self, rows: Tensor) -> Tensor:
        """The same for rows by number, which may repeat: int64 `[n]`."""
        return self.codes.gathered(self, rows)

    def multiply_heads(
        self, x: Tensor, rows: HeadRows, *, along_rows: bool = False, out: Tensor | None = None
    ) -> Tensor:
        """Products of x, head by head, with rows of each head: by the core (`csrc/moe/coded_linear.h`), or on a GPU by
        `quantized/gpu/head_products.py`."""
        codes = self.codes
        if isinstance(codes, PackedCodes):
            made = x.new_empty(*x.shape[:2], self.shape[1] if along_rows else rows.count) if out is None else out
            codes.multiply_heads(self, x, rows, along_rows, made)
            return made
        assert isinstance(codes, GpuCodes), "a table of an embedding is looked up alone"
        if codes.order is None:
            return multiply_heads(codes.device, x, rows, along_rows=along_rows, out=out)
        if not along_rows:
            return multiply_heads(codes.device, x.index_select(2, codes.order), rows, out=out)
        result = in_own_order(multiply_heads(codes.device, x, rows, along_rows=True), codes.order)
        return result if out is None else out.copy_(result)

    def check_heads(self, rows: HeadRows) -> None:
        """Compare products of heads with codes on a GPU with those of decoded rows."""
        if isinstance(self.codes, GpuCodes):
            check_heads(self.codes.device, rows)

    @property
    def decoded_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"CodedWeight({list(self.shape)}, {self.dtype}, stored in {self.spec})"


def _decoded(value: Any) -> Any:
    if not isinstance(value, CodedWeight):
        return value
    return value.decoded(0, value.shape[0]).to(value.dtype)


def _moves_alone(kwargs: Mapping[str, Any]) -> bool:
    """Whether a copy differs in dtype and device alone, and the device has memory."""
    given = {key for key, value in kwargs.items() if value not in (None, torch.strided, torch.preserve_format)}
    return given <= {"dtype", "non_blocking", "device"} and torch.device(kwargs.get("device") or "cpu").type != "meta"


def _written(name: str) -> InputError:
    remedy = "merge adapters into the released weights with `kt merge`"
    return InputError("weight", f"{name}, which writes into it", "a frozen weight, stored in codes", remedy)


class CodedProduct(torch.autograd.Function):
    """x `[..., K]` times weight `[N, K]` transposed; the weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: CodedWeight) -> Tensor:
        if isinstance(weight.codes, PackedCodes) and weight.codes.linear.w8a8:
            raise InputError("w8a8", "on", "off where gradients are wanted", "training computes with all bits")
        ctx.weight = weight
        return _product(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        rows = ctx.weight.codes.multiply_transposed(ctx.weight, grad.reshape(-1, grad.shape[-1]))
        return rows.view(*grad.shape[:-1], ctx.weight.shape[1]), None


def _embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`; of a frozen weight, padding and frequencies concern gradients alone."""
    if not isinstance(weight, CodedWeight) or max_norm is not None:
        return F.embedding(ids, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    _check_frozen(weight)
    rows = weight.gathered(ids.reshape(-1).to(torch.int64).contiguous())
    return rows.to(weight.dtype).view(*ids.shape, weight.shape[1])


def _linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    _check_frozen(weight)
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    out: Tensor = CodedProduct.apply(x, weight) if needs_grad else _product(x, weight)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias.to(out.dtype)


def _check_frozen(weight: CodedWeight) -> None:
    if torch.is_grad_enabled() and weight.requires_grad:
        expected = "a frozen one: weights that are stored in codes have no gradient"
        raise InputError(
            "weight", "one that requires a gradient", expected, "train adapters, or load the model in bf16"
        )


def _product(x: Tensor, weight: CodedWeight) -> Tensor:
    out = weight.codes.multiply(weight, x.detach().reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], weight.shape[0])


def rest_format(spec: str) -> EncodedFormat:
    """One that `encode_linears` takes."""
    form = format_of(spec)
    if not form.written or form.element == LOSSLESS:
        raise InputError("rest", spec, "keep, bf16, or a format that `kt quant` rounds to, such as int8 or int4:32")
    return form


def encode_linears(model: nn.Module, spec: str, pool: _core.Pool | None = None, *, left: Collection[str] = ()) -> int:
    """Encode the weights of all suitable linear layers on the CPU but those `left` by name, one after the other, whose
    memory is released; returns how many."""
    form, encoded = rest_format(spec), 0
    for name, linear in _suitable(model):
        if name not in left and linear.weight.shape[1] % form.multiple == 0:
            code_linear(name, linear, spec, pool=pool)
            encoded += 1
    return encoded


def code_linear(
    name: str, linear: nn.Linear, spec: str, released: Encoded | None = None, pool: _core.Pool | None = None
) -> None:
    """Encode the weight of one layer; where its files have that format, these codes are taken."""
    same = released is not None and released.format.partition(":")[0] == spec.partition(":")[0]
    if not (same and keep_linear(name, linear, released, pool)):
        _replace(linear, encode(stored_weight(linear.weight).detach(), spec), pool)


def keep_released(
    model: nn.Module, tensors: Iterable[PlainTensor], pool: _core.Pool | None = None, *, left: Collection[str] = ()
) -> int:
    """Give suitable linear layers on the CPU but those `left` by name the codes of the files that they were loaded
    from; returns how many. A head that shares the embedding's weight takes a copy of that one's codes."""
    released = {tensor.name: tensor.codes for tensor in tensors if tensor.codes is not None}
    names = {id(parameter): name for name, parameter in model.named_parameters()}  # of a shared one, the first
    kept = 0
    for name, linear in _suitable(model):
        if name in left:
            continue
        codes = released.get(f"{name}.weight") or released.get(names[id(linear.weight)])
        matrix = None if codes is None else codes()
        kept += keep_linear(name, linear, matrix if isinstance(matrix, Encoded) else None, pool)
    return kept


def keep_codes(tensor: PlainTensor, pool: _core.Pool | None = None, *, verify: bool = True) -> CodedWeight | None:
    """The matrix of a file in its codes; None: the file has numbers, or codes that numbers outrun here. `verify`: those
    of a packed directory are compared with their checksum."""
    if not is_coded(tensor) or (_core.isa() in ONE_PLANE_VARIANTS and _planes(tensor.format) > 1):
        return None
    if tensor.packed is not None:
        mapped = tensor.packed(pool or default_pool(), verify)
        return weight_of_codes(mapped.core, mapped.format, tensor.shape, tensor.dtype, mapped.order)
    matrix = None if tensor.codes is None else tensor.codes()
    if not isinstance(matrix, Encoded):
        return None
    weight = coded_weight(matrix, tensor.dtype, pool)
    checked = rows_of(matrix, 0, min(CHECKED_ROWS, matrix.rows))
    assert isinstance(checked, Encoded)
    if not torch.equal(weight.with_dtype(torch.float32).decoded(0, checked.rows), decode(checked)[0]):
        raise KTError(f"{tensor.name}: packed codes of {matrix.format} are not the numbers of the file; a defect")
    return weight


def is_coded(tensor: PlainTensor) -> bool:
    """Whether the file has a matrix in codes, and one that is large enough."""
    return bool(tensor.format) and len(tensor.shape) == 2 and torch.Size(tensor.shape).numel() >= MIN_WEIGHTS


def encodable_names(model: nn.Module) -> set[str]:
    """Names of the weights that `encode_linears` would encode, of a model on any device."""
    return {f"{name}.weight" for name, linear in coded_candidates(model) if linear.weight.numel() >= MIN_WEIGHTS}


def decode_unsuitable(model: nn.Module) -> int:
    """Give modules that need numbers these in the place of codes that the files had for them; returns how many."""
    suitable = {id(module.weight) for _, module in codable_modules(model)}
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, CodedWeight) and id(parameter) not in suitable:
                numbers = replaced.setdefault(
                    id(parameter), nn.Parameter(_decoded(parameter), requires_grad=parameter.requires_grad)
                )
                module.register_parameter(name, numbers)
            elif isinstance(parameter, CodedWeight):
                parameter.requires_grad_(False)
    return len(replaced)


def keep_linear(name: str, linear: nn.Linear, matrix: Encoded | None, pool: _core.Pool | None = None) -> bool:
    """Give one layer the codes of its files, which must have the numbers that were loaded; False: it has none that can
    be multiplied here."""
    if matrix is None or (_core.isa() in ONE_PLANE_VARIANTS and _planes(matrix.format) > 1):
        return False
    if (matrix.codes.shape[1], matrix.columns) != tuple(linear.weight.shape):
        return False
    loaded = stored_weight(linear.weight)[:CHECKED_ROWS].detach().to(torch.bfloat16, copy=True)
    coded = _replace(linear, matrix, pool)
    if not torch.equal(coded.with_dtype(torch.bfloat16).decoded(0, loaded.shape[0]), loaded):
        raise KTError(f"{name}: codes of {matrix.format} are not the numbers that were loaded; a defect")
    return True


def _planes(spec: str) -> int:
    return len(_core.format(spec)["planes"])


def _replace(linear: nn.Linear, matrix: Encoded, pool: _core.Pool | None) -> CodedWeight:
    coded = coded_weight(matrix, linear.weight.dtype, pool)
    linear.weight = nn.Parameter(coded, requires_grad=False)
    return coded


def coded_weight(matrix: Encoded, dtype: torch.dtype, pool: _core.Pool | None = None) -> CodedWeight:
    """`[1, N, K]` in codes as a weight `[N, K]`."""
    core = _core.CodedLinear(pool or default_pool(), matrix.rows, matrix.columns, matrix.format)
    core.pack(matrix.packable)
    return weight_of_codes(core, matrix.format, (matrix.rows, matrix.columns), dtype, matrix.order)


def weight_of_codes(
    core: _core.CodedLinear, spec: str, shape: Sequence[int], dtype: torch.dtype, order: Tensor | None = None
) -> CodedWeight:
    codes = PackedCodes(core, order)
    _packed.add(codes)
    return CodedWeight(codes, spec, shape, dtype)


def keep_embedding_on_host(model: Any, *, pin: bool = True) -> bool:
    """Give the input embedding of a model on the CPU a table that stays in host memory when the model is moved, if it
    has none yet; False: its weight is in codes, is used by another module too, or is none of a plain embedding."""
    embedding = model.get_input_embeddings()
    if not isinstance(embedding, nn.Embedding) or embedding.max_norm is not None:
        return False
    weight = embedding.weight
    owners = sum(one is weight for _, one in model.named_parameters(remove_duplicate=False))
    stored = stored_weight(weight)
    if isinstance(stored, CodedWeight) and isinstance(stored.codes, HostRows):
        return True
    if owners != 1 or isinstance(stored, CodedWeight) or stored.device.type != "cpu" or stored.dtype not in DTYPES:
        return False
    numbers = stored.detach().contiguous()
    rows = HostRows(numbers.pin_memory() if pin else numbers)
    held = CodedWeight(rows, str(stored.dtype).removeprefix("torch."), numbers.shape, stored.dtype)
    embedding.weight = nn.Parameter(held, requires_grad=False)
    return True


def check_on_device(model: nn.Module) -> None:
    """Compares products with codes on a GPU with those of decoded weights, for one weight of every format and
    shape on each of them."""
    checked: set[tuple[str, torch.Size, torch.device]] = set()
    for weight in model.parameters():
        if not isinstance(weight, CodedWeight):
            continue
        if isinstance(weight.codes, HostRows):
            weight.codes.check(weight)
        elif isinstance(weight.codes, GpuCodes):
            kind = (weight.spec, weight.shape, weight.device)
            if kind not in checked and weight.codes.device.check():
                checked.add(kind)


def describe_coded(model: nn.Module) -> str:
    """How many layers have codes, in which formats and bytes, in words; empty: none."""
    coded = [parameter for parameter in model.parameters() if isinstance(parameter, CodedWeight)]
    held = [weight for weight in coded if not isinstance(weight.codes, HostRows)]
    if not held:
        return ""
    formats = ", ".join(sorted({weight.spec for weight in held}))
    size = sum(weight.codes.bytes for weight in held) / 2**30
    on_host = sum(weight.codes.bytes for weight in coded if isinstance(weight.codes, HostRows)) / 2**30
    embedding = f"; the embedding in host memory: {on_host:.2f} GiB" if on_host else ""
    return f"{len(held)} linear layers outside of the experts in {formats}: {size:.2f} GiB{embedding}"


def _suitable(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers to be encoded, with their names."""
    return ((name, linear) for name, linear in coded_candidates(model) if _fits(linear.weight))


def _fits(weight: Tensor) -> bool:
    stored = stored_weight(weight)
    plain = stored.device.type == "cpu" and stored.dtype in DTYPES and not isinstance(stored, CodedWeight)
    return plain and stored.numel() >= MIN_WEIGHTS
