"""The head on answers alone: hidden states without a label are dropped before they meet the vocabulary.

Of a chat's tokens a third or less are learned, and the vocabulary is many times wider than a hidden state, so the head
and the softmax over its logits are most of what a small model computes on a CPU. On a GPU TRL leaves those rows out; on
a CPU it scores them all and masks them. Here a hook on the model below the head keeps hidden states `[B, L, H]` where
the next token has a label, as `[1, n, H]`, and TRL gets the labels that go with them, already shifted. Its sums over
labelled tokens are the same sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

IGNORED = -100


def labelled_positions(labels: Tensor) -> Tensor:
    """`[B, L - 1]`: does the next token have a label? At least one is kept, so that every step has a gradient."""
    kept = labels[:, 1:] != IGNORED
    if not bool(kept.any()):
        kept[0, 0] = True
    return kept


@contextmanager
def labelled_rows_only(model: Any, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Inputs for TRL's fused head, which then sees labelled rows alone. `model`: with the head, without wrappers."""
    labels = inputs["labels"]
    kept = labelled_positions(labels)

    def select(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[:, :-1][kept][None]
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        yield rest | {"shift_labels": labels[:, 1:][kept][None]}
    finally:
        handle.remove()
