"""Conversations rendered by templates that refuse or leave out some of their messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ktransformers.serve.doors.conversation import Call, ChatRequest, Conversation, Generation, Reasoning, Tool, Turn
from ktransformers.serve.doors.template_messages import read_arguments
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.prepare import ModelTemplate, RequestPreparer
from tests.support.serving import RunningServer

LINES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('order') }}{% endif %}"
    "{% endfor %}"
)
IN_TURNS = (
    "{% set n = namespace(last='') %}{% for m in messages %}{% if m.role == n.last or m.role == 'system' %}"
    "{{ raise_exception('turns') }}{% endif %}{% set n.last = m.role %}{% endfor %}"
)
LATE = "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}"
SILENT = LINES.replace("{{ m.role }}", LATE + "{{ m.role }}")
TURNS = (
    "{% set n = namespace(last='') %}{% for m in messages %}{% if m.role == n.last or m.role == 'system' %}"
    "{{ raise_exception('turns') }}{% endif %}{% set n.last = m.role %}{% endfor %}"
)
SILENT = LINES.replace(
    "{{ m.role }}", "{% if m.role == 'system' and not loop.first %}{% continue %}{% endif %}{{ m.role }}"
)
TURNS = (
    Turn("system", "S1"),
    Turn("system", "S2"),
    Turn("user", "U1"),
    Turn("assistant", "A1"),
    Turn("system", "S3"),
    Turn("user", "U2"),
)


def rendered(served: RunningServer, template: str, conversation: Conversation) -> str:
    request = ChatRequest(conversation, Generation(None, max_tokens=1))
    prepared = served.service.preparer.chat(request, {"": ModelTemplate(template)})
    return str(served.service.tokenizer.decode(prepared.prompts[0].tokens))


def test_a_template_that_takes_all_gets_all(served: RunningServer) -> None:
    text = rendered(served, LINES, Conversation(TURNS))
    assert text == "system: S1\nsystem: S2\nuser: U1\nassistant: A1\nsystem: S3\nuser: U2\nassistant:"


@pytest.mark.parametrize("template", [FIRST_ONLY + LINES, SILENT])
def test_late_system_messages_become_text_of_the_user_at_their_place(served: RunningServer, template: str) -> None:
    text = rendered(served, template, Conversation(TURNS))
    assert text == "system: S1\n\nS2\nuser: U1\nassistant: A1\nuser: S3\n\nU2\nassistant:"


def test_a_template_without_system_messages(served: RunningServer) -> None:
    text = rendered(served, IN_TURNS + LINES, Conversation(TURNS))
    assert text == "user: S1\n\nS2\n\nU1\nassistant: A1\nuser: S3\n\nU2\nassistant:"


def test_a_template_that_refuses_all(served: RunningServer) -> None:
    with pytest.raises(ApiError, match=r"refuses them \(TemplateError: never\)"):
        rendered(served, "{{ raise_exception('never') }}", Conversation(TURNS))


def test_tools_without_a_place_in_the_template(served: RunningServer) -> None:
    tool = Tool("weather", "The weather of a town.", {"type": "object"})
    turns = (
        Turn("user", "Rain?"),
        Turn("assistant", calls=(Call("a", "weather", {"town": "Bonn"}),)),
        Turn("tool", "no town", call_id="a", is_error=True),
    )
    text = rendered(served, IN_TURNS + LINES, Conversation(turns, (tool,)))
    assert "The weather of a town." in text and '"town": "Bonn"' in text and "Error: no town" in text
    assert text.index("The weather of a town.") < text.index("Rain?") < text.index("Bonn") < text.index("no town")


def test_only_the_beginning_of_the_answer_is_its_prefix(served: RunningServer) -> None:
    def prefix(template: str, **fields: Any) -> str:
        conversation = replace(Conversation((Turn("user", "<think>"), Turn("assistant", "A"))), **fields)
        request = ChatRequest(conversation, Generation(None, max_tokens=1))
        return str(served.service.preparer.chat(request, {"": ModelTemplate(template)}).chat.prefix)

    assert prefix(LINES.replace("assistant:{%", "assistant:<think>{%")) == "assistant:<think>"
    assert prefix(LINES, add_generation_prompt=False) == ""
    assert prefix(LINES, continue_final_turn=True) == "assistant: A"


def test_a_thinking_block_that_the_prompt_opens_is_bounded(served: RunningServer) -> None:
    opened = LINES.replace("assistant:{%", "assistant:<think>{%") + "{# </think> #}"
    conversation = Conversation((Turn("user", "a"),), reasoning=Reasoning(budget=5))
    request = ChatRequest(conversation, Generation(None, max_tokens=1))
    block = served.service.preparer.chat(request, {"": ModelTemplate(opened)}).chat.thinking
    assert block.begun and block.budget == 5
    assert served.service.tokenizer.decode(block.close) == "</think>"


def test_strict_fields_refuse_unknown_ones(served: RunningServer) -> None:
    settings = replace(served.service.prepare_settings, strict_fields=True)
    preparer = RequestPreparer(served.service.tokenizer, settings)
    with pytest.raises(ApiError, match="wishes: given an unknown field"):
        preparer.prepare("completion", b'{"prompt": "a", "wishes": 3}', {})
    with pytest.raises(ApiError, match="num_ctx"):
        preparer.prepare("chat", b'{"messages": [{"role": "user", "content": "a"}], "num_ctx": 3}', {})
    asked = b'{"messages": [{"role": "user", "content": "a"}], "return_token_strs": true, "add_special_tokens": true%s}'
    assert preparer.prepare("tokenize", asked % b"", {}).echo
    with pytest.raises(ApiError, match="num_ctx"):
        preparer.prepare("tokenize", asked % b', "num_ctx": 3', {})
    assert served.service.preparer.prepare("completion", b'{"prompt": "a", "wishes": 3}', {}).ignored == ("wishes",)


def test_surrogates_without_their_other_are_replaced() -> None:
    assert read_arguments(r'{"a\ud83d": ["\ude00", "\ud83d\ude00 é"]}') == {"a\ufffd": ["\ufffd", "😀 é"]}
