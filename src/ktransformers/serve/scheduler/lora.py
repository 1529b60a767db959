"""LoRA adapters of one base model: read from any adapter format, bound to the model's modules, applied to the rows of
the batch that request them.

Every linear layer gets a forward hook at start, because adapters are loaded while the server answers. The hook adds s *
B (A x), in float32 as PEFT does, to the rows of each adapter; all other rows keep the output of the base bit for bit.
LoRA of experts is packed for the expert stores and computed there (`experts/lora.py`). A tensor of an adapter
without a module in the model is an error that names it. A loaded adapter is immutable: loading the same name again
makes a new version, and requests in flight keep the one that they started with."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.adapters import Adapter, LoraPair, read_adapter
from ktransformers.adapters.adapter_template import AdapterTemplate
from ktransformers.adapters.pack import pack_expert_pairs
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import IMPLEMENTATION, is_experts
from ktransformers.experts.interface import experts_of
from ktransformers.experts.lora import ExpertLora, MixedLora
from ktransformers.ground.errors import InputError
from ktransformers.serve.cache.kv_cache import Owner

DEVICE_COPY_LOCK = threading.Lock()  # held while factors are copied to their device, and during a graph's sync check
MAX_CORE_ROWS = 8  # rows that the core computes on the calling thread: torch would wake all of its threads
CORE_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class LinearLora:
    """LoRA of a linear layer in float32: of one adapter, or of several side by side (r is the sum of their ranks), each
    row with the scales of its own adapter and zero in the columns of others."""

    a: Tensor  # [r, in]
    b: Tensor  # [r, out]
    scales: float | Tensor  # of all rows and columns, or [rows, r]


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """One version of an adapter, ready to be applied."""

    name: str
    version: int
    source: str
    linears: Mapping[nn.Module, LinearLora]
    experts: Mapping[nn.Module, _core.Adapter]
    matrices: int = 0  # with factors: each linear layer, and gate, up and down of each expert layer
    factors: Mapping[nn.Module, ExpertLora] = field(default_factory=dict)  # of expert layers that a GPU may compute
    template: AdapterTemplate | None = None  # that it was trained with; None: the base's
    content: bytes = b""  # hash of all factors; empty: it was not asked for

    @property
    def owner(self) -> Owner:
        return (self.name, self.version)

    def bytes(self) -> int:
        linear_bytes = sum((linear.a.numel() + linear.b.numel()) * 4 for linear in self.linears.values())
        return linear_bytes + sum(packed.packed_bytes for packed in self.experts.values())


@dataclass(frozen=True)
class AdapterRows:
    """Rows first .. last - 1 of the batch use this adapter."""

    adapter: LoadedAdapter
    first: int
    last: int


def adapter_rows(chunks: Iterable[tuple[LoadedAdapter | None, int]]) -> list[AdapterRows]:
    """Of consecutive chunks, each with its adapter and number of rows; adjacent ones of an adapter become one range."""
    entries: list[AdapterRows] = []
    last = 0
    for adapter, rows in chunks:
        first, last = last, last + rows
        if adapter is None:
            continue
        if entries and entries[-1].adapter is adapter and entries[-1].last == first:
            first = entries.pop().first
        entries.append(AdapterRows(adapter, first, last))
    return entries


LinearLoraFn = Callable[[nn.Module, Tensor, Tensor], None]  # (linear layer, input, output): adds to the output in place

_linear_lora_fn: ContextVar[LinearLoraFn | None] = ContextVar("kt_linear_lora_fn", default=None)


@contextmanager
def use_linear_lora(add: LinearLoraFn | None) -> Iterator[None]:
    """Sets the function that the hooks of linear layers call while the stock model runs; None: no LoRA.

    A ContextVar carries it past the model's forward. The function holds what the model does not know: which rows of the
    batch use which adapter."""
    token = _linear_lora_fn.set(add)
    try:
        yield
    finally:
        _linear_lora_fn.reset(token)


def current_linear_lora() -> LinearLoraFn | None:
    """The function that was set; None: no row has LoRA."""
    return _linear_lora_fn.get()


def apply_linear_lora(adapter_rows: Sequence[AdapterRows], token_count: int) -> AbstractContextManager[None]:
    return use_linear_lora(functools.partial(_add_row_ranges, adapter_rows, token_count) if adapter_rows else None)


def apply_adapter_to_all(adapter: LoadedAdapter | None) -> AbstractContextManager[None]:
    """Every row of every linear layer uses this adapter, however many rows there are."""
    return use_linear_lora(None if adapter is None else functools.partial(_add_to_all_rows, adapter))


def expert_lora(adapter_rows: Sequence[AdapterRows], token_count: int) -> dict[nn.Module, MixedLora]:
    """For every expert layer that one of the adapters has: the adapter of each row."""
    layers: dict[nn.Module, MixedLora] = {}
    row_indices: dict[tuple[bool, ...], Tensor] = {}
    for module in {module for entry in adapter_rows for module in entry.adapter.experts}:
        present = tuple(module in entry.adapter.experts for entry in adapter_rows)
        if present not in row_indices:
            row_indices[present] = torch.full((token_count,), -1, dtype=torch.int32)
            entries = [entry for entry, has in zip(adapter_rows, present, strict=True) if has]
            for index, entry in enumerate(entries):
                row_indices[present][entry.first : entry.last] = index
        adapters_present = [entry.adapter for entry in adapter_rows if module in entry.adapter.experts]
        factors = [adapter.factors[module] for adapter in adapters_present if module in adapter.factors]
        adapters = [adapter.experts[module] for adapter in adapters_present]
        layers[module] = MixedLora(row_indices[present], adapters, factors if len(factors) == len(adapters) else ())
    return layers


class LoraModules:
    """The model's linear and expert layers, by the names that adapters use for them."""

    def __init__(self, model: nn.Module, *, hash_content: bool = False) -> None:
        """`hash_content`: of adapters, which names their blocks in lower tiers of the KV cache."""
        self.hash_content = hash_content
        self._linears: dict[tuple[str, int, str], nn.Module] = {}
        self._experts: dict[tuple[str, int, str], nn.Module] = {}
        self.device = next(model.parameters()).device
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name != "lm_head":
                self._linears[split_layer_name(name)] = module
                module.register_forward_hook(_add_linear_lora)
            elif is_experts(module) and _is_packed_layer(module):
                self._experts[split_layer_name(name.removesuffix(".experts"))] = module

    def open(self, source: str | Path, name: str, version: int, model: str | None) -> LoadedAdapter:
        """Read and check an adapter, and bind it. `model` is the directory with the base's config.json."""
        return self.bind(read_adapter(source, model=model), str(source), name, version)

    def bind(self, adapter: Adapter, source: str, name: str, version: int) -> LoadedAdapter:
        if adapter.extras:
            first = adapter.extras[0].name
            remedy = "fold it in with `kt merge`"
            raise InputError(f"{source}: {first}", "a whole tensor", "LoRA factors alone", remedy)
        linears = {self._find_linear(source, layer.name): layer for layer in adapter.modules}
        experts = {self._find_experts(source, layer.root): layer for layer in adapter.experts}
        factors_by_layer = {module: (layer.name, layer.read()) for module, layer in linears.items()}
        digest = hashlib.blake2b(digest_size=20) if self.hash_content else None
        for layer_name, pair in sorted(factors_by_layer.values(), key=lambda entry: entry[0]):
            _hash_pair(digest, layer_name, pair)
        with DEVICE_COPY_LOCK:
            linear_loras = {
                module: self._linear_factors(source, name, module, pair)
                for module, (name, pair) in factors_by_layer.items()
            }
        packed: dict[nn.Module, _core.Adapter] = {}
        factors: dict[nn.Module, ExpertLora] = {}
        for module, layer in experts.items():
            pairs = layer.read()
            for role in sorted(pairs):
                _hash_pair(digest, f"{layer.root}.{role}", pairs[role])
            packed[module] = _pack_experts(f"{source}: {layer.root}.experts", module, pairs, layer.read)
            if experts_of(module).is_placed:
                factors[module] = _gpu_factors(pairs)
        matrices = len(linear_loras) + sum(len(layer.forms) for layer in experts.values())
        content = b"" if digest is None else digest.digest()
        return LoadedAdapter(name, version, source, linear_loras, packed, matrices, factors, content=content)

    def _find_linear(self, source: str, name: str) -> nn.Module:
        module = self._linears.get(split_layer_name(name))
        if module is None:
            expected = "LoRA on linear layers of this model, apart from lm_head, and on its experts"
            raise InputError(f"{source}: {name}", "no such layer", expected, "another base, or fold it with `kt merge`")
        return module

    def _find_experts(self, source: str, root: str) -> nn.Module:
        module = self._experts.get(split_layer_name(root))
        if module is None:
            raise InputError(f"{source}: {root}.experts", "no such layer of experts", "this model's layers")
        return module

    def _linear_factors(self, source: str, name: str, module: nn.Module, pair: LoraPair) -> LinearLora:
        linear: Any = module
        if (pair.a.shape[1], pair.b.shape[0]) != (linear.in_features, linear.out_features):
            given = f"{pair.b.shape[0]} by {pair.a.shape[1]}"
            raise InputError(f"{source}: {name}", given, f"{linear.out_features} by {linear.in_features}")
        a, b = (factor.to(linear.weight.device, torch.float32).contiguous() for factor in (pair.a, pair.b.T))
        return LinearLora(a, b, pair.scaling)


