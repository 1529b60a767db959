"""Compiled JSON schemas: llguidance's grammar of a schema (`pip install 'ktransformers[json]'`), cached by the schema's
text. Both a worker process, which refuses a schema that cannot be enforced, and the server, whose sequences copy the
matcher, use it. It imports no torch.

The tokenizer is converted once. A compiled grammar takes up to a few MB, so the cache is bounded; llguidance compiles
without the GIL.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections import OrderedDict
from typing import Any

from ktransformers.ground.errors import InputError

PACKAGE = "llguidance"
# Bounded: a model may indent its JSON, but must not generate whitespace until max_tokens.
WHITESPACE = r"[ \n]{1,12}"
MAX_COMPILED = 32  # grammars in the cache


class GrammarSource:
    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._llg_tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # source -> LLMatcher, least recently used first
        self._lock = threading.Lock()
        self.compilations = 0

    def compile(self, source: str, *, is_schema: bool = True) -> Any:
        """The LLMatcher of a JSON schema, or of a grammar of llguidance, at its beginning; copy it before use."""
        with self._lock:
            matcher = self._compiled.get(source)
            if matcher is None:
                matcher = self._compiled[source] = self._compile(source, is_schema)
                self.compilations += 1
            self._compiled.move_to_end(source)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher

    def _compile(self, source: str, is_schema: bool) -> Any:
        if importlib.util.find_spec(PACKAGE) is None:
            given = f"no package {PACKAGE}"
            raise InputError("response_format", given, "it installed", "pip install 'ktransformers[json]'")
        guidance = importlib.import_module(PACKAGE)
        if self._llg_tokenizer is None:
            hf_module = importlib.import_module(f"{PACKAGE}.hf")
            self._llg_tokenizer = hf_module.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)
        try:
            grammar = source
            if is_schema:
                defaults = {"whitespace_pattern": WHITESPACE}
                grammar = guidance.LLMatcher.grammar_from_json_schema(source, defaults=defaults)
            matcher = guidance.LLMatcher(self._llg_tokenizer, grammar, log_level=0)
        except ValueError as error:
            raise InputError("response_format", _first_line(str(error)), "a JSON schema") from error
        if matcher.is_error():
            given = _first_line(matcher.get_error())
            raise InputError("response_format", given, "a JSON schema that can be enforced")
        return matcher


def _first_line(text: str) -> str:
    """llguidance's message without its dump of the state and the grammar."""
    return text.split("\n", 1)[0]
