"""Grammars of tool calls in a family's own format, in llguidance's dialect of Lark.

Markers that are special tokens of the tokenizer are generated as these tokens: their text would be spelled letter by
letter. Arguments follow the tool's schema: JSON by llguidance's `%json`, other notations by a rule for each parameter,
in the schema's order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ktransformers.serve.doors.conversation import Tool
from ktransformers.serve.formats.arguments import schema_types
from ktransformers.serve.formats.syntax import CallSyntax, Thinking

ANY_TEXT = "/(?s:.*)/"
# Bounded: a model may indent its JSON, but must not generate whitespace until max_tokens.
WHITESPACE = r"[ \n]{1,12}"
GEMMA_QUOTE = '<|"|>'


class CallGrammar:
    def __init__(self, calls: CallSyntax, thinking: Thinking | None, special_tokens: Mapping[str, int]) -> None:
        self._calls, self._thinking, self._special = calls, thinking, special_tokens
        self._rules: dict[str, str] = {}
        longest_first = sorted((text for text in special_tokens if text), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def lark(self, tools: tuple[Tool, ...], demanded: bool, parallel: bool, may_think: bool, in_thinking: bool) -> str:
        calls = self._calls
        for number, tool in enumerate(tools):
            self._arguments(number, tool)
        thinking = self._thinking_rule(may_think, in_thinking)
        following = f"({self.literal(calls.between)} call)*" if parallel else ""
        opening, closing = (self.literal(part) for part in calls.section)
        self._rules["call"] = self._call(tools, calls.before)
        self._rules["calls"] = f"{opening} call {following} {closing}"
        self._rules["start"] = f"{thinking} {'calls' if demanded else self._with_text(tools, parallel)}"
        return "\n".join(f"{name}: {body}" for name, body in reversed(self._rules.items())) + "\n"

    def literal(self, text: str) -> str:
        """The text, with special tokens as tokens."""
        parts: list[str] = []
        position = 0
        for found in self._special_pattern.finditer(text):
            parts += [_quoted(text[position : found.start()]), f"<[{self._special[found.group()]}]>"]
            position = found.end()
        return " ".join(filter(None, (*parts, _quoted(text[position:]))))

    def _thinking_rule(self, may_think: bool, in_thinking: bool) -> str:
        thinking = self._thinking
        if thinking is None or not (may_think or in_thinking):
            return ""
        self._rules["thought"] = f"{self._text_until('thought_text', thinking.close)} {self.literal(thinking.resume)}"
        return "thought" if in_thinking else f"({self.literal(thinking.open)} thought)?"

    def _with_text(self, tools: tuple[Tool, ...], parallel: bool) -> str:
        """Text and calls. Text ends where the first marker of a call begins."""
        calls, thinking = self._calls, self._thinking
        many = "*" if parallel else "?"
        if calls.bare:
            return r"(calls | /[^{\[ \n](?s:.*)/)?"
        marker = calls.start_literals[0]
        begin = self._text_until("begin", marker)
        if calls.section[0]:
            first = f"{self.literal(calls.section[0].partition(marker)[2])} call"
        else:
            self._rules["first_call"] = self._call(tools, calls.before.removeprefix(marker))
            first = "first_call"
        following = f"({self.literal(calls.between)} call)*" if parallel else ""
        group = f"{begin} {first} {following} {self.literal(calls.section[1])}"
        if thinking is None or not thinking.marks:
            return f"({group}){many} {ANY_TEXT}"
        # Text has a header of its own, and an end before a call.
        header = self.literal(thinking.marks[0])
        text = f"({header} {ANY_TEXT} {self.literal(thinking.close + thinking.resume)})?"
        return f"({text} calls){many} ({header} {ANY_TEXT})?"

    def _text_until(self, name: str, closing: str, pattern: str = "(?s:.*)") -> str:
        """Text up to the closing marker, and the marker."""
        found = self._special_pattern.search(closing)
        if found is not None:
            # A special token ends the text, with whatever of the marker precedes it.
            return f"/{pattern}{_escaped(closing[: found.start()])}/ {self.literal(closing[found.start() :])}"
        self._rules[f"{name}[suffix={_quoted(closing)}]"] = f"/{pattern}/"
        return name

    def _call(self, tools: tuple[Tool, ...], before: str) -> str:
        """One call of any of the tools; `before` is what precedes its arguments."""
        style, after = self._calls.arguments, self.literal(self._calls.after)
        braces = ('"{"', '"}"') if style == "gemma" else ("", "")
        choices = []
        for number, tool in enumerate(tools):
            head, *rest = before.replace("$NAME", tool.name).split("$INDEX")
            opening = self.literal(head) + "".join(f" /[0-9]{{1,3}}/ {self.literal(part)}" for part in rest)
            choices.append(f"{opening} {braces[0]} arguments_{number} {braces[1]} {after}")
        return " | ".join(choices)

    def _arguments(self, number: int, tool: Tool) -> None:
        schema = {"type": "object", "properties": {}, **tool.parameters}
        if self._calls.arguments == "json":
            self._rules[f"arguments_{number}"] = self._json(schema)
        else:
            self._parameters(f"arguments_{number}", schema)

    def _json(self, schema: Any) -> str:
        guided = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
        return "%json " + json.dumps({**guided, **schema} if isinstance(schema, dict) else guided)

    def _parameters(self, name: str, schema: Mapping[str, Any]) -> None:
        """Rules for the parameters in order, those that are not required left out or not: `name_k` writes those from
        the k-th on when none has been written, `name_k_more` when one has."""
        calls = self._calls
        separator = {"tags": "", "python": ", ", "gemma": ","}[calls.arguments]
        properties = schema.get("properties") or {}
        required = schema.get("required") or ()
        last = len(properties)
        self._rules[f"{name}_{last}"] = self._rules[f"{name}_{last}_more"] = '""'
        for k, (key, value) in reversed(list(enumerate(properties.items()))):
            item = self._parameter(f"{name}_{k}_value", key, value, schema)
            for suffix, before in (("", ""), ("_more", _quoted(separator))):
                skipped = "" if key in required else f" | {name}_{k + 1}{suffix}"
                self._rules[f"{name}_{k}{suffix}"] = f"{before} {item} {name}_{k + 1}_more{skipped}"
        self._rules[name] = f"{name}_0"

    def _parameter(self, name: str, key: str, schema: Any, root: Mapping[str, Any]) -> str:
        types = schema_types(schema, root)
        if self._calls.arguments == "gemma":
            return f"{_quoted(key + ':')} {self._gemma(name, schema, root)}"
        if self._calls.arguments == "python":
            value = '("True" | "False")' if types == {"boolean"} else self._typed(name, schema, root)
            return f"{_quoted(key + '=')} {value}"
        is_text = "string" in types or not types
        argument = self._calls.argument.replace("$KEY", key).replace("$KIND", "true" if is_text else "false")
        opening, _, closing = argument.partition("$VALUE")
        choices = schema.get("enum", [schema["const"]] if "const" in schema else ()) if isinstance(schema, dict) else ()
        if is_text and choices:
            texts = [self.literal(choice if isinstance(choice, str) else json.dumps(choice)) for choice in choices]
            value = f"({' | '.join(text or _EMPTY for text in texts)}) {self.literal(closing)}"
        elif is_text:
            value = self._text_until(f"{name}_text", closing, _string_pattern(schema))
        else:
            value = f"{self._typed(name, schema, root)} {self.literal(closing)}"
        return f"{self.literal(opening)} {value}"

    def _typed(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
        self._rules[name] = self._json({**(schema if isinstance(schema, dict) else {}), **definitions})
        return name

    def _gemma(self, name: str, schema: Any, root: Mapping[str, Any]) -> str:
        types = schema_types(schema, root)
        schema = schema if isinstance(schema, dict) else {}
        quote = self.literal(GEMMA_QUOTE)
        if types == {"string"}:
            choices = schema.get("enum", [schema["const"]] if "const" in schema else ())
            if choices:
                return f"{quote} ({' | '.join(_quoted(str(choice)) or _EMPTY for choice in choices)}) {quote}"
            return f"{quote} {self._text_until(f'{name}_text', GEMMA_QUOTE, _string_pattern(schema))}"
        if types == {"array"}:
            item = self._gemma(f"{name}_item", schema.get("items"), root)
            self._rules[f"{name}_one"] = item
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if most == 0:
                return '"[]"'
            more = f'("," {name}_one){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
            return f'"[" ({name}_one {more}){"" if least else "?"} "]"'
        if types == {"object"} and "properties" in schema:
            self._parameters(f"{name}_object", schema)
            return f'"{{" {name}_object "}}"'
        if types and not types & {"string", "array", "object"}:
            return self._typed(name, schema, root)
        self._rules.setdefault("any_text", self._text_until("any_string", GEMMA_QUOTE))
        self._rules.setdefault(
            "any_value",
            f'{quote} any_text | /-?[0-9]+(\\.[0-9]+)?|true|false|null/ | "[" (any_value ("," any_value)*)? "]" |'
            ' "{" (any_pair ("," any_pair)*)? "}"',
        )
        self._rules.setdefault("any_pair", '/[A-Za-z_][A-Za-z0-9_]*/ ":" any_value')
        return "any_value"


_EMPTY = '""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _escaped(text: str) -> str:
    return re.sub(r"[^\w\s]", r"\\\g<0>", text).replace("\n", r"\n")


def _string_pattern(schema: Any) -> str:
    """A pattern for the text of a string with these limits."""
    schema = schema if isinstance(schema, dict) else {}
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"(?s:.{{{least},{most}}})" if least or most != "" else "(?s:.*)"
