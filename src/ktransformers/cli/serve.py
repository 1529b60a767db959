"""`kt serve`: one model and its adapters over the OpenAI API.

`serve/flags.py` parses the flags instead of typer, because SGLang's launch lines give several values to one flag and
must work unchanged.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.options import show_log
from ktransformers.cli.progress import log
from ktransformers.ground.log import logger

if TYPE_CHECKING:
    from ktransformers.plan import Plan
    from ktransformers.serve.running import RunningServer

LOG = logger(__name__)
VERBOSE_FLAGS = ("-v", "--verbose")
SERVE_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


Json = Annotated[bool, typer.Option("--json", help="Print the address as one JSON document once it listens.")]


def print_address(server: RunningServer) -> None:
    """For `--json`: what a program that starts a server needs, with --port 0 the port too."""
    print(json.dumps({"url": server.url, "model": server.model, "pid": server.pid}), flush=True)


def serve(context: typer.Context, as_json: Json = False) -> None:
    """Serve a model over APIs of OpenAI, Anthropic and Ollama. Each request chooses base or adapter."""
    from ktransformers.ground.openmp import limit_spinning
    from ktransformers.serve.flags import parse

    show_log(any(word in VERBOSE_FLAGS for word in context.args))
    launch = parse([word for word in context.args if word not in VERBOSE_FLAGS])
    limit_spinning()  # before torch is imported, with what follows
    from ktransformers.cli.library_output import library_output
    from ktransformers.serve.launch import serve as run_server

    with library_output():
        run_server(launch, log, show_plan, print_address if as_json else lambda _: None)


def show_plan(plan: Plan) -> None:
    """Print whether it fits, how fast and in how much memory, before anything is loaded; all of the plan with -v."""
    from ktransformers.cli.plan_text import plan_rows, summary_rows

    for name, value in plan_rows(plan):
        LOG.info("%-10s %s", name, value)
    for name, value in summary_rows(plan):
        log(f"{name:<8} {value}")
