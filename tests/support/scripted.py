"""Answers whose tokens are given: a real server samples them through its engine, and parses and emits what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ktransformers.serve.scheduler.sequence import Grammar


class Script:
    """A grammar that allows one token after the other. That of the request, if it has one, has to allow them too."""

    def __init__(self, tokens: Sequence[int], grammar: Callable[[], Grammar] | None = None) -> None:
        self._tokens, self._at = tokens, 0
        self._grammar = None if grammar is None else grammar()

    def allowed(self, size: int) -> torch.Tensor:
        token = self._tokens[self._at]
        if self._grammar is not None and not self._grammar.allowed(size)[token]:
            raise RuntimeError(f"the request's grammar does not allow token {self._at} of the script, {token}")
        mask = torch.zeros(size, dtype=torch.bool)
        mask[token] = True
        return mask

    def accept(self, token: int) -> None:
        assert token == self._tokens[self._at]
        self._at += 1
        if self._grammar is not None:
            self._grammar.accept(token)


@contextmanager
def scripted(service: Any, *answers: str, end: bool = True) -> Iterator[None]:
    """The next requests are answered with these texts, one for each sequence."""
    waiting = list(answers)
    original = service.generation_requests

    def generation_requests(prepared: Any, request_id: str = "") -> list[Any]:
        made = []
        for request in original(prepared, request_id):
            tokens = service.tokenizer(waiting.pop(0), add_special_tokens=False)["input_ids"]
            script = [*tokens, min(service.defaults.eos)] if end else tokens
            made.append(replace(request, grammar=lambda script=script: Script(script)))
        return made

    service.generation_requests = generation_requests
    try:
        yield
    finally:
        del service.generation_requests
