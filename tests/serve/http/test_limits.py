"""Limits of a request, checked without computing what they limit; and a worker process that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from ktransformers.serve.http.error import MAX_MESSAGE_CHARACTERS, ApiError, bounded
from ktransformers.serve.http.limits import PIECE_CHARACTERS, RequestLimits, check_schema, too_many_tokens
from tests.support.attacks import nested_schema, object_schema
from tests.support.serving import EngineHarness, make_service


def test_a_long_text_is_tokenised_as_far_as_the_limit() -> None:
    counted: list[int] = []

    def count(piece: str) -> int:
        counted.append(len(piece))
        return len(piece) // 4

    assert too_many_tokens("a" * 10**6, 100, 9, count) and not counted  # 111,112 tokens at least
    assert too_many_tokens("a" * 10**6, 10_000, 200, count)
    assert sum(counted) <= 4 * PIECE_CHARACTERS
    assert not too_many_tokens("a" * 40_000, 10_001, 200, count)
    assert not too_many_tokens("a" * 500, 10, 200, count)  # left to the tokenizer


def test_schema_limits() -> None:
    limits = RequestLimits(max_schema_properties=10, max_schema_depth=20)
    check_schema("x", object_schema(10), limits)
    check_schema("x", nested_schema(8), limits)
    for schema in (object_schema(11), nested_schema(12), {"enum": list(range(100_000))}):
        with pytest.raises(ApiError, match="schema of more than"):
            check_schema("x", schema, limits)


def test_messages_are_bounded_and_valid() -> None:
    assert bounded("short \ud800") == "short ?"
    error = ApiError(400, "x" * 10**6, param="y" * 10**6).to_json()["error"]
    assert len(error["message"]) < MAX_MESSAGE_CHARACTERS + 50 and len(error["param"]) < 150


def test_killed_worker_is_replaced(harness: EngineHarness, adapters: dict[str, Path]) -> None:
    pool: Any = make_service(harness, adapters).make_pool()
    body = json.dumps({"model": "tiny", "prompt": "Once", "echo": True, "logprobs": 1, "stop": "x"}).encode()

    async def prepare_twice() -> None:
        async with pool.running():
            first = await pool.prepare("completion", body, {})
            os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
            await pool._workers[0]._process.wait()
            assert await pool.prepare("completion", body, {}) == first
            assert first.prompts[0].text == "Once" and first.prompts[0].offsets[0] == 0 and first.stop_strings == ("x",)

    asyncio.run(prepare_twice())
    assert pool.restarts == 1
