"""Selective activation checkpointing of expert layers: their outputs are saved, so recomputation skips the experts.

`save_expert_outputs` is a `context_fn` for torch's non-reentrant checkpointing. In the first forward pass of a
checkpointed block every expert operator appends its outputs to a list; in the recomputation the operators take them
from that list in call order. torch's own selective checkpointing does the same for any operator, but dispatches to
Python at every operator of the block, attention included, which took a third of a training step.

`recompute_experts` exempts the experts of one store: they are computed in both passes and nothing of them is saved
between the two, which needs less memory. The choice belongs to the store rather than to the `context_fn`, because
trainers ask for that function without naming a model.

The ContextVar `_expert_outputs` carries the function that saves or replays from the `context_fn` past the stock model
to the operators, because torch passes no argument from one to the other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from torch import Tensor

Outputs = tuple[Tensor, ...]
Compute = Callable[[], Outputs]
# Takes the function that computes a layer's outputs and returns them, computed or replayed; None: no checkpointing.
_expert_outputs: ContextVar[Callable[[Compute], Outputs] | None] = ContextVar("expert_outputs", default=None)
_recomputed_stores: weakref.WeakSet[object] = weakref.WeakSet()


def compute_or_replay(compute: Compute, store: object) -> Outputs:
    """The result of `compute`, or what it returned in the pass that is being recomputed. The operators call it below
    autograd, with the `ExpertStore` that computes."""
    save_or_replay = _expert_outputs.get()
    return compute() if save_or_replay is None or store in _recomputed_stores else save_or_replay(compute)


def recompute_experts(store: object, recompute: bool = True) -> None:
    """Compute these experts again in the recomputation of a checkpointed block; False: replay them, the default."""
    (_recomputed_stores.add if recompute else _recomputed_stores.discard)(store)


def inside_checkpointed_block() -> bool:
    """Whether a block runs, for the first time or again, whose checkpointing uses `save_expert_outputs`."""
    return _expert_outputs.get() is not None


def save_expert_outputs() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """The contexts of the first forward pass and of its recomputation."""
    saved: list[Outputs] = []

    def save(compute: Compute) -> Outputs:
        outputs = compute()
        # Detached: the returned tensors will refer to their graph, and the graph refers to this list.
        saved.append(tuple(tensor.detach() for tensor in outputs))
        return outputs

    return _with_handler(lambda: save), _with_handler(lambda: _replay(saved))


def _replay(saved: list[Outputs]) -> Callable[[Compute], Outputs]:
    remaining = iter(saved)

    def replay(compute: Compute) -> Outputs:
        outputs = next(remaining, None)
        if outputs is None:
            raise RuntimeError("recomputation calls more expert layers than the forward pass did")
        return tuple(tensor.detach() for tensor in outputs)

    return replay


@contextlib.contextmanager
def _with_handler(make_handler: Callable[[], Callable[[Compute], Outputs]]) -> Iterator[None]:
    token = _expert_outputs.set(make_handler())
    try:
        yield
    finally:
        _expert_outputs.reset(token)
