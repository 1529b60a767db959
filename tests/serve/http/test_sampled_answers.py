"""Turns that continue from the tokens that were sampled: what counts as the same answer, how texts are cut, and whole
conversations through a server whose answers are tokenised as no tokenizer would."""

from __future__ import annotations

import functools
import hashlib
import json
import urllib.request
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.serve.doors.conversation import Call, Turn
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.piece_tokenizer import PieceTokenizer
from ktransformers.serve.http.prepare import COUNT, PrepareSettings, RequestPreparer
from ktransformers.serve.http.prepare_worker import answers_frame, answers_of
from ktransformers.serve.http.sampled_answers import (
    SampledAnswer,
    SampledAnswers,
    find_splices,
    same_arguments,
    turn_keys,
)
from tests.support.answers import byte_tokenizer
from tests.support.scripted import Script
from tests.support.serving import EngineHarness, RunningServer

SCHEMA = {"properties": {"path": {"type": "string"}, "all": {"type": "boolean"}, "deep": {"default": True}}}


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"path": "a"}, True),
        ({"all": False, "path": "a"}, True),  # Claude Code adds it in front
        ({"path": "a", "all": None}, True),
        ({"path": "a", "deep": True}, True),
        ({"path": "a", "deep": False}, False),  # not what the schema declares
        ({"path": "a", "all": True}, False),
        ({"path": "a", "all": 0}, False),
        ({"path": "b"}, False),
        ({}, False),
        ('{"path": "a"}', True),
        ('{"path":"a"}', False),
    ],
)
def test_arguments_that_say_the_same(given: Any, same: bool) -> None:
    assert same_arguments('{"path": "a"}', given, SCHEMA) is same


def test_arguments_that_are_no_object() -> None:
    assert not same_arguments('{"path": ', {"path": "a"}, SCHEMA)
    assert same_arguments('{"n": 1}', {"n": 1}, {}) and not same_arguments('{"n": 1}', {"n": True}, {})


def test_least_recently_used_answers_go_first() -> None:
    one = SampledAnswer(0, "", array("i", [1]), "")
    store = SampledAnswers(limit_bytes=2 * one.bytes)
    store.add("a", one)
    store.add("a", one)
    store.add("b", one)
    assert list(store.find(["a", "x"])) == ["a"] and store.bytes == 2 * one.bytes
    store.add("c", one)
    assert set(store.find(["a", "b", "c"])) == {"a", "c"} and len(store) == 2


def test_answers_pass_through_a_pipe() -> None:
    answers = {
        "a": SampledAnswer(3, "ab", array("i", [5, 6]), "<eos>", "I think.", ('{"a": 1}', "{}")),
        "b": SampledAnswer(9, "cd", array("i", [7]), ""),
    }
    document, block = answers_frame(answers)
    assert answers_of(json.loads(json.dumps(document)), block) == answers


def test_names_of_conversations() -> None:
    said = Turn("assistant", " Hello\n", "I think", (Call("1", "edit", {"a": 1}),))
    asked = Turn("user", "a")
    (*_, key) = turn_keys("", [asked, said])
    for same in (Turn("assistant", "Hello", "", (Call("2", "edit", "{}"),)), replace(said, reasoning="b")):
        assert list(turn_keys("", [asked, same]))[-1] == key
    for other in (replace(said, text="Hell"), replace(said, calls=()), replace(said, role="user")):
        assert list(turn_keys("", [asked, other]))[-1] != key
    assert list(turn_keys("", [Turn("user", "b"), said]))[-1] != key


@pytest.fixture(scope="module")
def tokenizer(harness: EngineHarness) -> Any:
    return harness.tokenizer


MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<think>",
    "<|im_",
    "|>",
    " ",
    "\n",
    "ü",
    "a cat",
    "  the",
    "123",
]


@given(st.lists(st.sampled_from(MARKS), max_size=24).map("".join))
def test_pieces_are_the_tokens_of_the_whole(tokenizer: Any, text: str) -> None:
    pieces = PieceTokenizer(tokenizer)
    expected = tokenizer(text, add_special_tokens=False)["input_ids"]
    for _ in range(2):  # new, then kept
        assert list(pieces.encode(text, 10**6)) == expected


def test_a_text_beyond_the_limit_is_not_tokenised_to_its_end() -> None:
    pieces = PieceTokenizer(byte_tokenizer(["<a>"]))
    assert 1000 < len(pieces.encode("a" * 10**6, 1000)) < 10**5
    assert 1000 < len(pieces.encode("<a>b" * 10**5, 1000)) < 1010
    assert len(pieces.encode("a" * 20_000, 20_000)) == 20_000


