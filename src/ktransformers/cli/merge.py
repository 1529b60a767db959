"""`kt merge`: an adapter folded into its model, one shard at a time, and read back before it is called done."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ktransformers.cli.model import names

LITTLE = 0.9  # share of the delta below which rounding deserves a word


def merge(
    model: Annotated[str, typer.Argument(metavar="BASE", help="The model's directory or name.", autocompletion=names)],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The adapter, in any dialect.")],
    out: Annotated[Path, typer.Option("--output", "-o", help="The directory to write.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or keep: the model's own.")] = "bfloat16",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
) -> None:
    """Fold an adapter into its model and write a complete model directory."""
    from ktransformers import adapters
    from ktransformers.library import resolve

    def progress(done: int, shards: int) -> None:
        if sys.stderr.isatty():
            print(f"\rshard {done} of {shards}", end="" if done < shards else "\n", file=sys.stderr, flush=True)

    done = adapters.merge(Path(resolve(model)), adapter, out, dtype=dtype, overwrite=overwrite, progress=progress)
    if as_json:
        print(json.dumps(done.to_json(), indent=2))
        return
    resumed = f" ({done.resumed} from an earlier run)" if done.resumed else ""
    print(
        f"written          {done.tensors} tensors in {done.shards} shards{resumed}, {done.changed} changed: {done.out}"
    )
    check = done.check
    print(f"read back        {check.rows} rows, worst {check.worst:.2f} of the rounding allowed")
    print(
        f"delta kept       {check.kept:.1%}"
        + ("" if check.kept >= LITTLE else f"; the rest fell to {dtype}'s rounding")
    )