def _hash_pair(digest: hashlib.blake2b | None, name: str, pair: LoraPair) -> None:
    if digest is None:
        return
    digest.update(f"{name} {pair.scaling!r}".encode())
    for factor in (pair.a, pair.b):
        digest.update(f" {factor.dtype} {tuple(factor.shape)} ".encode())
        digest.update(factor.detach().cpu().contiguous().view(torch.uint8).numpy().data)


def _is_packed_layer(module: Any) -> bool:
    """Whether our expert store computes this layer. If transformers does, a packed adapter would be ignored."""
    return module.config._experts_implementation == IMPLEMENTATION and packed_experts(module) is not None


def _gpu_factors(pairs: Mapping[str, LoraPair]) -> ExpertLora:
    """Factors in bf16 for the GPU kernels; an A that gate and up share is stored once."""
    factors: dict[str, Tensor] = {}
    gate, up = pairs.get("gate"), pairs.get("up")
    shared = gate is not None and up is not None and gate.a is up.a
    for role, pair in pairs.items():
        if not (role == "up" and shared):
            factors[f"{role}_a"] = pair.a.to(torch.bfloat16)
        factors[f"{role}_b"] = pair.b.to(torch.bfloat16)
    scales = [pairs[role].scaling if role in pairs else 1.0 for role in ("gate", "up", "down")]
    return ExpertLora.of_tensors(tuple(factors), tuple(factors.values()), (scales[0], scales[1], scales[2]))


