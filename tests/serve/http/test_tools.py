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
TYPES = parameter_types([TOOL])
ACTIVE = [{"role": "user", "content": "How is the weather?"}]


def test_json_and_tagged_calls_are_parsed() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"town": "Bonn"}}\n</tool_call>'
    assert parse_calls(text, TYPES) == ("Let me see.", [ToolCall("weather", '{"town": "Bonn"}')])
    tagged = (
        "<tool_call>\n<function=weather>\n<parameter=town>\n12\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    before, calls = parse_calls(tagged, TYPES)
    assert before == "" and json.loads(calls[0].arguments) == {"town": "12", "days": 3}
    assert len(parse_calls(text + text, TYPES)[1]) == 2


@pytest.mark.parametrize("text", ["no call", "<tool_call>\nnot JSON\n</tool_call>", '<tool_call>{"a": 1}</tool_call>'])
def test_text_without_a_call_stays_text(text: str) -> None:
    assert parse_calls(text, TYPES) == (text, [])


@pytest.mark.parametrize("size", [1, 3, 100])
def test_text_before_a_call_is_emitted_and_the_call_is_held(size: int) -> None:
    text = 'a < b <tool <tool_call>{"name": "x"}</tool_call>'
    apart = ToolCallSplitter()
    out = "".join(apart.add(text[at : at + size]) for at in range(0, len(text), size))
    assert out == "a < b <tool " and apart.end() == '<tool_call>{"name": "x"}</tool_call>'
    plain = ToolCallSplitter()
    assert "".join(plain.add(letter) for letter in "a <tool") + plain.end() == "a <tool"


def test_json_without_llguidance_is_refused(served: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.serve.http import grammar_source
    from ktransformers.serve.http.error import ApiError
    from ktransformers.serve.http.protocol import ChatRequest

    monkeypatch.setattr(grammar_source, "PACKAGE", "no_such_package")
    requested = {"model": "tiny", "messages": ACTIVE, "response_format": {"type": "json_object"}}
    with pytest.raises(ApiError, match="pip install"):
        served.service.chat(ChatRequest.model_validate(requested))


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
        assert [one.function.arguments for one in streamed] == [call.function.arguments]
        assert parts[-1].choices[0].finish_reason == "tool_calls"


def test_chat_template_receives_tools(served: RunningServer) -> None:
    from ktransformers.serve.http.protocol import ChatRequest

    requested = {"model": "tiny", "messages": ACTIVE, "max_tokens": 4}
    service, preparer = served.service, served.service.preparer

    def prepare(request: dict[str, Any]) -> Any:
        return preparer.chat(ChatRequest.model_validate(request), {})

    plain = prepare(requested)
    offered = prepare({**requested, "tools": [TOOL]})
    refused = prepare({**requested, "tools": [TOOL], "tool_choice": "none"})
    text = service.tokenizer.decode(offered.prompts[0].tokens)
    assert "weather" in text and "<tool_call>" in text
    assert plain.prompts == refused.prompts
    assert offered.parses_calls and not refused.parses_calls
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
