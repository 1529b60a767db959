"""Sessions of real clients, as `make test-agents` recorded them, sent again to a scripted model. The answers have the
types of OpenAI's and Anthropic's packages, and the calls and texts that the script generates."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.support.scripted_model import CLIENT_TOOLS, FileTask, ScriptedService, scripted_service, write_model
from tests.support.serving import DATA, RunningServer, run_app

FOLDER = "/home/me/project"
TRANSCRIPTS = DATA / "agents"


def requests_of(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Path and body of each request of a transcript."""
    document = json.loads((TRANSCRIPTS / f"{name}.json").read_text())
    requests = []
    for entry in document["requests"]:
        said = [document["messages"][index] for index in entry["said"]]
        requests.append((entry["path"], {**document["fields"][entry["fields"]], entry["history"]: said}))
    return requests


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from ktransformers.serve.http.api import create_app

    service = scripted_service(write_model(tmp_path_factory.mktemp("model") / "scripted"), lambda _: "nothing")
    with run_app(create_app(service)) as url:
        yield RunningServer(url, service)


def post(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of the streamed answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
    finally:
        connection.close()
    assert reply.status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def heard_by_openai(events: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls of a stream of Chat Completions."""
    from openai.types.chat import ChatCompletionChunk

    reasoning, text, names, arguments = "", "", dict[int, str](), dict[int, str]()
    for event in events:
        for choice in ChatCompletionChunk.model_validate(event).choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for part in choice.delta.tool_calls or []:
                assert part.function is not None
                names.setdefault(part.index, part.function.name or "")
                arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
    return reasoning, text, [(names[index], json.loads(arguments[index])) for index in names]


def heard_by_anthropic(events: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Thinking, text and calls of a stream of the Messages API."""
    from anthropic.types import RawMessageStreamEvent

    adapter: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
    pieces: dict[str, str] = {"thinking": "", "text": ""}
    names, arguments = list[str](), list[str]()
    for document in events:
        if document["type"] == "ping":
            continue
        event = adapter.validate_python(document)
        if event.type == "content_block_start" and event.content_block.type == "tool_use":
            names.append(event.content_block.name)
            arguments.append("")
        elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
            arguments[-1] += event.delta.partial_json
        elif event.type == "content_block_delta" and event.delta.type in ("text_delta", "thinking_delta"):
            kind = event.delta.type.removesuffix("_delta")
            pieces[kind] += getattr(event.delta, kind)
    return pieces["thinking"], pieces["text"], list(zip(names, map(json.loads, arguments), strict=True))


def heard_of_responses(events: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, text and calls of a stream of the Responses API."""
    from openai.types.responses import ResponseCompletedEvent, ResponseStreamEvent

    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    parsed = [adapter.validate_python(event) for event in events]
    assert [event.sequence_number for event in parsed] == list(range(len(parsed)))
    last = parsed[-1]
    assert isinstance(last, ResponseCompletedEvent)
    items = last.response.output
    reasoning = [part.text for item in items if item.type == "reasoning" for part in item.content or []]
    calls = [(item.name, json.loads(item.arguments)) for item in items if item.type == "function_call"]
    return "".join(reasoning), last.response.output_text, calls


HEARD = {
    "/v1/chat/completions": heard_by_openai,
    "/v1/messages": heard_by_anthropic,
    "/v1/responses": heard_of_responses,
}


@pytest.mark.parametrize("name", CLIENT_TOOLS)
def test_session_is_answered_as_the_script_says(name: str, server: RunningServer) -> None:
    pytest.importorskip("anthropic" if name == "claude" else "openai")
    assert isinstance(server.service, ScriptedService)
    task = FileTask(CLIENT_TOOLS[name], FOLDER)
    server.service.answer = task
    calls, texts, thoughts = list[Any](), list[str](), list[str]()
    for path, body in requests_of(name):
        reasoning, text, called = HEARD[path](post(server.url, path, body))
        calls += called
        texts.append(text.strip())
        thoughts.append(reasoning.strip())
    assert calls == list(task.steps())
    steps = range(1, len(calls) + 1)
    assert [text for text in texts if text.startswith("I go on")] == [f"I go on with step {step}." for step in steps]
    assert [text for text in thoughts if text] == [f"Step {step} is next." for step in steps]
    # The sum stands in the result of a tool alone; the second turn has it from the first.
    (first,) = {text for text in texts if text.startswith("The sum is")}
    total = first.split()[3].rstrip(".")
    assert total.isdigit() and "The other file:" in first and "was read" not in first
    assert f"The sum was {total} and is still {total}." in texts
