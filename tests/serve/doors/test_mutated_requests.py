"""Requests of every conversation API with one to three values exchanged, to a running server: each is answered, or
refused in words, and nothing of it is left behind. The slow test sends 2,000 to each path."""

from __future__ import annotations

import http.client
import json
import logging
import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.mutations import damage_document
from tests.support.serving import WAIT_SECONDS, RunningServer

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"name": "look", "description": "Look.", "parameters": SCHEMA}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "blue", "is_error": False}
SAID: list[Any] = [{"role": "user", "content": "Look at the sea."}]
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        *SAID,
        {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": [CALLED]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "blue"}]},
    ],
    "tools": [{"type": "function", "function": TOOL}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "max_tokens": 3,
    "stream": False,
    "stream_options": {"include_usage": True},
    "stop": ["a"],
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 1,
    "reasoning_effort": "low",
    "thinking": {"type": "enabled", "budget_tokens": 2},
    "parallel_tool_calls": False,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
    "logit_bias": {"5": 1},
    "chat_template_kwargs": {"enable_thinking": False},
}
MESSAGES: dict[str, Any] = {
    "model": "claude-any",
    "max_tokens": 3,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        *SAID,
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": "a"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}},
            ],
        },
        {"role": "user", "content": [RESULT]},
    ],
    "tools": [
        {"name": "look", "description": "Look.", "input_schema": SCHEMA},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 2},
    "stop_sequences": ["a"],
    "output_config": {"effort": "low"},
    "top_k": 5,
    "metadata": {"user_id": "a"},
}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Look at the sea."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": '{"at": "sea"}'},
        {"type": "function_call_output", "call_id": "call_1", "output": "blue"},
    ],
    "tools": [
        {"type": "function", **TOOL, "strict": True},
        {"type": "custom", "name": "patch", "format": {"type": "text"}},
    ],
    "tool_choice": "auto",
    "max_output_tokens": 3,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "include": ["reasoning.encrypted_content"],
    "store": False,
}
OLLAMA: dict[str, Any] = {
    "model": "tiny",
    "messages": SAID,
    "stream": False,
    "options": {"num_predict": 3, "temperature": 0.5, "stop": ["a"]},
    "tools": [{"type": "function", "function": TOOL}],
    "think": True,
    "format": {"type": "object"},
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": MESSAGES,
    "/v1/responses": RESPONSES,
    "/v1/responses/input_tokens": RESPONSES,
    "/api/chat": OLLAMA,
    "/v1/completions": {"model": "tiny", "prompt": "The sea", "max_tokens": 3, "n": 2, "logprobs": 1, "echo": True},
    "/tokenize": {"model": "tiny", "messages": SAID, "add_special_tokens": True},
    "/detokenize": {"model": "tiny", "tokens": [1, 2, 3]},
}


def send_mutated(server: RunningServer, path: str, seeds: range) -> Counter[int]:
    """Statuses of requests on one kept-alive connection."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    statuses: Counter[int] = Counter()
    for seed in seeds:
        rng = random.Random(f"{path} {seed}")
        document: Any = BODIES[path]
        for _ in range(rng.choice((1, 1, 2, 3))):
            document = damage_document(document, rng)
        connection.request("POST", path, json.dumps(document).encode(), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        answer = reply.read().decode()
        assert reply.status in (200, 400, 404), f"{path} {seed}: {reply.status} {answer[:300]}"
        assert answer.startswith(("{", "data: ", "event: ")), f"{path} {seed}: {answer[:300]}"
        for failure in ("internal_error", "engine_error", "Traceback"):
            assert failure not in answer, f"{path} {seed}: {answer[:300]}"
        statuses[reply.status] += 1
    connection.close()
    return statuses


def attack(server: RunningServer, path: str, count: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(4) as clients:
        parts = [range(start, count, 4) for start in range(4)]
        statuses = sum(clients.map(lambda seeds: send_mutated(server, path, seeds), parts), Counter[int]())
    assert sum(statuses.values()) == count
    # Both sides of the check are reached.
    assert statuses[200] and statuses[400], statuses
    assert "Traceback" not in caplog.text, caplog.text[-3000:]
    end = time.monotonic() + WAIT_SECONDS
    while server.service.engine.busy and time.monotonic() < end:
        time.sleep(0.01)
    assert not server.service.engine.busy


@pytest.mark.parametrize("path", BODIES)
def test_mutated_requests_are_answered_or_refused(
    served: RunningServer, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    attack(served, path, 40, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("path", BODIES)
def test_two_thousand_mutated_requests(served: RunningServer, caplog: pytest.LogCaptureFixture, path: str) -> None:
    attack(served, path, 2000, caplog)
