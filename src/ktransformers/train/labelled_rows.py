"""Applies the LM head only to hidden states whose next token has a label.

Of a chat's tokens a third or less have a label, and the head and the softmax over its logits dominate the cost of a
small model on a CPU. On a GPU TRL leaves those rows out; on a CPU it computes all of them and masks them. Here the head
gets the hidden states whose next token has a label (`modeling/head_rows.py`), and TRL the matching labels, already
shifted. The sums over labelled tokens are the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ktransformers.modeling.head_rows import head_rows_only
from ktransformers.train.data.render import IGNORE_INDEX


def labelled_positions(labels: Tensor) -> Tensor:
    """`[B, L - 1]`: whether the next token has a label. At least one is True, so that every step has a gradient."""
    mask = labels[:, 1:] != IGNORE_INDEX
    if not bool(mask.any()):
        mask[0, 0] = True
    return mask


@contextmanager
def labelled_rows_only(model: Any, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inputs for TRL's fused head, which then gets labelled rows only. `model` has the head and no wrappers."""
    labels = inputs["labels"]
    mask = labelled_positions(labels)
    with head_rows_only(model, pad(mask, (0, 1))):
        other_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        yield other_inputs | {"shift_labels": labels[:, 1:][mask][None]}
