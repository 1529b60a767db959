"""LoRA of several adapters in one CUDA graph: the adapter of each row is read from a tensor on the device.

`adapter_index` int64 `[R]` is a line of the step's table: 1 + the index of a row's adapter in the set; 0: the base. The
factors of a linear layer are concatenated over the adapters that have it, A `[S, in]` and B `[S, out]` with S the
sum of their ranks: one product with A, columns of other adapters than the row's multiplied by zero, one product with B,
all in float32 as PEFT does. So a set costs about as much as one adapter. Rows of the base keep its output bit for bit.
Expert layers get a `MixedLora` with the rows' indices on the device, one per layer, because adapters may have different
layers.

A captured graph refers to the tensors of a set by address, so it must not outlive the set. A set of one adapter uses
the adapter's own factors; larger sets hold copies (`bytes`), which `StepGraphs` bounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ktransformers.experts.lora import MixedLora, use_mixed_lora
from ktransformers.ground.errors import InputError
from ktransformers.serve.scheduler.lora import LinearLora, LoadedAdapter, token_rows, use_linear_lora

Adapters = tuple[LoadedAdapter, ...]  # in the order of `sort_adapters`
RowLoraFn = Callable[[nn.Module], LinearLora | None]


def sort_adapters(adapters: set[LoadedAdapter]) -> Adapters:
    return tuple(sorted(adapters, key=lambda adapter: (adapter.name, adapter.version)))


@dataclass(frozen=True, eq=False)
class RankColumns:
    """The adapter of each column of stacked factors; shared by all layers with the same adapters and ranks."""

    adapter_index: Tensor  # int64 [S]
    scales: Tensor  # float32 [S]
    has: Tensor  # bool [1 + adapters]: whether the adapter has this layer

    def choose(self, adapter_index: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [R, S]: factor of each column in each row; bool [R, 1]: rows whose adapter has the layer."""
        return (adapter_index[:, None] == self.adapter_index) * self.scales, self.has[adapter_index][:, None]


class AdapterSet:
    def __init__(self, adapters: Adapters, device: torch.device) -> None:
        self.adapters, self._device = adapters, device
        self.indices = {adapter: index for index, adapter in enumerate(adapters, start=1)}
        self._columns: dict[tuple[tuple[int, int, float | Tensor], ...], RankColumns] = {}
        self._indices: dict[tuple[int, ...], Tensor] = {}
        linears = {module for adapter in adapters for module in adapter.linears}
        experts = {module for adapter in adapters for module in adapter.experts}
        self._stacks = {module: self._stack(module) for module in linears}
        self.layers = {module: self._layer(module) for module in experts}

    @property
    def bytes(self) -> int:
        """Size of the copied factors on the device."""
        if len(self.adapters) < 2:
            return 0
        return sum((stack.a.numel() + stack.b.numel()) * 4 for stack, _ in self._stacks.values())

    def _stack(self, module: nn.Module) -> tuple[LinearLora, RankColumns]:
        """Factors of a linear layer, concatenated over the adapters that have it."""
        linears = [
            (index, adapter.linears[module]) for adapter, index in self.indices.items() if module in adapter.linears
        ]
        pattern = tuple((index, linear.a.shape[0], linear.scales) for index, linear in linears)
        if pattern not in self._columns:
            self._columns[pattern] = self._columns_of(linears)
        a, b = ([getattr(linear, factor) for _, linear in linears] for factor in ("a", "b"))
        stacked = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (a, b)]
        columns = self._columns[pattern]
        return LinearLora(stacked[0], stacked[1], columns.scales), columns

    def _columns_of(self, linears: list[tuple[int, LinearLora]]) -> RankColumns:
        adapter_index = [index for index, linear in linears for _ in range(linear.a.shape[0])]
        scales = [linear.scales for _, linear in linears for _ in range(linear.a.shape[0])]
        has = torch.zeros(len(self.adapters) + 1, dtype=torch.bool)
        has[adapter_index] = True
        numbers = torch.tensor(adapter_index), torch.tensor(scales, dtype=torch.float32), has
        return RankColumns(*(tensor.to(self._device) for tensor in numbers))

    def _layer(self, module: nn.Module) -> MixedLora:
        """Of the adapters that have this expert layer. Its `rows` are by adapter index, int32 [1 + adapters of the
        set]: index into `adapters`, or -1; shared by equal layers."""
        adapters_by_index = {index: adapter for adapter, index in self.indices.items() if module in adapter.experts}
        cpu_only = next((adapter for adapter in adapters_by_index.values() if module not in adapter.factors), None)
        if cpu_only is not None:
            given = f"adapter {cpu_only.name!r}, whose expert factors are packed for the CPU only"
            raise InputError("CUDA graph", given, "an adapter that was loaded while an expert engine was attached")
        present = tuple(adapters_by_index)
        if present not in self._indices:
            positions = range(len(self.adapters) + 1)
            indices = [present.index(index) if index in adapters_by_index else -1 for index in positions]
            self._indices[present] = torch.tensor(indices, dtype=torch.int32).to(self._device)
        packed = tuple(adapter.experts[module] for adapter in adapters_by_index.values())
        factors = tuple(adapter.factors[module] for adapter in adapters_by_index.values())
        return MixedLora(self._indices[present], packed, factors)

    @contextmanager
    def applied(self, adapter_index: Tensor) -> Iterator[RowLoraFn]:
        """While the model is called, row i uses the adapter `adapter_index[i]`. The value gives the factors of a linear
        layer that is not called but multiplied into others (`latent.py`)."""
        rows = {id(indices): indices[adapter_index] for indices in self._indices.values()}
        layers = {module: replace(layer, rows=rows[id(layer.rows)]) for module, layer in self.layers.items()}
        chosen = {columns: columns.choose(adapter_index) for columns in self._columns.values()}
        add = functools.partial(self._add, chosen, adapter_index.shape[0]) if self._stacks else None
        with use_linear_lora(add), use_mixed_lora(layers):
            yield functools.partial(self._of_rows, chosen)

    def _of_rows(self, chosen: dict[RankColumns, tuple[Tensor, Tensor]], module: nn.Module) -> LinearLora | None:
        if module not in self._stacks:
            return None
        stack, columns = self._stacks[module]
        return replace(stack, scales=chosen[columns][0])

    def _add(
        self,
        chosen: dict[RankColumns, tuple[Tensor, Tensor]],
        rows: int,
        module: nn.Module,
        inputs: Tensor,
        output: Tensor,
    ) -> None:
        if module not in self._stacks:
            return
        stack, columns = self._stacks[module]
        x, y = token_rows(module, inputs, output, rows)
        scales, has = chosen[columns]
        output_with_lora = torch.addmm(y.float(), (x.float() @ stack.a.T) * scales, stack.b)
        y.copy_(torch.where(has, output_with_lora, y))
