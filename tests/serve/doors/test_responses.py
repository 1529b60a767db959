"""The Responses API: what requests are parsed into, and that events and documents are what OpenAI's types, OpenAI's
client and a following request of the same client read.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
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
from ktransformers.serve.doors.conversation import Call, ChatRequest, Turn
from ktransformers.serve.doors.door import AnswerHead
from ktransformers.serve.doors.registry import error_answer
from ktransformers.serve.doors.responses import RESPONSES
from ktransformers.serve.http.error import ApiError
from tests.support.serving import RunningServer

CODEX = json.loads((Path(__file__).parent / "codex_request.json").read_text())
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(prompt=100, cached=64, completion=30, reasoning=12)
PATCH = '*** Begin Patch\n*** Add File: a.txt\n+"é" \\ 😀\u2028\t\n*** End Patch\n'
# What OpenAI's own server would send for a context that is too long is not among the codes of its types.
UNTYPED_CODES = {"context_length_exceeded"}


def parse(**fields: Any) -> ChatRequest:
    return RESPONSES.parse(json.dumps(fields).encode())


def turns(*items: dict[str, Any] | str) -> tuple[Turn, ...]:
    return parse(input=list(items)).conversation.turns


def pieces(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def call(index: int, name: str, arguments: Any, *, size: int = 5) -> list[AnswerEvent]:
    text = json.dumps(arguments)
    middle = [CallArguments(index, piece) for piece in pieces(text, size)]
    return [CallBegin(index, name, f"call_{index}"), *middle, CallEnd(index, text)]


class Answer:
    """An answer to a request, emitted as a stream and as a document. Every event has been checked by its type."""

    def __init__(self, request: ChatRequest, events: Iterable[AnswerEvent], finish: str = "stop") -> None:
        events = list(events)
        head = AnswerHead("demo", "req_abc", 1, USAGE.prompt, None, json.loads(json.dumps(request.echo)))
        emitter = RESPONSES.emitter(head)
        texts = [*emitter.begin(), emitter.ping()]
        for event in events:
            texts += emitter.event(0, event)
        texts += [*emitter.finish(0, Finish(finish)), *emitter.end(USAGE)]
        self.stream = "".join(texts)
        self.events = read_events(self.stream)
        other = RESPONSES.emitter(head)
        for event in events:
            list(other.event(0, event))
        other.finish(0, Finish(finish))
        self.document = other.document(USAGE)
        Response.model_validate(self.document)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == f"response.{kind}"]


def read_events(stream: str) -> list[dict[str, Any]]:
    events = []
    for block in stream.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if (event.get("response") or {}).get("error", None) is None:
            EVENTS.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# Requests


def test_a_request_of_codex() -> None:
    request = RESPONSES.parse(json.dumps(CODEX).encode())
    system, other, *rest = request.conversation.turns
    assert (system, other.role) == (Turn("system", "You are a coding agent."), "system")
    assert rest == [
        Turn("user", "<environment_context>"),
        Turn("user", "make the file"),
        Turn(
            "assistant",
            "Let me look.",
            "I look at the folder first.",
            (Call("call_a", "exec_command", {"cmd": "cat seen.txt"}),),
        ),
        Turn("tool", "Output:\nsecret 4711\n", call_id="call_a", name="exec_command"),
        Turn(
            "assistant",
            reasoning="Now the patch.",
            calls=(Call("call_b", "apply_patch", {"input": CODEX["input"][9]["input"]}),),
        ),
        Turn("tool", "Exit code: 0", call_id="call_b", name="apply_patch"),
        Turn(
            "assistant",
            reasoning="A tool of a namespace.",
            calls=(Call("call_c", "multi_agent_v1__close_agent", {"target": "nobody"}),),
        ),
        Turn("tool", "invalid agent id nobody", call_id="call_c", name="multi_agent_v1__close_agent"),
    ]
    names = [tool.name for tool in request.conversation.tools]
    assert names == ["exec_command", "apply_patch", "multi_agent_v1__close_agent"]
    assert request.ignored == ("tools.web_search",)
    assert request.generation.stream and request.generation.max_tokens is None
    assert (request.conversation.reasoning.enabled, request.conversation.reasoning.effort) == (True, "medium")


def test_a_custom_tool_is_offered_as_a_function_with_its_grammar_in_words() -> None:
    tool = {tool.name: tool for tool in RESPONSES.parse(json.dumps(CODEX).encode()).conversation.tools}["apply_patch"]
    assert tool.parameters["required"] == ["input"] and list(tool.parameters["properties"]) == ["input"]
    assert "lark" in tool.description and '"*** Begin Patch" LF' in tool.description


def test_a_probe_of_one_token_without_input() -> None:
    request = parse(model="demo", input="", max_output_tokens=1)
    assert request.conversation.turns == (Turn("user", ""),)
    assert request.generation.max_tokens == 1
    assert parse(input=[]).conversation.turns == (Turn("user"),)
    assert parse(instructions="be brief").conversation.turns == (Turn("system", "be brief"), Turn("user"))


def test_settings() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    request = parse(
        input="hi",
        instructions="be brief",
        temperature=0.5,
        top_p=0.9,
        top_k=20,
        parallel_tool_calls=False,
        reasoning={"effort": "none", "summary": "auto"},
        text={"format": {"type": "json_schema", "name": "a", "schema": schema}, "verbosity": "low"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        store=True,
        truncation="auto",
        metadata={"a": "b"},
        service_tier="flex",
        client_metadata={"x": 1},
        stream_options={"include_obfuscation": False},
        new_field=1,
    )
    assert request.conversation.turns == (Turn("system", "be brief"), Turn("user", "hi"))
    assert request.generation.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 20}
    assert (request.generation.schema, request.generation.logprobs) == (schema, 2)
    assert not request.conversation.parallel_calls and request.conversation.reasoning.enabled is False
    assert request.ignored == ("new_field",)
    assert Answer(request, [TextDelta("x")]).document["store"] is False


def test_items_of_the_assistant_are_one_turn_and_roles_may_come_late() -> None:
    assert turns(
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": "but"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "not json"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]},
        {"type": "agent_message", "author": "x", "recipient": "y", "content": [{"type": "input_text", "text": "d"}]},
    ) == (
        Turn("user", "a"),
        Turn("assistant", "no\nbut", calls=(Call("1", "f", "not json"),)),
        Turn("tool", "x", call_id="1", name="f"),
        Turn("system", "bc"),
        Turn("assistant", reasoning="s"),
        Turn("user", "d"),
    )


def test_reasoning_that_another_server_encrypted_is_left_out() -> None:
    item = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAA"}
    assert turns(item, {**item, "encrypted_content": "kt1:*"}, {"role": "assistant", "content": "a"}) == (
        Turn("assistant", "a"),
    )


FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "mcp__s__", "tools": [{**FUNCTION, "name": "g"}]}


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ("auto", ())),
        (None, ("auto", ())),
        ("none", ("none", ())),
        ("required", ("required", ())),
        ({"type": "function", "name": "f"}, ("named", ("f",))),
        ({"type": "custom", "name": "p"}, ("named", ("p",))),
        ({"type": "function", "name": "g", "namespace": "mcp__s__"}, ("named", ("mcp__s__g",))),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "mcp__s__"}]},
            ("auto", ("mcp__s__g",)),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            ("required", ("f",)),
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, ("none", ())),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[str, tuple[str, ...]]) -> None:
    tools = [FUNCTION, SPACE, {"type": "custom", "name": "p"}, {"type": "web_search"}]
    request = parse(input="a", tools=tools, tool_choice=choice)
    assert (request.conversation.tool_choice, request.conversation.chosen_tools) == expected
    assert Answer(request, []).document["tool_choice"] == (choice or "auto")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send all earlier items"),
        ({"conversation": {"id": "conv_1"}}, "conversation", "send all earlier items"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "send the item itself"),
        ({"background": True}, "background", "use `stream`"),
        ({"input": 7}, "input", "given 7, expected a list"),
        ({"input": [7]}, "input.0", "expected an object"),
        ({"input": [{"type": "hologram"}]}, "input.0.type", "given 'hologram', expected one of function_call"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input.0.role", "given 'robot', expected 'user', 'assistant'"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "input.0",
            "given a part of type 'input_image', expected text",
        ),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "given nothing"),
        ({"max_output_tokens": 0}, "max_output_tokens", "given 0, expected at least 1"),
        ({"user": "a" * 1025}, "user", "at most 1024 characters"),
        ({"prompt_cache_key": "a" * 1025}, "prompt_cache_key", "at most 1024 characters"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "at most 16 entries"),
        ({"metadata": {"a": "a" * 513}}, "metadata.a", "at most 512 characters"),
        ({"temperature": "hot"}, "temperature", "given 'hot', expected a number"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "given 'huge', expected 'none', 'minimal'"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "expected text.format.schema"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "given nothing"),
        ({"tools": [{"name": "f"}]}, "tools.0.type", "given nothing"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools", "given 'f' twice"),
        ({"tool_choice": "required"}, "tool_choice", "functions or custom tools"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "one of ['f']"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice", "given 'web_search'"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as raised:
        parse(**fields)
    assert raised.value.status == 400 and raised.value.param == param
    assert words in str(raised.value)
    assert RESPONSES.error_document(raised.value)["error"]["type"] == "invalid_request_error"


def test_what_is_stored_elsewhere_has_openais_code() -> None:
    with pytest.raises(ApiError) as raised:
        parse(previous_response_id="resp_1", input="go on")
    assert raised.value.code == "previous_response_not_found"


# Answers


def test_events_of_an_answer_with_reasoning_text_and_calls() -> None:
    request = RESPONSES.parse(json.dumps(CODEX).encode())
    answer = Answer(
        request,
        [
            ReasoningDelta("Hm"),
            ReasoningDelta("."),
            TextDelta("I "),
            TextDelta("patch."),
            *call(0, "apply_patch", {"input": PATCH}),
            *call(1, "multi_agent_v1__close_agent", {"target": "a"}),
            *call(2, "unknown", {}),
        ],
    )
    kinds = [event["type"].removeprefix("response.") for event in answer.events]
    assert [kind for number, kind in enumerate(kinds) if kind not in kinds[number - 1 : number]] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    items = [event["item"] for event in answer.of("output_item.done")]
    assert [event["output_index"] for event in answer.of("output_item.done")] == list(range(5))
    assert items == answer.of("completed")[0]["response"]["output"]
    assert items[2]["input"] == PATCH == "".join(event["delta"] for event in answer.of("custom_tool_call_input.delta"))
    assert len(answer.of("custom_tool_call_input.delta")) > 5
    assert (items[3]["namespace"], items[3]["name"]) == ("multi_agent_v1", "close_agent")
    assert (items[4]["name"], "namespace" in items[4]) == ("unknown", False)
    assert {item["status"] for item in items} == {"completed"}
    assert answer.document["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 64, "cache_write_tokens": 0},
        "output_tokens": 30,
        "output_tokens_details": {"reasoning_tokens": 12},
        "total_tokens": 130,
    }
    without_ids = [[{**item, "id": ""} for item in one] for one in (items, answer.document["output"])]
    assert without_ids[0] == without_ids[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"patch": "text"}', "text"),
        ('{"a": "1", "input": "2"}', "2"),
        ('{"a": "1", "b": "2"}', '{"a": "1", "b": "2"}'),
        ('{"input": 7}', '{"input": 7}'),
        ("not json", "not json"),
        ("", ""),
    ],
)
def test_input_of_a_custom_tool_that_the_model_called_otherwise(arguments: str, expected: str) -> None:
    request = parse(tools=[{"type": "custom", "name": "p"}])
    events = [CallBegin(0, "p"), *(CallArguments(0, piece) for piece in arguments), CallEnd(0, arguments)]
    (item,) = Answer(request, events).document["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", expected)


def test_a_ping_is_short() -> None:
    answer = Answer(parse(input="a", instructions="Be brief.", tools=[FUNCTION]), [TextDelta("Yes.")])
    (first, ping), (created,) = answer.of("in_progress"), answer.of("created")
    assert first["response"] == created["response"] and len(created["response"]["tools"]) == 1
    assert ping["response"]["tools"] == [] and ping["response"]["instructions"] is None


def test_log_probabilities_belong_to_text() -> None:
    score = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    thought, first, second = ({**score, "token": token} for token in "tab")
    answer = Answer(
        parse(input="x", top_logprobs=1),
        [TokenScores((thought,)), ReasoningDelta("t"), TokenScores((first,)), TokenScores((second,)), TextDelta("ab")],
    )
    assert [event["logprobs"] for event in answer.of("output_text.delta")] == [[first, second]]
    assert answer.document["output"][1]["content"][0]["logprobs"] == [first, second]


def test_a_call_that_was_cut_off_is_not_announced_as_done() -> None:
    answer = Answer(parse(tools=[FUNCTION]), [TextDelta("a"), *call(0, "f", {"rm": "/tmp/a"})], finish="length")
    assert [event["item"]["type"] for event in answer.of("output_item.done")] == ["message"]
    assert [event["type"] for event in answer.events][-1] == "response.incomplete"
    assert [item["status"] for item in answer.document["output"]] == ["completed", "incomplete"]
    assert answer.document["incomplete_details"] == {"reason": "max_output_tokens"}


def test_text_that_was_cut_off_is_incomplete() -> None:
    answer = Answer(parse(input="x"), [TextDelta("a")], finish="length")
    assert [event["item"]["status"] for event in answer.of("output_item.done")] == ["incomplete"]
    assert (answer.document["status"], answer.document["completed_at"]) == ("incomplete", None)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ApiError(400, "a", code="context_length_exceeded"), "context_length_exceeded"),
        (ApiError(400, "a"), "invalid_prompt"),
        (ApiError(429, "a"), "rate_limit_exceeded"),
        (ApiError(503, "a"), "server_error"),
        (ApiError(500, "a"), "server_error"),
    ],
)
def test_failures_have_the_codes_that_clients_act_on(error: ApiError, code: str) -> None:
    emitter = RESPONSES.emitter(AnswerHead("demo", "req_abc", 1, 1, None, parse(input="x").echo))
    texts = [*emitter.begin(), *emitter.event(0, TextDelta("a")), *emitter.fail(error)]
    failed = read_events("".join(texts))[-1]
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"] == {"code": code, "message": "a"}
    if code not in UNTYPED_CODES:
        EVENTS.validate_python(failed)


def test_a_full_queue_is_a_status_after_which_codex_tries_again() -> None:
    full = ApiError(429, "the server is full", code="queue_full")
    assert [error_answer(path, full)[0] for path in ("/v1/responses", "/v1/chat/completions")] == [503, 429]


def test_counting() -> None:
    assert RESPONSES.count_path == "/v1/responses/input_tokens"
    assert RESPONSES.count_document is not None
    assert RESPONSES.count_document(7) == {"object": "response.input_tokens", "input_tokens": 7}


# What we emit, sent back

TOOLS = [FUNCTION, SPACE, {"type": "custom", "name": "p"}]
SENT_BACK: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "tools": TOOLS}
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
made_calls = st.one_of(
    st.tuples(st.sampled_from(["f", "mcp__s__g"]), st.dictionaries(texts, st.integers(-9, 9) | texts, max_size=3)),
    st.tuples(st.just("p"), st.fixed_dictionaries({"input": texts})),
)


@settings(max_examples=30, deadline=None)
@given(st.text() | st.just(""), texts | st.just(""), st.lists(made_calls, max_size=3), st.integers(1, 9), st.booleans())
def test_an_answer_sent_back_is_the_same_turn(
    reasoning: str, text: str, calls: list[tuple[str, Any]], size: int, keeps_content: bool
) -> None:
    reasoning = reasoning.encode("utf-8", "replace").decode()
    events: list[AnswerEvent] = [ReasoningDelta(piece) for piece in pieces(reasoning, size)]
    events += [TextDelta(piece) for piece in pieces(text, size)]
    for index, (name, arguments) in enumerate(calls):
        events += call(index, name, arguments, size=size)
    answer = Answer(parse(input="a", **SENT_BACK), events)
    for output in (answer.document["output"], [event["item"] for event in answer.of("output_item.done")]):
        items = [item if keeps_content else {**item, "content": None} for item in output if item["type"] == "reasoning"]
        items += [item for item in output if item["type"] != "reasoning"]
        _, *said = turns({"role": "user", "content": "a"}, *items)
        expected = tuple(Call(f"call_{index}", name, arguments) for index, (name, arguments) in enumerate(calls))
        assert said == ([Turn("assistant", text, reasoning, expected)] if output else [])


# Requests that are wrong in any way

scraps = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats() | st.text(max_size=3) | st.sampled_from(["message"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "a"]), inner),
    max_leaves=4,
)


def places(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, entry in entries:
        yield from places(entry, (*place, key))


def replaced(document: Any, place: tuple[Any, ...], scrap: Any) -> Any:
    if not place:
        return scrap
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[place[0]] = replaced(document[place[0]], place[1:], scrap)
    return copy


BODY = {
    **CODEX,
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "exec_command"}]},
    "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}, "verbosity": "low"},
    "temperature": 1,
    "max_output_tokens": 5,
    "instructions": "be brief",
    "previous_response_id": None,
}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(places(BODY))), scraps)
@example(("input",), [{"type": ["a"]}])
@example(("tools",), [{"type": {"a": 1}}])
def test_a_mutated_request_is_parsed_or_refused(place: tuple[Any, ...], scrap: Any) -> None:
    body = json.dumps(replaced(BODY, place, scrap)).encode()
    try:
        request = RESPONSES.parse(body)
    except ApiError as error:
        assert 400 <= error.status < 500
        return
    assert isinstance(request, ChatRequest)
    json.dumps(request.echo)


@given(st.binary(max_size=40))
def test_bytes_are_parsed_or_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        RESPONSES.parse(body)


# OpenAI's client


def answer_to(request: ChatRequest) -> Answer:
    last = request.conversation.turns[-1]
    if last.role == "tool":
        return Answer(request, [ReasoningDelta("so"), TextDelta(f"it says {last.text}")])
    return Answer(request, [ReasoningDelta("hm"), *call(0, "f", {"a": 1})])


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = RESPONSES.parse(self.rfile.read(int(self.headers["content-length"])))
        answer, streams = answer_to(request), request.generation.stream
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if streams else "application/json")
        self.end_headers()
        self.wfile.write((answer.stream if streams else json.dumps(answer.document)).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
            yield made
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("streams", [False, True])
def test_a_tool_loop_of_openais_client(client: openai.OpenAI, streams: bool) -> None:
    items: Any = [{"role": "user", "content": "look"}]
    tools: Any = [{**FUNCTION, "strict": False}]
    for _ in range(2):
        if streams:
            with client.responses.stream(model="demo", input=items, tools=tools) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(model="demo", input=items, tools=tools)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "4711"}
            for item in response.output
            if item.type == "function_call"
        ]
    assert response.output_text == "it says 4711"
    assert response.usage.output_tokens_details.reasoning_tokens == 12


def test_a_served_model_answers_and_counts(served: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    settings: dict[str, Any] = {"model": "tiny", "input": "hello", "temperature": 0, "max_output_tokens": 6}
    whole = client.responses.create(**settings)
    streamed = [event for event in client.responses.create(**settings, stream=True) if event.type.endswith(".delta")]
    assert whole.output_text == "".join(event.delta for event in streamed)
    assert whole.usage is not None and whole.usage.output_tokens == 6 and whole.status == "incomplete"
    counted = client.responses.input_tokens.count(model="tiny", input="hello")
    assert counted.input_tokens == whole.usage.input_tokens > 0
    with pytest.raises(openai.BadRequestError, match="send all earlier items"):
        client.responses.create(**settings, previous_response_id="resp_1")
    assert client.responses.create(model="tiny", input="", max_output_tokens=1).usage is not None
