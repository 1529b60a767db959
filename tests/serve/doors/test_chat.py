"""Chat Completions: requests parsed, events emitted, and both through a server whose answers are given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ktransformers.serve.doors.answer_events import (
    AnswerEvent,
    CallArguments,
    CallBegin,
    CallEnd,
    Finish,
    ReasoningDelta,
    TextDelta,
    TokenScores,
    Usage,
)
from ktransformers.serve.doors.chat import CHAT
from ktransformers.serve.doors.conversation import ChatRequest, Reasoning
from ktransformers.serve.doors.door import AnswerHead
from ktransformers.serve.http.error import ApiError
from tests.support.scripted import scripted
from tests.support.serving import RunningServer

openai = pytest.importorskip("openai")

ASKED = [{"role": "user", "content": "How is the weather in Bonn?"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
THOUGHT = "<think>\nI need the tool.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Bonn"}}\n</tool_call>'


def parse(**fields: Any) -> ChatRequest:
    return CHAT.parse(json.dumps({"messages": ASKED, **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Reasoning()),
        ({"reasoning_effort": "high"}, Reasoning(True, "high")),
        ({"reasoning_effort": "none"}, Reasoning(False, "none")),
        ({"enable_thinking": False}, Reasoning(False)),
        ({"enable_thinking": True, "thinking_budget": 64}, Reasoning(True, None, 64)),
        ({"thinking_budget": 0}, Reasoning(False, None, 0)),
        ({"thinking_budget": -1}, Reasoning()),
        ({"thinking": True}, Reasoning(True)),
        ({"thinking": {"type": "disabled"}}, Reasoning(False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, Reasoning(True, None, 99)),
        ({"thinking": {"type": "adaptive"}}, Reasoning()),
        ({"chat_template_kwargs": {"thinking": True}}, Reasoning(True)),
        ({"chat_template_kwargs": {"enable_thinking": False, "thinking_budget": 8}}, Reasoning(False, None, 8)),
        ({"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}}, Reasoning(True)),
        ({"reasoning": {"effort": "low", "max_tokens": 7}}, Reasoning(True, "low", 7)),
    ],
)
def test_every_way_to_ask_for_reasoning(fields: dict[str, Any], expected: Reasoning) -> None:
    assert parse(**fields).conversation.reasoning == expected


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", ())),
        ("none", ("none", ())),
        ("required", ("required", ())),
        ({"type": "function", "function": {"name": "weather"}}, ("named", ("weather",))),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS}}, ("required", ("weather",))),
    ],
)
def test_tool_choices(choice: Any, expected: tuple[str, tuple[str, ...]]) -> None:
    conversation = parse(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).conversation
    assert (conversation.tool_choice, conversation.chosen_tools) == expected
    assert conversation.tools[0].name == "weather" and not conversation.parallel_calls


def test_fields_of_other_clients() -> None:
    request = parse(max_tokens=-1, num_ctx=4096, cache_prompt=True, stream_options={"continuous_usage_stats": True})
    assert request.generation.max_tokens is None and request.generation.model is None
    assert set(request.ignored) == {"num_ctx", "cache_prompt"}
    schema = {"type": "object"}
    for fields in ({"guided_json": schema}, {"structured_outputs": {"json": json.dumps(schema)}}):
        assert parse(**fields).generation.schema == schema
    old = parse(functions=[WEATHER], function_call={"name": "weather"})
    assert old.conversation.tools[0].name == "weather" and old.conversation.chosen_tools == ("weather",)


def test_history_with_reasoning_calls_and_results() -> None:
    called = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Bonn"}'}}
    turns = parse(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            *ASKED,
            {"role": "assistant", "content": None, "reasoning": "I ask.", "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
        ]
    ).conversation.turns
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "tool"]
    assert turns[0].text == "Be brief." and turns[2].reasoning == "I ask." and turns[3].call_id == "a"
    assert turns[2].calls[0].arguments == {"town": "Bonn"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: given [], expected at least 1 entries"),
        ({"messages": [{"role": "king", "content": "a"}]}, "messages.0.role: given 'king', expected"),
        ({"temperature": 9}, "temperature: given 9, expected at most 2"),
        ({"thinking": "much"}, "thinking: given 'much', expected true or false or an object"),
        ({"top_logprobs": 3}, "top_logprobs: given without logprobs"),
        ({"tools": [{"type": "function"}]}, "tools.0.function: given nothing"),
        ({"max_tokens": -2}, "max_tokens: given -2, expected at least 0"),
    ],
)
def test_wrong_values_are_named_with_what_is_expected(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(**fields)
    assert words in str(raised.value) and raised.value.status == 400


def test_a_body_that_is_no_json() -> None:
    with pytest.raises(ApiError, match="JSON"):
        CHAT.parse(b"{")


EVENTS: list[AnswerEvent] = [
    ReasoningDelta("I "),
    ReasoningDelta("think."),
    TokenScores(({"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []},)),
    TextDelta("Let me see."),
    CallBegin(0, "weather", "call_0"),
    CallArguments(0, '{"town":'),
    CallArguments(0, ' "Bonn"}'),
    CallEnd(0, '{"town": "Bonn"}'),
    CallBegin(1, "weather", "call_1"),
    CallEnd(1, "{}"),
]
USAGE = Usage(prompt=10, cached=4, completion=9, reasoning=3)


def emit(echo: dict[str, Any] | None = None, finish: str = "stop", choices: int = 1) -> tuple[list[Any], Any]:
    """(parsed events of a stream, document) of EVENTS, each validated by OpenAI's types."""
    settings = {"usage_in_stream": True, "functions": False, "logprobs": True} | (echo or {})
    emitter = CHAT.emitter(AnswerHead("tiny", "req_1", choices, 10, None, settings, (1, 2)))
    texts = list(emitter.begin())
    for choice in range(choices):
        for event in EVENTS:
            texts += emitter.event(choice, event)
        texts += emitter.finish(choice, Finish(finish))
    texts += emitter.end(USAGE)
    assert texts.pop() == "data: [DONE]\n\n"
    parts = []
    for text in texts:
        assert text.startswith("data: ") and text.endswith("\n\n")
        parts.append(
            openai.types.chat.ChatCompletionChunk.model_validate_json(text.removeprefix("data: "), strict=True)
        )
    document = emitter.document(USAGE)
    return parts, openai.types.chat.ChatCompletion.model_validate_json(json.dumps(document), strict=True)


