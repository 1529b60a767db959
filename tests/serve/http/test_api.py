"""The API through the `openai` client and through plain HTTP, on a local socket."""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ktransformers.serve.doors.chat import ChatEmitter
from tests.support.serving import EngineHarness, RunningServer, make_service, run_app

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def client(served: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def post(url: str, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def get(url: str, path: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ids(harness: EngineHarness, text: str) -> list[int]:
    actual: list[int] = harness.tokenizer(text)["input_ids"]
    return actual


def test_models_and_health(client: Any, served: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "tiny:one", "tiny:attention"]
    assert client.models.retrieve("tiny:one").id == "tiny:one"
    assert get(served.url, "/health") == (200, '{"status":"ok"}')


@pytest.mark.parametrize(("model", "adapter"), [("tiny", None), ("tiny:one", "one"), ("one", "one")])
def test_model_name_selects_base_or_adapter(
    client: Any, harness: EngineHarness, model: str, adapter: str | None
) -> None:
    response = client.completions.create(model=model, prompt="The sea is", max_tokens=8, temperature=0, logprobs=2)
    expected = harness.alone(ids(harness, "The sea is"), adapter)
    assert response.choices[0].text == expected.text
    assert response.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=2e-5)
    assert response.choices[0].finish_reason == "length"
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (len(ids(harness, "The sea is")), 8)


def test_streamed_chat_equals_complete_chat(client: Any) -> None:
    same = {"model": "tiny:one", "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 12, "logprobs": True}
    whole = client.chat.completions.create(**same, top_logprobs=3)
    parts = list(
        client.chat.completions.create(**same, top_logprobs=3, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == whole.choices[0].message.content
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts if part.choices][-1] == "length"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    logs = [
        one for part in parts if part.choices and part.choices[0].logprobs for one in part.choices[0].logprobs.content
    ]
    assert [one.token for one in logs] == [one.token for one in whole.choices[0].logprobs.content]
    for one in logs:
        assert len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob >= one.logprob
        assert bytes(one.bytes).decode(errors="replace") == one.token


def test_chat_template_receives_its_variables(client: Any, served: RunningServer) -> None:
    tokenizer = served.service.tokenizer
    for thinking in (True, False):
        text = tokenizer.apply_chat_template(
            MESSAGES, tokenize=False, add_generation_prompt=True, enable_thinking=thinking
        )
        response = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=1,
            extra_body={"chat_template_kwargs": {"enable_thinking": thinking}},
        )
        assert response.usage.prompt_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_developer_role_is_system_and_parts_are_text(served: RunningServer) -> None:
    from ktransformers.serve.doors.chat import CHAT

    def prompt(*messages: dict[str, Any]) -> tuple[int, ...]:
        body = {"model": "tiny", "messages": [*messages, *MESSAGES], "max_tokens": 1}
        generation, _ = served.service.chat(CHAT.parse(json.dumps(body).encode()))
        actual: tuple[int, ...] = generation.prompt
        return actual

    plain = prompt({"role": "system", "content": "Be brief."})
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    assert (
        plain == prompt({"role": "developer", "content": "Be brief."}) == prompt({"role": "system", "content": parts})
    )


def test_n_and_seed(client: Any) -> None:
    same = {"model": "tiny", "prompt": "Once", "max_tokens": 8, "n": 3, "seed": 5}
    first = client.completions.create(**same, extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1})
    again = client.completions.create(**same, extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1})
    texts = [choice.text for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.text for choice in again.choices] and len(set(texts)) == 3
    assert first.usage.completion_tokens == 24


def test_stop_strings_and_tokens(client: Any, harness: EngineHarness) -> None:
    whole = client.completions.create(model="tiny", prompt="Once", max_tokens=24, temperature=0).choices[0].text
    stop = whole[9:12]
    cut = client.completions.create(model="tiny", prompt="Once", max_tokens=24, temperature=0, stop=[stop, "never"])
    assert cut.choices[0].text == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    parts = client.completions.create(model="tiny", prompt="Once", max_tokens=24, temperature=0, stop=stop, stream=True)
    assert "".join(part.choices[0].text for part in parts) == cut.choices[0].text
    tokens = harness.alone(ids(harness, "Once"), max_tokens=6).tokens
    ended = client.completions.create(
        model="tiny", prompt="Once", max_tokens=24, temperature=0, extra_body={"stop_token_ids": [tokens[3]]}
    )
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens <= 4


def test_echo_scores_batch_of_token_prompts_like_lm_eval(client: Any, harness: EngineHarness) -> None:
    prompts = [ids(harness, "The sea is deep and blue."), ids(harness, "One two")]
    response = client.completions.create(
        model="tiny:one", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    for prompt, choice in zip(prompts, response.choices, strict=True):
        reported = choice.logprobs
        assert len(reported.tokens) == len(reported.token_logprobs) == len(reported.text_offset) == len(prompt) + 1
        assert reported.token_logprobs[0] is None and reported.top_logprobs[0] is None
        expected = harness.alone(prompt, "one", max_tokens=0, prompt_logprobs=True)
        scores = [score.logprob for event in expected.events for score in event.prompt_scores][1:]
        assert reported.token_logprobs[1:-1] == pytest.approx(scores, abs=2e-5)
        for token, top in zip(reported.token_logprobs[1:], reported.top_logprobs[1:], strict=True):
            assert max(top.values()) >= token


def test_echo_of_text_reports_offsets(client: Any) -> None:
    text = "The sea is deep."
    response = client.completions.create(model="tiny", prompt=text, max_tokens=0, logprobs=1, echo=True)
    choice = response.choices[0]
    assert choice.text == text
    starts = choice.logprobs.text_offset
    assert starts[0] == 0 and starts == sorted(starts) and starts[-1] < len(text)
    assert "".join(choice.logprobs.tokens) == text
    streamed = list(client.completions.create(model="tiny", prompt=text, max_tokens=2, echo=True, stream=True))
    assert "".join(part.choices[0].text for part in streamed).startswith(text)


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        (b"[" * 100_000, 400, "recursion"),
        (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "temperature"),
        ({"model": "tiny"}, 400, "prompt: given nothing, expected a value"),
        ({"model": 3, "prompt": "a"}, 400, "model: given 3, expected text"),
        ({"model": "other", "prompt": "a"}, 404, "not served; expected one of tiny, tiny:one"),
        ({"model": "tiny:none", "prompt": "a"}, 404, "not served"),
        ({"model": "tiny", "prompt": 3}, 400, "prompt: given 3, expected text or a list"),
        ({"model": "tiny", "prompt": ["a", 1]}, 400, "prompt"),
        ({"model": "tiny", "prompt": "a", "max_tokens": "8"}, 400, "max_tokens: given '8', expected an integer"),
        ({"model": "tiny", "prompt": "a", "suffix": "b"}, 400, "suffix: given 'b', expected no text"),
        ({"model": "tiny", "prompt": "a", "guided_json": "{"}, 400, "guided_json"),
        ({"model": "tiny", "prompt": "a", "max_tokens": 100_000}, 400, "512 is the limit"),
        ({"model": "tiny", "prompt": [6400]}, 400, "less than 6400"),
        ({"model": "tiny", "prompt": []}, 400, "empty"),
        ({"model": "tiny", "prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"model": "tiny", "prompt": "a", "temperature": -1}, 400, "temperature"),
        ({"model": "tiny", "prompt": "a", "best_of": 4}, 400, "best_of"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, ""),
    ],
)
def test_invalid_requests_get_openai_error_envelope(served: RunningServer, body: Any, status: int, words: str) -> None:
    code, response = post(served.url, "/v1/completions", body)
    assert code == status
    assert set(response["error"]) == {"message", "type", "param", "code"}
    assert words.lower() in response["error"]["message"].lower()


def test_invalid_chats_are_refused(served: RunningServer, client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="image_url"):
        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        client.chat.completions.create(model="tiny", messages=picture)
    with pytest.raises(openai.BadRequestError, match="own variables"):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"chat_template_kwargs": {"tokenize": True}}
        )
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert post(served.url, "/v1/nothing", {})[0] == 404
    assert json.loads(get(served.url, "/v1/nothing")[1])["error"]["type"] == "not_found_error"
    assert get(served.url, "/v1/completions")[0] == 405


