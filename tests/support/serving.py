"""A tiny qwen3_moe engine and server for tests: sample adapters, prompts, recorded events, an ASGI app on a socket."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ktransformers.adapters import LoraPair, adapter_from_tensors, facts_from_config, write_adapter

DATA = Path(__file__).parents[1] / "data"
HIDDEN, WIDE, EXPERTS, LAYERS = 64, 40, 6, 2
LINEARS = {"q_proj": (64, 64), "v_proj": (64, 32), "o_proj": (64, 64)}
VOCABULARY = 6400
# Until a test fails that waits for an event, however busy the machine is.
WAIT_SECONDS = 120.0
# Sums of a matrix product depend in their last bits on how many rows there are; nothing else may differ.
CPU_TOLERANCE = 2e-5
# What enters the experts is rounded to bf16: a sum that cuBLAS adds in another order, because the batch has other rows,
# may fall on the other side of a step of 2^-9. Adapters move these log-probabilities by more than a hundred times that.
GPU_TOLERANCE = 1e-2


def write_sample_adapter(directory: Path, model: Path, *, rank: int, seed: int, experts: bool = True) -> Path:
    torch.manual_seed(seed)

    def pair(outputs: int, inputs: int, *stack: int) -> LoraPair:
        a = torch.randn(*stack, rank, inputs) / inputs**0.5
        return LoraPair(a.bfloat16().float(), (torch.randn(*stack, outputs, rank) / 2).bfloat16().float(), 1.0)

    layers = {
        f"model.layers.{layer}.mlp": {
            "gate": pair(WIDE, HIDDEN, EXPERTS),
            "up": pair(WIDE, HIDDEN, EXPERTS),
            "down": pair(HIDDEN, WIDE, EXPERTS),
        }
        for layer in range(LAYERS if experts else 0)
    }
    linears = {
        f"model.layers.{layer}.self_attn.{name}": pair(outputs, inputs)
        for layer in range(LAYERS)
        for name, (inputs, outputs) in LINEARS.items()
    }
    facts = facts_from_config(json.loads((model / "config.json").read_text()))
    config = {"base_model_name_or_path": str(model)}
    write_adapter(adapter_from_tensors(layers, linears, model=facts, config=config), directory, "peft")
    return directory


@dataclass
class RecordedEvents:
    """The events of one sequence."""

    events: list[Any] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Any) -> None:
        self.events.append(event)
        self.began.set()
        if event.finish is not None:
            self.ended.set()

    @property
    def finish(self) -> str | None:
        return self.events[-1].finish if self.events else None

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    @property
    def tokens(self) -> list[int]:
        return [score.token for event in self.events for score in event.scores]

    @property
    def logprobs(self) -> list[float]:
        return [score.logprob for event in self.events for score in event.scores]


class EngineHarness:
    """A model, its forward pass and its adapters; each test makes new engines."""

    def __init__(
        self,
        directory: Path,
        adapters: dict[str, Path],
        dtype: torch.dtype = torch.float32,
        device: str | None = None,  # of everything but the experts
        hash_adapters: bool = False,
        model: Any = None,  # that is loaded already
    ) -> None:
        from transformers import AutoTokenizer

        from ktransformers.nn import load_model
        from ktransformers.serve.scheduler.forward import Forward
        from ktransformers.serve.scheduler.lora import LoraModules

        self.directory = directory
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model = load_model(directory, dtype=dtype, device=device) if model is None else model
        self.forward = Forward(self.model)
        self.kv_bytes_per_token = self.forward.check_against_stock()
        self.lora_modules = LoraModules(self.model, hash_content=hash_adapters)
        self.loaded = {name: self.lora_modules.open(path, name, 1, str(directory)) for name, path in adapters.items()}

    def engine(self, **limits: int) -> Any:
        from ktransformers.serve.scheduler.engine import ServeEngine
        from ktransformers.serve.scheduler.scheduler import Limits

        settings = {
            "max_running_requests": 8,
            "max_queued_requests": 64,
            "chunked_prefill_size": 64,
            "max_total_tokens": 4096,
            "context_length": 512,
        } | limits
        return ServeEngine(self.forward, Limits(**settings))

    def sequence(self, prompt: list[int], adapter: str | None = None, **options: Any) -> tuple[Any, RecordedEvents]:
        from ktransformers.serve.sampling.sampling import Sampling
        from ktransformers.serve.scheduler.sequence import GenerationRequest, Sequence

        options = {"max_tokens": 8, "sampling": Sampling(temperature=0), "logprobs": 2} | options
        request = GenerationRequest(tuple(prompt), adapter=self.loaded[adapter] if adapter else None, **options)
        recorded = RecordedEvents()
        return Sequence(request, self.tokenizer, recorded), recorded

    def run(self, engine: Any, *sequences: Any) -> None:
        engine.submit(sequences)
        while engine.busy:
            engine.step()

    def alone(self, prompt: list[int], adapter: str | None = None, **options: Any) -> RecordedEvents:
        sequence, recorded = self.sequence(prompt, adapter, **options)
        self.run(self.engine(), sequence)
        return recorded


@dataclass
class RunningServer:
    url: str
    service: Any


@contextmanager
def run_app(app: Any) -> Iterator[str]:
    """The application on a real socket, in a thread."""
    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 120
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    assert server.started
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def make_service(
    harness: EngineHarness, adapters: dict[str, Path], timeout: float | None = 120, workers: int = 1, **limits: int
) -> Any:
    """`workers`: processes that prepare requests; each takes seconds to start on a small machine."""
    from ktransformers.serve.http.registry import Registry
    from ktransformers.serve.http.service import PrepareOptions, Service

    engine = harness.engine(**limits)
    registry = Registry("tiny", harness.lora_modules, str(harness.directory), engine.drop_adapter)
    for name in ("one", "attention"):
        registry.load(name, adapters[name])
    options = PrepareOptions(workers=workers)
    size = harness.kv_bytes_per_token
    return Service(engine, registry, harness.tokenizer, timeout=timeout, prepare=options, kv_bytes_per_token=size)


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=length)


def same_completion(first: RecordedEvents, second: RecordedEvents) -> bool:
    assert first.tokens == second.tokens
    return torch.allclose(torch.tensor(first.logprobs), torch.tensor(second.logprobs), rtol=0, atol=CPU_TOLERANCE)


def wait_for_finish(recorded: RecordedEvents, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while recorded.finish is None and time.monotonic() < end:
        time.sleep(0.01)
    assert recorded.finish == "length", recorded.events
