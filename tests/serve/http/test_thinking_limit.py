"""A thinking block that is bounded, and what follows it."""

from __future__ import annotations

import json
import random

import pytest
import torch

from ktransformers.serve.http.grammar import SchemaMatcher, ThinkingLimit
from ktransformers.serve.http.grammar_source import GrammarCompiler
from ktransformers.serve.http.prepare import PrepareSettings, RequestPreparer, ThinkingBlock
from tests.support.answers import byte_tokenizer, parse
from tests.support.scripted import Script

OPEN, CLOSE, EXTRA, END, SIZE = 1, 2, 3, 4, 8


def allowed(limit: ThinkingLimit) -> list[int]:
    return [int(token) for token in torch.nonzero(limit.allowed(SIZE))]


def test_closing_tokens_are_forced_when_the_budget_is_used() -> None:
    limit = ThinkingLimit(ThinkingBlock((OPEN,), (CLOSE, EXTRA), False, 2), None, frozenset({END}))
    for token in (7, 7, 7, OPEN, 5, 6):
        assert len(allowed(limit)) == SIZE
        limit.accept(token)
    for token in (CLOSE, EXTRA):
        assert allowed(limit) == [token]
        limit.accept(token)
    assert len(allowed(limit)) == SIZE


def test_a_budget_of_nothing_closes_an_opened_block_at_once() -> None:
    limit = ThinkingLimit(ThinkingBlock((OPEN,), (CLOSE,), True, 0), None, frozenset())
    assert allowed(limit) == [CLOSE]


def test_a_grammar_begins_behind_the_block_that_the_prompt_opened() -> None:
    limit = ThinkingLimit(ThinkingBlock((OPEN,), (CLOSE,), True, None), lambda: Script([5, 6]), frozenset({END}))
    assert END not in allowed(limit) and len(allowed(limit)) == SIZE - 1
    for token in (7, 7, CLOSE):
        limit.accept(token)
    assert allowed(limit) == [5]
    limit.accept(5)
    assert allowed(limit) == [6]


def test_what_a_grammar_forbids_is_not_forced() -> None:
    limit = ThinkingLimit(ThinkingBlock((OPEN,), (CLOSE,), True, 1, True), lambda: Script([5, 6, 7]), frozenset())
    for token in (5, 6, 7):
        assert allowed(limit) == [token]
        limit.accept(token)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("opened", ["", "<think>"])
def test_a_budget_holds_where_a_call_is_required(opened: str, special: bool) -> None:
    """The answer thinks until its budget is used, and then calls."""
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer(["<think>", "</think>"] if special else [])
    template = "{{ messages[0].content }}{% if add_generation_prompt %}A:" + opened + "{% endif %}"
    settings = PrepareSettings(
        len(tokenizer), 4096, template=template, tool_call_parser="hermes", reasoning_parser="qwen3"
    )
    preparer = RequestPreparer(tokenizer, settings)
    schema = {"type": "object", "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "ping", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool], "tool_choice": "required"}
    body |= {"thinking_budget": 5, "parallel_tool_calls": False}
    prepared = preparer.prepare("chat", json.dumps(body).encode(), {})
    assert prepared.chat is not None and prepared.chat.thinking is not None and prepared.grammar is not None
    compiled = GrammarCompiler(tokenizer, len(tokenizer)).compile(prepared.grammar)
    eos = tokenizer.eos_token_id
    limit = ThinkingLimit(prepared.chat.thinking, lambda: SchemaMatcher(compiled), frozenset({eos}))
    tokens: list[int] = []
    wanted = [] if opened else tokenizer("<think>")["input_ids"]
    rng = random.Random(1)
    while len(tokens) < 400:
        choices = [int(token) for token in torch.nonzero(limit.allowed(len(tokenizer)))]
        token = wanted.pop(0) if wanted else eos if eos in choices else rng.choice(choices)
        assert token in choices
        if token == eos:
            break
        limit.accept(token)
        tokens.append(token)
    text = tokenizer.decode(tokens)
    close = tokenizer("</think>")["input_ids"]
    begin = len(tokens) - len(tokenizer(text.partition("</think>")[2])["input_ids"]) - len(close)
    assert tokens[begin : begin + len(close)] == close
    assert begin == 5 + (0 if opened else len(tokenizer("<think>")["input_ids"]))
    answer = parse(settings.answer_format(template).parser(prepared.chat.prefix, prepared.chat.tools), [text])
    assert answer.calls == [("ping", {})] and not answer.text
