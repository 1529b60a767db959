"""Experts that activation checkpointing does not compute again.

`retain_experts` is a `context_fn` for torch's non-reentrant checkpointing: what the experts of a checkpointed stretch
gave in its first pass is kept, and the pass that is computed again finds it, in the order of the calls. torch's own
selective checkpointing does the same for any operator, and pays for it with a Python call at every operator of the
stretch, attention's included: that was a third of a training step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from torch import Tensor

Outputs = tuple[Tensor, ...]
# Gives the next outputs; its argument computes them.
_tape: ContextVar[Callable[[Callable[[], Outputs]], Outputs] | None] = ContextVar("tape", default=None)


def computed(compute: Callable[[], Outputs]) -> Outputs:
    """What `compute` gives, or gave in the pass that is being repeated. Called by the operators, below autograd."""
    tape = _tape.get()
    return compute() if tape is None else tape(compute)


def retain_experts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """For the first pass, and for the one that is computed again."""
    kept: list[Outputs] = []

    def record(compute: Callable[[], Outputs]) -> Outputs:
        outputs = compute()
        # Detached: what is returned will know its graph, which keeps this list.
        kept.append(tuple(tensor.detach() for tensor in outputs))
        return outputs

    return _under(lambda: record), _under(lambda: _player(kept))


def _player(kept: list[Outputs]) -> Callable[[Callable[[], Outputs]], Outputs]:
    following = iter(kept)

    def play(compute: Callable[[], Outputs]) -> Outputs:
        outputs = next(following, None)
        if outputs is None:
            raise RuntimeError("experts are called more often in recomputation than in the pass that is repeated")
        return tuple(tensor.detach() for tensor in outputs)

    return play


@contextlib.contextmanager
def _under(tape: Callable[[], Callable[[Callable[[], Outputs]], Outputs]]) -> Iterator[None]:
    token = _tape.set(tape())
    try:
        yield
    finally:
        _tape.reset(token)
