"""Constrained decoding: the tokens that may come next, computed by llguidance. A grammar is compiled once and cached
(`serve/http/grammar_source.py`); each sequence has its own copy of the matcher. A thinking block may come before what
the grammar is for, and ends by force when it has used its budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ktransformers.serve.http.prepare import ThinkingBlock
from ktransformers.serve.scheduler.sequence import Grammar


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


class ThinkingLimit:
    """Counts the tokens of a thinking block and forces those that close it once its budget is used. `grammar` applies
    to the whole answer if it has thinking in it (`block.in_grammar`), otherwise to what comes after a block that the
    prompt has opened, which then may not be the answer's end."""

    def __init__(self, block: ThinkingBlock, grammar: Callable[[], Grammar] | None, end_tokens: frozenset[int]) -> None:
        self._block, self._end_tokens = block, sorted(end_tokens)
        made = grammar() if grammar is not None else None
        self._whole = made if block.in_grammar else None
        self._following = None if block.in_grammar else made
        self._inside, self._count = block.begun, 0
        self._recent: list[int] = []
        self._forced: list[int] = []
        self._force_close_if_used()

    def _force_close_if_used(self) -> None:
        if self._inside and self._block.budget is not None and self._count >= self._block.budget:
            self._forced = list(self._block.close)

    def allowed(self, size: int) -> torch.Tensor:
        if not self._inside and self._following is not None:
            return self._following.allowed(size)
        allowed = torch.full((size,), True) if self._whole is None else self._whole.allowed(size)
        if self._forced and allowed[self._forced[0]]:
            allowed[:] = False
            allowed[self._forced[0]] = True
        elif self._inside and self._following is not None:
            allowed[self._end_tokens] = False
        return allowed

    def accept(self, token: int) -> None:
        if not self._inside and self._following is not None:
            self._following.accept(token)
            return
        if self._whole is not None:
            self._whole.accept(token)
        self._recent = [*self._recent, token][-max(len(self._block.open), len(self._block.close)) :]
        self._count += 1
        # The grammar may forbid what is forced where the marks that were seen are text of a call's arguments.
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        mark = self._block.close if self._inside else self._block.open
        if tuple(self._recent[-len(mark) :]) == mark:
            self._inside, self._count, self._recent = not self._inside, 0, []
        elif not self._forced:
            self._force_close_if_used()
