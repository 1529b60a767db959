"""Applies the LM head only to hidden states whose next token has a label.

Of a chat's tokens a third or less have a label, and the vocabulary is many times wider than a hidden state, so the head
and the softmax over its logits dominate the cost of a small model on a CPU. On a GPU TRL leaves those rows out; on a
CPU it computes all of them and masks them. A forward hook on the model below the head selects the hidden states `[B, L,
H]` whose next token has a label, as `[1, n, H]`, and TRL gets the matching labels, already shifted. The sums over
labelled tokens are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

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

    def select(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, :-1][mask][None]
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        other_inputs = {name: value for name, value in inputs.items() if name != "labels"}
        yield other_inputs | {"shift_labels": labels[:, 1:][mask][None]}
    finally:
        handle.remove()
