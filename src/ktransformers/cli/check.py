"""`kt model check`: a report on a release, to read and to send in."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from ktransformers.cli.model import Name, find_entry
from ktransformers.cli.options import Json
from ktransformers.cli.progress import drawn_reports


def check(
    name: Name,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Compare numbers of so many layers. [default: those that fit]")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON document here.")] = None,
    as_json: Json = False,
) -> None:
    """Check a release: names, shapes, scales, tokenizer, template, numbers against stock transformers."""
    from ktransformers.cli.library_output import library_output
    from ktransformers.ground.files import write_json
    from ktransformers.ground.model_registry import read_facts
    from ktransformers.plan.roofs import describe_machine
    from ktransformers.quant.model_check import CheckResult, check_model, report_lines

    folder, results = find_entry(name).path, list[CheckResult]()
    with library_output(), drawn_reports(quiet=as_json):
        for result in check_model(folder, layers):
            results.append(result)
            if not as_json:
                print("\n".join(report_lines([result])), flush=True)
    faults = [f"{result.name}: {fault}" for result in results for fault in result.faults]
    document = {
        "model": dataclasses.asdict(read_facts(folder)) | {"name": folder.name},
        "machine": describe_machine(),
        "checks": [dataclasses.asdict(result) for result in results],
        "faults": faults,
    }
    if output is not None:
        write_json(output, document)
    if as_json:
        print(json.dumps(document, indent=2))
    if faults:
        raise typer.Exit(1)
