"""Answers whose tokens are given: a real server samples them through its engine, and parses and emits what they say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch


class Script:
    """A grammar that allows one token after the other."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = list(tokens)

    def allowed(self, size: int) -> torch.Tensor:
        mask = torch.zeros(size, dtype=torch.bool)
        mask[self._tokens[0]] = True
        return mask

    def accept(self, token: int) -> None:
        assert token == self._tokens.pop(0)


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
