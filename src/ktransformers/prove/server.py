"""The server's side of `kt prove`: one of our own on a free port, and what is asked of it or of any other.

Rows are scored as lm-eval does: tokens in, `echo` with `logprobs`, nothing new. How many matrices an adapter has bound
is in /v1/models. The model of a server in this process can be looked at, so a difference can be followed to its layer.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers.adapters.comparison import Marks, marking
from ktransformers.errors import InputError, KTError
from ktransformers.serve.client import Client
from ktransformers.serve.flags import Launch
from ktransformers.serve.launch import LogLine, bind_socket, open_service
from ktransformers.serve.target import Target


@contextmanager
def start_server(launch: Launch, target: Target, say: LogLine) -> Iterator[tuple[str, Any]]:
    """A server on a free port of this machine, and the service behind it."""
    import uvicorn  # type: ignore[import-not-found,unused-ignore]

    from ktransformers.serve.http.api import create_app

    door = bind_socket("127.0.0.1", 0)
    service = open_service(launch, target, say)
    server = uvicorn.Server(uvicorn.Config(create_app(service), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, name="kt-prove-server", daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise KTError("the server did not start")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{door.getsockname()[1]}", service
    finally:
        server.should_exit = True
        thread.join()
        door.close()


def find_names(client: Client, target: Target) -> tuple[str, str, str]:
    """(base, adapter, name that was loaded for this) as the server calls them."""
    name, place = target.adapters[0]
    with client.open("/v1/models") as reply:
        known = json.loads(reply.read())["data"]
    bases = [one["id"] for one in known if one.get("parent") is None]
    for one in known:
        if one.get("parent") is not None and Path(str(one.get("root"))).resolve() == Path(place).resolve():
            return str(one["parent"]), str(one["id"]), ""
    if not bases:
        raise InputError("server", f"{client.url}, which names no base", "a server of ours", "start `kt serve`")
    name = f"{name}-proof-{os.getpid()}"
    asked = {"lora_name": name, "lora_path": str(Path(place).resolve())}
    client.open("/v1/load_lora_adapter", asked).close()
    return str(bases[0]), f"{bases[0]}:{name}", name


def bound_matrices(client: Client, adapter: str) -> int | None:
    """How many matrices with factors the server has bound; None where it does not say."""
    with client.open("/v1/models") as reply:
        known = {one["id"]: one for one in json.loads(reply.read())["data"]}
    found = known.get(adapter, {}).get("matrices")
    return None if found is None else int(found)


def score_row(client: Client, name: str, row: Sequence[int]) -> Tensor:
    """Log-probabilities of a row as the server tells them."""
    body = {"model": name, "prompt": list(row), "echo": True, "logprobs": 0, "max_tokens": 0}
    with client.open("/v1/completions", body) as reply:
        found = json.loads(reply.read())["choices"][0]["logprobs"]["token_logprobs"]
    if len(found) != len(row):
        raise KTError(f"{client.url}: {len(found)} log-probabilities for {len(row)} tokens of {name}")
    return torch.tensor([float("nan") if value is None else float(value) for value in found[1:]])


def measure_served_layers(
    client: Client, service: Any, name: str, rows: Sequence[Sequence[int]], names: Sequence[str]
) -> Marks:
    """Of an adapter. What the server remembers of it is forgotten first, or it would not compute the rows again."""
    found: dict[str, list[Tensor]] = {one: [] for one in names}
    for row in rows:
        service.engine.drop_adapter(service.find(name).owner)
        with marking(service.engine.forward.model, names) as seen:
            score_row(client, name, row)
        for one, parts in seen.items():
            found[one].append(torch.cat(parts))
    return found
