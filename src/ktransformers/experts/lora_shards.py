"""Expert LoRA where the ranks of a group divide the experts: a rank holds the factors of its experts, files hold all.

PEFT's tensors of one adapted parameter are lora_A `[E * r, in]`, expert by expert, and lora_B `[out, r * E]`, with the
expert index fastest. A rank keeps `[e * r, in]` and `[out, r * e]` of its e experts, possibly none. PEFT creates a
layer for all experts first, so that every rank draws the random numbers of a single process, and `keep_shard` drops the
rest at once: no more than one layer is ever whole. Whole tensors that are loaded are cut by a hook, so adapters and
checkpoints have the ordinary form and do not depend on the number of ranks; `gather_experts` makes them
(`parallel/whole_state.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.experts.partition import LayerShard


@dataclass(frozen=True)
class FactorShard:
    """How the whole tensor of one factor is divided: along dimension 0 as `[E, r]` or along dimension 1 as `[r, E]`."""

    shard: LayerShard
    dimension: int
    lora_rank: int

    def shape(self, part: Tensor, experts: int) -> tuple[int, int]:
        """Of the tensor with this many experts."""
        size = experts * self.lora_rank
        return (size, part.shape[1]) if self.dimension == 0 else (part.shape[0], size)

    def whole_shape(self, part: Tensor) -> tuple[int, int]:
        return self.shape(part, len(self.shard.owners))

    def cut(self, whole: Tensor, experts: Sequence[int] | None = None) -> Tensor:
        """The part of these experts, by default of this rank's."""
        chosen = list(self.shard.experts if experts is None else experts)
        return self._split(whole)[chosen].movedim(0, self._place).reshape(self.shape(whole, len(chosen)))

    def insert(self, whole: Tensor, part: Tensor, experts: Sequence[int]) -> None:
        """Write the part of these experts into the whole tensor."""
        if experts:
            self._split(whole)[list(experts)] = self._split(part)

    @property
    def _place(self) -> int:
        """Of the expert index, once the divided dimension is split."""
        return 0 if self.dimension == 0 else 2

    def _split(self, tensor: Tensor) -> Tensor:
        """A view with the expert index as a dimension of its own, in front."""
        experts = tensor.shape[self.dimension] // self.lora_rank
        rows, columns = tensor.shape
        shape = (experts, self.lora_rank, columns) if self.dimension == 0 else (rows, self.lora_rank, experts)
        return tensor.view(shape).movedim(self._place, 0)


_factor_shards: weakref.WeakKeyDictionary[nn.Module, FactorShard] = weakref.WeakKeyDictionary()  # by lora_A, lora_B


def keep_shard(layer: Any, adapter: str, shard: LayerShard) -> None:
    """Keep the factors of this rank's experts of an adapter that PEFT has just created for all experts."""
    for dimension, factors in enumerate((layer.lora_A, layer.lora_B)):
        factor: nn.Linear = factors[adapter]
        divided = FactorShard(shard, dimension, int(layer.r[adapter]))
        with torch.no_grad():
            part = divided.cut(factor.weight.detach()).clone()
        factor.weight = nn.Parameter(part, requires_grad=factor.weight.requires_grad)
        factor.out_features, factor.in_features = part.shape
        _factor_shards[factor] = divided
        factor.register_load_state_dict_pre_hook(_cut_loaded)  # type: ignore[no-untyped-call]
    layer.num_experts = len(shard.experts)


def _cut_loaded(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    name, divided = f"{prefix}weight", _factor_shards[module]
    # Any other shape is reported by load_state_dict.
    if name in state and tuple(state[name].shape) == divided.whole_shape(module.weight):
        state[name] = divided.cut(state[name])


def factor_shards(model: nn.Module) -> dict[str, FactorShard]:
    """Name -> division of every parameter of which this rank holds a part."""
    return {
        f"{name}.weight": _factor_shards[module] for name, module in model.named_modules() if module in _factor_shards
    }