PROMPT, END = "<user>ask<end><assistant>", "<end>"


def spliced(rendered: str, turn: Turn, **fields: Any) -> tuple[list[str], str]:
    """(what an answer takes the place of, what became of it), with a tokenizer of bytes."""
    tokenizer = byte_tokenizer(["<user>", "<end>", "<assistant>", "<call>"])
    pieces = PieceTokenizer(tokenizer)
    _, _, digest = find_splices(PROMPT, [], [], {}, pieces)
    answer = SampledAnswer(len(PROMPT), digest, array("i", tokenizer("<call>x")["input_ids"]), END)
    splices, state, _ = find_splices(rendered, [Turn("user", "ask"), turn], [], {1: replace(answer, **fields)}, pieces)
    return [rendered[one.start : one.end] for one in splices], state


CALLED = Turn("assistant", "", "", (Call("", "edit", {"a": 1}),))


@pytest.mark.parametrize(
    ("rendered", "turn", "fields", "expected"),
    [
        (PROMPT + "Yes.<end><user>", Turn("assistant", "Yes."), {}, "continued"),
        (PROMPT + "<call>edit 1<end>", CALLED, {"arguments": ('{"a":1}',)}, "continued"),
        (PROMPT + "<call>edit 2<end>", CALLED, {"arguments": ('{"a": 2}',)}, "changed_call"),
        (PROMPT + "I think. Yes.<end>", Turn("assistant", "Yes.", "I think."), {"reasoning": "I think."}, "continued"),
        (PROMPT + "Yes.<end>", Turn("assistant", "Yes.", "I think."), {"reasoning": "I think."}, "template"),
        (PROMPT + "You. I. Yes.<end>", Turn("assistant", "Yes.", "You."), {"reasoning": "I."}, "other_text"),
        (PROMPT + "No.<end>", Turn("assistant", "Yes."), {}, "template"),  # what is rendered is not the answer
        (PROMPT + "Yes.<user>b<end>", Turn("assistant", "Yes."), {}, "template"),  # another turn begins before the end
        (PROMPT + "Yes.", Turn("assistant", "Yes."), {}, "template"),
        (PROMPT.replace("ask", "ass") + "Yes.<end>", Turn("assistant", "Yes."), {}, "template"),
    ],
)
def test_where_an_answer_takes_the_place_of_its_text(
    rendered: str, turn: Turn, fields: dict[str, Any], expected: str
) -> None:
    replaced, state = spliced(rendered, turn, **fields)
    assert state == expected
    assert replaced == ([rendered[len(PROMPT) : rendered.index(END, len(PROMPT))]] if state == "continued" else [])


TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {}}}}]
THINKING = "<think>\nI call it.\n</think>\n\n"
CALL = THINKING + 'Now.\n<tool_call>\n{"name":"edit","arguments":{"path":"/a","line":3}}\n</tool_call>'


@pytest.fixture
def answers(served: RunningServer) -> Iterator[list[list[int]]]:
    """The tokens of the next answers of the server."""
    service, waiting = served.service, list[list[int]]()
    original = service.generation_requests

    def generation_requests(prepared: Any, request_id: str = "") -> list[Any]:
        script = waiting.pop(0)
        return [replace(one, grammar=lambda: Script(script)) for one in original(prepared, request_id)]

    service.generation_requests = generation_requests
    yield waiting
    del service.generation_requests


def sampled(tokenizer: Any, text: str) -> list[int]:
    """Tokens of every character for itself, then the end."""
    return [token for letter in text for token in tokenizer(letter, add_special_tokens=False)["input_ids"]] + [2]


