"""Answers that must be JSON: the tokens that may come next, from llguidance (`pip install 'ktransformers[json]'`).

The tokenizer is read once, a schema is compiled once per request, and each sequence follows it with a matcher of its
own. A schema that llguidance cannot enforce is refused before anything is computed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import torch

from ktransformers.errors import InputError
from ktransformers.serve.engine.sequence import Grammar

PACKAGE = "llguidance"
# Some, so that a model may indent as it learned to, and not without end, which is what a lost model would write.
SPACE = r"[ \n]{1,12}"


class Grammars:
    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._known: Any = None

    def of_schema(self, schema: Any) -> Callable[[], Grammar]:
        """For every sequence of a request, one that follows the schema from the start."""
        if importlib.util.find_spec(PACKAGE) is None:
            given = f"no package {PACKAGE}"
            raise InputError("response_format", given, "it installed", "pip install 'ktransformers[json]'")
        guidance = importlib.import_module(PACKAGE)
        if self._known is None:
            reader = importlib.import_module(f"{PACKAGE}.hf")
            self._known = reader.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
        try:
            words = guidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), defaults={"whitespace_pattern": SPACE}
            )
            first = guidance.LLMatcher(self._known, words)
        except ValueError as error:
            raise InputError("response_format", str(error), "a JSON schema") from error
        if first.is_error():
            raise InputError("response_format", first.get_error(), "a JSON schema that can be enforced")
        return lambda: Follower(first.deep_copy())


class Follower:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, size: int) -> torch.Tensor:
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        found = bits.reshape(-1)[:size].bool()
        if found.numel() < size:  # rows of the head beyond the tokenizer's vocabulary
            found = torch.cat([found, torch.zeros(size - found.numel(), dtype=torch.bool)])
        return found

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"the grammar does not know token {token}: {self._matcher.get_error()}")
