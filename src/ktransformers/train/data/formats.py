"""Converts a row of any supported format to a `TrainingConversation`, a `PreferencePair` or `PlainText`.

Messages are dicts as chat templates expect them: role, content, and tool_calls if the assistant calls a function. A
format that dataset_info.json does not name is detected by the fields: `messages`, `conversations`, `prompt` with
`completion`, `prompt` with `chosen` and `rejected`, `text`, `instruction`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

from ktransformers.ground.files import parse_json, short
from ktransformers.train.data.files import DataRow, row_error
from ktransformers.train.data.registry import DatasetSource

Message = dict[str, Any]


def user_texts(messages: list[Message]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user" and message["content"]]


@dataclass(frozen=True)
class TrainingConversation:
    messages: list[Message]
    tools: list[Any] | None = None
    raw_prompt: str | None = None  # {prompt, completion} as strings: no chat template; messages hold the completion

    @property
    def needs_template(self) -> bool:
        """Whether rendering needs a chat template."""
        return self.raw_prompt is None

    @property
    def questions(self) -> list[str]:
        return user_texts(self.messages)


@dataclass(frozen=True)
class PlainText:
    text: str
    tools: ClassVar[None] = None
    needs_template: ClassVar[bool] = False
    questions: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True)
class PreferencePair:
    """`raw` holds prompt, chosen and rejected if they are plain strings; `prompt` is empty then."""

    prompt: list[Message]
    chosen: Message
    rejected: Message
    tools: list[Any] | None = None
    raw: tuple[str, str, str] | None = None

    @property
    def needs_template(self) -> bool:
        return self.raw is None

    @property
    def questions(self) -> list[str]:
        return user_texts(self.prompt)


Sample = TrainingConversation | PlainText | PreferencePair

ROLES = ("system", "user", "assistant", "tool")


def _text(row: DataRow, field: str, *, optional: bool = False) -> str:
    value = row.values.get(field)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        given = f"no {field}" if field not in row.values else f"{field}: {type(value).__name__}"
        raise row_error(row, given, f"text in {field}", f"the row has {', '.join(row.values) or 'no fields'}")
    return value


def _tools(row: DataRow, field: str) -> list[Any] | None:
    value = row.values.get(field)
    if isinstance(value, str) and value.strip():
        value = parse_json(value, f"{row.position}: {field}", "a JSON list of functions")
    if not value:
        return None
    if not isinstance(value, list):
        raise row_error(row, f"{field}: {type(value).__name__}", "a JSON list of functions")
    for tool in value:
        if not isinstance(tool, dict):
            raise row_error(row, f"{field}: {short(tool)}", "a JSON list of functions")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in value]


def _tool_calls(row: DataRow, text: str) -> list[dict[str, Any]]:
    parsed = parse_json(text, f"{row.position}: a function call", '{"name": ..., "arguments": ...}')
    calls = parsed if isinstance(parsed, list) else [parsed]
    for call in calls:
        if not isinstance(call, dict) or "name" not in call:
            raise row_error(row, f"a function call {short(call)}", '{"name": ..., "arguments": ...}')
    return [
        {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}
        for call in calls
    ]


def _sharegpt_message(row: DataRow, turn: Any, source: DatasetSource) -> Message:
    tags = source.tags
    if not isinstance(turn, dict):
        raise row_error(
            row, f"a turn of type {type(turn).__name__}", f"an object with {tags.role_tag}, {tags.content_tag}"
        )
    role, content = turn.get(tags.role_tag), turn.get(tags.content_tag)
    names = {
        tags.user_tag: "user",
        tags.assistant_tag: "assistant",
        tags.observation_tag: "tool",
        tags.function_tag: "function",
        tags.system_tag: "system",
    }
    if not isinstance(role, str) or role not in names:
        raise row_error(row, f"a turn from {short(role)}", f"one of {', '.join(names)}")
    if names[role] == "function":
        if not isinstance(content, str):
            content = json.dumps(content)
        return {"role": "assistant", "content": "", "tool_calls": _tool_calls(row, content)}
    if not isinstance(content, str):
        raise row_error(row, f"{tags.content_tag}: {type(content).__name__}", "text")
    return {"role": names[role], "content": content}


def _openai_message(row: DataRow, turn: Any) -> Message:
    if not isinstance(turn, dict) or turn.get("role") not in ROLES:
        given = turn.get("role") if isinstance(turn, dict) else turn
        raise row_error(row, f"a message with role {short(given)}", f"one of {', '.join(ROLES)}")
    content, calls = turn.get("content"), turn.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise row_error(row, f"tool_calls: {short(calls)}", "a list of calls")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise row_error(row, f"content: {type(content).__name__}", "text")
    optional_fields = {
        key: turn[key] for key in ("reasoning_content", "name", "tool_call_id") if turn.get(key) is not None
    }
    return {"role": turn["role"], "content": content, **optional_fields, **({"tool_calls": calls} if calls else {})}


def check_order(row: DataRow, messages: list[Message]) -> list[Message]:
    """A system message only first, and a user's turn before the assistant's."""
    turns = messages[1:] if messages and messages[0]["role"] == "system" else messages
    if any(message["role"] == "system" for message in turns):
        raise row_error(row, "a system message in the middle", "one at the beginning")
    if not turns or turns[0]["role"] != "user":
        raise row_error(row, f"{turns[0]['role'] if turns else 'nothing'} first", "a user's turn first")
    return messages


def _needs_answer(row: DataRow, messages: list[Message]) -> list[Message]:
    if check_order(row, messages)[-1]["role"] != "assistant":
        raise row_error(row, f"{messages[-1]['role']} last", "an assistant's turn last")
    return messages


def _alpaca_prompt(row: DataRow, source: DatasetSource) -> list[Message]:
    columns = source.columns
    prompt = [_text(row, columns.prompt), _text(row, columns.query, optional=True)]
    messages: list[Message] = []
    system = _text(row, columns.system, optional=True)
    if system:
        messages.append({"role": "system", "content": system})
    history = row.values.get(columns.history) or []
    if not isinstance(history, list):
        raise row_error(row, f"{columns.history}: {short(history)}", "a list of pairs of texts")
    for turn in history:
        if not isinstance(turn, (list, tuple)) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise row_error(row, f"{columns.history}: {short(turn)}", "pairs of texts")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    return [*messages, {"role": "user", "content": "\n".join(part for part in prompt if part)}]


def _alpaca(row: DataRow, source: DatasetSource) -> Sample:
    columns, prompt = source.columns, _alpaca_prompt(row, source)
    tools = _tools(row, columns.tools)
    if source.ranking or (columns.chosen in row.values and columns.rejected in row.values):
        chosen, rejected = (
            {"role": "assistant", "content": _text(row, key)} for key in (columns.chosen, columns.rejected)
        )
        return PreferencePair(prompt, chosen, rejected, tools)
    answer = {"role": "assistant", "content": _text(row, columns.response)}
    return TrainingConversation([*prompt, answer], tools)


def _sharegpt(row: DataRow, source: DatasetSource) -> Sample:
    columns = source.columns
    turns = row.values.get(columns.messages)
    if not isinstance(turns, list) or not turns:
        raise row_error(row, f"{columns.messages}: {type(turns).__name__}", "a list of turns")
    messages = [_sharegpt_message(row, turn, source) for turn in turns]
    system = _text(row, columns.system, optional=True)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = _tools(row, columns.tools)
    if source.ranking or (columns.chosen in row.values and columns.rejected in row.values):
        chosen, rejected = (
            _sharegpt_message(row, row.values.get(key), source) for key in (columns.chosen, columns.rejected)
        )
        return _pair(row, check_order(row, messages), chosen, rejected, tools)
    return TrainingConversation(_needs_answer(row, messages), tools)


def _pair(
    row: DataRow, prompt: list[Message], chosen: Message, rejected: Message, tools: list[Any] | None
) -> PreferencePair:
    if not prompt or prompt[-1]["role"] == "assistant":
        raise row_error(row, "a prompt that ends with the assistant", "a user's turn before chosen and rejected")
    for message in (chosen, rejected):
        if message["role"] != "assistant":
            raise row_error(row, f"an answer from {message['role']}", "the assistant's")
    return PreferencePair(prompt, chosen, rejected, tools)


def _messages(row: DataRow, value: Any, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise row_error(row, f"{field}: {type(value).__name__}", "a list of messages")
    return [_openai_message(row, turn) for turn in value]


def _trl_pair(row: DataRow) -> PreferencePair:
    """TRL's preference rows: explicit prompt or not, messages or strings."""
    values, tools = row.values, _tools(row, "tools")
    if all(isinstance(values.get(key), str) for key in ("prompt", "chosen", "rejected")):
        texts = (values["prompt"], values["chosen"], values["rejected"])
        answers = [{"role": "assistant", "content": text} for text in texts[1:]]
        return PreferencePair([], answers[0], answers[1], None, raw=texts)
    chosen = _messages(row, values.get("chosen"), "chosen")
    rejected = _messages(row, values.get("rejected"), "rejected")
    if "prompt" in values:
        prompt = _messages(row, values["prompt"], "prompt")
        if len(chosen) != 1 or len(rejected) != 1:
            raise row_error(row, "several answers", "one message in chosen and one in rejected")
    else:
        prompt = chosen[:-1]
        if prompt != rejected[:-1]:
            raise row_error(row, "chosen and rejected that differ before the last turn", "the same prompt in both")
    return _pair(row, check_order(row, prompt), chosen[-1], rejected[-1], tools)


