"""The format of a model's answers: makes parsers of answers, grammars that answers are held to, and the template's
variables. Immutable, without torch and without a tokenizer: worker processes and the server have one for each template.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ktransformers.serve.doors.answer_events import AnswerParser
from ktransformers.serve.doors.conversation import Reasoning, Tool
from ktransformers.serve.formats.families import (
    CALL_ALIASES,
    CALL_SIGNS,
    CALLS,
    CALLS_OF_TYPE,
    THINKING,
    THINKING_ALIASES,
    THINKING_OF_TYPE,
    THINKING_SIGNS,
    TURN_MARKS,
    find,
    suffixed,
    tag_suffix,
)
from ktransformers.serve.formats.grammar import CallGrammar
from ktransformers.serve.formats.parser import FormatParser, TextParser
from ktransformers.serve.formats.response_template import ResponseTemplateParser
from ktransformers.serve.formats.syntax import CallSyntax, Thinking

DEFAULT_CALLS = "hermes"  # of models whose template has no tools
# Switches of chat templates -> their values for thinking and for none.
SWITCHES: dict[str, tuple[Any, Any]] = {
    "enable_thinking": (True, False),
    "thinking": (True, False),
    "thinking_mode": ("enabled", "disabled"),
}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True)
class AnswerFormat:
    name: str = "text"  # of the calls' format, then of the thinking's
    calls: CallSyntax | None = None
    thinking: Thinking | None = None
    marks: tuple[str, ...] = ()  # tokens between turns, no part of the text
    switches: frozenset[str] = frozenset()  # variables of the template that say whether and how much to think
    template_has_tools: bool = True  # it renders the tools that are offered
    template_has_calls: bool = True  # it renders calls of earlier turns
    response_template: Mapping[str, Any] | None = None  # of the tokenizer, where the table has no format
    note: str = ""  # for the log at start: what of an answer is not recognised

    @property
    def is_text(self) -> bool:
        """Answers are passed through, and special tokens need not be in the text that the parser gets."""
        return self.calls is None and self.thinking is None and self.response_template is None

    def parser(self, prefix: str, tools: tuple[Tool, ...]) -> AnswerParser:
        """`prefix`: the end of the rendered prompt, which may have opened a thinking block. Calls are read only if
        tools are offered."""
        if self.is_text:
            return TextParser()
        if self.response_template is not None:
            return ResponseTemplateParser(self.response_template, prefix, tools)
        in_thinking = self.opens_thinking(prefix)
        return FormatParser(self.calls if tools else None, self.thinking, self.marks, in_thinking, tools)

    def opens_thinking(self, prefix: str) -> bool:
        """Whether the prompt ends within a thinking block."""
        if self.thinking is None:
            return False
        opened = prefix.rfind(self.thinking.open.strip())
        return opened >= 0 and not any(mark in prefix[opened + 1 :] for mark in (self.thinking.close, *self.marks))

    def template_variables(self, reasoning: Reasoning) -> dict[str, Any]:
        """Variables for the chat template; only those that its text mentions."""
        effort, enabled = reasoning.effort, reasoning.enabled
        if enabled is None and effort is not None:
            enabled = effort != "none"
        variables: dict[str, Any] = {}
        if enabled is not None:
            variables = {name: values[not enabled] for name, values in SWITCHES.items() if name in self.switches}
        if "reasoning_effort" in self.switches and (effort is not None or enabled is False):
            variables["reasoning_effort"] = self._effort("none" if effort is None or enabled is False else effort)
        return variables

    def _effort(self, effort: str) -> str:
        """The nearest effort that the template knows."""
        known = self.thinking.efforts if self.thinking else ()
        if not known or effort in known or effort not in EFFORTS:
            return effort
        ranks = {name: 0 if name == "no_think" else EFFORTS.index(name) for name in known}
        return min(known, key=lambda name: abs(ranks[name] - EFFORTS.index(effort)))

    def constraint(
        self,
        tools: tuple[Tool, ...],
        choice: str,
        chosen: tuple[str, ...],
        parallel: bool,
        reasoning: Reasoning,
        prefix: str = "",
        special_tokens: Mapping[str, int] | None = None,
    ) -> str | None:
        """A grammar for llguidance (Lark) that the answer is held to: it has calls if `choice` is required or named,
        and calls follow their schemas if one of the tools is strict. None: the answer is free.

        `special_tokens`: text -> id of the tokens that llguidance does not match by their text. A marker that is one of
        them is generated as this token."""
        offered = tuple(tool for tool in tools if not chosen or tool.name in chosen)
        demanded = choice in ("required", "named")
        if self.calls is None or not offered or choice == "none":
            return None
        if not demanded and not any(tool.strict for tool in offered):
            return None
        may_think = reasoning.enabled is not False
        return CallGrammar(self.calls, self.thinking, special_tokens or {}).lark(
            offered, demanded, parallel, may_think, self.opens_thinking(prefix)
        )

    def default_tools_prompt(self, tools: tuple[Tool, ...]) -> str:
        """A text for the system message that offers tools to a model whose template has none."""
        functions = "\n".join(
            json.dumps(
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters}, ensure_ascii=False
            )
            for tool in tools
        )
        example = self.call_text("function", {"parameter": "value"})
        return (
            "You can call functions. Each line between <tools> and </tools> describes one, with the JSON schema of its"
            f" parameters:\n<tools>\n{functions}\n</tools>\nTo call a function, write exactly this form, with the"
            f" function's name and arguments, and nothing behind it:\n{example}"
        )

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the model writes it, for templates that do not render calls."""
        calls = self.calls or CALLS[DEFAULT_CALLS]
        written = json.dumps(arguments, ensure_ascii=False)
        if calls.arguments == "tags":
            written = "".join(
                calls.argument.replace("$KEY", key)
                .replace("$KIND", "true" if isinstance(value, str) else "false")
                .replace("$VALUE", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
                for key, value in arguments.items()
            )
        elif calls.arguments == "python":
            written = ", ".join(
                f"{key}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
                for key, value in arguments.items()
            )
        text = calls.call.replace("$NAME", name).replace("$INDEX", "0").replace("$ARGS", written)
        return calls.section[0] + text + calls.section[1]


def recognise(
    model_type: str,
    chat_template: str,
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    response_template: Mapping[str, Any] | None = None,
) -> AnswerFormat:
    """The format of a model with this template. Parsers by SGLang's names overrule what is recognised."""
    return _recognise(
        model_type, chat_template, tool_call_parser, reasoning_parser, json.dumps(response_template, sort_keys=True)
    )


@functools.lru_cache(maxsize=64)
def _recognise(
    model_type: str, template: str, call_parser: str | None, reasoning_parser: str | None, shipped: str
) -> AnswerFormat:
    has_tools = bool(re.search(r"\btools\b", template)) or (not template and model_type in CALLS_OF_TYPE)
    call_name = call_parser or find(CALL_SIGNS, template) or ("" if template else CALLS_OF_TYPE.get(model_type, ""))
    if not call_name and not has_tools:
        call_name = DEFAULT_CALLS
    thinking_name = reasoning_parser or find(THINKING_SIGNS, template)
    if not template and not thinking_name:
        thinking_name = THINKING_OF_TYPE.get(model_type, "")
    calls = CALLS.get(CALL_ALIASES.get(call_name, call_name))
    thinking = THINKING.get(THINKING_ALIASES.get(thinking_name, thinking_name))
    if (suffix := tag_suffix(template)) and calls is not None and thinking is not None:
        opening, closing = (suffixed(part, suffix) for part in calls.section)
        argument = suffixed(calls.argument, suffix)
        calls = replace(calls, call=suffixed(calls.call, suffix), argument=argument, section=(opening, closing))
        thinking = replace(thinking, open=suffixed(thinking.open, suffix), close=suffixed(thinking.close, suffix))
    response_template = json.loads(shipped) if calls is None and call_parser is None else None
    note = ""
    if calls is None and response_template is None:
        given = f"the template of {model_type or 'this model'}"
        note = f"tool calls in answers stay text: {given} has no known format ({', '.join(CALLS)})"
    marks = tuple(mark for mark in TURN_MARKS if mark in template) + (thinking.marks if thinking else ())
    return AnswerFormat(
        name=" + ".join(filter(None, (call_name if calls else "", thinking_name if thinking else ""))) or "text",
        calls=calls,
        thinking=thinking,
        marks=tuple(dict.fromkeys(marks)),
        switches=frozenset(
            name for name in (*SWITCHES, "reasoning_effort") if re.search(rf"(?<![\w.'\"]){name}\b", template)
        ),
        template_has_tools=has_tools,
        template_has_calls="tool_calls" in template or not template,
        response_template=response_template,
        note=note,
    )
