"""Tool calls in generated text. The format is defined by the chat template; two formats between `<tool_call>` and
`</tool_call>` are parsed: JSON with name and arguments (Hermes, Qwen3, GLM), and
`<function=name><parameter=key>value</parameter></function>` (Qwen3-Coder, Qwen3.5). Text in any other format stays
text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
CALL_BLOCK = re.compile(re.escape(CALL_OPEN) + r"\s*(.*?)\s*(?:" + re.escape(CALL_CLOSE) + r"|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def parameter_types(tools: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """function -> parameter -> JSON type, where the tool's schema gives one."""
    types: dict[str, dict[str, str]] = {}
    for tool in tools:
        parameters = tool["function"].get("parameters") or {}
        properties = parameters.get("properties")
        named = properties if isinstance(properties, dict) else {}
        types[tool["function"]["name"]] = {
            name: schema["type"]
            for name, schema in named.items()
            if isinstance(schema, dict) and isinstance(schema.get("type"), str)
        }
    return types


def parse_calls(text: str, types: Mapping[str, Mapping[str, str]]) -> tuple[str, list[ToolCall]]:
    """(text before the calls, calls); no calls if one of them cannot be parsed. `types`: of `parameter_types`."""
    calls = []
    for block in CALL_BLOCK.findall(text):
        call = _parse_json_call(block) or _parse_tagged_call(block, types)
        if call is None:
            return text, []
        calls.append(call)
    return (text[: text.index(CALL_OPEN)].rstrip(), calls) if calls else (text, [])


def parse_bare_call(text: str) -> list[ToolCall]:
    """The call in a text that is one call in JSON and nothing else."""
    call = _parse_json_call(text)
    return [] if call is None else [call]


def _parse_json_call(text: str) -> ToolCall | None:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict) or not isinstance(document.get("name"), str):
        return None
    arguments = document.get("arguments", document.get("parameters", {}))
    text_arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(document["name"], text_arguments)


def _parse_tagged_call(text: str, types: Mapping[str, Mapping[str, str]]) -> ToolCall | None:
    match = FUNCTION.search(text)
    if match is None:
        return None
    name = match[1]
    arguments = {}
    for key, value in PARAMETER.findall(match[2]):
        arguments[key] = value if types.get(name, {}).get(key) == "string" else _parse_value(value)
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _parse_value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def call_schema(tools: Sequence[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """JSON schema of a response that has to be a call of any tool, or of the named one."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    return {"anyOf": [_call_schema_of(function) for function in functions]}


def _call_schema_of(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class ToolCallSplitter:
    """Splits a stream of text: text before the first tool call is emitted, the rest is held back until the end."""

    def __init__(self) -> None:
        self._held = ""
        self.inside = False

    def add(self, text: str) -> str:
        self._held += text
        if self.inside:
            return ""
        start = self._held.find(CALL_OPEN)
        if start >= 0:
            self.inside = True
            ready, self._held = self._held[:start], self._held[start:]
            return ready
        for size in range(min(len(CALL_OPEN) - 1, len(self._held)), 0, -1):
            if self._held.endswith(CALL_OPEN[:size]):
                ready, self._held = self._held[:-size], self._held[-size:]
                return ready
        ready, self._held = self._held, ""
        return ready

    def end(self) -> str:
        return self._held