def _detect_format(row: DataRow, source: DatasetSource) -> Sample:
    values = row.values
    if {"chosen", "rejected"} <= values.keys() and "conversations" not in values and "instruction" not in values:
        return _trl_pair(row)
    if "messages" in values:
        messages = _messages(row, values["messages"], "messages")
        return TrainingConversation(_needs_answer(row, messages), _tools(row, "tools"))
    if "conversations" in values:
        return _sharegpt(row, source)
    if {"prompt", "completion"} <= values.keys():
        prompt, completion = values["prompt"], values["completion"]
        if isinstance(prompt, str):
            answer = {"role": "assistant", "content": _text(row, "completion")}
            return TrainingConversation([answer], None, raw_prompt=prompt)
        messages = _messages(row, prompt, "prompt") + _messages(row, completion, "completion")
        return TrainingConversation(_needs_answer(row, messages), _tools(row, "tools"))
    if "instruction" in values:
        return _alpaca(row, source)
    if "text" in values:
        return PlainText(_text(row, "text"))
    expected = "messages, conversations, prompt with completion or chosen and rejected, instruction, or text"
    raise row_error(row, f"fields {', '.join(map(str, values)) or 'none'}", expected)


def read_sample(row: DataRow, source: DatasetSource) -> Sample:
    if source.formatting == "auto":
        return _detect_format(row, source)
    return _alpaca(row, source) if source.formatting == "alpaca" else _sharegpt(row, source)
