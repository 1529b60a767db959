"""Constrained decoding for JSON: the tokens that may come next, computed by llguidance. A schema is compiled once and
cached (`serve/http/grammar_source.py`); each sequence has its own copy of the matcher.
"""

from __future__ import annotations

from typing import Any

import torch


class SchemaMatcher:
    """The grammar of one sequence, a copy of a compiled matcher."""

    def __init__(self, compiled: Any) -> None:
        self._matcher = compiled.deep_copy()

    def allowed(self, size: int) -> torch.Tensor:
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.reshape(-1)[:size].bool()
        if allowed.numel() < size:  # rows of the head beyond the tokenizer's vocabulary
            allowed = torch.cat([allowed, torch.zeros(size - allowed.numel(), dtype=torch.bool)])
        return allowed

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            reason = self._matcher.get_error().split("\n", 1)[0]
            raise RuntimeError(f"the grammar does not allow token {token}: {reason}")
