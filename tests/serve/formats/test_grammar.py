"""Random text under a format's grammar is parsed into calls that follow their schemas, whether or not the tokenizer has
the format's markers as tokens; and what does not follow is refused."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest

from ktransformers.serve.doors.conversation import Reasoning, Tool
from ktransformers.serve.formats import AnswerFormat
from ktransformers.serve.formats.families import CALLS, THINKING
from tests.support.answers import Answer, byte_tokenizer, parse

llguidance = pytest.importorskip("llguidance")

FORECAST = Tool(
    "forecast",
    "",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 4},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "units": {
                "type": "object",
                "properties": {"temperature": {"type": "string", "maxLength": 3}},
                "required": ["temperature"],
                "additionalProperties": False,
            },
            "hourly": {"type": "boolean"},
            "kind": {"enum": ["rain", "a b", "7"]},
            "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        },
        "required": ["city", "hourly"],
        "additionalProperties": False,
    },
    strict=True,
)
PING = Tool("ping", "", {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (FORECAST, PING)
MARKERS = re.compile(r"</?[\w:|｜▁]+(?:\|)?>|\[/?[A-Z_]+\]|\]<\]minimax\[>\[|｜DSML｜")


def is_type(value: Any, name: str) -> bool:
    kinds = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}
    return isinstance(value, kinds[name]) and isinstance(value, bool) == (name == "boolean")


def follows(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if not is_type(value, schema["type"]):
        return False
    if schema["type"] == "object":
        properties = schema["properties"]
        required = set(schema.get("required", ()))
        return required <= value.keys() <= properties.keys() and all(
            follows(item, properties[key]) for key, item in value.items()
        )
    if schema["type"] == "array":
        return len(value) <= schema["maxItems"] and all(follows(item, schema["items"]) for item in value)
    if schema["type"] == "string":
        return len(value) <= schema["maxLength"]
    return schema["type"] != "integer" or schema["minimum"] <= value <= schema["maximum"]


class Constrained:
    """A format with a tokenizer of bytes, whose markers may be special tokens."""

    def __init__(self, name: str, special: bool) -> None:
        syntax = CALLS[name]
        thinking = THINKING["gpt-oss" if name == "gpt-oss" else "gemma4" if name == "gemma4" else "qwen3"]
        marked = "".join((syntax.call, syntax.argument, *syntax.section, thinking.open, thinking.close, '<|"|>'))
        markers = sorted({'<|"|>', *MARKERS.findall(marked)}) if special else []
        self.format = AnswerFormat(name, syntax, thinking, thinking.marks)
        self.tokenizer = byte_tokenizer(markers)
        self.special = {marker: self.tokenizer.convert_tokens_to_ids(marker) for marker in markers}
        self._llg = llguidance_hf().from_tokenizer(self.tokenizer, n_vocab=len(self.tokenizer))

    def matcher(self, choice: str, parallel: bool, prefix: str = "", chosen: tuple[str, ...] = ()) -> Any:
        reasoning = Reasoning(enabled=bool(prefix))
        lark = self.format.constraint(TOOLS, choice, chosen, parallel, reasoning, prefix, self.special)
        matcher = llguidance.LLMatcher(self._llg, llguidance.LLMatcher.grammar_from_lark(lark), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def generate(self, matcher: Any, rng: random.Random) -> str:
        tokens: list[int] = []
        while not matcher.is_stopped():
            mask = int.from_bytes(matcher.compute_bitmask(), "little")
            allowed = [token for token in range(len(self.tokenizer)) if mask >> token & 1]
            special = [token for token in allowed if token >= 256]
            token = rng.choice(special if special and rng.random() < 0.3 else allowed)
            if token == self.tokenizer.eos_token_id:
                break
            assert matcher.consume_token(token) and len(tokens) < 3000
            tokens.append(token)
        return str(self.tokenizer.decode(tokens))

    def accepts(self, matcher: Any, text: str) -> bool:
        tokens = self.tokenizer(text)["input_ids"]
        return all(matcher.consume_token(token) for token in tokens) and bool(matcher.is_accepting())

    def parse(self, text: str, prefix: str = "") -> Answer:
        return parse(self.format.parser(prefix, TOOLS), text)


@functools.cache
def constrained_format(name: str, special: bool) -> Constrained:
    return Constrained(name, special)


def llguidance_hf() -> Any:
    import llguidance.hf

    return llguidance.hf


@pytest.fixture(params=[False, True], ids=["text", "tokens"])
def special(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("name", CALLS)
def test_random_calls_follow_their_schemas(name: str, special: bool) -> None:
    constrained = constrained_format(name, special)
    for seed, (choice, parallel) in enumerate((c, p) for c in ("required", "auto", "named") for p in (True, False)):
        chosen = ("ping",) if choice == "named" else ()
        text = constrained.generate(constrained.matcher(choice, parallel, chosen=chosen), random.Random(seed))
        answer = constrained.parse(text)
        schemas = {tool.name: tool.parameters for tool in TOOLS}
        assert all(follows(arguments, schemas[called]) for called, arguments in answer.calls), text
        if choice != "auto":
            assert answer.calls and not answer.text.strip(), text
            assert parallel or len(answer.calls) == 1
            assert choice != "named" or set(answer.names) == {"ping"}


@pytest.mark.parametrize("name", CALLS)
def test_text_and_reasoning_are_free_and_calls_are_not(name: str, special: bool) -> None:
    constrained = constrained_format(name, special)
    thinking, syntax = constrained.format.thinking, constrained.format.calls
    assert thinking is not None and syntax is not None
    thought = f"so <b {thinking.close}{thinking.resume}"
    header = thinking.marks[0] if thinking.marks else ""
    text = "" if syntax.bare or header else "Hi <b.\n"

    def call(called: str, arguments: dict[str, Any]) -> str:
        # Gemma's own notation of these arguments, which the format's default text writes as JSON.
        gemma = "".join(
            f"{',' if index else ''}{key}:" + (f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value))
            for index, (key, value) in enumerate(arguments.items())
        )
        written = constrained.format.call_text(called, arguments)
        return syntax.call.replace("$NAME", called).replace("$ARGS", f"{{{gemma}}}") if name == "gemma4" else written

    def accepted(answer: str) -> bool:
        return constrained.accepts(constrained.matcher("auto", True, thinking.open), thought + answer)

    assert accepted(f"{header}{text}just text")
    good = text + call("forecast", {"city": "Bonn", "hourly": True})
    assert accepted(good)
    assert constrained.parse(thought + good, thinking.open).names == ["forecast"]
    assert not accepted(text + call("unknown", {"city": "Bonn", "hourly": True}))
    assert not accepted(text + call("forecast", {"hourly": True}))
    assert not accepted(text + call("forecast", {"city": "Bonn", "hourly": "x"}))


def test_answers_are_free_unless_something_is_asked() -> None:
    answer_format = Constrained("hermes", False).format
    no_strict = (PING,)
    assert answer_format.constraint(no_strict, "auto", (), True, Reasoning()) is None
    assert answer_format.constraint(TOOLS, "none", (), True, Reasoning()) is None
    assert answer_format.constraint((), "required", (), True, Reasoning()) is None
    assert answer_format.constraint(TOOLS, "auto", ("ping",), True, Reasoning()) is None
    assert answer_format.constraint(no_strict, "required", (), True, Reasoning()) is not None


def test_definitions_of_a_schema_hold_for_its_parameters() -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}, "name": {"type": ["string", "null"]}},
        "required": ["at"],
        "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    constrained = Constrained("qwen3_coder", False)
    lark = constrained.format.constraint((Tool("go", "", schema),), "required", (), False, Reasoning(False))
    matcher = llguidance.LLMatcher(constrained._llg, llguidance.LLMatcher.grammar_from_lark(lark))
    text = '<tool_call>\n<function=go>\n<parameter=at>\n{"x": 1}\n</parameter>\n</function>\n</tool_call>'
    assert constrained.accepts(matcher, text)