def test_events_of_a_stream_add_up_to_the_document() -> None:
    parts, document = emit()
    deltas = [part.choices[0].delta for part in parts if part.choices]
    message = document.choices[0].message
    assert deltas[0].role == "assistant" and parts[0].prompt_token_ids == document.prompt_token_ids == [1, 2]
    assert "".join(delta.content or "" for delta in deltas) == message.content == "Let me see."
    thoughts = [delta.reasoning_content for delta in deltas if getattr(delta, "reasoning_content", None)]
    assert thoughts == ["I ", "think."] and message.reasoning_content == "I think."
    streamed: dict[int, dict[str, str]] = {}
    for one in [call for delta in deltas for call in delta.tool_calls or []]:
        call = streamed.setdefault(one.index, {"id": one.id, "name": one.function.name, "arguments": ""})
        call["arguments"] += one.function.arguments or ""
    assert (
        [call["id"] for call in streamed.values()] == [call.id for call in message.tool_calls] == ["call_0", "call_1"]
    )
    assert streamed[0]["arguments"] == message.tool_calls[0].function.arguments == '{"town": "Bonn"}'
    assert parts[-2].choices[0].finish_reason == document.choices[0].finish_reason == "tool_calls"
    assert parts[-1].usage == document.usage and document.usage.completion_tokens_details.reasoning_tokens == 3
    assert document.usage.prompt_tokens_details.cached_tokens == 4
    scores = [part.choices[0].logprobs.content for part in parts if part.choices and part.choices[0].logprobs]
    assert [[one.token for one in content] for content in scores] == [["a"]]
    assert document.choices[0].logprobs.content == scores[0]


def test_an_answer_that_was_cut_is_no_tool_call() -> None:
    parts, document = emit(finish="length", choices=2)
    assert [choice.finish_reason for choice in document.choices] == ["length", "length"]
    assert {part.choices[0].index for part in parts if part.choices} == {0, 1}


def test_old_functions_are_answered_with_a_function_call() -> None:
    parts, document = emit({"functions": True})
    message = document.choices[0].message
    assert message.function_call.name == "weather" and message.tool_calls is None
    assert document.choices[0].finish_reason == "function_call"
    calls = [part.choices[0].delta.function_call for part in parts if part.choices]
    assert next(call.name for call in calls if call and call.name) == "weather"


def test_a_stream_that_fails_says_so() -> None:
    emitter = CHAT.emitter(
        AnswerHead("tiny", "r", 1, 1, None, {"usage_in_stream": False, "functions": False, "logprobs": False})
    )
    error, done = emitter.fail(ApiError(503, "no memory", code="out_of_memory"))
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "out_of_memory" and "[DONE]" in done