def test_adapters_are_loaded_and_unloaded_while_requests_run(
    client: Any, served: RunningServer, adapters: dict[str, Path]
) -> None:
    running = client.completions.create(
        model="tiny:one",
        prompt="Once upon",
        max_tokens=200,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(running))
    code, response = post(served.url, "/v1/load_lora_adapter", {"lora_name": "two", "lora_path": str(adapters["two"])})
    assert code == 200 and response["loaded_adapters"]["two"] == str(adapters["two"])
    assert "tiny:two" in [model.id for model in client.models.list()]
    two = client.completions.create(model="tiny:two", prompt="Once upon", max_tokens=8, temperature=0).choices[0].text
    code, response = post(served.url, "/v1/load_lora_adapter", {"lora_name": "two", "lora_path": str(adapters["one"])})
    assert code == 400 and "not loaded yet" in response["error"]["message"]
    replaced = {"lora_name": "two", "lora_path": str(adapters["one"]), "load_inplace": True}
    assert post(served.url, "/load_lora_adapter", replaced)[0] == 200
    one = client.completions.create(model="tiny:two", prompt="Once upon", max_tokens=8, temperature=0).choices[0].text
    assert one != two
    assert (
        one == client.completions.create(model="one", prompt="Once upon", max_tokens=8, temperature=0).choices[0].text
    )
    assert post(served.url, "/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 200
    assert post(served.url, "/v1/unload_lora_adapter", {"lora_name": "two"})[0] == 404
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny:two", prompt="Once upon")
    code, response = post(served.url, "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": "/no/such/place"})
    assert code == 400 and "/no/such/place" in response["error"]["message"]
    present = str(Path(__file__).parent)
    code, same = post(served.url, "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": present})
    assert code == 400 and same["error"]["param"] == "lora_path"
    assert same["error"]["message"].replace(present, "/no/such/place") == response["error"]["message"]
    rest = list(running)
    assert rest[-1].choices[0].finish_reason == "length"


