"""Several LoRA adapters, and none, in one forward pass without gradients: who runs the model says for every layer of
experts which packed adapters there are and which one each row of the batch wants.

`with mixed({module: MixedLora(rows, adapters)}):` holds for the calling thread while the model is called. Rows are
int32 `[T]`, the place in `adapters` or -1, in the order of the hidden states that the experts get. A module that is not
named computes its experts alone. Rows are in host memory, but for a pass that is captured in a CUDA graph: there they
are on the device, read anew at every replay (`place/host_callback.py`). Training knows nothing of this: PEFT's factors
go their own way (`nn/peft_lora.py`). `factors` has the same adapters as tensors, for a device that computes experts
itself; without them the CPU does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor, nn

from ktransformers import _core
from ktransformers.nn.lora_factors import LoraFactors


@dataclass(frozen=True)
class MixedLora:
    rows: Tensor
    adapters: Sequence[_core.Adapter]
    factors: Sequence[LoraFactors] = ()


_active: ContextVar[Mapping[nn.Module, MixedLora] | None] = ContextVar("mixed", default=None)


@contextmanager
def mixed(layers: Mapping[nn.Module, MixedLora]) -> Iterator[None]:
    token = _active.set(layers)
    try:
        yield
    finally:
        _active.reset(token)


def mixed_lora(module: nn.Module) -> MixedLora | None:
    """What the pass under way wants of this layer; None: the experts alone, or there is no such pass."""
    layers = _active.get()
    return None if layers is None else layers.get(module)
