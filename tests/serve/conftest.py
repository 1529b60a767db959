"""A tiny qwen3_moe with a real tokenizer and Qwen3's chat template, and three adapters for it: on attention and
experts, on both with other ranks, on attention alone. Everything in float32; the numbers of the weights are bf16.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.adapters import LoraPair, facts_of, in_memory, write_adapter
from tests.support.tiny_models import FAMILIES, build, save

DATA = Path(__file__).parents[1] / "data"
HIDDEN, WIDE, EXPERTS, LAYERS = 64, 40, 6, 2
LINEARS = {"q_proj": (64, 64), "v_proj": (64, 32), "o_proj": (64, 64)}
VOCABULARY = 6400

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "tiny"
    assert FAMILIES["qwen3_moe"]["num_experts"] == EXPERTS
    save(build("qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=512, eos_token_id=2), directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, directory / file)
    shutil.copy(DATA / "chat_templates" / "qwen3.jinja", directory / "chat_template.jinja")
    return directory


def write_sample(directory: Path, model: Path, *, rank: int, seed: int, experts: bool = True) -> Path:
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
    facts = facts_of(json.loads((model / "config.json").read_text()))
    config = {"base_model_name_or_path": str(model)}
    write_adapter(in_memory(layers, linears, model=facts, config=config), directory, "peft")
    return directory


@pytest.fixture(scope="session")
def adapters(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_sample(root / "one", model_directory, rank=4, seed=1),
        "two": write_sample(root / "two", model_directory, rank=7, seed=2),
        "attention": write_sample(root / "attention", model_directory, rank=3, seed=3, experts=False),
    }


@dataclass
class Heard:
    """What a reader of one sequence was told."""

    events: list[Any] = field(default_factory=list)

    def __call__(self, event: Any) -> None:
        self.events.append(event)

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


class Bench:
    """A model, its forward pass and the adapters on it; engines are made anew for each test."""

    def __init__(
        self,
        directory: Path,
        adapters: dict[str, Path],
        dtype: torch.dtype = torch.float32,
        device: str | None = None,  # of everything but the experts
    ) -> None:
        from transformers import AutoTokenizer

        from ktransformers.nn import load_model
        from ktransformers.serve.engine.forward import Forward
        from ktransformers.serve.engine.lora import LoraModules

        self.directory = directory
        self.tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.model = load_model(directory, dtype=dtype, device=device)
        self.forward = Forward(self.model)
        self.per_token = self.forward.check()
        self.places = LoraModules(self.model)
        self.residents = {name: self.places.open(path, name, 1, str(directory)) for name, path in adapters.items()}

    def engine(self, **limits: int) -> Any:
        from ktransformers.serve.engine.engine import Limits, ServeEngine

        given = {"running": 8, "queued": 64, "chunk": 64, "tokens": 4096, "context": 512} | limits
        return ServeEngine(self.forward, Limits(**given))

    def sequence(self, prompt: list[int], adapter: str | None = None, **asked: Any) -> tuple[Any, Heard]:
        from ktransformers.serve.engine.sampling import Sampling
        from ktransformers.serve.engine.sequence import GenerationRequest, Sequence

        asked = {"max_tokens": 8, "sampling": Sampling(temperature=0), "logprobs": 2} | asked
        ask = GenerationRequest(tuple(prompt), adapter=self.residents[adapter] if adapter else None, **asked)
        heard = Heard()
        return Sequence(ask, self.tokenizer, heard), heard

    def run(self, engine: Any, *sequences: Any) -> None:
        engine.submit(sequences)
        while engine.busy:
            engine.step()

    def alone(self, prompt: list[int], adapter: str | None = None, **asked: Any) -> Heard:
        one, heard = self.sequence(prompt, adapter, **asked)
        self.run(self.engine(), one)
        return heard


@pytest.fixture(scope="session")
def bench(model_directory: Path, adapters: dict[str, Path]) -> Iterator[Bench]:
    yield Bench(model_directory, adapters)


@dataclass
class Served:
    url: str
    service: Any


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The application behind a real socket, in a thread."""
    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    assert server.started
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def service_of(bench: Bench, adapters: dict[str, Path], timeout: float | None = 120, **limits: int) -> Any:
    from ktransformers.serve.http.registry import Registry
    from ktransformers.serve.http.service import Service

    engine = bench.engine(**limits)
    registry = Registry("tiny", bench.places, str(bench.directory), engine.forget)
    for name in ("one", "attention"):
        registry.load(name, adapters[name])
    return Service(engine, registry, bench.tokenizer, timeout=timeout)


@pytest.fixture(scope="session")
def served(bench: Bench, adapters: dict[str, Path]) -> Iterator[Served]:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    from ktransformers.serve.http.api import create_app

    service = service_of(bench, adapters)
    with listening(create_app(service)) as url:
        yield Served(url, service)
