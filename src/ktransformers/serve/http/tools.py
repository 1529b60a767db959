"""Tool calls in the model's text. What a model writes is its template's business; read are the two forms that templates
put between `<tool_call>` and `</tool_call>`: JSON with name and arguments (Hermes, Qwen3, GLM), and
`<function=name><parameter=key>value</parameter></function>` (Qwen3-Coder, Qwen3.5). Text in no known form stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"
BLOCK = re.compile(re.escape(OPEN) + r"\s*(.*?)\s*(?:" + re.escape(CLOSE) + r"|\Z)", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # JSON

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def read_calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[str, list[ToolCall]]:
    """(text before the calls, calls); no calls where one of them cannot be read."""
    found = []
    for block in BLOCK.findall(text):
        call = _json_call(block) or _tagged_call(block, tools)
        if call is None:
            return text, []
        found.append(call)
    return (text[: text.index(OPEN)].rstrip(), found) if found else (text, [])


def read_bare_call(text: str) -> list[ToolCall]:
    """A text that is one call in JSON and nothing else."""
    call = _json_call(text)
    return [] if call is None else [call]


def _json_call(text: str) -> ToolCall | None:
    try:
        said = json.loads(text)
    except ValueError:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str):
        return None
    arguments = said.get("arguments", said.get("parameters", {}))
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(said["name"], written)


def _tagged_call(text: str, tools: Sequence[dict[str, Any]]) -> ToolCall | None:
    found = FUNCTION.search(text)
    if found is None:
        return None
    name = found[1]
    kinds = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    properties = kinds.get(name, {}).get("properties", {})
    arguments = {}
    for key, value in PARAMETER.findall(found[2]):
        kind = properties.get(key, {}).get("type") if isinstance(properties.get(key), dict) else None
        arguments[key] = value if kind == "string" else _value(value)
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def call_schema(tools: Sequence[dict[str, Any]], name: str | None) -> dict[str, Any]:
    """What an answer looks like that has to be a call: of any tool, or of the one that is named."""
    wanted = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    return {"anyOf": [_call_of(function) for function in wanted]}


def _call_of(function: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "arguments": function.get("parameters") or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


class CallsApart:
    """Text that comes in parts: what stands before the first call goes on, the rest is kept for the end."""

    def __init__(self) -> None:
        self._held = ""
        self.inside = False

    def add(self, text: str) -> str:
        self._held += text
        if self.inside:
            return ""
        place = self._held.find(OPEN)
        if place >= 0:
            self.inside = True
            ready, self._held = self._held[:place], self._held[place:]
            return ready
        for size in range(min(len(OPEN) - 1, len(self._held)), 0, -1):
            if self._held.endswith(OPEN[:size]):
                ready, self._held = self._held[:-size], self._held[-size:]
                return ready
        ready, self._held = self._held, ""
        return ready

    def end(self) -> str:
        return self._held
