"""Ollama's API for desktop clients, through a server whose answers are given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ktransformers.serve.doors.conversation import Reasoning
from ktransformers.serve.doors.ollama import OLLAMA
from ktransformers.serve.http.error import ApiError
from tests.serve.doors.test_chat import ASKED, CALL, THOUGHT, TOOLS
from tests.serve.http.test_access import ask
from tests.support.scripted import scripted
from tests.support.serving import RunningServer


def parse(**fields: Any) -> Any:
    return OLLAMA.parse(json.dumps({"model": "tiny:latest", "messages": ASKED, **fields}).encode())


def test_options_are_settings() -> None:
    options = {"temperature": 0.5, "repeat_penalty": 1.2, "num_predict": -1, "num_ctx": 8192, "mirostat": 1}
    request = parse(options=options, think="high", format="json", keep_alive="5m")
    assert request.generation.sampling == {"temperature": 0.5, "repetition_penalty": 1.2}
    assert (
        request.generation.max_tokens is None
        and request.generation.stream
        and request.generation.model == "tiny:latest"
    )
    assert request.conversation.reasoning == Reasoning(True, "high") and request.generation.schema == {"type": "object"}
    assert request.ignored == ("options.mirostat",)
    with pytest.raises(ApiError, match="images"):
        parse(messages=[{"role": "user", "content": "a", "images": ["AA=="]}])


@pytest.mark.parametrize("stream", [True, False])
def test_chat(served: RunningServer, stream: bool) -> None:
    body = {"model": "tiny:latest", "messages": ASKED, "tools": TOOLS, "stream": stream}
    with scripted(served.service, f"{THOUGHT}Let me see.\n{CALL}"):
        status, headers, answer = ask(served.url, "/api/chat", body)
    lines = [json.loads(line) for line in answer.decode().splitlines()]
    assert status == 200 and headers["content-type"] == ("application/x-ndjson" if stream else "application/json")
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    assert "".join(message.get("thinking", "") for message in messages).strip() == "I need the tool."
    assert "".join(message["content"] for message in messages).strip() == "Let me see."
    (call,) = [call for message in messages for call in message.get("tool_calls", [])]
    assert call["function"]["name"] == "weather" and call["function"]["arguments"] == {"town": "Bonn"}
    assert lines[-1]["done_reason"] == "stop" and lines[-1]["eval_count"] > 10 < lines[-1]["prompt_eval_count"]


def test_lists_and_descriptions(served: RunningServer) -> None:
    tags = json.loads(ask(served.url, "/api/tags")[2])["models"]
    assert [model["name"] for model in tags] == ["tiny", "tiny:one", "tiny:attention"]
    for name in ("tiny:latest", "tiny:one", "one"):
        shown = json.loads(ask(served.url, "/api/show", {"model": name})[2])
        assert {"completion", "tools"} <= set(shown["capabilities"]) and "messages" in shown["template"]
        assert shown["model_info"]["ktransformers.context_length"] == 512
    status, _, body = ask(served.url, "/api/show", {"model": "nobody:latest"})
    assert status == 404 and "not served" in json.loads(body)["error"]
    assert "version" in json.loads(ask(served.url, "/api/version")[2])


def test_an_adapter_may_have_the_name_of_the_default_tag(served: RunningServer, adapters: dict[str, Path]) -> None:
    service = served.service
    assert service.find("tiny:latest") is None and service.find("one:latest") is service.find("tiny:one")
    latest = service.registry.load("latest", adapters["two"])
    try:
        assert service.find("tiny:latest") is service.find("latest") is latest
        shown = json.loads(ask(served.url, "/api/show", {"model": "tiny:latest"})[2])
        assert shown["details"]["parent_model"]
    finally:
        service.registry.unload("latest")
