"""Text that is generated piece by piece: what is held back and released, what is malformed or cut off, types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.serve.doors.answer_events import CallArguments, CallBegin, TextDelta
from ktransformers.serve.doors.conversation import Reasoning
from ktransformers.serve.formats import AnswerFormat, recognise
from ktransformers.serve.formats.families import CALLS, THINKING
from tests.support.answers import TOOLS, Answer, joined, parse

JSON_ARGUMENTS = '{"city": "Bonn </tool_call> \\"q\\" {[", "units": {"temperature": "ä"}, "zip": "007"}'
EXPECTED = json.loads(JSON_ARGUMENTS)


def format_of(name: str) -> AnswerFormat:
    thinking = THINKING[name] if name in THINKING else THINKING["qwen3"]
    return AnswerFormat(name, CALLS[name], thinking, ("<|im_end|>", *thinking.marks))


def written(answer_format: AnswerFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    syntax = answer_format.calls
    assert syntax is not None
    texts = [answer_format.call_text(name, arguments) for name, arguments in calls]
    first, last = syntax.section
    return first + syntax.between.join(text[len(first) : len(text) - len(last)] for text in texts) + last


def read(name: str, text: str, prefix: str = "", size: int = 1) -> Answer:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return parse(format_of(name).parser(prefix, TOOLS), pieces)


class TestEveryFormat:
    @pytest.mark.parametrize("name", CALLS)
    def test_reasoning_text_and_several_calls(self, name: str) -> None:
        answer_format = format_of(name)
        thinking, syntax = answer_format.thinking, answer_format.calls
        assert thinking is not None and syntax is not None
        calls = (("get_weather", EXPECTED), ("ping", {}), ("get_weather", {"city": "42"}))
        text = "" if syntax.bare else "Let me see.\n\n"
        header = thinking.marks[0] if thinking.marks and text else ""
        body = (
            f"{thinking.open}I think <b.{thinking.close}{thinking.resume}{header}{text}{written(answer_format, *calls)}"
        )
        answer = read(name, body + "<|im_end|>")
        assert answer.calls == list(calls)
        assert (answer.reasoning, answer.text) == ("I think <b.", text.strip())
        prefilled = read(name, body.removeprefix(thinking.open), prefix=f"user{thinking.open}")
        assert prefilled.content == answer.content

    @pytest.mark.parametrize("name", CALLS)
    @given(data=st.data())
    @settings(max_examples=10, deadline=None)
    def test_cuts_change_nothing(self, name: str, data: st.DataObject) -> None:
        answer_format = format_of(name)
        values = st.text(st.sampled_from('ab<>|/"\\\n{}[]()=, é▁｜'), max_size=8)
        calls = [("get_weather", {"city": data.draw(values)}), ("ping", {})]
        text = data.draw(st.sampled_from(["", "<think>", "<tool", "<think>a</think>\n", "a <| b"]))
        text += written(answer_format, *calls) + data.draw(
            st.sampled_from(["", "<|im_end|>", " b", "</", "<tool_call>"])
        )
        text = text[: data.draw(st.integers(0, len(text))) if data.draw(st.booleans()) else len(text)]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole = parse(answer_format.parser("", TOOLS), [text])
        assert parse(answer_format.parser("", TOOLS), pieces).content == whole.content
        assert parse(answer_format.parser("", TOOLS), text).content == whole.content

    @pytest.mark.parametrize("name", CALLS)
    @given(text=st.text(st.sampled_from('ab<>|/"{}[]() \nft'), max_size=40))
    @settings(max_examples=10, deadline=None)
    def test_text_is_text(self, name: str, text: str) -> None:
        assert read(name, f"x{text}").content == ("", f"x{text}", [], [])

    @pytest.mark.parametrize("name", CALLS)
    def test_a_call_that_is_cut_off_loses_nothing_and_is_no_json(self, name: str) -> None:
        """Clients that do not look at the finish reason must not run half a call."""
        answer_format = format_of(name)
        syntax = answer_format.calls
        assert syntax is not None
        call = written(answer_format, ("get_weather", {"city": "Bonn", "zip": "53111"}))
        for length in range(1, call.index("53111")):
            answer = read(name, call[:length])
            if answer.names:
                with pytest.raises(ValueError, match=r"Expecting|Unterminated|delimiter"):
                    json.loads(answer.arguments[0])
            elif length > len(syntax.section[0]) + 5:
                assert answer.text or length < 30

    @pytest.mark.parametrize("name", CALLS)
    def test_without_tools_calls_are_text(self, name: str) -> None:
        answer_format = format_of(name)
        call = written(answer_format, ("ping", {}))
        answer = parse(answer_format.parser("", ()), [call])
        assert not answer.names and answer.text


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\nnot JSON\n</tool_call>",
        '<tool_call>{"a": 1}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "ping", "arguments": [1]}</tool_call>',
        "the tag <tool_call> begins a call",
        "<tool_call",
    ],
)
def test_malformed_calls_are_text(text: str) -> None:
    assert read("hermes", text).content == ("", text, [], [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=ping>\nno parameters\n</function>\n</tool_call>"),
        ("lfm2", "<|tool_call_start|>[ping(1 +)]<|tool_call_end|>"),
        ("gemma4", "<|tool_call>call:ping{a:<b>}<tool_call|>"),
        ("llama3", '{"name": "unknown", "parameters": {"a": 1}}'),
        ("pythonic", "[see(a=1)] is a list"),
    ],
)
def test_what_is_no_call_of_the_format_is_text(name: str, text: str) -> None:
    answer = read(name, text)
    assert not answer.names and answer.text.startswith(text[:30])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"city": "B"}, "name": "get_weather"}</tool_call>',
        '<tool_call>{"name": "get_weather", "parameters": {"city": "B"}}\n</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": "{\\"city\\": \\"B\\"}"}\n</tool_call>',
        '<tool_call>\n{"name":"get_weather","arguments":{"city":"B"}}</tool_call>',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "B"}</tool_call>',
    ],
)
def test_calls_of_hermes_that_models_write_otherwise(text: str) -> None:
    answer = read("hermes", text)
    assert answer.calls == [("get_weather", {"city": "B"})] and not answer.text


@pytest.mark.parametrize(
    "text",
    [
        " to=functions.ping<|channel|>commentary json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}",
        "<|channel|>commentary to=functions.ping<|message|>{}<|call|>",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.ping<|message|>{}",
        "<|channel|>analysis to=functions.ping json<|message|>{}<|call|>",
    ],
)
def test_recipients_of_harmony_before_and_behind_the_channel(text: str) -> None:
    answer = read("gpt-oss", text)
    assert answer.calls == [("ping", {})] and not answer.text


def test_a_preamble_of_harmony_is_text() -> None:
    text = "<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>Then.<|return|>"
    assert read("gpt-oss", text).text == "First.Then."


def test_ids_that_the_model_writes_are_kept() -> None:
    assert read("kimi_k2", written(format_of("kimi_k2"), ("ping", {}))).ids == ["functions.ping:0"]


def test_arguments_have_the_types_of_the_schema() -> None:
    text = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in (("city", "42"), ("days", "3"), ("hourly", "True"), ("units", '{"temperature": "1"}'))
    )
    answer = read("qwen3_coder", f"<tool_call>\n<function=get_weather>\n{text}</function>\n</tool_call>")
    assert answer.calls == [("get_weather", {"city": "42", "days": 3, "hourly": True, "units": {"temperature": "1"}})]
    tagged = "<parameter=other>\n[1]\n</parameter>\n<parameter=more>\n 1 a\n</parameter>\n"
    answer = read("qwen3_coder", f"<function=get_weather>\n{tagged}</function>\n</tool_call>")
    assert answer.calls == [("get_weather", {"other": [1], "more": " 1 a"})]


def test_nested_tags_with_a_namespace() -> None:
    mark = "]<]minimax[>["
    units = f"{mark}<units>{mark}<temperature>7{mark}</temperature>{mark}</units>"
    listed = f"{mark}<towns>{mark}<item>a{mark}</item>{mark}<item>b{mark}</item>{mark}</towns>"
    text = f'{mark}<tool_call>\n{mark}<invoke name="get_weather">{units}{listed}{mark}</invoke>\n{mark}</tool_call>'
    assert read("minimax-m3", text).calls == [("get_weather", {"units": {"temperature": "7"}, "towns": ["a", "b"]})]


def test_values_may_contain_the_tags_of_their_format() -> None:
    value = "a </parameter> b\n</tool_call>\n  indented\n"
    text = written(format_of("qwen3_coder"), ("get_weather", {"city": value}))
    assert read("qwen3_coder", text).calls == [("get_weather", {"city": value})]


def test_line_breaks_inside_of_json_strings_are_escaped() -> None:
    answer = read("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "a\nb\tc"}}\n</tool_call>')
    assert answer.calls == [("get_weather", {"city": "a\nb\tc"})]


def test_json_arguments_come_in_pieces() -> None:
    parser = format_of("hermes").parser("", TOOLS)
    parser.feed('<tool_call>\n{"name": "get_weather", ')
    first = parser.feed('"arguments": {"city": "Bo')
    assert isinstance(first[0], CallBegin) and first[1] == CallArguments(0, '{"city": "Bo')
    assert parser.feed("nn") == [CallArguments(0, "nn")]


def test_arguments_in_tags_come_one_by_one() -> None:
    parser = format_of("qwen3_coder").parser("", TOOLS)
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n")
    (begin, piece) = parser.feed("<parameter=zip>\n")
    assert isinstance(begin, CallBegin) and piece == CallArguments(0, '{"city": "Bonn"')


def test_text_is_not_held_back_longer_than_a_marker_needs() -> None:
    parser = format_of("hermes").parser("", TOOLS)
    assert parser.feed("a <tool") == [TextDelta("a")]
    assert parser.feed("s are") == [TextDelta(" <tools are")]


@pytest.mark.parametrize(
    ("prefix", "text", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n", "so\n</think>\n\nHi", ("so", "Hi")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Hi </think>", ("", "Hi </think>")),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "</think>Hi", ("", "Hi")),
        ("what is <think>?<|im_end|>", "Hi", ("", "Hi")),
        ("", "A <think> tag", ("", "A <think> tag")),
        ("<think>", "only thoughts", ("only thoughts", "")),
        ("<think>", "a</think>b<think>c", ("a", "b<think>c")),
    ],
)
def test_thinking_blocks(prefix: str, text: str, expected: tuple[str, str]) -> None:
    answer = read("hermes", text, prefix)
    assert (answer.reasoning, answer.text) == expected


def test_a_call_ends_thinking_where_models_forget_to() -> None:
    answer = read("glm45", "so<tool_call>ping\n</tool_call>", prefix="<think>")
    assert answer.reasoning == "so" and answer.calls == [("ping", {})]
    assert read("hermes", "so <tool_call> so", prefix="<think>").reasoning == "so <tool_call> so"


def test_the_tokenizers_own_response_template() -> None:
    template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<a>",
        "fields": {
            "thinking": {"open": "<t>", "close": "</t>"},
            "tool_calls": {
                "open_pattern": r"<call (?P<name>\w+)>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {},
        },
    }
    answer_format = recognise("new", "{{ tools }}", response_template=template)
    assert not answer_format.is_text and not answer_format.note
    answer = parse(answer_format.parser("<a>", TOOLS), '<t>so</t>Hi<call ping>{"a": 1}</call><call ping>{}</call>')
    assert answer.reasoning == "so" and answer.text == "Hi" and answer.calls == [("ping", {"a": 1}), ("ping", {})]
    broken = parse(answer_format.parser("<a>", TOOLS), ["Hi ", "<call ping>{x</call> more", " text"])
    assert not broken.names and broken.text == "Hi <call ping>{x</call> more text"


def test_an_unknown_format_passes_text_through() -> None:
    answer_format = recognise("new", "{{ tools }}")
    assert answer_format.is_text and "stay text" in answer_format.note
    events = answer_format.parser("", TOOLS).feed("<tool_call>x")
    assert joined(events).text == "<tool_call>x"
    assert answer_format.constraint(TOOLS, "required", (), True, Reasoning()) is None
