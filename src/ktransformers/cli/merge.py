"""`kt merge`: merges an adapter into its model one layer at a time, and verifies the result.

A plain base gives a plain model, whose rows are read back and compared. With `--format`, or if the base is quantised, a
packed directory is written. Both are compared with base and adapter on a text; beyond `--max-kl` the result is refused
and deleted. A plain model that cannot be compared on this machine is written all the same, because its rows were.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli.model import complete_names
from ktransformers.cli.options import Verbose, print_result
from ktransformers.cli.quant import normalise_format, report_lines
from ktransformers.ground.errors import InputError, MissingArgumentError
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.adapters.divergence import Divergence
    from ktransformers.adapters.merge_packed import PackedMerge

MIN_DELTA_KEPT = 0.9  # share of the delta; if less was kept, rounding is mentioned


def merge(
    model: Annotated[
        str,
        typer.Argument(
            metavar="[BASE]",
            help="The model's directory or name. [default: the one that ADAPTER names]",
            autocompletion=complete_names,
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", help="The directory to write.")],
    adapter: Annotated[
        Path | None, typer.Argument(metavar="ADAPTER", help="The adapter, in any format.", show_default=False)
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (default), float16, float32, or keep: of a plain model.")
    ] = None,
    word: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Write a packed directory: int8, int4[:GROUP], bf16, fp8:128x128 ..., or keep: the base's own format, "
            "which is what a quantised or packed base gets anyway.",
        ),
    ] = None,
    group: Annotated[int | None, typer.Option(help="int4: columns that share a scale. [default: 32]")] = None,
    down_format: Annotated[str | None, typer.Option(help="Another format for down.")] = None,
    threads: Annotated[int | None, typer.Option(help="Of a packed merge. [default: all cores]")] = None,
    max_kl: Annotated[
        float | None, typer.Option(help="Refuse beyond this divergence, nats a token. [default: 0.1]")
    ] = None,
    calib: Annotated[
        Path | None, typer.Option(help="The text to compare on, or JSON lines. [default: a page of our own]")
    ] = None,
    calib_tokens: Annotated[int | None, typer.Option(help="Tokens of it to read. [default: 4096]")] = None,
    unchecked: Annotated[bool, typer.Option("--unchecked", help="Write it without comparing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")] = False,
    verbose: Verbose = False,
) -> None:
    """Merge an adapter into its model: a complete directory."""
    from ktransformers.adapters.divergence import CALIBRATION_TOKENS, MAX_KL, calibration_text, measure_divergence
    from ktransformers.adapters.merge_packed import merge_packed, wants_packing
    from ktransformers.checkpoint.recode import KEEP
    from ktransformers.checkpoint.small_model import resolve_model
    from ktransformers.cli.library_output import library_output
    from ktransformers.ground.progress import report
    from ktransformers.quant.plan import parse_formats
    from ktransformers.serve.target import base_of_adapter

    if adapter is None:  # a single word is the adapter
        adapter = Path(model)
        if not (adapter / "adapter_config.json").is_file():
            raise MissingArgumentError("ADAPTER", "one", "kt merge BASE ADAPTER, or an adapter that names its base")
        model = base_of_adapter(adapter)
    base, limit, tokens = (
        Path(resolve_model(model)),
        MAX_KL if max_kl is None else max_kl,
        calib_tokens or CALIBRATION_TOKENS,
    )
    if calib is not None and not calib.is_file():
        raise InputError("calib", f"{calib}, which does not exist", "a text file or JSON lines")
    if word is None and (dtype is not None or not wants_packing(base)):
        for name, value in {"group": group, "down-format": down_format, "threads": threads}.items():
            if value is not None:
                raise InputError(name, value, "it with --format", "--format int8, say")

        def compare(merged: Path, size: int) -> Divergence:
            with calibration_text(calib) as text:
                return measure_divergence(base, adapter, merged, text, tokens=tokens, base_bytes=size)

        merge_plain(base, adapter, out, dtype or "bfloat16", overwrite, None if unchecked else compare, limit, as_json)
        return
    if dtype is not None:
        raise InputError("dtype", dtype, "--dtype or --format", "a packed directory keeps what is not experts as it is")
    formats = parse_formats(
        normalise_format(word or KEEP), group, None if down_format is None else normalise_format(down_format)
    )
    with library_output():

        def show(done: float, total: float | None, _: str | None = None, /) -> None:
            report("Merging", done, total, "bytes")

        done = merge_packed(
            base,
            adapter,
            out,
            formats=formats,
            threads=threads,
            calib=calib,
            tokens=tokens,
            max_kl=limit,
            unchecked=unchecked,
            overwrite=overwrite,
            progress=show,
        )
    print_result(done.to_json(), packed_lines(done), as_json)


def merge_plain(
    model: Path,
    adapter: Path,
    out: Path,
    dtype: str,
    overwrite: bool,
    compare: Callable[[Path, int], Divergence] | None,
    limit: float,
    as_json: bool,
) -> None:
    from ktransformers import adapters
    from ktransformers.cli.library_output import library_output
    from ktransformers.ground.progress import report

    with library_output():

        def show(done: int, shards: int) -> None:
            report("Merging shards", done, shards)

        done = adapters.merge(
            model, adapter, out, dtype=dtype, overwrite=overwrite, progress=show, compare=compare, max_kl=limit
        )
    resumed = f" ({done.resumed} from an earlier run)" if done.resumed else ""
    written = f"{done.tensors} tensors in {done.shards} shards{resumed}, {done.changed} changed: {done.out}"
    check = done.check
    lost = "" if check.kept >= MIN_DELTA_KEPT else f"; the rest fell to {dtype}'s rounding"
    lines = [
        f"written          {written}",
        f"read back        {check.rows} rows, worst {check.worst:.2f} of the rounding allowed",
        f"delta kept       {check.kept:.1%}{lost}",
    ]
    if done.divergence is not None:
        lines += divergence_lines(done.divergence, limit)
    elif done.skipped is not None:
        lines.append(f"not compared     {done.skipped}")
    print_result(done.to_json(), lines, as_json)


def packed_lines(done: PackedMerge) -> list[str]:
    size = sum(file.stat().st_size for file in Path(done.out).glob("*.safetensors"))
    resumed = f", {done.kept_layers} layers from an earlier run" if done.kept_layers else ""
    lines = [f"written          {gigabytes(size)}, {done.changed} matrices changed{resumed}: {done.out}"]
    divergence = done.divergence
    if divergence is None:
        return [*lines, "compared         no: --unchecked", *report_lines(done.report)]
    return [*lines, *divergence_lines(divergence, done.max_kl), *report_lines(done.report)]


def divergence_lines(divergence: Divergence, limit: float) -> list[str]:
    more = "" if divergence.kl < divergence.effect else ": less than was lost"
    return [
        f"KL               {divergence.kl:.5f} nats a token from base + adapter, at most {limit:g} "
        f"({divergence.tokens} tokens of {divergence.text}); same first choice {divergence.same_top:.2%}",
        f"the adapter      {divergence.effect:.5f} nats a token from the base alone{more}",
    ]
