"""Compares the logits of two ways to compute the same rows of tokens, for the checks before serving and training.

Where two experts tie in a router, two correct computations may choose different ones, and all that follows differs. So
logits that differ by more than the limit are computed once more, recorded: the second way takes the experts of the
first where its own router chooses others (`router_choices.py`). The result counts only if every replaced choice is a
tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from ktransformers.adapters.router_choices import compare_choices, recording_choices

# Entered around a pass of the model, with the numbers of the tokens that it computes; rows are numbered consecutively.
ForwardPass = Callable[[Tensor], AbstractContextManager[None]]
ComputeLogits = Callable[[ForwardPass], Sequence[Tensor]]  # -> [T, V] of each row, float32


def logit_error(
    model: nn.Module, rows: Sequence[Sequence[int]], expected: ComputeLogits, measured: ComputeLogits, limit: float
) -> float:
    """Largest relative difference of a row's logits; ties between experts count for nothing if it exceeds `limit`."""
    error = _largest_difference(expected(_unrecorded), measured(_unrecorded))
    if error <= limit:
        return error
    with recording_choices(model, rows) as recorder:
        reference = expected(recorder.forward_pass)
    choices = recorder.choices()
    with recording_choices(model, rows, choices) as recorder:
        replayed = measured(recorder.forward_pass)
    comparison = compare_choices(recorder.choices(), choices)
    explained = comparison is not None and comparison.ties and not comparison.faults
    return _largest_difference(reference, replayed) if explained else error


def _unrecorded(tokens: Tensor) -> AbstractContextManager[None]:
    return nullcontext()


def _largest_difference(expected: Sequence[Tensor], measured: Sequence[Tensor]) -> float:
    """NaN if one is."""
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(measured, expected, strict=True)]
    return max(errors, key=lambda error: (error != error, error))
