"""`kt run`: a model with settings chosen for this machine: served, or asked once."""

from __future__ import annotations

import sys
import threading
from typing import Annotated

import typer

from ktransformers.errors import InputError, KTError


def run(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, a short name, or a training output.")],
    prompt: Annotated[str | None, typer.Argument(help="Answer this and end; without it, serve.")] = None,
    adapter: Annotated[str | None, typer.Option(help="Name of the adapter to ask; a training output's own.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most that many tokens of answer.")] = 512,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy. [default: model's]")] = None,
    port: Annotated[int | None, typer.Option(help="Where to serve. [default: 30000]")] = None,
) -> None:
    """Serve a model on this machine, or answer one prompt and end."""
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.launch import open_service, serve
    from ktransformers.serve.target import resolve

    def say(line: str) -> None:
        print(f"kt: {line}", file=sys.stderr, flush=True)

    if prompt is None:
        serve(Launch(model, port=port), say)
        return
    target = resolve(model)
    names = [name for name, _ in target.adapters]
    if adapter is not None and adapter not in names:
        raise InputError("adapter", adapter, f"one of {', '.join(names) or 'none: this is a model without adapters'}")
    service = open_service(Launch(model, running=1), target, say)
    wanted = adapter or (names[0] if names else None)
    name = service.registry.served if wanted is None else f"{service.registry.served}:{wanted}"
    _answer(service, name, prompt, system, max_tokens, temperature)


def _answer(
    service: object, name: str, prompt: str, system: str | None, max_tokens: int, temperature: float | None
) -> None:
    from ktransformers.serve.protocol import ChatRequest, CompletionRequest
    from ktransformers.serve.sequence import Event, Sequence
    from ktransformers.serve.service import Service

    assert isinstance(service, Service)
    common = {"model": name, "max_tokens": max_tokens, "temperature": temperature}
    if service.tokenizer.chat_template:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        ask = service.chat(ChatRequest.model_validate({**common, "messages": messages})).ask
    else:
        request = CompletionRequest.model_validate({**common, "prompt": f"{system or ''}{prompt}"})
        ask = service.completion(request, service.prompts(request.prompt)[0])
    ended = threading.Event()
    errors: list[str] = []

    def hear(event: Event) -> None:
        print(event.text, end="", flush=True)
        if event.finish is not None:
            errors.extend([event.error] if event.error else [])
            ended.set()

    service.engine.start()
    service.engine.submit([Sequence(ask, service.tokenizer, hear)])
    try:
        ended.wait()
    finally:
        service.engine.stop()
    print()
    if errors:
        raise KTError(errors[0])
