"""Answers rendered by the models' own chat templates come back as the same reasoning, text and calls. The templates are
those that TRL ships as released, and two of `tests/data/chat_templates`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from ktransformers.serve.formats import recognise
from tests.support.answers import TOOLS, common_beginning, parse

DATA = Path(__file__).parents[2] / "data" / "chat_templates"
TRL = importlib.util.find_spec("trl")
RELEASED = Path(str(TRL.origin)).parent / "chat_templates" if TRL else DATA
ARGUMENTS = {
    "city": 'Zürich "x" </tool_call> <b>\n  (c)',
    "days": 3,
    "units": {"temperature": "a, b"},
    "hourly": True,
    "zip": "007",
}
# Template of TRL -> format, and what it does not render: reasoning, text beside calls, several calls.
ROWS: dict[str, tuple[str, frozenset[str]]] = {
    "qwen2_5": ("hermes", frozenset({"reasoning"})),
    "qwen3": ("hermes + qwen3", frozenset()),
    "qwen3_instruct_2507": ("hermes", frozenset({"reasoning"})),
    "qwen3_vl": ("hermes", frozenset({"reasoning"})),
    "qwen3_5_think": ("qwen3_coder + qwen3", frozenset()),
    "qwen3_5_nothink": ("qwen3_coder + qwen3", frozenset()),
    "qwen3_6": ("qwen3_coder + qwen3", frozenset()),
    "qwen3_8": ("qwen3_coder + qwen3", frozenset()),
    "nemotron_3_nano": ("qwen3_coder + qwen3", frozenset()),
    "nemotron_3_super": ("qwen3_coder + qwen3", frozenset()),
    "nemotron_3_ultra": ("qwen3_coder + qwen3", frozenset()),
    "nemotron_3_5_lightning": ("qwen3_coder + qwen3", frozenset()),
    "glm4moe": ("glm45 + deepseek-v3", frozenset()),
    "gptoss": ("gpt-oss + gpt-oss", frozenset({"text", "several"})),
    "llama3_1": ("llama3", frozenset({"reasoning", "text", "several"})),
    "llama3_2": ("llama3", frozenset({"reasoning", "text", "several"})),
    "gemma4": ("gemma4 + gemma4", frozenset()),
    "gemma4_v5": ("gemma4 + gemma4", frozenset()),
    "lfm2_v2": ("lfm2", frozenset({"reasoning"})),
    "lfm2_2_5": ("lfm2 + qwen3", frozenset()),
    "lfm2_2_5_v2": ("lfm2 + qwen3", frozenset()),
}


def render(template: str, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in TOOLS
    ]
    texts, _ = render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=generation_prompt,
        bos_token="",
        eos_token="",
    )
    return str(texts[0])


def assistant(calls: list[tuple[str, dict[str, Any]]], lacks: frozenset[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "reasoning_content": "I think so.", "thinking": "I think so."}
    if "text" not in lacks or not calls:
        message["content"] = "Let me see."
    if calls:
        message["tool_calls"] = [
            {"id": f"functions.{name}:{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(calls)
        ]
    return message


@pytest.mark.skipif(TRL is None, reason="needs trl's templates")
@pytest.mark.parametrize("calls", [[("get_weather", ARGUMENTS), ("ping", {})], [("ping", {})], []], ids=["2", "1", "0"])
@pytest.mark.parametrize("name", ROWS)
def test_answers_of_released_templates(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    expected_format, lacks = ROWS[name]
    template = (RELEASED / f"{name}.jinja").read_text()
    calls = calls[:1] if "several" in lacks else calls
    answer_format = recognise("", template)
    assert answer_format.name == expected_format and not answer_format.note
    user = [{"role": "user", "content": "How is the weather?"}]
    whole = render(template, [*user, assistant(calls, lacks)], False)
    prefix = common_beginning(whole, render(template, user, True))
    text = whole[len(prefix) :]
    for size in (1, 7, len(text)):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        answer = parse(answer_format.parser(prefix, TOOLS), pieces)
        assert answer.calls == calls
        # Templates drop reasoning of answers that end a conversation, and some of them text beside calls.
        assert answer.reasoning == "I think so." or ("I think so." not in text and not answer.reasoning)
        assert answer.text.strip() == ("Let me see." if "text" not in lacks or not calls else "")
    if "reasoning" not in lacks and calls:
        assert "I think so." in text


@pytest.mark.skipif(TRL is None, reason="needs trl's templates")
def test_templates_refuse_what_the_table_says() -> None:
    two = assistant([("ping", {}), ("ping", {})], frozenset())
    with pytest.raises(TemplateError, match="single tool-call"):
        render((RELEASED / "llama3_1.jinja").read_text(), [{"role": "user", "content": "a"}, two], False)


def test_deepseek_v3() -> None:
    """Its template renders calls whose arguments are text, and offers no tools."""
    answer_format = recognise("deepseek_v3", (DATA / "deepseek_v3.jinja").read_text())
    message: dict[str, Any] = {"role": "assistant", "content": None}
    message["tool_calls"] = [
        {"type": "function", "function": {"name": name, "arguments": text}}
        for name, text in (("get_weather", '{"city": "Bonn", "zip": "1"}'), ("ping", "{}"))
    ]
    user = [{"role": "user", "content": "Weather?"}]
    whole = render((DATA / "deepseek_v3.jinja").read_text(), [*user, message], False)
    answer = parse(answer_format.parser("", TOOLS), whole.partition("<｜Assistant｜>")[2])
    assert answer.calls == [("get_weather", {"city": "Bonn", "zip": "1"}), ("ping", {})]
    assert not answer.text
