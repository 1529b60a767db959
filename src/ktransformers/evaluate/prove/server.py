"""The server side of `kt prove`: starts a server on a free port, and scores rows on it or on any other.

Rows are scored as lm-eval does: tokens as prompt, `echo` with `logprobs`, no new tokens. /v1/models reports how many
matrices an adapter has bound. The model of a server in this process is accessible, so router choices of another program
can be replayed in its batches, and a difference can be traced to its layer.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.comparison import LogprobsAndNorms, Projections, recording_projections
from ktransformers.adapters.router_choices import PADDING, RouterChoices, RouterRecorder, recording_choices
from ktransformers.ground.client import Client
from ktransformers.ground.errors import InputError, KTError
from ktransformers.serve.flags import Launch
from ktransformers.serve.launch import LogLine, bind_socket
from ktransformers.serve.loading import open_service
from ktransformers.serve.scheduler.forward import Chunk, ForwardResult
from ktransformers.serve.target import Target


@contextmanager
def start_server(launch: Launch, target: Target, log: LogLine) -> Iterator[tuple[str, Any]]:
    """Start a server on a free port of this machine; yields its URL and its service."""
    import uvicorn  # type: ignore[import-not-found,unused-ignore]

    from ktransformers.serve.http.api import create_app

    listener = bind_socket("127.0.0.1", 0)
    service = open_service(launch, target, log)
    server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="kt-prove-server", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise KTError("the server did not start")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def find_names(client: Client, target: Target) -> tuple[str, str, str]:
    """(base, adapter, name of an adapter that was loaded for this or "") as the server names them."""
    name, directory = target.adapters[0]
    models = client.request("/v1/models")["data"]
    bases = [model["id"] for model in models if model.get("parent") is None]
    for model in models:
        if model.get("parent") is not None and Path(str(model.get("root"))).resolve() == Path(directory).resolve():
            return str(model["parent"]), str(model["id"]), ""
    if not bases:
        raise InputError(
            "server", f"{client.url}, which lists no base", "a server of ktransformers", "start `kt serve`"
        )
    name = f"{name}-proof-{os.getpid()}"
    body = {"lora_name": name, "lora_path": str(Path(directory).resolve())}
    client.open("/v1/load_lora_adapter", body).close()
    return str(bases[0]), f"{bases[0]}:{name}", name


def bound_matrices(client: Client, adapter: str) -> int | None:
    """The number of matrices with factors that the server has bound; None: it does not report it."""
    models = {model["id"]: model for model in client.request("/v1/models")["data"]}
    matrices = models.get(adapter, {}).get("matrices")
    return None if matrices is None else int(matrices)


def score_row(client: Client, name: str, row: Sequence[int]) -> Tensor:
    """Log-probabilities of a row as the server reports them."""
    body = {"model": name, "prompt": list(row), "echo": True, "logprobs": 0, "max_tokens": 0}
    logprobs = client.request("/v1/completions", body)["choices"][0]["logprobs"]["token_logprobs"]
    if len(logprobs) != len(row):
        raise KTError(f"{client.url}: {len(logprobs)} log-probabilities for {len(row)} tokens of {name}")
    return torch.tensor([float("nan") if value is None else float(value) for value in logprobs[1:]])


def score_rows(client: Client, names: Sequence[str], rows: Sequence[Sequence[int]]) -> list[LogprobsAndNorms]:
    """All rows under each name, requested at the same time, so that they share batches."""
    with ThreadPoolExecutor(len(names) * len(rows)) as pool:
        futures = [pool.submit(score_row, client, name, row) for row in rows for name in names]
        answers = [future.result() for future in futures]
    return [LogprobsAndNorms(tuple(answers[index :: len(names)])) for index in range(len(names))]


def score_rows_replayed(
    client: Client,
    service: Any,
    names: Sequence[str],
    rows: Sequence[Sequence[int]],
    name: str,
    replay: RouterChoices | None,
) -> LogprobsAndNorms:
    """`score_rows` with router choices of another program replayed under `name`; only its outputs are returned."""
    with _recording_served_choices(service, names, rows, name, replay) as recorder:
        outputs = score_rows(client, names, rows)[list(names).index(name)]
    return LogprobsAndNorms(outputs.logprobs, routers=recorder.choices())


@contextmanager
def _recording_served_choices(
    service: Any, names: Sequence[str], rows: Sequence[Sequence[int]], name: str, replay: RouterChoices | None
) -> Iterator[RouterRecorder]:
    """Records, in the engine's batches, the tokens of `rows` under `name`. The slots of all names are evicted before,
    so that every token is computed."""
    forward, owner = service.engine.forward, _owner(service, name)
    for evicted in names:
        service.engine.drop_adapter(_owner(service, evicted))
    run_chunks = forward.run

    with recording_choices(forward.model, rows, replay) as recorder:
        numbered = list(zip(rows, recorder.tokens_of_rows(), strict=True))

        def run(chunks: Sequence[Chunk]) -> list[ForwardResult | None]:
            # In the order in which the engine computes them: the base first.
            order = sorted(range(len(chunks)), key=lambda index: chunks[index].adapter is not None)
            ordered = [chunks[index] for index in order]
            tokens = [_token_numbers(chunk, numbered if chunk.slot.owner == owner else ()) for chunk in ordered]
            with recorder.forward_pass(torch.cat(tokens)):
                results = dict(zip(order, run_chunks(ordered), strict=True))
            return [results[index] for index in range(len(chunks))]

        forward.run = run
        try:
            yield recorder
        finally:
            del forward.run  # the class has it


def _owner(service: Any, name: str) -> Any:
    adapter = service.find(name)
    return None if adapter is None else adapter.owner


def _token_numbers(chunk: Chunk, numbered: Sequence[tuple[Sequence[int], Tensor]]) -> Tensor:
    """Numbers of the chunk's tokens in the first of these rows that begins with its sequence; PADDING if none does."""
    sequence = [*chunk.slot.tokens[: chunk.position], *chunk.tokens]
    for row, numbers in numbered:
        if list(row[: len(sequence)]) == sequence:
            return numbers[chunk.position : len(sequence)]
    return torch.full((len(chunk.tokens),), PADDING)


def measure_served_layers(
    client: Client,
    service: Any,
    name: str,
    rows: Sequence[Sequence[int]],
    names: Sequence[str],
    replay: RouterChoices | None = None,
) -> Projections:
    """Projections of layer outputs for an adapter, one row at a time, with router choices of another program."""
    projections: dict[str, list[Tensor]] = {layer: [] for layer in names}
    with _recording_served_choices(service, [name], rows, name, replay):
        for row in rows:
            # Otherwise tokens that two rows have in common would not be computed again.
            service.engine.drop_adapter(_owner(service, name))
            with recording_projections(service.engine.forward.model, names) as recorded:
                score_row(client, name, row)
            for layer, parts in recorded.items():
                projections[layer].append(torch.cat(parts))
    return projections
