"""`kt model`: what is done to a model's directory before anything is loaded. `prepare` lets other programs open it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

model = typer.Typer(name="model", help="Directories of models.", no_args_is_help=True)


@model.callback()
def group() -> None:
    """Directories of models."""


@model.command()
def prepare(
    source: Annotated[Path, typer.Argument(help="A local Hugging Face directory.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The directory to write; it must not exist.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a directory of links that any program opens with packed experts."""
    from ktransformers.nn.prepare import prepare as write

    found = write(source, out)
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return
    print(f"{found.directory}: {found.model_type}, {found.links} links to {found.source}")
    if found.quantised is not None:
        print(f"the source is quantised with {found.quantised}, which is recorded in config.json")
