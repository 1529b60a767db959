"""GPU memory that runs out while a server computes: the request that asked for too much ends with 503 and says what to
change, running and later requests are answered, and no memory is lost. The shortage is torch's own, not a stand-in: the
process is held to a little more than the model and short requests need, and one prompt has tens of thousands of tokens.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktransformers.ground.options.placement import PlacementOptions
from ktransformers.place.apply import attach_engine, place_residents
from ktransformers.serve.flags import parse
from ktransformers.serve.forecast import plan_server
from ktransformers.serve.loading import open_service
from ktransformers.serve.target import resolve_target
from tests.support.gpu_memory import allocated, check_shortage, limited_gpu_memory
from tests.support.serving import DATA, VOCABULARY, EngineHarness, random_prompt, run_app
from tests.support.tiny_models import build, save

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*bf16.*")]

LARGE = 32_000  # tokens of the prompt that does not fit: one activation in float32 has 64 MiB
SPARE = 160 << 20  # enough for short requests and the KV slot of the large one
DRIFT = 1 << 20  # bytes: what a step leaves in caches of torch
CYCLES = 4
LONG = 4000  # new tokens of a request that runs meanwhile
TOLERANCE = 0.05  # of log-probabilities: experts on a GPU round gate and up to bf16


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("out_of_memory") / "wide"
    sizes: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64, "moe_intermediate_size": 64}
    positions = {"max_position_embeddings": 2 * LARGE, "vocab_size": VOCABULARY, "eos_token_id": 2}
    save(build("qwen3_moe", **sizes, **positions), directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, directory / file)
    return directory


@pytest.fixture(params=["cpu", "resident", "stream"])
def wide(request: pytest.FixtureRequest, wide_model: Path) -> Iterator[EngineHarness]:
    """Experts on the CPU, some of them on the GPU, all of them streamed to it."""
    harness = EngineHarness(wide_model, {}, device="cuda")
    placement = None
    if request.param != "cpu":
        residents = 2 if request.param == "resident" else None
        options = PlacementOptions(kt_place=request.param, kt_num_gpu_experts=residents)
        placement = attach_engine(harness.model, options, device="cuda:0")
        assert placement is not None
        place_residents(placement, options, None, {})
    yield harness
    if placement is not None:
        placement.detach()


def test_the_engine_ends_one_request_and_loses_no_memory(wide: EngineHarness) -> None:
    prompts = [random_prompt(seed, 9) for seed in (1, 2)]
    engine = wide.engine(
        max_running_requests=4, chunked_prefill_size=LARGE, max_total_tokens=2 * LARGE, context_length=LARGE + 64
    )
    engine.memory_advice = "a smaller --chunked-prefill-size"

    def answers(*others: Any) -> list[Any]:
        """Two short requests; the others come when these have begun."""
        sequences, recorded = zip(*(wide.sequence(prompt, max_tokens=12) for prompt in prompts), strict=True)
        engine.submit(sequences)
        for _ in range(3):
            engine.step()
        wide.run(engine, *others)
        return list(recorded)

    expected = answers()
    held = []
    with limited_gpu_memory(SPARE) as limit:
        for cycle in range(CYCLES):
            large, ended = wide.sequence(random_prompt(3 + cycle, LARGE), max_tokens=1)
            recorded = answers(large)
            assert ended.finish == "out_of_memory", ended.events[-1].error
            line = ended.events[-1].error
            check_shortage(line, limit)
            assert f" on the GPU, in a step with {LARGE} tokens of this request; in this order: a smaller" in line
            for one, other in zip(recorded, expected, strict=True):
                assert one.finish == "length" and len(one.tokens) == 12
                assert one.logprobs[0] == pytest.approx(other.logprobs[0], abs=TOLERANCE)
            assert not engine.running and not any(slot.busy for slot in engine.kv_cache.slots)
            held.append(allocated())
    assert max(held[1:]) - min(held[1:]) < DRIFT, held
    large, ended = wide.sequence(random_prompt(3, LARGE), max_tokens=1)
    wide.run(engine, large)
    assert ended.finish == "length", "with enough memory the same request is answered"


def post(url: str, body: dict[str, Any]) -> tuple[int, Any, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.headers, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


@pytest.mark.parametrize("place", ["cpu", "stream"])
def test_a_server_answers_503_with_advice_and_goes_on(
    place: str, wide_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from ktransformers.serve.http.api import create_app

    line = [str(wide_model), "--device", "cuda", "--dtype", "float32", "--kt-place", place]
    line += ["--chunked-prefill-size", str(LARGE), "--max-total-tokens", str(2 * LARGE)]
    line += ["--context-length", str(LARGE + 4096), "--max-running-requests", "4"]
    launch, target = parse(line), resolve_target(str(wide_model))
    plan = plan_server(launch, target, lambda _: None, lambda _: None)
    assert plan is not None
    service = open_service(launch, target, lambda _: None, plan)
    short = {"model": "wide", "prompt": random_prompt(1, 9), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    large = short | {"prompt": random_prompt(2, LARGE), "max_tokens": 1}
    with run_app(create_app(service)) as url:
        address = f"{url}/v1/completions"
        for _ in range(6):  # graphs of decode steps are captured, workspaces allocated
            assert post(address, short)[0] == 200
        text = post(address, short)[2]["choices"][0]["text"]
        with limited_gpu_memory(SPARE) as limit:
            running: list[Any] = []
            long = threading.Thread(target=lambda: running.append(post(address, short | {"max_tokens": LONG})))
            before = service.engine.counts.new_tokens
            long.start()
            end = time.monotonic() + 60
            while service.engine.counts.new_tokens < before + 20 and time.monotonic() < end:
                time.sleep(0.005)
            status, headers, answer = post(address, large)
            assert service.engine.running, "the long request was still computed when the large one had ended"
            assert status == 503 and answer["error"]["code"] == "out_of_memory"
            assert headers["x-request-id"]
            message = answer["error"]["message"]
            check_shortage(message, limit)
            order = [f"--chunked-prefill-size (now {LARGE}, planned", "--max-running-requests (now 4)"]
            order += ["int8 experts by --kt-method int8 (now bf16", "--max-total-tokens (now "]
            places = [message.index(words) for words in order]
            assert places == sorted(places), message
            long.join()
            assert running[0][0] == 200 and running[0][2]["usage"]["completion_tokens"] == LONG
            held = []
            for _ in range(CYCLES):
                assert post(address, large)[0] == 503
                status, _, answer = post(address, short)
                assert status == 200 and answer["choices"][0]["text"][:1] == text[:1]
                held.append(allocated())
            assert max(held[1:]) - min(held[1:]) < DRIFT, held
            with urllib.request.urlopen(f"{url}/health") as reply:
                assert reply.status == 200
        assert post(address, large)[0] == 200
    assert service.engine.counts.finished["out_of_memory"] == 1 + CYCLES
    assert "Traceback" not in caplog.text
