"""Who computes a layer's experts: the protocol `ExpertBackend`, and `LocalExperts`, which has them on this CPU.

A module of transformers whose experts are packed carries one attribute of ours, `module.kt`, a `KtExperts`. Its
`backend` computes batches of hidden states `[T, H]`, expert ids and routing weights `[T, k]`. There are four:
`LocalExperts`; `PlacedExperts` (`place/placed_experts.py`), which divides experts between GPU and CPU;
`ExchangedExperts` (`parallel/exchange.py`), whose experts other ranks have too; and `RemoteExperts`
(`serve/nodes/remote_layer.py`), for inference with several nodes. `experts/operator.py` makes each of them an operator
of autograd.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ktransformers import _core
from ktransformers.experts.contract import Contract
from ktransformers.experts.lora import ExpertLora, MixedLora, empty_gradients, match_factor_strides, packed_adapter
from ktransformers.experts.partition import LayerShard
from ktransformers.experts.store import NO_DROPOUT, Dropout, ExpertStore
from ktransformers.ground.errors import InputError

CPU = torch.device("cpu")
Saved = tuple[Tensor, ...]


@dataclass(frozen=True)
class ExpertBatch:
    """A batch for one layer. LoRA is either that of all rows, or one adapter by row (`mixed`)"""

    hidden: Tensor  # [T, H]
    ids: Tensor  # [T, k]; those that name no expert, such as -1, contribute nothing
    weights: Tensor  # [T, k]
    lora: ExpertLora | None = None
    dropout: Dropout = NO_DROPOUT
    mixed: MixedLora | None = None
    needs_grad: bool = False  # weights are rounded as in backward, also for experts with few rows


@dataclass(frozen=True)
class ExpertGradients:
    hidden: Tensor
    weights: Tensor
    factors: list[Tensor]  # in host memory; empty if they are not wanted
    # Waits for copies that `factors` is still being written by; None: there are none.
    wait: Callable[[], object] | None = None


class ExpertBackend(Protocol):
    @property
    def copies_gradients(self) -> bool:
        """Whether `ExpertGradients` may have a `wait`."""
        ...

    @property
    def device(self) -> torch.device:
        """Of the batches that it computes."""
        ...

    @property
    def store(self) -> ExpertStore | None:
        """The experts that this process has; None: none of this layer."""
        ...

    def infer(self, batch: ExpertBatch) -> Tensor:
        """Sum over k of weight * expert(hidden), `[T, H]` in hidden's dtype."""
        ...

    def forward(self, batch: ExpertBatch, retain: bool) -> tuple[Tensor, Saved]:
        """As `infer`, and what `backward` needs besides the batch; with `retain` gate and up are not recomputed."""
        ...

    def backward(self, batch: ExpertBatch, grad_out: Tensor, saved: Saved, factor_grads: bool) -> ExpertGradients: ...


class LocalExperts:
    """The experts of a store, computed by the CPU of this process."""

    copies_gradients, device = False, CPU

    def __init__(self, store: ExpertStore) -> None:
        self.store = store

    def infer(self, batch: ExpertBatch) -> Tensor:
        inputs, mixed = (batch.hidden, batch.ids, batch.weights), batch.mixed
        if mixed is not None:
            return self.store.forward(*inputs, adapter=mixed.rows, adapters=mixed.adapters)
        return self.store.forward(*inputs, adapters=self._adapters(batch), needs_grad=batch.needs_grad)

    def forward(self, batch: ExpertBatch, retain: bool) -> tuple[Tensor, Saved]:
        keep = self.store.new_keep(*batch.ids.shape) if retain else torch.empty(0, dtype=torch.uint8, device=CPU)
        out = self.store.forward(
            batch.hidden,
            batch.ids,
            batch.weights,
            keep=keep if retain else None,
            adapters=self._adapters(batch),
            dropout=batch.dropout,
            needs_grad=True,
        )
        return out, (keep,)

    def backward(self, batch: ExpertBatch, grad_out: Tensor, saved: Saved, factor_grads: bool) -> ExpertGradients:
        (keep,), lora = saved, batch.lora
        grads: list[Tensor] = []
        targets = None
        if lora is not None and factor_grads:
            grads, views = empty_gradients(lora)
            targets = [views]
        grad_hidden, grad_weights = self.store.backward(
            grad_out.contiguous(),
            batch.hidden,
            batch.ids,
            batch.weights,
            keep=keep if keep.numel() else None,
            adapters=self._adapters(batch),
            factors=targets,
            dropout=batch.dropout,
        )
        if lora is not None and grads:
            grads = match_factor_strides(self.store, lora, grads)
        return ExpertGradients(grad_hidden, grad_weights.to(batch.weights.dtype), grads)

    def _adapters(self, batch: ExpertBatch) -> list[_core.Adapter]:
        return [] if batch.lora is None else [packed_adapter(self.store, batch.lora)]


class KtExperts:
    """What we keep of an experts module: `module.kt`."""

    def __init__(self, contract: Contract, store: ExpertStore | None, shard: LayerShard | None = None) -> None:
        """With a `shard` the store holds the shard's experts alone, and is None if there are none; nothing computes
        the layer until the processes are connected."""
        self.contract, self.store, self.shard = contract, store, shard
        self.local = None if store is None or shard is not None else LocalExperts(store)
        self.backend: ExpertBackend | None = self.local
        self.is_placed = False  # `place/` computes tensors on the backend's device, `local` those on others
        self.group: Any | None = None  # ranks that divide the experts, an `ExpertGroup` of parallel/exchange.py
        self.lora: ExpertLora | None = None  # that a program trains without PEFT
        self.lora_dropout = 0.0  # of PEFT's LoRA in training
        # Packs LoRA for experts of which `store` has a part: (name, pairs by role, a function that reads them again).
        self.pack_lora: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> KtExperts:
        # A copy of a model (a reference model, an average of weights) shares the experts and what computes them.
        other = copy.copy(self)
        other.lora = copy.deepcopy(self.lora, memo)
        return other

    def place(self, backend: ExpertBackend | None) -> None:
        """Let `backend` compute tensors on its device; None: the CPU computes all."""
        self.backend, self.is_placed = self.local if backend is None else backend, backend is not None

    def is_placed_on(self, device: torch.device) -> bool:
        return self.is_placed and self.backend is not None and self.backend.device == device

    def backend_for(self, device: torch.device, mixed: MixedLora | None) -> ExpertBackend:
        """What computes a batch on this device. Placed experts need the adapters of a mixed batch as tensors."""
        elsewhere = not self.is_placed_on(device) or (mixed is not None and not mixed.factors)
        if self.is_placed and self.local is not None and elsewhere:
            return self.local
        if self.backend is None:
            given = "a part of the experts, without the processes that have the others"
            raise InputError("experts", given, "a connected group", "call connect (parallel/exchange.py)")
        return self.backend


def packed_experts(module: nn.Module) -> KtExperts | None:
    """`module.kt`; None: the module has its own parameters, or no experts."""
    kt: KtExperts | None = getattr(module, "kt", None)
    return kt
