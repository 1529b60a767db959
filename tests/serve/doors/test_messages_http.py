"""The Messages API of a running server, through the `anthropic` client."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.support.serving import RunningServer

CONVERSATION: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def client(served: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


def test_a_stream_is_the_same_message_and_its_prompt_is_cached(client: anthropic.Anthropic) -> None:
    fields: dict[str, Any] = {"model": "claude-any", "max_tokens": 8, "messages": CONVERSATION}
    fields["extra_body"] = {"temperature": 0}
    message = client.messages.create(**fields)
    with client.messages.stream(**fields) as stream:
        streamed = stream.get_final_message()
    (answered,), (block,) = message.content, streamed.content
    assert answered.type == block.type == "text" and answered.text == block.text
    assert (message.stop_reason, message.model, message.usage.output_tokens) == ("max_tokens", "claude-any", 8)
    cached = streamed.usage.cache_read_input_tokens
    assert cached
    counted = client.messages.count_tokens(model="tiny", messages=CONVERSATION)
    assert counted.input_tokens == streamed.usage.input_tokens + cached


def test_a_limit_beyond_the_context_is_lowered(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model="tiny", max_tokens=16000, messages=CONVERSATION, stop_sequences=["e", "a"])
    assert message.stop_reason in ("stop_sequence", "end_turn", "model_context_window_exceeded")


def test_a_prompt_that_is_too_long_is_refused_in_words_that_make_clients_compact(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "sea " * 2000}]
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="tiny", max_tokens=8, messages=messages)
    body: Any = caught.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["message"].startswith("prompt is too long")


def test_a_wrong_value_is_told_in_the_envelope_of_this_api(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="max_tokens: given 0, expected at least 1"):
        client.messages.create(model="tiny", max_tokens=0, messages=CONVERSATION)
