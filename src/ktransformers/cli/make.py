"""`kt model make` and `kt model upcycle`: a small working Mixture of Experts from a dense model, without training. They
are one verb under two names; `smollm2-moe` stands for the dense model that a package of the package index holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ktransformers.cli.options import Json, print_result
from ktransformers.cli.progress import drawn_reports, progress_bar
from ktransformers.ground.errors import InputError


def upcycle(
    source: Annotated[
        str,
        typer.Argument(
            help="smollm2-moe, or a dense Llama-class model: a .gguf file, a Hugging Face directory, or a name of one."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write, new or empty.")],
    family: Annotated[str, typer.Option(help="Class of the result: mixtral, qwen2_moe or glm4_moe.")] = "mixtral",
    experts: Annotated[int | None, typer.Option(help="Routed experts, a multiple of top-k. [default: 2 x top-k]")] = (
        None
    ),
    top_k: Annotated[int, typer.Option(help="Experts per token: slices of the dense layer.")] = 4,
    copies: Annotated[int | None, typer.Option(help="Copies of the dense layer, instead of --experts.")] = None,
    shared_experts: Annotated[
        int | None, typer.Option(help="Slices that are shared experts. [default: 0 for mixtral, else 1]")
    ] = None,
    noise: Annotated[float, typer.Option(help="Difference between copies, 0.01 for one per cent; 0 is exact.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the router and of the noise.")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Json = False,
) -> None:
    """Turn a dense model into a Mixture of Experts that computes the same, without training."""
    from ktransformers.checkpoint.dense import open_dense
    from ktransformers.checkpoint.small_model import NAME, fetch_weights
    from ktransformers.checkpoint.upcycle import Recipe
    from ktransformers.checkpoint.upcycle import upcycle as write
    from ktransformers.ground.model_registry import resolve

    if copies is not None and experts is not None and experts != copies * top_k:
        raise InputError("copies", f"{copies} with {experts} experts, top {top_k}", "experts = copies x top-k")
    experts = (2 if copies is None else copies) * top_k if experts is None else experts
    shared = (0 if family == "mixtral" else 1) if shared_experts is None else shared_experts
    recipe = Recipe(family, experts, top_k, shared, noise, seed, dtype)
    with drawn_reports(quiet=as_json):
        model = open_dense(fetch_weights() if source == NAME else Path(resolve(source)))
    start = time.perf_counter()
    with progress_bar("Converting layers", quiet=as_json) as progress:
        parameters = write(model, out, recipe, progress)
    seconds = time.perf_counter() - start
    document = {"directory": str(out), "family": family, "experts": experts, "top_k": top_k}
    document |= {"parameters": parameters, "dtype": dtype, "seconds": round(seconds, 2)}
    shape = f"{family}, {experts} experts, top {top_k}"
    print_result(document, [f"{out}: {shape}, {parameters / 1e6:.1f}M parameters, {dtype}, {seconds:.1f} s"], as_json)
