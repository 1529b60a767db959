"""JSON schemas and tool calls in responses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.serving import RunningServer

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 9}},
            "required": ["town", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ACTIVE = [{"role": "user", "content": "How is the weather?"}]


def test_json_without_llguidance_is_refused(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.ground.errors import InputError
    from ktransformers.serve.http import grammar_source

    monkeypatch.setattr(grammar_source, "PACKAGE", "no_such_package")
    compiler = grammar_source.GrammarCompiler(served.service.tokenizer, served.service.vocabulary)
    with pytest.raises(InputError, match="pip install"):
        compiler.compile(grammar_source.GrammarSource("json_schema", "{}"))


class TestConstrained:
    @pytest.fixture
    def client(self, served: RunningServer) -> Any:
        pytest.importorskip("llguidance")
        openai = pytest.importorskip("openai")
        return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    @pytest.mark.parametrize("model", ["tiny", "tiny:one"])
    def test_an_answer_follows_its_schema(self, client: Any, model: str) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        for seed in range(3):
            response = client.chat.completions.create(
                model=model, messages=ACTIVE, response_format=form, seed=seed, max_tokens=300
            )
            assert response.choices[0].finish_reason == "stop"
            actual = json.loads(response.choices[0].message.content)
            assert set(actual) == {"name", "age"} and 0 <= actual["age"] <= 99 and len(actual["name"]) <= 5

    def test_a_json_object(self, client: Any) -> None:
        response = client.chat.completions.create(
            model="tiny", messages=ACTIVE, response_format={"type": "json_object"}, seed=1, max_tokens=40, logit_bias={}
        )
        assert response.choices[0].message.content.lstrip().startswith("{")

    def test_a_schema_that_is_none(self, client: Any) -> None:
        import openai

        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "number of sorts"}}}
        with pytest.raises(openai.BadRequestError, match="response_format"):
            client.chat.completions.create(model="tiny", messages=ACTIVE, response_format=form)
        with pytest.raises(openai.BadRequestError, match=r"json_schema\.schema"):
            client.chat.completions.create(model="tiny", messages=ACTIVE, response_format={"type": "json_schema"})

    @pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
    def test_a_call_that_is_required(self, client: Any, choice: Any) -> None:
        same = {
            "model": "tiny",
            "messages": ACTIVE,
            "tools": [TOOL],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": 3,
            "max_tokens": 250,
        }
        response = client.chat.completions.create(**same)
        (call,) = response.choices[0].message.tool_calls
        assert response.choices[0].finish_reason == "tool_calls" and call.function.name == "weather"
        assert set(json.loads(call.function.arguments)) == {"town", "days"}
        parts = list(client.chat.completions.create(**same, stream=True))
        deltas = [part.choices[0].delta for part in parts]
        streamed = [one for delta in deltas for one in delta.tool_calls or []]
        assert "".join(one.function.arguments for one in streamed) == call.function.arguments
        assert [one.function.name for one in streamed if one.function.name] == ["weather"]
        assert {one.index for one in streamed} == {0} and streamed[0].id and not any(one.id for one in streamed[1:])
        assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_chat_template_receives_tools(served: RunningServer) -> None:
    from ktransformers.serve.doors.chat import CHAT

    requested = {"model": "tiny", "messages": ACTIVE, "max_tokens": 4}
    service, preparer = served.service, served.service.preparer

    def prepare(request: dict[str, Any]) -> Any:
        return preparer.chat(CHAT.parse(json.dumps(request).encode()), {})

    plain = prepare(requested)
    offered = prepare({**requested, "tools": [TOOL]})
    refused = prepare({**requested, "tools": [TOOL], "tool_choice": "none"})
    text = service.tokenizer.decode(offered.prompts[0].tokens)
    assert "weather" in text and "<tool_call>" in text
    assert plain.prompts == refused.prompts
    assert [tool.name for tool in offered.chat.tools] == ["weather"] and not refused.chat.tools
    history = [
        *ACTIVE,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bonn"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
    ]
    again = prepare({**requested, "messages": history, "tools": [TOOL]})
    text = service.tokenizer.decode(again.prompts[0].tokens)
    assert '{"town": "Bonn"}' in text and "rain" in text
