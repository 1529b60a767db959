"""Which format a template has, what flags overrule, and the template's own variables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ktransformers.serve.doors.conversation import Reasoning
from ktransformers.serve.formats import recognise
from ktransformers.serve.formats.families import CALL_ALIASES, CALLS, THINKING, THINKING_ALIASES
from ktransformers.serve.formats.syntax import CallSyntax, Thinking
from tests.support.answers import TOOLS, parse

PAGE = Path(__file__).parents[3] / "docs" / "tools.md"
# A sign of the template -> the formats of calls and of thinking.
TEMPLATES = {
    "{{ tools }} <｜tool▁calls▁begin｜> function ```json </think>": "deepseekv3 + deepseek-v3",
    "{{ tools }} <｜tool▁calls▁begin｜> </think>": "deepseekv31 + deepseek-v3",
    "{{ tools }} <｜DSML｜function_calls> </think>": "deepseekv32 + deepseek-v3",
    "{{ tools }} <|tool_calls_section_begin|>": "kimi_k2",
    "{{ tools }} <tool_call>{function-name}\\n<arg_key> </think>": "glm45 + deepseek-v3",
    "{{ tools }} <tool_call>{function-name}<arg_key> </think>": "glm47 + deepseek-v3",
    "{{ tools }} <minimax:tool_call> </think>": "minimax-m2 + deepseek-v3",
    "{{ tools }} ]<]minimax[>[ <mm:think>": "minimax-m3 + minimax-m3",
    "{{ tools }} [TOOL_CALLS] [ARGS] [THINK]": "mistral + mistral",
    "{{ tools }} [TOOL_CALLS]": "mistral_list",
    "{{ tools }} <|header_start|> [func_name1(params_name1=params_value1)]": "pythonic",
    "{{ tools }} <tool_calls:opensource> <tool_sep:opensource> </think>": "hunyuan + hunyuan",
    "{{ tools }} <|START_ACTION|> <|START_THINKING|>": "cohere_command4 + cohere_command4",
    "{{ messages }}": "hermes",
    "{{ messages }} <think> </think> <|im_start|>": "hermes + qwen3",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_formats_are_recognised_by_the_template(template: str) -> None:
    found = recognise("any", template)
    assert found.name == TEMPLATES[template] and not found.note


def test_releases_without_a_template_are_recognised_by_type() -> None:
    assert recognise("deepseek_v4", "").name == "deepseekv4 + deepseek-v3"


@pytest.mark.parametrize(
    ("call_parser", "reasoning_parser", "name"),
    [
        ("qwen25", None, "qwen25"),
        ("step3p5", "step3p5", "step3p5 + step3p5"),
        ("glm", "glm45", "glm + glm45"),
        (None, "deepseek-r1", "deepseek-r1"),
    ],
)
def test_flags_overrule(call_parser: str | None, reasoning_parser: str | None, name: str) -> None:
    found = recognise("new", "{{ tools }}", call_parser, reasoning_parser)
    assert found.name == name
    assert (found.calls is None) == (call_parser is None)


def test_a_template_without_a_known_format_is_said_at_start() -> None:
    found = recognise("new", "{{ tools }}")
    assert found.is_text and "the template of new" in found.note


def test_aliases_lead_to_formats() -> None:
    assert set(CALL_ALIASES.values()) <= set(CALLS) and not set(CALL_ALIASES) & set(CALLS)
    assert set(THINKING_ALIASES.values()) <= set(THINKING) and not set(THINKING_ALIASES) & set(THINKING)


def test_variables_that_the_template_mentions() -> None:
    qwen = recognise("", "{{ tools }}{% if enable_thinking %}<think></think>")
    assert qwen.template_variables(Reasoning()) == {}
    assert qwen.template_variables(Reasoning(enabled=False)) == {"enable_thinking": False}
    assert qwen.template_variables(Reasoning(effort="high")) == {"enable_thinking": True}
    assert qwen.template_variables(Reasoning(effort="none")) == {"enable_thinking": False}
    deepseek = recognise("", "{{ tools }}{% if thinking %}{{ message.thinking }}")
    assert deepseek.template_variables(Reasoning(enabled=True)) == {"thinking": True}
    assert recognise("", "{{ tools }}{{ message.thinking }}").template_variables(Reasoning(enabled=True)) == {}
    harmony = recognise("", "{{ tools }} <|channel|>analysis functions. {{ reasoning_effort }}")
    efforts = {effort: harmony.template_variables(Reasoning(effort=effort)) for effort in ("none", "xhigh", "medium")}
    assert [values["reasoning_effort"] for values in efforts.values()] == ["low", "high", "medium"]


def test_models_without_tools_get_a_text_and_are_read() -> None:
    found = recognise("llama", "{% for message in messages %}")
    assert not found.template_has_tools and not found.template_has_calls
    prompt = found.default_tools_prompt(TOOLS)
    assert '"name": "get_weather"' in prompt and '"zip": {"type": "string"}' in prompt
    example = prompt[prompt.rindex("<tool_call>") :]
    assert parse(found.parser("", TOOLS), [example]).calls == [("function", {"parameter": "value"})]
    call = found.call_text("ping", {"a": "ü"})
    assert parse(found.parser("", TOOLS), [call]).calls == [("ping", {"a": "ü"})]


def test_tags_with_a_suffix() -> None:
    found = recognise("hy_v3", "{{ tools }} <tool_calls:opensource> <tool_sep:opensource> </think:opensource>")
    call = found.call_text("ping", {"a": "b"})
    assert call.startswith("<tool_calls:opensource>\n<tool_call:opensource>ping<tool_sep:opensource>")
    answer = parse(found.parser("<think:opensource>", TOOLS), f"so</think:opensource>{call}")
    assert answer.calls == [("ping", {"a": "b"})] and answer.reasoning == "so"


@pytest.mark.parametrize(
    ("heading", "formats", "aliases"),
    [("Formats of calls", CALLS, CALL_ALIASES), ("Formats of reasoning", THINKING, THINKING_ALIASES)],
)
def test_the_page_has_every_format(
    heading: str, formats: dict[str, CallSyntax | Thinking], aliases: dict[str, str]
) -> None:
    """docs/tools.md: a row for each format, with its other names and how it is written."""
    section = PAGE.read_text().split(f"## {heading}")[1].split("\n## ")[0]
    rows = {line.split("`")[1]: line.split(" | ") for line in section.splitlines() if line.startswith("| `")}
    assert set(rows) == set(formats)
    for name, syntax in formats.items():
        assert re.findall(r"`([^`]+)`", rows[name][1]) == [alias for alias in aliases if aliases[alias] == name]
        texts = (syntax.open, syntax.close) if isinstance(syntax, Thinking) else (syntax.before, syntax.after)
        assert all(text.replace("\n", "↵").replace("|", "\\|") in rows[name][3] for text in texts)