class TestServed:
    @pytest.fixture
    def client(self, served: RunningServer) -> Any:
        return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)

    def test_reasoning_text_and_calls(self, served: RunningServer, client: Any) -> None:
        same = {"model": "tiny", "messages": ASKED, "tools": TOOLS}
        with scripted(served.service, f"{THOUGHT}Let me see.\n{CALL}", f"{THOUGHT}Let me see.\n{CALL}"):
            whole = client.chat.completions.create(**same)
            parts = list(client.chat.completions.create(**same, stream=True, stream_options={"include_usage": True}))
        message = whole.choices[0].message
        assert message.reasoning_content.strip() == "I need the tool." and message.content.strip() == "Let me see."
        assert json.loads(message.tool_calls[0].function.arguments) == {"town": "Bonn"}
        assert whole.choices[0].finish_reason == "tool_calls"
        thought = len(served.service.tokenizer(THOUGHT, add_special_tokens=False)["input_ids"])
        reasoning = whole.usage.completion_tokens_details.reasoning_tokens
        assert 0 < reasoning <= thought and parts[-1].usage.completion_tokens_details.reasoning_tokens == reasoning
        deltas = [part.choices[0].delta for part in parts if part.choices]
        text = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert text == message.reasoning_content
        pieces = [call.function.arguments for delta in deltas for call in delta.tool_calls or []]
        assert "".join(pieces) == message.tool_calls[0].function.arguments and len(pieces) > 2

    def test_one_call_of_two_without_parallel_calls(self, served: RunningServer, client: Any) -> None:
        for stream in (False, True):
            with scripted(served.service, f"{CALL}\n{CALL}"):
                answer = client.chat.completions.create(
                    model="tiny", messages=ASKED, tools=TOOLS, parallel_tool_calls=False, stream=stream
                )
                if stream:
                    calls = [call for part in answer for call in part.choices[0].delta.tool_calls or []]
                    assert {call.index for call in calls} == {0}
                else:
                    assert len(answer.choices[0].message.tool_calls) == 1
        assert not served.service.engine.running

    def test_special_tokens_are_no_text_unless_asked_for(self, served: RunningServer, client: Any) -> None:
        marks = [token.content for token in served.service.tokenizer.added_tokens_decoder.values() if token.special]
        special = next(mark for mark in marks if "im_" not in mark and mark != "<|endoftext|>")
        for kept in (False, True):
            with scripted(served.service, f"a{special}b"):
                answer = client.chat.completions.create(
                    model="tiny", messages=ASKED, extra_body={"skip_special_tokens": not kept}
                )
            assert (special in answer.choices[0].message.content) == kept

    def test_a_stop_string_ends_the_text(self, served: RunningServer, client: Any) -> None:
        with scripted(served.service, "one two three"):
            answer = client.chat.completions.create(model="tiny", messages=ASKED, stop=["two"])
        assert answer.choices[0].message.content == "one " and answer.choices[0].finish_reason == "stop"

    def test_unknown_fields_are_named_in_a_header(self, client: Any) -> None:
        raw = client.chat.completions.with_raw_response.create(
            model="tiny", messages=ASKED, max_tokens=1, extra_body={"num_ctx": 4096, "chät": 1}
        )
        assert set(raw.headers["x-ktransformers-ignored-fields"].split(", ")) == {"num_ctx", "ch\\xe4t"}

    @pytest.mark.parametrize("model", [None, "", "claude-haiku-5", "gpt-6"])
    def test_absent_and_other_vendors_names_are_the_base(self, client: Any, model: str | None) -> None:
        body = {"messages": ASKED, "max_tokens": 1} | ({} if model is None else {"model": model})
        answer = client.post("/chat/completions", body=body, cast_to=object)
        assert answer["model"] == (model or "tiny")
        assert client.post("/completions", body={"prompt": "a", "max_tokens": 1}, cast_to=object)["model"] == "tiny"

    def test_more_tokens_than_fit_are_the_rest_of_the_context(self, client: Any) -> None:
        answer = client.chat.completions.create(
            model="tiny", messages=ASKED, max_tokens=100_000, extra_body={"ignore_eos": True}
        )
        assert answer.usage.total_tokens == 512 and answer.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a b c d " * 400}])
        assert raised.value.code == "context_length_exceeded"

    def test_a_silent_stream_is_kept_alive(
        self, served: RunningServer, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ktransformers.serve.http import answers

        monkeypatch.setattr(answers, "PING_SECONDS", 0.0005)
        with client.chat.completions.with_streaming_response.create(
            model="tiny", messages=ASKED, max_tokens=2, stream=True
        ) as reply:
            lines = list(reply.iter_lines())
        assert ": ping" in lines and lines[-2:] == ["data: [DONE]", ""]