def ask(served: RunningServer, messages: list[dict[str, Any]], **fields: Any) -> tuple[dict[str, Any], int, int]:
    """(the answer, tokens of the prompt, cached ones)."""
    body = {"messages": messages, "tools": TOOLS, **fields}
    request = urllib.request.Request(
        f"{served.url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        document = json.load(response)
    usage = document["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return document["choices"][0]["message"], usage["prompt_tokens"], cached


def test_a_turn_continues_from_what_was_sampled(served: RunningServer, answers: list[list[int]]) -> None:
    """Also where the client writes the call otherwise. An answer whose arguments it changed is rendered anew, and so is
    one without its thinking, which the client or the template drops."""
    tokenizer = served.service.tokenizer
    before = dict(served.service.prefixes)
    script = sampled(tokenizer, CALL)
    answers.append(list(script))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Please edit /a for me."}]
    message, first_tokens, _ = ask(served, messages)
    (call,) = message["tool_calls"]
    assert message["reasoning_content"] == "I call it." and message["content"] == "Now."
    function = {"name": "edit", "arguments": '{"replace_all": false, "line": 3, "path": "/a"}'}
    back = {**message, "tool_calls": [{**call, "function": function}]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}

    final = sampled(tokenizer, "I did it.")
    answers.append(list(final))
    message, tokens, cached = ask(served, [*messages, back, result])
    assert cached == first_tokens + len(script) - 1 and tokens > cached

    answers.append(list(final))
    done = {"role": "assistant", "content": message["content"]}
    _, _, cached = ask(served, [*messages, back, result, done, {"role": "user", "content": "And?"}])
    assert first_tokens - 4 <= cached <= first_tokens

    function = {"name": "edit", "arguments": '{"path": "/b", "line": 3}'}
    changed = {**back, "tool_calls": [{**call, "function": function}]}
    answers.append(list(final))
    _, _, cached = ask(served, [*messages, changed, result])
    assert cached <= first_tokens + len(tokenizer(THINKING)["input_ids"]) + 8

    answers.append(list(final))
    _, _, cached = ask(served, [*messages, {**back, "reasoning_content": None}, result])
    assert cached >= first_tokens
    counted = {name: count - before.get(name, 0) for name, count in served.service.prefixes.items()}
    assert counted == {"first_turn": 1, "continued": 1, "changed_call": 1, "template": 2}
    with urllib.request.urlopen(f"{served.url}/metrics") as response:
        metrics = response.read().decode()
    assert 'kt_conversation_prompts_total{prefix="changed_call"} ' in metrics
    assert "kt_sampled_answers_bytes " in metrics


def test_a_turn_continues_from_an_answer_that_ended_with_its_first_call(
    served: RunningServer, answers: list[list[int]]
) -> None:
    tokenizer = served.service.tokenizer
    script = sampled(tokenizer, CALL + "\n" + CALL.removeprefix(THINKING))
    answers += [list(script), sampled(tokenizer, "Done.")]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Please edit only /a for me."}]
    message, first_tokens, _ = ask(served, messages, parallel_tool_calls=False)
    (call,) = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Done."}
    _, _, cached = ask(served, [*messages, message, result])
    assert cached >= first_tokens + len(sampled(tokenizer, CALL)) - 2


def test_an_answer_without_an_end_is_not_remembered(served: RunningServer, answers: list[list[int]]) -> None:
    answers.append(sampled(served.service.tokenizer, "Yes."))
    before = len(served.service.sampled_answers)
    ask(served, [{"role": "user", "content": "Is it so?"}], ignore_eos=True, max_tokens=4)
    assert len(served.service.sampled_answers) == before


def test_the_prompt_is_the_rendered_text_with_answers_as_they_were_sampled(
    served: RunningServer, answers: list[list[int]]
) -> None:
    tokenizer = served.service.tokenizer
    script = sampled(tokenizer, "It rains over the sea.")
    answers.append(list(script))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
    message, _, _ = ask(served, messages)
    messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "Thanks."}]
    body = json.dumps({"messages": messages, "tools": TOOLS}).encode()
    service = served.service
    prompt = service.preparer.prepare("chat", body, {}, service.sampled_answers.find).prompts[0].tokens
    plain = service.preparer.prepare("chat", body, {}).prompts[0].tokens
    assert prompt != plain and tokenizer.decode(prompt) == tokenizer.decode(plain)
    text = ",".join(map(str, prompt))
    assert ",".join(map(str, script)) in text and len(prompt) > len(plain)


KEEPS = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}|{{ m.content }}<end>{% endfor %}"
STRIPS = KEEPS.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content if loop.index > 2 }}")


@functools.cache
def byte_tokens() -> Any:
    return byte_tokenizer(["<user>", "<assistant>", "<tool>", "<end>", "</think>"])


def prepared_text(
    template: str, body: dict[str, Any], known: Mapping[str, SampledAnswer] | None = None
) -> tuple[str, str]:
    """(the prompt, what became of its last answer) of a server that remembers these answers."""
    preparer = RequestPreparer(byte_tokens(), PrepareSettings(len(byte_tokens()), 4096, template=template))
    prepared = preparer.prepare("chat", json.dumps(body).encode(), {}, lambda asked: known or {})
    assert prepared.chat is not None and prepared.chat.prompt_end is not None
    return byte_tokens().decode(prepared.prompts[0].tokens), prepared.chat.prompt_end.continuation


