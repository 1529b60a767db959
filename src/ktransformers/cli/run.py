"""`kt run`: serves a model, or answers one prompt, with settings chosen for this machine.

It takes every flag of `kt serve`, which `serve/flags.py` parses instead of typer; typer has those of all verbs.
"""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli import ask
from ktransformers.cli.model import complete_names
from ktransformers.cli.options import NoVerify, Verbose
from ktransformers.cli.progress import log
from ktransformers.ground.errors import InputError, KTError

if TYPE_CHECKING:
    from ktransformers.serve.flags import RunLine

DIM, RESET = "\x1b[2m", "\x1b[0m"
RUN_CONTEXT = {"ignore_unknown_options": True, "help_option_names": []}


def run(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [PROMPT] [FLAGS]", autocompletion=complete_names, show_default=False),
    ] = None,
    no_verify: NoVerify = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer, or the server's address, as one JSON document.")
    ] = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model, or answer one prompt and exit."""
    from ktransformers.serve.flags import names_model, parse_run

    given = list(words or [])
    if not names_model(given):
        given.insert(0, ask.for_model(None, as_json))
    line = parse_run(given)
    from ktransformers.ground.openmp import limit_spinning

    limit_spinning()  # before torch is imported, with what follows
    from ktransformers.cli.library_output import library_output
    from ktransformers.cli.serve import print_address, show_plan
    from ktransformers.serve.launch import serve

    if line.dry_run:
        with library_output():
            _show_launch(line, given, as_json)
        return
    if line.prompt is None:
        with library_output():
            serve(line.launch, log, show_plan, print_address if as_json else lambda _: None)
        return
    with library_output():
        _answer_prompt(line, as_json)


def _show_launch(line: RunLine, words: list[str], as_json: bool) -> None:
    """The command and its plan."""
    from ktransformers.cli.plan_text import summary_rows
    from ktransformers.plan.document import plan_document
    from ktransformers.serve.forecast import plan_server
    from ktransformers.serve.target import resolve_target
    from ktransformers.serve.yaml_keys import with_yaml_keys

    target = resolve_target(line.launch.target)
    launch = with_yaml_keys(replace(line.launch, force=True), target.keys)
    if launch.engine == "sglang":
        from ktransformers.serve.launch import with_environment
        from ktransformers.serve.sglang.command import PROGRAM, hide_key, plan_sglang, sglang_words

        plan = plan_sglang(launch, target, log, lambda _: None)
        given = sglang_words(with_environment(launch), target, plan)
        command = shlex.join(hide_key([PROGRAM, "serve", *given]))
    else:
        plan = plan_server(launch, target, log, lambda _: None)
        command = shlex.join(["kt", "run", *(word for word in words if word != "--dry-run")])
    if as_json:
        print(json.dumps({"command": command, "plan": None if plan is None else plan_document(plan)}, indent=2))
        return
    for name, value in [] if plan is None else summary_rows(plan):
        print(f"{name:<8} {value}")
    print(f"{'command':<8} {command}")


def _answer_prompt(line: RunLine, as_json: bool) -> None:
    from ktransformers.cli.serve import show_plan
    from ktransformers.serve.forecast import plan_server
    from ktransformers.serve.loading import open_service
    from ktransformers.serve.target import check_adapters, resolve_target
    from ktransformers.serve.yaml_keys import with_yaml_keys

    for note in line.launch.notes:
        log(f"accepted without effect: {note}")
    target = resolve_target(line.launch.target)
    if with_yaml_keys(line.launch, target.keys).engine != "ktransformers":
        remedy = "leave the prompt out to serve, and ask with `kt chat`"
        raise InputError("--engine", "sglang and a prompt", "our own engine for one answer", remedy)
    check_adapters(line.launch, target)
    adapters = [name for name, _ in (*target.adapters, *line.launch.lora_paths)]
    if line.adapter is not None and line.adapter not in adapters:
        expected = f"one of {', '.join(adapters) or 'none: this is a model without adapters'}"
        raise InputError("adapter", line.adapter, expected)
    launch = with_yaml_keys(replace(line.launch, max_running_requests=1), target.keys)
    plan = plan_server(launch, target, log, show_plan)
    service = open_service(launch, target, log, plan)
    adapter = line.adapter or (adapters[0] if adapters else None)
    name = service.registry.served if adapter is None else f"{service.registry.served}:{adapter}"
    assert line.prompt is not None
    _answer(service, name, line.prompt, line.system, line.max_tokens, line.temperature, as_json)


def _answer(
    service: object,
    name: str,
    prompt: str,
    system: str | None,
    max_tokens: int,
    temperature: float | None,
    as_json: bool,
) -> None:
    from ktransformers.adapters.adapter_template import check_rendering_ends
    from ktransformers.serve.doors.answer_events import ReasoningDelta, TextDelta
    from ktransformers.serve.doors.conversation import ChatRequest, Conversation, Generation, Turn
    from ktransformers.serve.http.choice_parser import ChoiceParser
    from ktransformers.serve.http.protocol import CompletionRequest
    from ktransformers.serve.http.service import Service
    from ktransformers.serve.scheduler.sequence import Event, Sequence

    assert isinstance(service, Service)
    sampling = {} if temperature is None else {"temperature": temperature}
    parser: ChoiceParser | None = None
    if template := service.template_of(service.find(name)):
        turns = [Turn("system", system)] if system else []
        messages = [{"role": turn.role, "content": turn.text} for turn in (*turns, Turn("user", prompt))]
        check_rendering_ends(template, messages, service.tokenizer)
        conversation = Conversation((*turns, Turn("user", prompt)))
        asked = ChatRequest(conversation, Generation(name, max_tokens, sampling=sampling))
        generation, parser = service.chat(asked)
    else:
        text = f"{system or ''}{prompt}"
        body = {"model": name, "max_tokens": max_tokens, "temperature": temperature, "prompt": text}
        generation = service.completion(CompletionRequest.model_validate(body))
    finished = threading.Event()
    events: list[Event] = []
    answer, reasoning = "", ""
    dims = sys.stdout.isatty()

    def on_event(event: Event) -> None:
        nonlocal answer, reasoning
        events.append(event)
        for one in parser.events(event) if parser is not None else [TextDelta(event.text)]:
            match one:
                case TextDelta(text):
                    answer += text
                    print("" if as_json else text, end="", flush=True)
                case ReasoningDelta(text):
                    reasoning += text
                    print(f"{DIM}{text}{RESET}" if dims and not as_json else "", end="", flush=True)
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
            "content": answer,
            **({"reasoning_content": reasoning} if reasoning else {}),
            "finish_reason": last.finish,
        }
        document |= {"prompt_tokens": len(generation.prompt), "completion_tokens": last.tokens}
        print(json.dumps(document | {"seconds": round(time.monotonic() - started, 3)}, ensure_ascii=False, indent=2))
    else:
        print()
