"""`kt quant`: converts a checkpoint to a packed directory, with `--layout kt-kernel` to kt-kernel's files, or with
`--format bf16 --plain` to an ordinary checkpoint in bf16.

Flags of kt-kernel's converter are accepted under their names. Those about its file layout (NUMA parts, merging,
backward weights) mean what they mean there with that layout; without it, and in any case those about its requirements
(a GPU), they have no effect, which is printed, not refused.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.progress import log, progress_bar
from ktransformers.cli.sizes import gigabytes
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import rest_word

if TYPE_CHECKING:
    from ktransformers.quant.convert import Converted
    from ktransformers.quant.kt_convert import KTPlan
    from ktransformers.quant.plan import ConversionPlan
    from ktransformers.quant.report import QuantizationReport

LAYOUTS = ("packed", "kt-kernel")
KT_BITS = {"int4": 4, "amxint4": 4, "int8": 8, "amxint8": 8}
OLD_FORMATS = {"moe_int8": "int8", "moe_int4": "int4"}


def normalise_format(word: str) -> str:
    """The format behind an older name."""
    if word.lower() == "awq":
        raise InputError("quant-method", word, "int4, int8 or another format", "`kt quant --help` lists them")
    if word.lower() in KT_BITS and word.lower().startswith("amx"):
        raise InputError("format", word, "int4 or int8", f"--layout kt-kernel --format {word.lower()[3:]}")
    return OLD_FORMATS.get(word.lower(), word.lower())


def kt_bits(word: str) -> int:
    """The bits of a method that kt-kernel's files can hold."""
    if word.lower() in KT_BITS:
        return KT_BITS[word.lower()]
    remedy = "its bytes depend on the library of the build" if word.lower() in OLD_FORMATS else ""
    raise InputError("format", word, "int4 or int8 with --layout kt-kernel", remedy or "--layout packed has the others")