def remembered(prompt: str, reasoning: str, *arguments: str) -> SampledAnswer:
    """An answer to what this prompt rendered, whose tokens say `~`."""
    digest = hashlib.sha256(prompt.encode()).hexdigest()
    return SampledAnswer(
        len(prompt), digest, array("i", byte_tokens()("~")["input_ids"]), "<end>", reasoning, arguments
    )


@pytest.mark.parametrize(("template", "kept"), [(KEEPS, True), (STRIPS, False)])
def test_dropped_thinking_is_restored_where_the_template_keeps_it(template: str, kept: bool) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    keys = list(turn_keys("", [Turn("user", "a"), Turn("assistant", "b")]))
    known = {keys[1]: remembered("<user>|a<end><assistant>", "I think.")}
    body = {"messages": [*messages, {"role": "user", "content": "c"}]}
    text, continuation = prepared_text(template, body, known)
    answer = "~" if kept else "|b"
    assert text == f"<user>|a<end><assistant>{answer}<end><user>|c<end>"
    assert continuation == ("continued" if kept else "template")


CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.path }}{% endfor %}"


@pytest.mark.parametrize(
    ("prompt", "path", "taken"),
    [
        ("<user>|a<end><assistant>", "/a", True),
        ("<user>|a<end><assistant>", "/other", False),
        ("tools<user>|a<end><assistant>", "/a", False),
    ],
)
def test_thinking_of_one_conversation_is_not_put_into_another(prompt: str, path: str, taken: bool) -> None:
    """Two conversations have the same first turns and calls of the same name. The second answer follows a first one
    without thinking."""
    template = KEEPS.replace("<end>", CALLS + "<end>")
    call = {"id": "1", "type": "function", "function": {"name": "edit", "arguments": '{"path": "/a"}'}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
        {"role": "assistant", "content": "b", "reasoning_content": "Mine."},
        {"role": "user", "content": "c"},
    ]
    keys = list(turn_keys("", [Turn("user", "a"), CALLED, Turn("tool", "r"), Turn("assistant", "b")]))
    shown = "<user>|a<end><assistant>|edit/a<end><tool>|r<end><assistant>"
    known = {
        keys[1]: remembered(prompt, "Of another.", json.dumps({"path": path})),
        keys[3]: remembered(shown, "Mine."),
    }
    text, continuation = prepared_text(template, {"messages": messages}, known)
    if taken:
        begin = shown.replace("|edit/a", "~")
        assert (text, continuation) == (f"{begin}Mine.|b<end><user>|c<end>", "template")
    else:
        assert (text, continuation) == (f"{shown}~<end><user>|c<end>", "continued")


def test_a_final_turn_of_the_user_can_be_continued() -> None:
    messages = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "bc"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert prepared_text(KEEPS, body)[0] == "<assistant>|a<end><user>|bc"


def test_stop_tokens_beyond_the_vocabulary_are_refused() -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stop_token_ids": [1, 10**6]}
    with pytest.raises(ApiError, match="stop_token_ids: given token 1000000, expected less than"):
        prepared_text(KEEPS, body)


def test_answers_that_go_on_behind_their_end_are_not_remembered(served: RunningServer) -> None:
    service = served.service
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "ignore_eos": True}).encode()
    prepared = service.preparer.prepare("chat", body, {})
    known = len(service.sampled_answers)
    service.remember(prepared, Turn("assistant", "b"), [5, 2, 6], ended=False, cached=0)
    assert len(service.sampled_answers) == known


@pytest.mark.parametrize("schema", [{"properties": ["a"]}, {"properties": {"a": {"enum": 5, "type": "string"}}}])
def test_strict_tools_with_odd_schemas_are_refused(schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "edit", "parameters": schema, "strict": True}}
    preparer = RequestPreparer(
        byte_tokens(), PrepareSettings(len(byte_tokens()), 4096, template=KEEPS, tool_call_parser="qwen3_coder")
    )
    body = json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": [tool]}).encode()
    with pytest.raises(ApiError, match="tools: given parameters that are no JSON schema"):
        preparer.prepare("chat", body, {})


def test_prompts_that_are_too_long_are_counted(served: RunningServer) -> None:
    service = served.service
    body = json.dumps({"messages": [{"role": "user", "content": "sea " * 600}]}).encode()
    counted = len(service.preparer.prepare(f"{COUNT}chat", body, {}).prompts[0].tokens)
    limit = service.max_sequence_tokens
    assert counted > limit
    with pytest.raises(ApiError, match=f"prompt is too long: {counted} tokens > {limit - 1} maximum"):
        service.preparer.prepare("chat", body, {})
