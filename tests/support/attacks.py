"""Requests that are made to be slow, large or malformed, each with the statuses that may answer it. None may be a 500,
stop /health or a running stream, or leave memory behind.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHATS, LOAD = "/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@dataclass(frozen=True)
class Attack:
    name: str
    path: str
    make_body: Callable[[], bytes]
    statuses: tuple[int, ...] = (400,)
    headers: dict[str, str] = field(default_factory=dict)
    message: str = ""  # that the answer contains


def completion(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "tiny", "max_tokens": 2, **fields}).encode()


def chat(**fields: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"model": "tiny", "messages": MESSAGES, "max_tokens": 2, **fields}).encode()


def schema_form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def object_schema(properties: int, prefix: str = "p") -> dict[str, Any]:
    named = {f"{prefix}{number}": {"type": "string", "maxLength": 9} for number in range(properties)}
    return {"type": "object", "properties": named, "additionalProperties": False}


def nested_schema(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tool(name: str, properties: int = 1) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": object_schema(properties)}}


def words(count: int) -> str:
    return "the sea and the stone " * (count // 22)


SPECIAL_CHOICE = {"type": "function", "function": {"name": "<|im_end|>"}}
IMAGE = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": "data:,x"}}]

ATTACKS: Sequence[Attack] = (
    Attack("2 MB of words", COMPLETIONS, lambda: completion(prompt=words(2 * 10**6))(), message="limit"),
    Attack("2 MB without a space", COMPLETIONS, lambda: completion(prompt="a" * 2 * 10**6)(), message="limit"),
    Attack("10 MB of words", COMPLETIONS, lambda: completion(prompt=words(10**7))(), message="limit"),
    Attack("2 MB chat", CHATS, lambda: chat(messages=[{"role": "user", "content": words(2 * 10**6)}])()),
    Attack("100,000 empty prompts", COMPLETIONS, lambda: completion(prompt=[""] * 100_000)(), message="at most 128"),
    Attack("1,000,000 tokens", COMPLETIONS, lambda: completion(prompt=[7] * 10**6)(), message="limit"),
    Attack("500,000 wrong entries", COMPLETIONS, lambda: completion(prompt=[None] * 500_000)()),
    Attack("20 MB", COMPLETIONS, lambda: completion(prompt=words(20 * 10**6))(), (413,)),
    Attack("deep nesting", COMPLETIONS, lambda: b"[" * 10**6),
    Attack("no JSON", COMPLETIONS, lambda: b"\xff\xfe{"),
    Attack("a lone surrogate", COMPLETIONS, lambda: b'{"model": "tiny", "prompt": "\\ud800"}'),
    Attack("a schema of 2,000 properties", CHATS, chat(response_format=schema_form(object_schema(2000)))),
    Attack("a schema of 200 levels", CHATS, chat(response_format=schema_form(nested_schema(200)))),
    Attack(
        "a schema of 100,000 values",
        CHATS,
        chat(response_format=schema_form({"enum": [f"value {number}" for number in range(100_000)]})),
    ),
    Attack(
        "a schema with large counts",
        COMPLETIONS,
        completion(
            prompt="a", response_format=schema_form({"type": "string", "pattern": "^(a{1,900}b{1,900}){1,900}$"})
        ),
        (200, 400, 429),
    ),
    Attack(
        "a schema that takes minutes to compile",
        COMPLETIONS,
        completion(prompt="a", response_format=schema_form({"type": "integer", "multipleOf": 500010})),
        message="beyond 1 s and 64 MiB of compilation",
    ),
    Attack(
        "a schema that is a reference to itself",
        COMPLETIONS,
        completion(prompt="a", response_format=schema_form({"$ref": "#"})),
        message="$ref to itself",
    ),
    Attack(
        "a schema of 1,000 optional properties",
        COMPLETIONS,
        completion(prompt="a", max_tokens=20, response_format=schema_form(object_schema(1000))),
        (200,),
    ),
    Attack(
        "300 prompts with a schema",
        COMPLETIONS,
        completion(prompt=["Once"] * 300, response_format=schema_form(object_schema(30))),
    ),
    Attack(
        "100 prompts with a schema",
        COMPLETIONS,
        completion(prompt=["Once"] * 100, response_format=schema_form(object_schema(30))),
        (200, 429),
    ),
    Attack(
        "a tool named like a special token",
        CHATS,
        chat(tools=[tool("<|im_end|>")], tool_choice=SPECIAL_CHOICE),
        message="special token",
    ),
    Attack(
        "a property named like a special token",
        CHATS,
        chat(response_format=schema_form({"type": "object", "properties": {"<|im_start|>": {"type": "string"}}})),
        message="special token",
    ),
    Attack("1,000 tools", CHATS, chat(tools=[tool(f"tool{number}") for number in range(1000)]), message="at most 128"),
    Attack("10,000 messages", CHATS, chat(messages=MESSAGES * 10_000), message="at most 4096"),
    Attack("an image", CHATS, chat(messages=[{"role": "user", "content": IMAGE}]), message="image"),
    Attack("a long stop string", COMPLETIONS, completion(prompt="a", stop=["x" * 10**6])),
    Attack("100,000 biases", COMPLETIONS, completion(prompt="a", logit_bias={str(n): 1 for n in range(100_000)})),
    Attack("a long model name", COMPLETIONS, completion(prompt="a", model="m" * 10**6)),
    Attack("an unknown model", COMPLETIONS, completion(prompt="a", model="m" * 1000), (404,)),
    Attack("a long unknown field", COMPLETIONS, completion(prompt="a", **{"f" * 10**5: 1}), (200,)),
    Attack(
        "a lora_path with a long component",
        LOAD,
        lambda: json.dumps({"lora_name": "bad", "lora_path": "/tmp/" + "x" * 300}).encode(),
    ),
    Attack(
        "a lora_path with a null byte", LOAD, lambda: json.dumps({"lora_name": "bad", "lora_path": "/tmp/\0x"}).encode()
    ),
    Attack("no lora_path", LOAD, lambda: json.dumps({"lora_name": "bad", "lora_path": "/no/such/place"}).encode()),
    Attack("a form", COMPLETIONS, completion(prompt="a"), (415,), {"Content-Type": "text/plain"}),
    Attack("a page", COMPLETIONS, completion(prompt="a"), (403,), {"Origin": "https://evil.example"}),
    Attack("another host", COMPLETIONS, completion(prompt="a"), (403,), {"Host": "rebound.example"}),
    Attack("embeddings", "/v1/embeddings", completion(input="a"), (404,), message="does not exist"),
)
