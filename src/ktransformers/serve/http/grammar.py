"""Constrained decoding for JSON: the tokens that may come next, computed by llguidance (`pip install
'ktransformers[json]'`).

The tokenizer is converted once, a schema is compiled once per request, and each sequence has its own matcher. A schema
that llguidance cannot enforce is refused before anything is computed.
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
# Bounded: a model may indent its JSON, but must not generate whitespace until max_tokens.
WHITESPACE = r"[ \n]{1,12}"


class GrammarCompiler:
    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._llg_tokenizer: Any = None

    def compile(self, schema: Any) -> Callable[[], Grammar]:
        """Compile a JSON schema; each call of the result makes a matcher for one sequence."""
        if importlib.util.find_spec(PACKAGE) is None:
            given = f"no package {PACKAGE}"
            raise InputError("response_format", given, "it installed", "pip install 'ktransformers[json]'")
        guidance = importlib.import_module(PACKAGE)
        if self._llg_tokenizer is None:
            hf_module = importlib.import_module(f"{PACKAGE}.hf")
            self._llg_tokenizer = hf_module.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
        try:
            grammar = guidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), defaults={"whitespace_pattern": WHITESPACE}
            )
            matcher = guidance.LLMatcher(self._llg_tokenizer, grammar)
        except ValueError as error:
            raise InputError("response_format", str(error), "a JSON schema") from error
        if matcher.is_error():
            raise InputError("response_format", matcher.get_error(), "a JSON schema that can be enforced")
        return lambda: SchemaMatcher(matcher.deep_copy())


class SchemaMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, size: int) -> torch.Tensor:
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        allowed = bits.reshape(-1)[:size].bool()
        if allowed.numel() < size:  # rows of the head beyond the tokenizer's vocabulary
            allowed = torch.cat([allowed, torch.zeros(size - allowed.numel(), dtype=torch.bool)])
        return allowed

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"the grammar does not allow token {token}: {self._matcher.get_error()}")