def test_disconnected_client_is_cancelled(served: RunningServer) -> None:
    engine = served.service.engine
    body = {"model": "tiny", "prompt": "Once", "max_tokens": 450, "ignore_eos": True}
    for stream in (True, False):
        before = engine.counts.finished.get("cancelled", 0)
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=30)
        connection.request(
            "POST", "/v1/completions", json.dumps({**body, "stream": stream}), {"Content-Type": "application/json"}
        )
        if stream:
            connection.getresponse().read(40)
        else:
            time.sleep(0.2)
        connection.close()
        if connection.sock is not None:
            connection.sock.close()
        end = time.monotonic() + 20
        while engine.counts.finished.get("cancelled", 0) == before and time.monotonic() < end:
            time.sleep(0.02)
        assert engine.counts.finished.get("cancelled", 0) == before + 1
    assert not engine.running


@pytest.mark.parametrize("broken", ["parser", "emitter", "event"])
def test_sequences_end_with_an_answer_that_fails(
    served: RunningServer, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    engine, counts = served.service.engine, served.service.engine.counts
    owner, name = {
        "parser": (served.service, "choice_parser"),
        "emitter": (ChatEmitter, "__init__"),
        "event": (ChatEmitter, "event"),
    }[broken]
    monkeypatch.setattr(owner, name, fail)
    before = sum(counts.finished.values()), counts.finished.get("cancelled", 0)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 400, "ignore_eos": True}
    assert post(served.url, "/v1/chat/completions", body)[0] == 500
    if broken != "parser":
        end = time.monotonic() + 20
        while counts.finished.get("cancelled", 0) == before[1] and time.monotonic() < end:
            time.sleep(0.02)
        assert counts.finished.get("cancelled", 0) == before[1] + 1
    else:
        assert sum(counts.finished.values()) == before[0]
    assert not engine.running


