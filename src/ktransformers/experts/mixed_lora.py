"""Multi-LoRA inference: one forward pass without gradients in which every row of the batch has its own adapter or none.

The ContextVar `_mixed_lora` carries, past the stock model to each expert layer, the packed adapters of the layer and
the adapter index of every row. It holds for the calling thread while the model is called:
`with use_mixed_lora({module: MixedLora(rows, adapters)}):`. A module that is not listed computes its experts without
LoRA. Training does not use it: PEFT's factors take another path (`experts/peft_lora.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from ktransformers import _core
from ktransformers.experts.lora_factors import LoraFactors


@dataclass(frozen=True)
class MixedLora:
    """`rows` is in host memory, except in a pass that is captured as a CUDA graph: there it is on the device, and every
    replay reads it (`place/host_callback.py`). `factors` has the adapters as tensors, for a device that computes
    experts itself; without them the CPU computes all experts."""

    rows: Tensor  # int32 [T], in the order of the hidden states: index into `adapters`, or -1
    adapters: Sequence[_core.Adapter]  # of a layer on several hosts: `SharedLora` of serve/hosts/remote_layer.py
    factors: Sequence[LoraFactors] = ()


_mixed_lora: ContextVar[Mapping[nn.Module, MixedLora] | None] = ContextVar("mixed_lora", default=None)


@contextmanager
def use_mixed_lora(layers: Mapping[nn.Module, MixedLora]) -> Iterator[None]:
    token = _mixed_lora.set(layers)
    try:
        yield
    finally:
        _mixed_lora.reset(token)


def current_mixed_lora(module: nn.Module) -> MixedLora | None:
    """The adapters of this layer in the running pass; None: experts without LoRA, or no multi-LoRA pass."""
    layers = _mixed_lora.get()
    return None if layers is None else layers.get(module)