def parse_layers(text: str) -> set[int]:
    """`0-3,7` -> {0, 1, 2, 3, 7}."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise InputError("layers", repr(text), "numbers and ranges, as 0-3,7")
        layers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return layers


def format_duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.1f} s"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def report_lines(report: QuantizationReport) -> list[str]:
    """The quantization report in short: a line for each matrix."""
    lines = [f"{'matrix':<8} {'from':<14} {'to':<14} {'mean error':>10} {'largest':>10}  layer"]
    for role, row in report.summary().items():
        source, target = (", ".join(row[key]) for key in ("source", "format"))
        kept = row["kept"] == row["layers"]
        errors = f"{'kept':>10} {'':>10}" if kept else f"{row['mean']:>10.5f} {row['largest']:>10.5f}  {row['layer']}"
        lines.append(f"{role:<8} {source:<14} {target:<14} {errors}".rstrip())
    calibration = report.calibration
    if calibration is not None:
        lines.append(
            f"{calibration.tokens} tokens of {calibration.text}: perplexity {calibration.perplexity:.4f}, source "
            f"{calibration.source_perplexity:.4f}; KL {calibration.kl:.5f} nats; "
            f"same first choice {calibration.same_top:.2%}"
        )
    if report.skipped is not None:
        lines.append(f"no calibration: {report.skipped}")
    return lines


def add_calibration(converted: Converted, plan: ConversionPlan, text: Path, tokens: int) -> QuantizationReport:
    """The quantization report with the calibration on `text`, or with the reason why there is none."""
    from ktransformers.cli.library_output import library_output
    from ktransformers.quant.report import calibrate, write_report

    origin = plan.origin
    try:
        with library_output():
            calibration = calibrate(
                origin.path,
                converted.directory,
                text,
                experts=origin.experts,
                tokens=tokens,
                source_bytes=plan.source_bytes,
            )
        report = dataclasses.replace(converted.report, calibration=calibration, skipped=None)
    except InputError as error:
        report = dataclasses.replace(converted.report, calibration=None, skipped=str(error))
    write_report(converted.directory, report)
    return report


def show_plan(plan: ConversionPlan, seconds: float, as_json: bool) -> None:
    layers = [
        {
            "module": layer.origin.module,
            "from": layer.origin.formats,
            "to": layer.formats,
            "source_bytes": layer.origin.bytes,
            "packed_bytes": layer.packed_bytes,
        }
        for layer in plan.layers
    ]
    if as_json:
        document: dict[str, Any] = {"layers": layers, "rest_bytes": plan.rest_bytes, "source_bytes": plan.source_bytes}
        document |= {"rest": plan.rest, "linears": len(plan.linears), "rest_out_bytes": plan.rest_out_bytes}
        document |= {"out_bytes": plan.out_bytes, "seconds": round(seconds, 1), "threads": plan.threads}
        print(json.dumps(document, indent=2))
        return
    for role in plan.layers[0].formats:
        source, target = (sorted({str(layer[key][role]) for layer in layers}) for key in ("from", "to"))  # type: ignore[index]
        print(f"{role:<8} {', '.join(source)} -> {', '.join(target)}")
    experts = sum(layer.packed_bytes for layer in plan.layers)
    print(f"source   {gigabytes(plan.source_bytes)}, {len(plan.layers)} layers of experts")
    print(
        f"result   {gigabytes(plan.out_bytes)}: experts {gigabytes(experts)}, the rest {gigabytes(plan.rest_out_bytes)}"
    )
    estimate = f"{format_duration(seconds)} with {plan.threads} threads, measured on one expert"
    print(f"time     {estimate}; the disk may take longer")


def run_quant(
    source: Path,
    out: Path | None,
    *,
    word: str,
    experts: Path | None = None,
    rest: str = "bf16",
    group: int | None = None,
    down: str | None = None,
    threads: int | None = None,
    layers: str | None = None,
    dry_run: bool = False,
    calib: Path | None = None,
    calib_tokens: int | None = None,
    hash_source: bool = False,
    as_json: bool = False,
) -> None:
    """Runs `kt quant` and convert_cpu_weights.py."""
    selected = None if layers is None else parse_layers(layers)
    if out is None and not dry_run:
        raise InputError("out", "nothing", "the directory to write", "-o OUT")
    if threads is not None and threads < 1:
        raise InputError("threads", threads, "1 or more")
    if calib is not None and not calib.is_file():
        raise InputError("calib", f"{calib}, which does not exist", "a text file or JSON lines")
    from ktransformers.quant.convert import convert
    from ktransformers.quant.plan import estimate, make_plan, parse_formats
    from ktransformers.quant.report import MAX_TOKENS

    formats = parse_formats(normalise_format(word), group, None if down is None else normalise_format(down))
    rest = rest_word(rest)
    plan = make_plan(source, formats, threads, experts, rest)
    if rest != "bf16" and not plan.linears:
        reason = "the files have numbers there" if rest == "keep" else "no linear layer of this model is large enough"
        log(f"--rest {rest}: without effect: {reason}")
    for note in plan.origin.notes:
        log(note)
    if dry_run:
        show_plan(plan, estimate(plan), as_json)
        return
    assert out is not None
    with progress_bar("Converting", quiet=as_json, unit="bytes") as progress:
        done = convert(plan, out, layers=selected, hash_source=hash_source, progress=progress)
    report = done.report
    if calib is not None and done.whole:
        report = add_calibration(done, plan, calib, calib_tokens or MAX_TOKENS)
    if as_json:
        document = {"directory": str(done.directory), "whole": done.whole, "seconds": round(done.seconds, 2)}
        document |= {"source_bytes": done.source_bytes, "kept_layers": done.kept_layers, "redone": done.redone}
        print(json.dumps(document | report.to_json(), indent=2))
        return
    if done.redone:
        print(f"written again, because their checksums did not fit: {', '.join(done.redone)}")
    rate = f", {done.source_bytes / done.seconds / 1e9:.2f} GB/s" if done.source_bytes else ""
    state = "" if done.whole else f": {len(report.layers)} of {len(plan.layers)} layers; the same command continues"
    print(f"{done.directory}{state} ({gigabytes(plan.out_bytes)} in all, {format_duration(done.seconds)}{rate})")
    print("\n".join(report_lines(report)))


def show_kt_plan(plan: KTPlan, seconds: float, as_json: bool) -> None:
    from ktransformers.checkpoint.kt_codes import tile_format

    form, layers = tile_format(plan.bits), len(plan.origin.layers)
    if as_json:
        document: dict[str, Any] = {"layout": "kt-kernel", "method": form.method, "threadpool_count": plan.parts}
        document |= {"layers": layers, "source_bytes": plan.source_bytes, "rest_bytes": plan.rest_bytes}
        document |= {"out_bytes": plan.out_bytes, "seconds": round(seconds, 1), "threads": plan.threads}
        print(json.dumps(document, indent=2))
        return
    what = "merged safetensors" if plan.merged else "a tree of .kt files"
    print(f"layout   kt-kernel, {form.method}, {what} for {plan.parts} NUMA nodes")
    print(f"source   {gigabytes(plan.source_bytes)}, {layers} layers of experts")
    print(f"result   {gigabytes(plan.out_bytes)}: {gigabytes(plan.layer_bytes)} a layer")
    print(f"time     {format_duration(seconds)} with {plan.threads} threads, measured on one expert")


def run_quant_kt(
    source: Path,
    out: Path | None,
    *,
    word: str,
    experts: Path | None = None,
    numa_nodes: int | None = None,
    merged: bool = True,
    backward: bool = False,
    threads: int | None = None,
    layers: str | None = None,
    resume_layer: int = 0,
    dry_run: bool = False,
    profile: bool = False,
    as_json: bool = False,
) -> None:
    """Runs `kt quant --layout kt-kernel` and convert_cpu_weights.py."""
    bits = kt_bits(word)
    selected = None if layers is None else parse_layers(layers)
    if threads is not None and threads < 1:
        raise InputError("threads", threads, "1 or more")
    from ktransformers import _core
    from ktransformers.checkpoint.kt_codes import tile_format
    from ktransformers.quant.kt_convert import convert_kt, estimate_kt, plan_kt
    from ktransformers.quant.origin import Origin

    parts = _core.machine()["nodes"] if numa_nodes is None else numa_nodes
    plan = plan_kt(Origin(source, experts), bits, parts, merged=merged, backward=backward, threads=threads)
    for note in plan.origin.notes:
        log(note)
    if dry_run:
        show_kt_plan(plan, estimate_kt(plan), as_json)
        return
    method = tile_format(bits).method
    stem = source.stem if source.suffix == ".gguf" else source.name
    target = out or source.absolute().with_name(f"{stem}-{method}-NUMA{parts}")
    with progress_bar("Converting", quiet=as_json, unit="bytes") as progress:
        done = convert_kt(plan, target, layers=selected, resume_layer=resume_layer, progress=progress)
    if as_json:
        document = {"directory": str(done.directory), "whole": done.whole, "seconds": round(done.seconds, 2)}
        document |= {"layout": "kt-kernel", "method": method, "threadpool_count": parts, "redone": done.redone}
        document |= {"source_bytes": done.source_bytes, "out_bytes": plan.out_bytes, "kept_layers": done.kept_layers}
        document["layer_seconds"] = {str(layer): round(value, 3) for layer, value in done.layer_seconds.items()}
        print(json.dumps(document, indent=2))
        return
    if done.redone:
        print(f"written again, because their checksums did not fit: {', '.join(done.redone)}")
    for layer, value in done.layer_seconds.items() if profile else ():
        print(f"layer {layer}: {format_duration(value)}")
    count = done.kept_layers + len(done.layer_seconds)
    state = "" if done.whole else f": {count} of {len(plan.origin.layers)} layers; the same command continues"
    rate = f", {done.source_bytes / done.seconds / 1e6:.0f} MB/s" if done.source_bytes else ""
    print(f"{done.directory}{state} ({gigabytes(plan.out_bytes)} in all, {format_duration(done.seconds)}{rate})")
    if done.whole:
        print(f"{method} for kt-kernel with threadpool_count {parts}")


def run_plain(source: Path, out: Path | None, *, dry_run: bool = False, as_json: bool = False) -> None:
    """Runs `kt quant --format bf16 --plain` and fp8_cast_bf16.py."""
    if out is None and not dry_run:
        raise InputError("out", "nothing", "the directory to write", "-o OUT")
    from ktransformers.quant.plain import check_plain_target, plan_plain, write_plain

    if out is not None:
        check_plain_target(source, out)
    plan = plan_plain(source)
    for note in plan.source.notes:
        log(note)
    if out is None or dry_run:
        sizes = {"source_bytes": plan.source_bytes, "out_bytes": plan.out_bytes, "shards": len(plan.shards)}
        written = f"{gigabytes(plan.source_bytes)} -> {gigabytes(plan.out_bytes)} in {len(plan.shards)} files of bf16"
        print(json.dumps(sizes, indent=2) if as_json else written)
        return
    with progress_bar("Converting", quiet=as_json, unit="bytes") as progress:
        done = write_plain(plan, out, progress)
    if as_json:
        print(json.dumps(done.to_json(), indent=2))
        return
    kept = f", {done.kept_shards} of them by an earlier call" if done.kept_shards else ""
    print(f"{done.directory} ({gigabytes(done.bytes)}, {format_duration(done.seconds)})")
    files = f"{done.shards} file{'s' if done.shards > 1 else ''}"
    print(f"{done.tensors} tensors in {files}{kept}; stock transformers opens it")


def refuse_with_plain(word: str, **options: object) -> None:
    if word.lower() != "bf16":
        raise InputError("format", f"{word} with --plain", "bf16", "--format bf16 --plain")
    for name, value in options.items():
        if value:
            raise InputError(name.replace("_", "-"), f"{value} with --plain", "it without --plain")


def refuse_with_kt_layout(**options: object) -> None:
    for name, value in options.items():
        if value:
            raise InputError(name.replace("_", "-"), f"{value} with --layout kt-kernel", "it with --layout packed")


def warn_ignored(**options: object) -> None:
    for name, value in options.items():
        if value:
            log(f"--{name.replace('_', '-')} has no effect here and is ignored")


# Options of `kt quant`; the names behind the first are those of kt-kernel's converter.
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        "--method",
        "-m",
        "--quant-method",
        help="int4, int8, bf16, bf16:12 (the same bits in 25 % less memory), fp8:128x128, q8_0 ... (docs/quant.md has "
        "all), or keep: as released.",
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", "--cpuinfer-threads", "--cpu-threads", help="[default: all cores]")
]
ExpertsOption = Annotated[
    Path | None, typer.Option(help="Take the experts from here: GGUF or kt-kernel files of the same model.")
]
LayoutOption = Annotated[
    str, typer.Option(help="packed, which ktransformers maps, or kt-kernel: files that kt-kernel 0.7 reads.")
]
NumaNodesOption = Annotated[
    int | None,
    typer.Option(
        "--numa-nodes",
        "--threadpool-count",
        help="kt-kernel's layout: parts of each expert, its threadpool_count. [default: this machine's]",
    ),
]
NoMergeOption = Annotated[
    bool, typer.Option("--no-merge", "--no-merge-safetensor", help="kt-kernel's layout: a tree of .kt files.")
]
BackwardOption = Annotated[
    bool, typer.Option("--backward", "--save-backward-weights", help="kt-kernel's layout: transposed matrices too.")
]
ResumeLayerOption = Annotated[
    int, typer.Option("--resume-layer", help="kt-kernel's layout: refuse if a layer below is missing.", hidden=True)
]
PlainOption = Annotated[
    bool, typer.Option("--plain", help="With --format bf16: an ordinary checkpoint, which stock transformers opens.")
]
RestOption = Annotated[
    str,
    typer.Option(
        "--rest",
        help="Dense (non-expert) linear layers: bf16, keep (as released) or a format such as int8 or int4:32.",
    ),
]
CalibOption = Annotated[
    Path | None, typer.Option(help="A text or JSON lines: measure KL and perplexity against the source.")
]


def _only_source(model: str | None, input_path: str | None) -> str:
    """MODEL or `--input-path`, which mean the same."""
    source = model or input_path
    if not source or (model and input_path):
        raise InputError("MODEL", "two" if source else "nothing", "the model to convert")
    return source


def quant(
    model: Annotated[str | None, typer.Argument(help="A model's directory, a GGUF file, or a registered name.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", "--output", help="The directory to write.")] = None,
    word: FormatOption = "int4",
    group: Annotated[int | None, typer.Option(help="int4: columns that share a scale. [default: 32]")] = None,
    down_format: Annotated[str | None, typer.Option(help="Another format for down.")] = None,
    threads: ThreadsOption = None,
    experts: ExpertsOption = None,
    rest: RestOption = "bf16",
    layout: LayoutOption = "packed",
    plain: PlainOption = False,
    numa_nodes: NumaNodesOption = None,
    no_merge: NoMergeOption = False,
    backward: BackwardOption = False,
    resume_layer: ResumeLayerOption = 0,
    layers: Annotated[str | None, typer.Option(help="Only these now, as 0-3,7; the rest with a later call.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and time, write nothing.")] = False,
    calib: CalibOption = None,
    calib_tokens: Annotated[int | None, typer.Option(help="Tokens of it to read. [default: 8192]")] = None,
    hash_source: Annotated[bool, typer.Option("--hash-source", help="Record SHA-256 of the source's files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    input_path: Annotated[str | None, typer.Option("--input-path", help="The same as MODEL.", hidden=True)] = None,
    input_type: Annotated[str | None, typer.Option("--input-type", "-i", hidden=True)] = None,
    gpu: Annotated[bool, typer.Option("--gpu", hidden=True)] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", hidden=True)] = False,
) -> None:
    """Convert a checkpoint into a packed directory, opened without reading, into kt-kernel's files, or into bf16."""
    from ktransformers.checkpoint.small_model import resolve_model

    source = _only_source(model, input_path)
    if layout not in LAYOUTS:
        raise InputError("layout", layout, " or ".join(LAYOUTS))
    if plain:
        refuse_with_plain(
            word, layout=layout == "kt-kernel" and layout, group=group, down_format=down_format, experts=experts,
            rest=rest != "bf16" and rest, layers=layers, calib=calib, calib_tokens=calib_tokens,
            hash_source=hash_source,
        )  # fmt: skip
        warn_ignored(threads=threads, numa_nodes=numa_nodes, no_merge=no_merge, backward=backward, gpu=gpu)
        run_plain(Path(resolve_model(source)), out, dry_run=dry_run, as_json=as_json)
        return
    if layout == "kt-kernel":
        refuse_with_kt_layout(
            group=group, down_format=down_format, rest=rest != "bf16" and rest, calib=calib, calib_tokens=calib_tokens,
            hash_source=hash_source,
        )  # fmt: skip
        warn_ignored(gpu=gpu)
        run_quant_kt(
            Path(resolve_model(source)),
            out,
            word=word,
            experts=experts,
            numa_nodes=numa_nodes,
            merged=not no_merge,
            backward=backward,
            threads=threads,
            layers=layers,
            resume_layer=resume_layer,
            dry_run=dry_run,
            as_json=as_json,
        )
        return
    warn_ignored(numa_nodes=numa_nodes, no_merge=no_merge, backward=backward, resume_layer=resume_layer, gpu=gpu)
    run_quant(
        Path(resolve_model(source)),
        out,
        experts=experts,
        rest=rest,
        word=word,
        group=group,
        down=down_format,
        threads=threads,
        layers=layers,
        dry_run=dry_run,
        calib=calib,
        calib_tokens=calib_tokens,
        hash_source=hash_source,
        as_json=as_json,
    )
