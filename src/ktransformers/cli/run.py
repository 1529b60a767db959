"""`kt run`: serves a model, or answers one prompt, with settings chosen for this machine."""

from __future__ import annotations

import json
import threading
import time
from typing import Annotated

import typer

from ktransformers.cli import ask
from ktransformers.cli.model import complete_names
from ktransformers.cli.no_verify import NoVerify
from ktransformers.cli.progress import log
from ktransformers.cli.verbose import Verbose
from ktransformers.errors import InputError, KTError


def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A directory, a name of `kt model list`, a hub id, or a training output.",
            autocompletion=complete_names,
        ),
    ] = None,
    prompt: Annotated[str | None, typer.Argument(help="Answer this and exit; without it, serve.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Name of the adapter to ask; a training output's own.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most that many tokens of answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy. [default: model's]")] = None,
    host: Annotated[str | None, typer.Option("--host", "-H", help="Where to serve. [default: server.host]")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Where to serve. [default: server.port]")] = None,
    cpu_threads: Annotated[int | None, typer.Option(min=1, help="Threads of the experts. [default: chosen]")] = None,
    kt_place: Annotated[
        str | None,
        typer.Option(
            help="Mode of the experts: auto, cpu, resident, host_callback, stream, stream_all or split. "
            "[default: KT_PLACE, then auto]"
        ),
    ] = None,
    gpu_experts: Annotated[
        int | None, typer.Option("--gpu-experts", "--kt-num-gpu-experts", min=0, help="Experts of a layer on the GPU.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--tensor-parallel-size", "--tp", min=1, help="GPUs that layers are distributed over.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Run even if the plan says that it does not fit.")] = False,
    no_verify: NoVerify = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as one JSON document.")] = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model on this machine, or answer one prompt and exit."""
    model = ask.for_model(model, as_json)
    from ktransformers.cli.serve import show_plan
    from ktransformers.openmp import limit_spinning
    from ktransformers.serve.flags import Launch

    limit_spinning()  # before torch is imported, with what follows
    from ktransformers.cli.library_output import library_output
    from ktransformers.serve.launch import make_plan, open_service, serve
    from ktransformers.serve.target import resolve_target
    from ktransformers.serve.yaml_keys import with_yaml_keys

    placement_options = {"kt_place": kt_place, "kt_num_gpu_experts": gpu_experts}
    place = {name: value for name, value in placement_options.items() if value is not None}
    if prompt is None:
        if as_json:
            raise InputError("json", "without a prompt", "a prompt", "a server's answers are JSON already: /v1")
        options = Launch(model, host=host, port=port, threads=cpu_threads, force=force, gpus=gpus, place=place)
        with library_output():
            serve(options, log, show_plan)
        return
    target = resolve_target(model)
    adapters = [name for name, _ in target.adapters]
    if adapter is not None and adapter not in adapters:
        raise InputError(
            "adapter", adapter, f"one of {', '.join(adapters) or 'none: this is a model without adapters'}"
        )
    line = Launch(model, max_running_requests=1, threads=cpu_threads, force=force, gpus=gpus, place=place)
    launch = with_yaml_keys(line, target.keys)
    with library_output():
        plan = make_plan(launch, target, log, show_plan)
        service = open_service(launch, target, log, plan)
        adapter_name = adapter or (adapters[0] if adapters else None)
        name = service.registry.served if adapter_name is None else f"{service.registry.served}:{adapter_name}"
        _answer(service, name, prompt, system, max_tokens, temperature, as_json)


def _answer(
    service: object,
    name: str,
    prompt: str,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    as_json: bool,
) -> None:
    from ktransformers.serve.engine.sequence import Event, Sequence
    from ktransformers.serve.http.protocol import ChatRequest, CompletionRequest
    from ktransformers.serve.http.service import Service

    assert isinstance(service, Service)
    common = {"model": name, "max_tokens": max_tokens, "temperature": temperature}
    if service.template_of(service.find(name)):
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        generation = service.chat(ChatRequest.model_validate({**common, "messages": messages}))
    else:
        request = CompletionRequest.model_validate({**common, "prompt": f"{system or ''}{prompt}"})
        generation = service.completion(request)
    finished = threading.Event()
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        print("" if as_json else event.text, end="", flush=True)
        if event.finish is not None:
            finished.set()

    service.engine.start()
    started = time.monotonic()
    service.engine.submit([Sequence(generation, service.tokenizer, on_event)])
    try:
        finished.wait()
    finally:
        service.engine.stop()
    last = events[-1]
    if last.error:
        raise KTError(last.error)
    if as_json:
        document: dict[str, object] = {
            "model": name,
            "content": "".join(event.text for event in events),
            "finish_reason": last.finish,
        }
        document |= {"prompt_tokens": len(generation.prompt), "completion_tokens": last.tokens}
        print(json.dumps(document | {"seconds": round(time.monotonic() - started, 3)}, ensure_ascii=False, indent=2))
    else:
        print()
