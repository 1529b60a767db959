"""Applies the LM head only to the hidden states whose logits are used.

A vocabulary is a hundred times wider than a hidden state, so on a CPU the head of a small model costs as much as
several layers, and its logits more memory than all of them. A forward hook on the model below the head selects rows
`[1, n, H]` of the hidden states `[B, L, H]`; the head, and what a family does to its logits, then see a batch of one
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def head_rows_only(model: Any, rows: Tensor) -> Iterator[None]:
    """Within it the head of `model`, which has no wrappers, gets the hidden states where `rows` `[B, L]` is True, in
    their order."""

    def select(module: Any, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[rows.to(output.last_hidden_state.device)][None]
        return output

    handle = model.base_model.register_forward_hook(select)
    try:
        yield
    finally:
        handle.remove()