def test_an_adapter_may_be_unloaded_before_its_answer_begins(
    served: RunningServer, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = served.service
    service.registry.load("brief", adapters["one"])
    original = service.generation_requests

    def generation_requests(prepared: Any, request_id: str = "") -> Any:
        requests = original(prepared, request_id)
        service.registry.unload("brief")
        return requests

    monkeypatch.setattr(service, "generation_requests", generation_requests)
    body = {"model": "brief", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    code, response = post(served.url, "/v1/chat/completions", body)
    assert code == 200 and response["usage"]["completion_tokens"] > 0


def test_full_queue_missing_key_and_timeout_are_refused(harness: EngineHarness, adapters: dict[str, Path]) -> None:
    from ktransformers.serve.http.api import create_app
    from ktransformers.serve.http.boundary import AccessRules

    service = make_service(harness, adapters, timeout=0.4, max_running_requests=1, max_queued_requests=1)
    with run_app(create_app(service, rules=AccessRules("secret"))) as url:
        key = {"Authorization": "Bearer secret"}
        short = {"model": "tiny", "prompt": "Once", "max_tokens": 1}
        assert post(url, "/v1/completions", short)[0] == 401
        assert post(url, "/v1/completions", short, Authorization="Bearer wrong")[0] == 401
        assert get(url, "/health")[0] == 200 and get(url, "/metrics")[0] == 401
        assert post(url, "/v1/completions", short, **key)[0] == 200
        code, response = post(url, "/v1/completions", {**short, "n": 4}, **key)
        assert code == 429 and response["error"]["type"] == "rate_limit_error"
        code, response = post(url, "/v1/completions", {**short, "max_tokens": 500, "ignore_eos": True}, **key)
        assert code == 504 and response["error"]["code"] == "timeout"
        text = get(url, "/metrics", **key)[1]
        assert 'kt_requests_total{path="/v1/completions",status="429"} 1' in text
        assert "\nkt_worker_restarts_total 0\n" in text
        assert 'kt_finished_total{finish="timeout"} 1' in text


def test_metrics_count_requests(served: RunningServer, client: Any) -> None:
    def read() -> dict[str, float]:
        lines = [line.split(" ") for line in get(served.url, "/metrics")[1].splitlines() if line[0] != "#"]
        return {name: float(value) for name, value in lines}

    before = read()
    client.completions.create(model="tiny", prompt="Something new", max_tokens=5, extra_body={"ignore_eos": True})
    after = read()
    assert after["kt_new_tokens_total"] - before["kt_new_tokens_total"] == 5
    assert after["kt_adapters"] == 2 and after["kt_running_sequences"] == 0
    assert after["kt_cache_bytes_per_token"] == served.service.kv_bytes_per_token > 0
    assert after["kt_cache_bytes_per_sequence"] == after["kt_cache_states"] == 0


def test_openapi_describes_every_path(served: RunningServer) -> None:
    text = get(served.url, "/openapi.json")[1]
    document = json.loads(text)
    schemas = document["components"]["schemas"]
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in schemas
    assert "#/$defs" not in text and "messages" in schemas["ChatBody"]["properties"]
    listed = {"/v1/completions", "/v1/models", "/v1/load_lora_adapter", "/metrics", "/api/chat", "/tokenize"}
    assert listed <= set(document["paths"])
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert {"200", "400", "404", "429"} <= set(answers) and "422" not in answers


def test_models_have_the_fields_that_clients_read(served: RunningServer) -> None:
    document = json.loads(get(served.url, "/v1/models")[1])
    assert isinstance(document["models"], list)
    for model in document["data"]:
        lengths = {model["context_length"], model["max_context_length"], model["max_model_len"], model["meta"]["n_ctx"]}
        assert lengths == {512} and {"chat", "tools", "thinking"} <= set(model["capabilities"])


def test_tokenize_and_detokenize(served: RunningServer, harness: EngineHarness) -> None:
    expected = ids(harness, "The sea is deep.")
    status, answer = post(served.url, "/tokenize", {"prompt": "The sea is deep.", "return_token_strs": True})
    assert (
        status == 200 and answer["tokens"] == expected and answer["count"] == len(expected) == len(answer["token_strs"])
    )
    assert post(served.url, "/detokenize", {"tokens": expected}) == (200, {"prompt": "The sea is deep."})
    chat = post(served.url, "/tokenize", {"messages": MESSAGES})[1]["tokens"]
    text = harness.tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert chat == harness.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert post(served.url, "/tokenize", {})[0] == post(served.url, "/detokenize", {"tokens": [-1]})[0] == 400


def test_counts_are_of_models_that_are_served(served: RunningServer) -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}]}
    bodies = {
        "/v1/messages/count_tokens": said,
        "/v1/responses/input_tokens": {"input": "Hi"},
        "/tokenize": said,
        "/detokenize": {"tokens": [5]},
    }
    for path, body in bodies.items():
        assert post(served.url, path, {**body, "model": "one"})[0] == 200
        status, answer = post(served.url, path, {**body, "model": "nobody"})
        assert status == 404 and "not served" in answer["error"]["message"]


def test_page_loads_nothing_from_other_hosts(served: RunningServer) -> None:
    status, page = get(served.url, "/")
    assert status == 200 and "<title>ktransformers</title>" in page
    outside = [word for word in re.findall(r"https?://[^\s\"'<>]+", page) if "www.w3.org/2000/svg" not in word]
    assert not outside and "import(" not in page
    for path in re.findall(r'fetch\("([^"?]+)', page):
        assert get(served.url, path)[0] in (200, 405), path
    assert json.loads(get(served.url, "/training")[1]) == {"directory": None, "lines": [], "next": 0}
    status, response = get(served.url, "/training?after=x")
    assert status == 400 and "after" in json.loads(response)["error"]["message"]


def test_kt_eval_scores_through_the_server(served: RunningServer, harness: EngineHarness) -> None:
    """Text prompts by offsets, token prompts by count: both equal the engine's scores."""
    from ktransformers.evaluate.backend import EvalPrompt, PromptTokenizer, Question
    from ktransformers.evaluate.remote import RemoteBackend, connect

    question = Question(EvalPrompt("The sea is", chat=False), (" deep", " very dry indeed"))
    expected = []
    for text in question.continuations:
        whole = ids(harness, question.prompt.text + text)
        recorded = harness.alone(whole, "one", max_tokens=0, prompt_logprobs=True)
        scores = [score.logprob for event in recorded.events for score in event.prompt_scores]
        expected.append(sum(scores[len(ids(harness, question.prompt.text)) :]))
    for tokens in (None, PromptTokenizer(harness.tokenizer, "tiny")):
        backend = RemoteBackend(connect(served.url), "tiny:one", tokens)
        (actual,) = backend.likelihoods([question])
        assert [one.logprob for one in actual] == pytest.approx(expected, abs=1e-4)
