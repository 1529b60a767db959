"""`kt convert`: converts an adapter to another format; every tensor is counted and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ktransformers.cli.options import Verbose, print_result


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The adapter: a directory, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The directory to write.")],
    to: Annotated[str, typer.Option(help="peft, per-expert, sglang, kt or gguf.")],
    expert_output_dir: Annotated[Path | None, typer.Option(help="Write the experts' part here as well.")] = None,
    nonexpert_output_dir: Annotated[Path | None, typer.Option(help="Write the other part here as well.")] = None,
    base_model_name_or_path: Annotated[
        str | None, typer.Option(help="The base model; its config.json is compared with the adapter.")
    ] = None,
    lora_alpha: Annotated[float | None, typer.Option(help="Used where adapter_config.json has none.")] = None,
    dtype: Annotated[str, typer.Option(help="keep, bfloat16, float16 or float32.")] = "keep",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace outputs that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
    verbose: Verbose = False,
) -> None:
    """Convert an adapter into another format, without loss."""
    from ktransformers import adapters

    done = adapters.convert(
        source,
        target,
        to,
        expert_output_dir=expert_output_dir,
        nonexpert_output_dir=nonexpert_output_dir,
        base_model_name_or_path=base_model_name_or_path,
        lora_alpha=lora_alpha,
        dtype=dtype,
        overwrite=overwrite,
    )
    shared = ", gate and up share A" if done.shared else ""
    read = f"{done.source}, {done.read} tensors, {done.layers} layers of {done.experts} experts{shared}"
    lines = [f"read             {read}"]
    if done.model is None:
        lines.append("model            its config.json was not found: sizes and layers were not compared")
    outputs = {"merged": done.merged, "expert-only": done.expert_only, "non-expert-only": done.nonexpert_only}
    for word, output in outputs.items():
        if output is not None:
            lines.append(f"{word:<16} {output.tensors} tensors, {', '.join(output.target_modules)}: {output.path}")
    print_result(done.to_json(), lines, as_json)
