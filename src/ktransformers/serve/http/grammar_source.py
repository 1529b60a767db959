"""Grammars that answers follow, compiled by llguidance (`pip install 'ktransformers[json]'`) from JSON schemas or its
dialect of Lark, once for all requests that have the same text. It imports no torch.

A schema of 150 bytes may take minutes and gigabytes to compile, and llguidance cannot be stopped. So a worker process
compiles it first, in a copy of itself that ends at COMPILE_SECONDS and COMPILE_BYTES (`measure`), and the server only
what has passed, on a thread. No request waits for another one's grammar. The cache is bounded by the bytes that
the workers measured.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import threading
import urllib.parse
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from ktransformers.ground.errors import InputError
from ktransformers.ground.sandbox import SandboxError, run_forked
from ktransformers.ground.system import resident_bytes
from ktransformers.serve.formats.grammar import WHITESPACE
from ktransformers.serve.http.error import ApiError

PACKAGE = "llguidance"
COMPILE_SECONDS, COMPILE_BYTES = 1, 64 * 2**20
MAX_COMPILED_BYTES = COMPILE_BYTES  # of the cache, by `measure`
MIN_BYTES = 2**20  # that a grammar counts for in the cache
# llguidance's own limits. An object with n optional properties has four n items in a row; a state of the lexer, of
# which an answer may add some, takes 1 to 2 KB.
PARSER_LIMITS = {"max_items_in_row": 20_000, "max_lexer_states": 50_000, "verbose_errors": False}
PARAMETERS = {"json_schema": "response_format", "lark": "tools"}  # of the request, that errors name


class GrammarSource(NamedTuple):
    kind: Literal["json_schema", "lark"]
    text: str


@dataclass(frozen=True)
class CachedGrammar:
    matcher: Future[Any]
    size: int


class GrammarCompiler:
    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._compiled: OrderedDict[GrammarSource, CachedGrammar] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # never held while something is compiled
        self.compilations = 0

    def __contains__(self, source: GrammarSource) -> bool:
        cached = self._compiled.get(source)
        return cached is not None and cached.matcher.done()

    @property
    def cached_bytes(self) -> int:
        return sum(cached.size for cached in self._compiled.values())

    def compile(self, source: GrammarSource, size: int = MIN_BYTES) -> Any:
        """The LLMatcher of a grammar, at its beginning; copy it before use. `size`: what `measure` said."""
        with self._lock:
            cached = self._compiled.get(source)
            is_new = cached is None
            if cached is None:
                cached = self._compiled[source] = CachedGrammar(Future(), max(size, MIN_BYTES))
                self.compilations += 1
            self._compiled.move_to_end(source)
            while self.cached_bytes > MAX_COMPILED_BYTES and len(self._compiled) > 1:
                self._compiled.popitem(last=False)
        if is_new:
            try:
                cached.matcher.set_result(self._compile(source))
            except BaseException as error:
                with self._lock:
                    self._compiled.pop(source, None)
                cached.matcher.set_exception(error)
                raise
        return cached.matcher.result()

    def measure(self, source: GrammarSource) -> int:
        """Bytes that the compiled grammar takes; raises ApiError if it cannot be compiled within the limits. Called
        where no other threads run, in a worker."""
        name = PARAMETERS[source.kind]

        def compile_here() -> dict[str, Any]:
            before = resident_bytes()
            try:
                self._compile(source)
            except InputError as error:
                return {"error": str(error)}
            return {"bytes": resident_bytes() - before}

        try:
            self._llg_tokenizer  # noqa: B018 (made here once, and not in every child)
            answer = run_forked(compile_here, seconds=COMPILE_SECONDS, memory=COMPILE_BYTES)
        except InputError as error:
            answer = {"error": str(error)}
        except SandboxError:
            limits = f"{COMPILE_SECONDS} s and {COMPILE_BYTES >> 20} MiB"
            answer = {"error": f"{name}: given a grammar beyond {limits} of compilation, expected a simpler one"}
        if "error" in answer:
            raise ApiError(400, answer["error"], param=name)
        return int(answer["bytes"])

    @cached_property
    def _llg_tokenizer(self) -> Any:
        if importlib.util.find_spec(PACKAGE) is None:
            given = f"no package {PACKAGE}"
            raise InputError("response_format", given, "it installed", "pip install 'ktransformers[json]'")
        module = importlib.import_module(f"{PACKAGE}.hf")
        return module.from_tokenizer(self._tokenizer, n_vocab=self._vocabulary)

    def _compile(self, source: GrammarSource) -> Any:
        name, tokenizer = PARAMETERS[source.kind], self._llg_tokenizer
        guidance = importlib.import_module(PACKAGE)
        grammar = source.text
        try:
            if source.kind == "json_schema":
                _check_references(json.loads(source.text))
                defaults = {"whitespace_pattern": WHITESPACE}
                grammar = guidance.LLMatcher.grammar_from_json_schema(source.text, defaults=defaults)
            limits = guidance.LLParserLimits(**PARSER_LIMITS)
            matcher = guidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        except ValueError as error:
            raise InputError(name, _first_line(str(error)), "a JSON schema") from error
        beginning = matcher.deep_copy()
        if not matcher.is_error():
            beginning.compute_bitmask()
        if beginning.is_error():
            given = _first_line(beginning.get_error())
            given = "a grammar that no text follows" if given.startswith("NoExtension") else given
            raise InputError(name, given, "a grammar that can be enforced")
        return matcher


def _check_references(schema: Any) -> None:
    """Refuse a `$ref` that leads back to itself: nothing follows it, and llguidance ends the answer where it comes."""
    pending = [schema]
    while pending:
        value = pending.pop()
        pending += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        seen = set()
        while isinstance(value, dict) and isinstance(reference := value.get("$ref"), str):
            if reference in seen:
                raise InputError("response_format", f"a $ref to itself ({reference!r})", "a $ref to a schema")
            seen.add(reference)
            value = _resolve(schema, reference)


def _resolve(schema: Any, reference: str) -> Any:
    """What a JSON pointer names; None if it is no pointer into this schema."""
    if not reference.startswith("#"):
        return None
    value = schema
    for part in urllib.parse.unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(name)] if name.isdecimal() and int(name) < len(value) else None
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value


def _first_line(text: str) -> str:
    """llguidance's message without its dump of the state and the grammar."""
    return text.split("\n", 1)[0]
