"""The Messages API: requests that Claude Code 2.1.328 sent, with shortened texts, and answers read by the `anthropic`
package.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, MessageTokensCount, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

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
from ktransformers.serve.doors.conversation import Call, ChatRequest, Reasoning, Tool, Turn
from ktransformers.serve.doors.door import AnswerHead
from ktransformers.serve.doors.messages import MESSAGES, MessagesEmitter, error_document
from ktransformers.serve.http.error import ApiError
from tests.support.mutations import damage_json

RECORDED: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "claude_code_requests.json").read_text())
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
USAGE = Usage(prompt=100, cached=60, completion=7, reasoning=3)


def parsed(**fields: Any) -> ChatRequest:
    return MESSAGES.parse(json.dumps({"messages": [{"role": "user", "content": "Hi"}]} | fields).encode())


def turns_of(*messages: dict[str, Any], **fields: Any) -> tuple[Turn, ...]:
    return parsed(messages=list(messages), **fields).conversation.turns


def refusal(**fields: Any) -> str:
    with pytest.raises(ApiError) as caught:
        parsed(**fields)
    assert caught.value.status == 400
    return str(caught.value)


def recorded(name: str) -> ChatRequest:
    return MESSAGES.parse(json.dumps(RECORDED[name]).encode())


# Requests.


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_request_is_accepted(name: str) -> None:
    conversation = recorded(name).conversation
    assert conversation.turns and conversation.add_generation_prompt
    assert all(turn.text or turn.calls for turn in conversation.turns)
    assert not any("billing" in turn.text for turn in conversation.turns)


def test_the_first_request_of_claude_code() -> None:
    request = recorded("first")
    assert [turn.role for turn in request.conversation.turns] == ["system", "user", "system"]
    assert request.conversation.turns[0].text == "text 3\ntext 4"
    assert request.conversation.reasoning == Reasoning(enabled=True, effort="medium")
    assert [tool.name for tool in request.conversation.tools] == ["Bash", "Edit", "Read", "ToolSearch"]
    assert request.generation.model == "claude-opus-5-5"
    assert request.generation.max_tokens == 128000
    assert request.generation.stream
    assert request.ignored == ()


def test_the_turns_of_a_session_extend_those_of_its_last_request() -> None:
    first, second, third = (recorded(name).conversation for name in ("first", "second", "third"))
    assert second.turns[: len(first.turns)] == first.turns
    assert third.turns[: len(second.turns)] == second.turns
    assert first.tools == second.tools == third.tools


def test_calls_and_results_of_a_recorded_session() -> None:
    assistant, *results = recorded("second").conversation.turns[3:]
    assert (assistant.text, assistant.reasoning) == ("Reading.", "I read it.")
    assert [call.name for call in assistant.calls] == ["Read", "Bash"]
    assert [(turn.role, turn.call_id, turn.name, turn.is_error) for turn in results] == [
        ("tool", assistant.calls[0].id, "Read", False),
        ("tool", assistant.calls[1].id, "Bash", True),
    ]


def test_a_billing_line_may_stand_at_the_head_of_a_text() -> None:
    for hashed in ("a1", "b2"):
        system = f"x-anthropic-billing-header: cc_version=2; cch={hashed};\nBe brief."
        assert parsed(system=system).conversation.turns[0] == Turn("system", "Be brief.")
    assert parsed(system="See x-anthropic-billing-header: x").conversation.turns[0].text.endswith("header: x")


def test_cache_markers_change_nothing() -> None:
    marked = copy.deepcopy(RECORDED["third"])
    for message in marked["messages"]:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        for block in message["content"]:
            block["cache_control"] = {"type": "ephemeral", "ttl": "1h"}
    for tool in marked["tools"]:
        tool["cache_control"] = {"type": "ephemeral"}
    assert MESSAGES.parse(json.dumps(marked).encode()).conversation == recorded("third").conversation


def test_a_deferred_tool_is_offered_once_a_result_refers_to_it() -> None:
    request = recorded("tools_loaded")
    names = [tool.name for tool in request.conversation.tools]
    assert "WebSearch" in names and "DeferredToolPlaceholder" not in names
    result = request.conversation.turns[-1]
    assert result.role == "tool" and result.text.count("<function>") == 2
    definition = json.loads(result.text.splitlines()[0].removeprefix("<function>").removesuffix("</function>"))
    web_search = next(tool for tool in request.conversation.tools if tool.name == "WebSearch")
    assert (definition["name"], definition["parameters"]) == ("WebSearch", web_search.parameters)


def test_a_provider_that_searches_tools_is_not_here_so_all_are_offered() -> None:
    tools = [
        {"type": "tool_search_tool_regex_20251119", "name": "search"},
        {"name": "f", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    assert [tool.name for tool in parsed(tools=tools).conversation.tools] == ["f"]


def test_tools_of_a_provider_are_skipped() -> None:
    request = recorded("web_search")
    assert request.conversation.tools == ()
    assert "tools.web_search_20250305" in request.ignored
    tools = [{"type": "bash_20250124", "name": "bash"}, {"type": "custom", "name": "f", "input_schema": {}}]
    chosen = parsed(tools=tools, tool_choice={"type": "tool", "name": "bash"})
    assert chosen.conversation.tools == (Tool("f"),)
    assert chosen.conversation.tool_choice == "auto"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", (), True)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", (), False)),
        ({"type": "any"}, ("required", (), True)),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, ("named", ("f",), False)),
        ({"type": "none"}, ("none", (), True)),
        (None, ("auto", (), True)),
    ],
)
def test_tool_choice(choice: Any, expected: Any) -> None:
    conversation = parsed(tools=[{"name": "f", "input_schema": {}, "strict": True}], tool_choice=choice).conversation
    assert (conversation.tool_choice, conversation.chosen_tools, conversation.parallel_calls) == expected
    assert conversation.tools[0].strict


def test_results_come_before_the_text_of_their_message() -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "one"}]}
    foreign = {"type": "tool_result", "tool_use_id": "x", "is_error": True}
    made = turns_of(
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [{"type": "text", "text": "and"}, result, foreign, {"type": "text", "text": "so"}]},
        {"role": "user", "content": "again"},
    )
    assert made == (
        Turn("assistant", calls=(Call("1", "f", {"a": 1}),)),
        Turn("tool", "one", call_id="1", name="f"),
        Turn("tool", "", call_id="x", is_error=True),
        Turn("user", "and\nso"),
        Turn("user", "again"),
    )


def test_blocks_that_are_text_and_blocks_that_are_skipped() -> None:
    found = {
        "type": "search_result",
        "title": "A page",
        "source": "a.org",
        "content": [{"type": "text", "text": "Yes"}],
    }
    request = parsed(
        messages=[
            {"role": "user", "content": [found]},
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "server_tool_use", "id": 5, "name": "web_search", "input": {}},
                    {"type": "web_search_tool_result", "tool_use_id": "a", "content": {"error_code": "unavailable"}},
                    {"type": "text", "text": "A"},
                    {"type": "text", "text": "B"},
                ],
            },
            {"role": "user", "content": "ok"},
        ]
    )
    assert [turn.text for turn in request.conversation.turns] == ["A page\na.org\nYes", "AB", "ok"]
    skipped = {"messages.redacted_thinking", "messages.server_tool_use", "messages.web_search_tool_result"}
    assert set(request.ignored) == skipped


def test_an_answer_that_the_client_began_is_continued() -> None:
    begun = parsed(messages=[{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is"}])
    assert begun.conversation.continue_final_turn and not begun.conversation.add_generation_prompt


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Reasoning(enabled=False)),
        ({"thinking": {"type": "disabled"}}, Reasoning(enabled=False)),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, Reasoning(enabled=True, budget=1024)),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, Reasoning(True, "max")),
    ],
)
def test_thinking(fields: dict[str, Any], expected: Reasoning) -> None:
    assert parsed(**fields).conversation.reasoning == expected


def test_unknown_fields_are_named() -> None:
    request = parsed(metadata={}, mcp_servers=[], thinking={"type": "adaptive", "display": "omitted", "depth": 2})
    assert request.ignored == ("mcp_servers", "thinking.depth")


def test_generation() -> None:
    output_format = {"type": "json_schema", "schema": {"type": "object"}}
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 4}
    for fields in ({"output_format": output_format}, {"output_config": {"format": output_format, "task_budget": {}}}):
        generation = parsed(stop_sequences=["END"], max_tokens=5, model="m", **sampling, **fields).generation
        assert generation.schema == {"type": "object"}
        assert generation.sampling == sampling
        assert (generation.stop_strings, generation.max_tokens, generation.model) == (("END",), 5, "m")
    assert parsed().generation.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "messages: given [], expected at least 1"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content: given 5, expected text or a list of blocks",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "takes no images"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "expected the field tool_use_id"),
        ({"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": ""}]}]}, "'thinking' where"),
        ({"max_tokens": 0}, "max_tokens: given 0, expected at least 1"),
        ({"temperature": "1"}, "temperature: given '1', expected a number"),
        ({"thinking": {"type": "on"}}, "thinking.type: given 'on', expected 'enabled', 'disabled'"),
        ({"tools": [{"name": "f"}]}, "tools.0: given {'name': 'f'}, expected the field input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "two tools of one name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: given any, expected a tool of `tools`"),
        ({"stop_sequences": [""]}, "stop_sequences.0: given '', expected at least 1 character"),
    ],
)
def test_a_wrong_value_is_refused_in_our_words(fields: dict[str, Any], words: str) -> None:
    assert words in refusal(**fields)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(RECORDED)), st.integers(0, 2**32))
def test_a_damaged_request_is_parsed_or_refused(name: str, seed: int) -> None:
    try:
        assert isinstance(
            MESSAGES.parse(damage_json(json.dumps(RECORDED[name]).encode(), random.Random(seed))), ChatRequest
        )
    except ApiError as error:
        assert error.status == 400
        assert "expected" in str(error) or "body: Invalid JSON" in str(error)
        ErrorResponse.model_validate(error_document(error))


# Answers.


def emitter_of(max_tokens: int | None = None, cached: int | None = None) -> MessagesEmitter:
    return MessagesEmitter(AnswerHead("m", "req_1", 1, USAGE.prompt, cached, {"max_tokens": max_tokens}))


def stream_of(emitter: MessagesEmitter, events: Iterable[AnswerEvent], finish: Finish) -> str:
    parts = [*emitter.begin(), emitter.ping()]
    for event in events:
        parts += emitter.event(0, event)
    parts += emitter.finish(0, finish)
    return "".join([*parts, *emitter.end(USAGE)])


def documents_of(stream: str) -> list[dict[str, Any]]:
    """The events of a stream, each valid for the `anthropic` package and in the order that it expects."""
    documents = []
    for event in stream.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        if document["type"] not in ("ping", "error"):
            STREAM_EVENT.validate_python(document)
        documents.append(document)
    blocks = [one for one in documents if one["type"].startswith("content_block")]
    is_open, begun = False, 0
    for one in blocks:
        if one["type"] == "content_block_start":
            assert not is_open
            is_open, begun = True, begun + 1
        assert is_open and one["index"] == begun - 1
        is_open = one["type"] != "content_block_stop"
    assert not is_open
    return documents


def read_by_client(stream: str) -> Message:
    """The message that the `anthropic` client makes of a stream."""
    httpx = __import__(type(anthropic.DefaultHttpxClient()).__mro__[1].__module__.split(".")[0])
    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, content=stream.encode()))
    client = anthropic.Anthropic(api_key="k", http_client=anthropic.DefaultHttpxClient(transport=transport))
    with client.messages.stream(model="m", max_tokens=5, messages=[{"role": "user", "content": "Hi"}]) as answer:
        return answer.get_final_message()


ANSWER: list[AnswerEvent] = [
    ReasoningDelta("I "),
    ReasoningDelta("think."),
    TextDelta("\n\n"),
    TextDelta("I read"),
    TextDelta(" it."),
    TextDelta("\n"),
    CallBegin(0, "read", "call_1"),
    CallArguments(0, '{"path": '),
    CallArguments(0, '"ü"}'),
    CallEnd(0, '{"path": "ü"}'),
    TextDelta("\n"),
    CallBegin(1, "list", "call_2"),
    CallArguments(1, "{}"),
    CallEnd(1, "{}"),
]


def test_the_events_of_an_answer() -> None:
    documents = documents_of(stream_of(emitter_of(), ANSWER, Finish("stop")))
    kinds = [one.get("delta", {}).get("type", one["type"]) for one in documents]
    assert kinds == [
        "message_start",
        "ping",
        *("content_block_start", "thinking_delta", "thinking_delta", "signature_delta", "content_block_stop"),
        *("content_block_start", "text_delta", "text_delta", "text_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "input_json_delta", "content_block_stop"),
        *("content_block_start", "input_json_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    start, delta = documents[0]["message"], documents[-2]
    assert start["stop_reason"] is None and start["content"] == []
    assert start["usage"]["input_tokens"] == USAGE.prompt
    assert delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert (delta["usage"]["input_tokens"], delta["usage"]["cache_read_input_tokens"]) == (40, 60)
    assert (delta["usage"]["output_tokens"], delta["usage"]["output_tokens_details"]) == (7, {"thinking_tokens": 3})


def test_the_usage_of_the_first_event_is_without_cached_tokens_where_they_are_known() -> None:
    (start,) = documents_of("".join(emitter_of(cached=60).begin()))
    assert start["message"]["usage"]["input_tokens"] == 40
    assert start["message"]["usage"]["cache_read_input_tokens"] == 60


def test_a_client_reads_the_stream_as_the_document() -> None:
    emitter = emitter_of()
    message = read_by_client(stream_of(emitter, ANSWER, Finish("stop")))
    document = Message.model_validate(emitter.document(USAGE))
    assert message.to_dict(exclude_none=True) == document.to_dict(exclude_none=True)
    thinking, text, read, listing = message.content
    assert thinking.type == "thinking" and thinking.thinking == "I think." and len(thinking.signature) == 64
    assert text.type == "text" and text.text == "\n\nI read it.\n"
    assert read.type == "tool_use" and read.input == {"path": "ü"} and read.id == "toolu_call_1"
    assert listing.type == "tool_use" and listing.input == {}
    assert message.usage.input_tokens == 40


def test_what_a_client_sends_back_is_what_was_answered() -> None:
    emitter = emitter_of()
    stream_of(emitter, ANSWER, Finish("stop"))
    (turn,) = turns_of({"role": "assistant", "content": emitter.document(USAGE)["content"]})
    calls = (Call("call_1", "read", {"path": "ü"}), Call("call_2", "list", {}))
    assert turn == Turn("assistant", "\n\nI read it.\n", "I think.", calls)


@pytest.mark.parametrize(
    ("finish", "max_tokens", "expected"),
    [
        (Finish("stop"), 7, ("end_turn", None)),
        (Finish("length"), 7, ("max_tokens", None)),
        (Finish("length"), 8, ("model_context_window_exceeded", None)),
        (Finish("length"), None, ("model_context_window_exceeded", None)),
        (Finish("stop_string", "END"), 7, ("stop_sequence", "END")),
    ],
)
def test_why_an_answer_ended(finish: Finish, max_tokens: int | None, expected: Any) -> None:
    emitter = emitter_of(max_tokens)
    message = read_by_client(stream_of(emitter, [TextDelta("A"), TokenScores(())], finish))
    assert (message.stop_reason, message.stop_sequence) == expected
    assert Message.model_validate(emitter.document(USAGE)).stop_reason == expected[0]


def test_a_call_that_the_limit_cuts_keeps_what_is_complete() -> None:
    emitter = emitter_of(7)
    cut = '{"a": 1, "b": [2'
    events = [CallBegin(0, "f", "1"), CallArguments(0, cut), CallEnd(0, cut)]
    documents_of(stream_of(emitter, events, Finish("length")))
    document = Message.model_validate(emitter.document(USAGE))
    assert document.stop_reason == "max_tokens"
    assert emitter.document(USAGE)["content"][0]["input"] == {"a": 1, "b": [2]}


def pieces(text: str, sizes: list[int]) -> list[str]:
    cut, at = [], 0
    for size in sizes:
        cut.append(text[at : at + size])
        at += size
    return [part for part in (*cut, text[at:]) if part]


REGION = st.tuples(
    st.sampled_from(["reasoning", "text", "call"]), st.text(min_size=1), st.lists(st.integers(1, 4), max_size=4)
)


@settings(max_examples=100, deadline=None)
@given(st.lists(REGION, max_size=6))
def test_any_answer_is_a_valid_stream_of_the_same_message(regions: list[tuple[str, str, list[int]]]) -> None:
    events: list[AnswerEvent] = []
    for index, (kind, text, sizes) in enumerate(regions):
        if kind == "call":
            arguments = json.dumps({"text": text})
            events.append(CallBegin(index, "f", f"call_{index}"))
            events += [CallArguments(index, part) for part in pieces(arguments, sizes)]
            events.append(CallEnd(index, arguments))
        else:
            events += [(TextDelta if kind == "text" else ReasoningDelta)(part) for part in pieces(text, sizes)]
    emitter = emitter_of()
    documents = documents_of(stream_of(emitter, events, Finish("stop")))
    document = Message.model_validate(emitter.document(USAGE))
    texts = ["" for _ in document.content]
    for one in documents:
        if one["type"] == "content_block_delta" and one["delta"]["type"] != "signature_delta":
            texts[one["index"]] += next(value for name, value in one["delta"].items() if name != "type")
    for block, text in zip(document.content, texts, strict=True):
        if block.type == "tool_use":
            assert block.input == json.loads(text)
        else:
            assert text == (block.text if block.type == "text" else block.thinking)
            assert text.strip() or block.type == "thinking"
    calls = [block.id for block in document.content if block.type == "tool_use"]
    assert calls == [f"toolu_call_{index}" for index, (kind, _, _) in enumerate(regions) if kind == "call"]


# Errors and counts.


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_the_envelope_of_an_error(status: int, kind: str) -> None:
    document = error_document(ApiError(status, "no"))
    assert document == {"type": "error", "error": {"type": kind, "message": "no"}}
    ErrorResponse.model_validate(document)


def test_a_body_that_is_too_large_has_a_kind_of_its_own() -> None:
    assert error_document(ApiError(413, "no"))["error"]["type"] == "request_too_large"


def test_a_prompt_that_is_too_long_is_told_in_words_that_make_clients_compact() -> None:
    error = ApiError(400, "40000 tokens > 32768 maximum", code="context_length_exceeded")
    assert error_document(error)["error"]["message"] == "prompt is too long: 40000 tokens > 32768 maximum"


def test_an_error_in_a_stream_reaches_the_client() -> None:
    emitter = emitter_of()
    stream = "".join([*emitter.begin(), *emitter.event(0, TextDelta("A")), *emitter.fail(ApiError(503, "no memory"))])
    last = json.loads(stream.rstrip().rsplit("data: ", 1)[1])
    assert last == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "no memory"},
        "request_id": "req_1",
    }
    with pytest.raises(anthropic.APIStatusError, match="no memory"):
        read_by_client(stream)


def test_a_count_of_tokens() -> None:
    assert MESSAGES.count_path == "/v1/messages/count_tokens"
    assert MESSAGES.count_document is not None
    assert MessageTokensCount.model_validate(MESSAGES.count_document(12)).input_tokens == 12
