"""A conversation as the messages that a chat template renders, and what is tried where a template refuses them.

Templates differ in the system messages that they take: some want one at the beginning, some none, and some leave out a
late one without an error. `candidates` yields the messages as they are, then with leading system messages joined and
later ones as text of the user at their place, then with all of them as text of the user. Late ones stay where they are
so that the prompt before them, which is cached, does not change. Where the template takes no text between thinking and
a call, the text joins the thinking. The first candidate is taken that the template renders with the text of every
system message in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from ktransformers.serve.doors.conversation import Call, Tool, Turn


def candidates(turns: Sequence[Turn]) -> Iterator[list[dict[str, Any]]]:
    yield from _system_candidates(turns)
    if any(turn.text and turn.reasoning and turn.calls for turn in turns):
        yield from _system_candidates([_text_as_reasoning(turn) for turn in turns])


def _text_as_reasoning(turn: Turn) -> Turn:
    """For templates that take either thinking or text before a call: gpt-oss'."""
    if not (turn.text and turn.reasoning and turn.calls):
        return turn
    return replace(turn, reasoning=f"{turn.reasoning}\n\n{turn.text}", text="")


def _system_candidates(turns: Sequence[Turn]) -> Iterator[list[dict[str, Any]]]:
    yield [_message(turn) for turn in turns]
    leading = list(takewhile(lambda turn: turn.role == "system", turns))
    rest = turns[len(leading) :]
    if len(leading) > 1 or any(turn.role == "system" for turn in rest):
        joined = [replace(leading[0], text="\n\n".join(turn.text for turn in leading))] if leading else []
        yield [_message(turn) for turn in _as_user_text([*joined, *rest], first=len(joined))]
    if leading:
        yield [_message(turn) for turn in _as_user_text(turns, first=0)]


def calls_as_text(turns: Sequence[Turn], call_text: Callable[[str, dict[str, Any]], str]) -> tuple[Turn, ...]:
    """For templates without tool calls: calls as the text that the model writes for them, results as text of the
    user."""
    made = []
    for turn in turns:
        if turn.role == "tool":
            turn = Turn("user", f"<tool_response>\n{_text(turn)}\n</tool_response>")
        elif turn.calls:
            written = [call_text(call.name, call.arguments) for call in turn.calls if isinstance(call.arguments, dict)]
            turn = replace(turn, text="\n".join(filter(None, [turn.text, *written])), calls=())
        made.append(turn)
    return tuple(made)


def template_tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value}}


def system_texts(turns: Sequence[Turn]) -> list[str]:
    return [turn.text.strip() for turn in turns if turn.role == "system"]


def _as_user_text(turns: Sequence[Turn], first: int) -> list[Turn]:
    """System messages from `first` on become text of the user. Those that lie beside a message of the user join it,
    because templates that refuse system messages often want user and assistant in turns."""
    made: list[Turn] = []
    after_folded = False
    for index, turn in enumerate(turns):
        folded = index >= first and turn.role == "system"
        user = Turn("user", turn.text) if folded else turn
        if made and (folded or after_folded) and user.role == made[-1].role == "user":
            user = replace(user, text=f"{made.pop().text}\n\n{user.text}")
        made.append(user)
        after_folded = folded
    return made


def _message(turn: Turn) -> dict[str, Any]:
    """Arguments of calls are objects and content is one string, as templates expect."""
    message: dict[str, Any] = {**turn.extra, "role": turn.role, "content": _text(turn)}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_call(call) for call in turn.calls]
    if turn.call_id:
        message["tool_call_id"] = turn.call_id
    if turn.name:
        message["name"] = turn.name
    return message


def _text(turn: Turn) -> str:
    """Templates have no place for the mark of a failed result, so its text says it."""
    says_so = not turn.is_error or turn.text.lower().startswith("error")
    return turn.text if says_so else f"Error: {turn.text}"


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def read_arguments(arguments: str | dict[str, Any] | None) -> dict[str, Any] | str:
    """Arguments of an earlier call as a client sent them: an object if they are one."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        document = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return _paired(document) if isinstance(document, dict) else arguments


def _paired(document: dict[str, Any]) -> dict[str, Any]:
    """With U+FFFD for surrogates that have no other, which no tokenizer takes."""
    text = json.dumps(document, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        paired: dict[str, Any] = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        return paired
    return document
