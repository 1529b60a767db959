"""Grammars of answers: compiled once, within limits, without waiting for others, in a cache bounded by bytes."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

pytest.importorskip("llguidance")
from ktransformers.ground.errors import InputError
from ktransformers.serve.http import grammar_source
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.grammar_source import MIN_BYTES, GrammarCompiler, GrammarSource
from tests.support.attacks import object_schema
from tests.support.serving import DATA

SELF = {"properties": {"a": {"$ref": "#/properties/a"}}}
LOOP = {"$defs": {"a/b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/a~1b"}}, "$ref": "#/$defs/c"}
NESTED = {"$ref": "#/items/anyOf/1"}
TREE = {"type": "object", "properties": {"child": {"$ref": "#"}, "name": {"$ref": "#/$defs/name"}}}
TREE["$defs"] = {"name": {"type": "string", "maxLength": 3}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "minimind_6400")


@pytest.fixture
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer))


def schema_source(schema: Any) -> GrammarSource:
    return GrammarSource("json_schema", json.dumps(schema))


def follows(compiler: GrammarCompiler, tokenizer: Any, source: GrammarSource, text: str) -> bool:
    matcher = compiler.compile(source).deep_copy()
    for token in tokenizer(text)["input_ids"]:
        matcher.compute_bitmask()
        assert not matcher.is_error(), matcher.get_error()
        if not matcher.consume_token(token):
            return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 500010},
        {"allOf": [{"type": "integer", "multipleOf": 4999}, {"type": "integer", "multipleOf": 101}]},
    ],
)
def test_a_schema_that_takes_long_to_compile_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(ApiError, match="beyond 1 s and 64 MiB of compilation, expected a simpler one") as refused:
        compiler.measure(schema_source(schema))
    assert refused.value.status == 400 and refused.value.param == "response_format"
    assert 0 <= compiler.measure(schema_source({"type": "integer", "multipleOf": 5})) < 32 * 2**20


@pytest.mark.parametrize("count", [500, 600, 1000])
def test_many_optional_properties_are_enforced(compiler: GrammarCompiler, tokenizer: Any, count: int) -> None:
    source = schema_source(object_schema(count))
    assert compiler.measure(source) < 32 * 2**20
    given = {f"p{number}": "abc" for number in range(0, count, 40)}
    assert follows(compiler, tokenizer, source, json.dumps(given))
    assert not follows(compiler, tokenizer, source, json.dumps({"other": "abc"}))


@pytest.mark.parametrize("schema", [{"$ref": "#"}, SELF, LOOP, {"items": {"anyOf": [{"type": "null"}, NESTED]}}])
def test_a_reference_to_itself_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(InputError, match=r"response_format: given a \$ref to itself"):
        compiler.compile(schema_source(schema))
    with pytest.raises(ApiError, match=r"\$ref to itself"):
        compiler.measure(schema_source(schema))


def test_a_grammar_that_no_text_follows_is_refused(compiler: GrammarCompiler) -> None:
    for schema in ({"anyOf": [{"$ref": "#"}]}, {"type": "object", "properties": {"a": False}, "required": ["a"]}):
        with pytest.raises(InputError, match="response_format"):
            compiler.compile(schema_source(schema))


def test_recursive_schemas_are_enforced(compiler: GrammarCompiler, tokenizer: Any) -> None:
    source = schema_source(TREE)
    assert follows(compiler, tokenizer, source, '{"child": {"child": {"name": "abc"}}}')
    assert not follows(compiler, tokenizer, source, '{"child": {"child": {"name": "abcd"}}}')


def test_lark_grammars_are_compiled(compiler: GrammarCompiler, tokenizer: Any) -> None:
    source = GrammarSource("lark", 'start: "<call>" NAME "</call>"\nNAME: /[a-z]+/')
    assert compiler.measure(source) < 32 * 2**20
    assert follows(compiler, tokenizer, source, "<call>weather</call>")
    assert not follows(compiler, tokenizer, source, "<call>7</call>")
    for measure_or_compile in (compiler.measure, compiler.compile):
        with pytest.raises((ApiError, InputError), match="tools: given"):
            measure_or_compile(GrammarSource("lark", "start: nothing"))


def test_requests_wait_only_for_their_own_grammar(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def compile_slowly(source: GrammarSource) -> str:
        if source.text == "slow":
            began.set()
            assert goes_on.wait(60)
        return f"compiled {source.text}"

    monkeypatch.setattr(compiler, "_compile", compile_slowly)
    results: list[str] = []
    slow = GrammarSource("lark", "slow")
    waiting = [threading.Thread(target=lambda: results.append(compiler.compile(slow))) for _ in range(4)]
    for thread in waiting:
        thread.start()
    assert began.wait(60)
    assert compiler.compile(GrammarSource("lark", "fast")) == "compiled fast" and results == []
    goes_on.set()
    for thread in waiting:
        thread.join()
    assert results == ["compiled slow"] * 4 and compiler.compilations == 2


def test_what_fails_is_not_kept(compiler: GrammarCompiler) -> None:
    source = schema_source({"type": "number of sorts"})
    for _ in range(2):
        with pytest.raises(InputError, match="response_format"):
            compiler.compile(source)
    assert source not in compiler and compiler.cached_bytes == 0


def test_the_cache_is_bounded_by_bytes(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_compile", lambda source: source.text)
    monkeypatch.setattr(grammar_source, "MAX_COMPILED_BYTES", 10 * MIN_BYTES)
    first, large, huge = (GrammarSource("lark", name) for name in ("first", "large", "huge"))
    compiler.compile(first)
    compiler.compile(large, 8 * MIN_BYTES)
    compiler.compile(first)
    assert compiler.cached_bytes == 9 * MIN_BYTES
    compiler.compile(GrammarSource("lark", "other"), 2 * MIN_BYTES)
    assert large not in compiler and first in compiler and compiler.cached_bytes == 3 * MIN_BYTES
    assert compiler.compile(huge, 99 * MIN_BYTES) == "huge" and first not in compiler and huge in compiler
