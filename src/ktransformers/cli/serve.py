"""`kt serve`: one model and its adapters over the OpenAI API.

Its flags are read by `serve/flags.py` rather than by typer, because SGLang's launch lines give several values to one
flag and have to work as they are.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from ktransformers.plan import Plan

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context) -> None:
    """Serve a model over the OpenAI API: base and adapters, chosen by each request."""
    from ktransformers.openmp import limit_spinning
    from ktransformers.serve.flags import parse

    limit_spinning()  # before torch is imported, with what follows
    from ktransformers.serve.launch import serve as run

    run(parse(context.args), say, show)


def say(line: str) -> None:
    print(f"kt: {line}", file=sys.stderr, flush=True)


def show(plan: Plan) -> None:
    """Before anything is loaded: where memory goes, and how fast it will be."""
    from ktransformers.cli.plan import plan_rows

    for name, value in plan_rows(plan):
        print(f"{name:<10} {value}", file=sys.stderr, flush=True)