def _pack_experts(
    what: str, module: nn.Module, pairs: Mapping[str, LoraPair], read: Callable[[], Mapping[str, LoraPair]]
) -> Any:
    """A packed adapter of the layer's store, or a `SharedLora` of several nodes."""
    kt = experts_of(module)
    if kt.pack_lora is not None:
        return kt.pack_lora(what, pairs, read)
    assert kt.store is not None
    return pack_expert_pairs(what, kt.store, pairs)


def _add_linear_lora(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Forward hook of every linear layer: adds the LoRA terms of the batch's rows to its output."""
    add = _linear_lora_fn.get()
    if add is not None:
        add(module, inputs[0], output)


def token_rows(module: nn.Module, inputs: Tensor, outputs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Input and output of a linear layer as `[rows, features]`, one row per token of the batch."""
    inputs, outputs = inputs.reshape(-1, inputs.shape[-1]), outputs.view(-1, outputs.shape[-1])
    if inputs.shape[0] != rows:
        given = f"{inputs.shape[0]} rows in a batch of {rows}"
        raise InputError(type(module).__name__, given, "every token once", "LoRA on this layer cannot be served")
    return inputs, outputs


def _add_row_ranges(
    adapter_rows: Sequence[AdapterRows], rows: int, module: nn.Module, inputs: Tensor, output: Tensor
) -> None:
    """LoRA of each adapter, added to its rows of `output`."""
    adapter_rows = [entry for entry in adapter_rows if module in entry.adapter.linears]
    if not adapter_rows:
        return
    input_rows, output_rows = token_rows(module, inputs, output, rows)
    for entry in adapter_rows:
        row_range, linear = slice(entry.first, entry.last), entry.adapter.linears[module]
        _add_lora(linear, input_rows[row_range], output_rows[row_range])


def _add_to_all_rows(adapter: LoadedAdapter, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
    linear = adapter.linears.get(module)
    if linear is not None:
        _add_lora(linear, inputs.reshape(-1, inputs.shape[-1]), output.view(-1, output.shape[-1]))


def _add_lora(linear: LinearLora, x: Tensor, y: Tensor) -> None:
    """Add the term of inputs `[rows, in]` to outputs `[rows, out]`."""
    fits_core = x.device.type == "cpu" and x.shape[0] <= MAX_CORE_ROWS and x.dtype == y.dtype and x.dtype in CORE_DTYPES
    if fits_core and isinstance(linear.scales, float):
        _core.add_lora(x.contiguous(), linear.a, linear.b, y, linear.scales)  # Jamba's input is transposed
    else:
        y.copy_(y.float() + (x.float() @ linear.a.T) @ linear.b * linear.scales)
