"""`kt quant`: converts a checkpoint to a packed directory, with `--layout kt-kernel` to kt-kernel's files, or with
`--format bf16 --plain` to an ordinary checkpoint in bf16.

Flags of kt-kernel's converter are accepted under their names. Those about its file layout (NUMA parts, merging,
backward weights) mean what they mean there with that layout; without it, and in any case those about its requirements
(a GPU), they have no effect, which is printed, not refused.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.options import Json, print_result, with_options
from ktransformers.cli.progress import log, progress_bar
from ktransformers.ground.errors import InputError, MissingArgumentError
from ktransformers.ground.linear_storage import rest_word
from ktransformers.ground.progress import clock
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.quant.convert import Converted
    from ktransformers.quant.kt_convert import KTConverted, KTPlan
    from ktransformers.quant.plan import ConversionPlan
    from ktransformers.quant.report import QuantizationReport

LAYOUTS = ("packed", "kt-kernel")
KT_BITS = {"int4": 4, "amxint4": 4, "int8": 8, "amxint8": 8}
OLD_FORMATS = {"moe_int8": "int8", "moe_int4": "int4"}


@dataclass(frozen=True)
class QuantOptions:
    """One conversion. The names of a flag behind the first are those of kt-kernel's converter."""

    model: Annotated[str | None, typer.Argument(help="A model's directory, a GGUF file, or a registered name.")] = None
    out: Annotated[Path | None, typer.Option("--out", "-o", "--output", help="The directory to write.")] = None
    word: Annotated[
        str,
        typer.Option(
            "--format",
            "--method",
            "-m",
            "--quant-method",
            help="int4, int8, bf16, bf16:12 (the same bits in 25 % less memory), fp8:128x128, q8_0 ... (docs/quant.md "
            "has all), or keep: as released.",
        ),
    ] = "int4"
    group: Annotated[int | None, typer.Option(help="int4: columns that share a scale. [default: 32]")] = None
    down_format: Annotated[str | None, typer.Option(help="Another format for down.")] = None
    threads: Annotated[
        int | None, typer.Option("--threads", "--cpuinfer-threads", "--cpu-threads", help="[default: all cores]")
    ] = None
    experts: Annotated[
        Path | None, typer.Option(help="Take the experts from here: GGUF or kt-kernel files of the same model.")
    ] = None
    rest: Annotated[
        str,
        typer.Option(
            "--rest",
            help="Dense (non-expert) linear layers: bf16, keep (as released) or a format such as int8 or int4:32.",
        ),
    ] = "bf16"
    layout: Annotated[
        str, typer.Option(help="packed, which ktransformers maps, or kt-kernel: files that kt-kernel 0.7 reads.")
    ] = "packed"
    plain: Annotated[
        bool,
        typer.Option("--plain", help="With --format bf16: an ordinary checkpoint, which stock transformers opens."),
    ] = False
    numa_nodes: Annotated[
        int | None,
        typer.Option(
            "--numa-nodes",
            "--threadpool-count",
            help="kt-kernel's layout: parts of each expert, its threadpool_count. [default: this machine's]",
        ),
    ] = None
    no_merge: Annotated[
        bool, typer.Option("--no-merge", "--no-merge-safetensor", help="kt-kernel's layout: a tree of .kt files.")
    ] = False
    backward: Annotated[
        bool, typer.Option("--backward", "--save-backward-weights", help="kt-kernel's layout: transposed matrices too.")
    ] = False
    resume_layer: Annotated[
        int, typer.Option("--resume-layer", help="kt-kernel's layout: refuse if a layer below is missing.", hidden=True)
    ] = 0
    layers: Annotated[str | None, typer.Option(help="Only these now, as 0-3,7; the rest with a later call.")] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print sizes and time, write nothing.")] = False
    calib: Annotated[
        Path | None, typer.Option(help="A text or JSON lines: measure KL and perplexity against the source.")
    ] = None
    calib_tokens: Annotated[int | None, typer.Option(help="Tokens of it to read. [default: 8192]")] = None
    hash_source: Annotated[bool, typer.Option("--hash-source", help="Record SHA-256 of the source's files.")] = False
    as_json: Json = False
    input_path: Annotated[str | None, typer.Option("--input-path", help="The same as MODEL.", hidden=True)] = None
    input_type: Annotated[str | None, typer.Option("--input-type", "-i", hidden=True)] = None
    gpu: Annotated[bool, typer.Option("--gpu", hidden=True)] = False
    yes: Annotated[bool, typer.Option("--yes", "-y", hidden=True)] = False
    profile: bool = False  # of convert_cpu_weights.py alone: print the time of each layer

    @property
    def selected(self) -> set[int] | None:
        return None if self.layers is None else parse_layers(self.layers)

    def require_out(self) -> None:
        if self.out is None and not self.dry_run:
            raise MissingArgumentError("out", "the directory to write", "-o OUT")


# Options that a target refuses, and those that have no effect there.
PACKED_ALONE = ("group", "down_format", "rest", "calib", "calib_tokens", "hash_source")
REFUSED = {"--layout kt-kernel": PACKED_ALONE, "--plain": (*PACKED_ALONE, "layout", "experts", "layers")}
IGNORED = {
    "--layout packed": ("numa_nodes", "no_merge", "backward", "resume_layer", "gpu"),
    "--layout kt-kernel": ("gpu",),
    "--plain": ("threads", "numa_nodes", "no_merge", "backward", "gpu"),
}


def check_options(options: QuantOptions, target: str) -> None:
    if target == "--plain" and options.word.lower() != "bf16":
        raise InputError("format", f"{options.word} with --plain", "bf16", "--format bf16 --plain")
    if options.threads is not None and options.threads < 1:
        raise InputError("threads", options.threads, "1 or more")
    for item in dataclasses.fields(options):
        name, value = item.name.replace("_", "-"), getattr(options, item.name)
        if value != item.default and item.name in REFUSED.get(target, ()):
            raise InputError(name, f"{value} with {target}", f"it without {target}")
        if value != item.default and item.name in IGNORED[target]:
            log(f"--{name} has no effect here and is ignored")


def normalise_format(word: str) -> str:
    """The format behind an older name."""
    if word.lower() == "awq":
        raise InputError("quant-method", word, "int4, int8 or another format", "`kt quant --help` lists them")
    if word.lower() in KT_BITS and word.lower().startswith("amx"):
        raise InputError("format", word, "int4 or int8", f"--layout kt-kernel --format {word.lower()[3:]}")
    return OLD_FORMATS.get(word.lower(), word.lower())


def kt_bits(word: str) -> int:
    """The bits of a method that kt-kernel's files can hold."""
    name = OLD_FORMATS.get(word.lower(), word.lower())
    if name != word.lower():
        log(f"{word}: written as {name}; the bytes of kt-kernel's own {word} depend on the library of its build")
    if name in KT_BITS:
        return KT_BITS[name]
    raise InputError("format", word, "int4 or int8 with --layout kt-kernel", "--layout packed has the others")


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
    return f"{seconds:.1f} s" if round(seconds) < 60 else clock(seconds)


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


def add_calibration(converted: Converted, plan: ConversionPlan, text: Path, tokens: int | None) -> QuantizationReport:
    """The quantization report with the calibration on `text`, or with the reason why there is none."""
    from ktransformers.cli.library_output import library_output
    from ktransformers.quant.report import MAX_TOKENS, calibrate, write_report

    origin, calibration, skipped = plan.origin, None, None
    given: dict[str, Any] = {"experts": origin.experts, "tokens": tokens or MAX_TOKENS}
    try:
        with library_output():
            calibration = calibrate(origin.path, converted.directory, text, source_bytes=plan.source_bytes, **given)
    except InputError as error:
        skipped = str(error)
    report = dataclasses.replace(converted.report, calibration=calibration, skipped=skipped)
    write_report(converted.directory, report)
    return report


def plan_document(plan: ConversionPlan | KTPlan, seconds: float) -> dict[str, Any]:
    sizes = {"source_bytes": plan.source_bytes, "rest_bytes": plan.rest_bytes, "out_bytes": plan.out_bytes}
    return {**sizes, "seconds": round(seconds, 1), "threads": plan.threads}


def plan_lines(plan: ConversionPlan | KTPlan, seconds: float, parts: str) -> list[str]:
    estimate = f"{format_duration(seconds)} with {plan.threads} threads, measured on one expert"
    return [
        f"source   {gigabytes(plan.source_bytes)}, {len(plan.origin.layers)} layers of experts",
        f"result   {gigabytes(plan.out_bytes)}: {parts}",
        f"time     {estimate}; the disk may take longer",
    ]


def done_document(done: Converted | KTConverted) -> dict[str, Any]:
    document = {"directory": str(done.directory), "whole": done.whole, "seconds": round(done.seconds, 2)}
    return document | {"source_bytes": done.source_bytes, "kept_layers": done.kept_layers, "redone": done.redone}


def done_lines(done: Converted | KTConverted, plan: ConversionPlan | KTPlan, layers: int) -> list[str]:
    lines = [f"written again, because their checksums did not fit: {', '.join(done.redone)}"] if done.redone else []
    rate = f", {done.source_bytes / done.seconds / 1e9:.2f} GB/s" if done.source_bytes else ""
    state = "" if done.whole else f": {layers} of {len(plan.origin.layers)} layers; the same command continues"
    taken = f"{gigabytes(plan.out_bytes)} in all, {format_duration(done.seconds)}{rate}"
    return [*lines, f"{done.directory}{state} ({taken})"]


def run_packed(source: Path, options: QuantOptions) -> None:
    options.require_out()
    selected, calib, down = options.selected, options.calib, options.down_format
    if calib is not None and not calib.is_file():
        raise InputError("calib", f"{calib}, which does not exist", "a text file or JSON lines")
    from ktransformers.quant.convert import convert
    from ktransformers.quant.plan import estimate, make_plan, parse_formats

    down = None if down is None else normalise_format(down)
    formats, rest = parse_formats(normalise_format(options.word), options.group, down), rest_word(options.rest)
    plan = make_plan(source, formats, options.threads, options.experts, rest)
    if rest != "bf16" and not plan.linears:
        reason = "the files have numbers there" if rest == "keep" else "no linear layer of this model is large enough"
        log(f"--rest {rest}: without effect: {reason}")
    for note in plan.origin.notes:
        log(note)
    if options.dry_run:
        show_plan(plan, estimate(plan), options.as_json)
        return
    assert options.out is not None
    with progress_bar("Converting", quiet=options.as_json, unit="bytes") as progress:
        done = convert(plan, options.out, layers=selected, hash_source=options.hash_source, progress=progress)
    report = done.report
    if calib is not None and done.whole:
        report = add_calibration(done, plan, calib, options.calib_tokens)
    lines = [*done_lines(done, plan, len(report.layers)), *report_lines(report)]
    print_result(done_document(done) | report.to_json(), lines, options.as_json)


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
    document = {"layers": layers, "rest": plan.rest, "linears": len(plan.linears), **plan_document(plan, seconds)}
    lines = []
    for role in plan.layers[0].formats:
        stored = ", ".join(sorted({layer.origin.formats[role] for layer in plan.layers}))
        lines.append(f"{role:<8} {stored} -> {', '.join(sorted({layer.formats[role] for layer in plan.layers}))}")
    experts = sum(layer.packed_bytes for layer in plan.layers)
    parts = f"experts {gigabytes(experts)}, the rest {gigabytes(plan.rest_out_bytes)}"
    lines += plan_lines(plan, seconds, parts)
    print_result(document | {"rest_out_bytes": plan.rest_out_bytes}, lines, as_json)


def run_kt(source: Path, options: QuantOptions) -> None:
    bits, selected = kt_bits(options.word), options.selected
    from ktransformers import _core
    from ktransformers.checkpoint.kt_codes import tile_format
    from ktransformers.quant.kt_convert import convert_kt, estimate_kt, fitting_parts, plan_kt
    from ktransformers.quant.origin import Origin

    origin, nodes = Origin(source, options.experts), options.numa_nodes
    asked = _core.machine()["nodes"] if nodes is None else nodes
    parts = fitting_parts(origin, bits, asked)
    if parts != asked:
        log(
            f"{asked} NUMA parts of these experts do not fit the tiles of {tile_format(bits).name}: {parts} are written"
        )
    shape: dict[str, Any] = {"merged": not options.no_merge, "backward": options.backward}
    plan = plan_kt(origin, bits, parts, threads=options.threads, **shape)
    for note in plan.origin.notes:
        log(note)
    method, count = tile_format(bits).method, len(plan.origin.layers)
    facts = {"layout": "kt-kernel", "method": method, "threadpool_count": parts}
    if options.dry_run:
        seconds, files = estimate_kt(plan), "merged safetensors" if plan.merged else "a tree of .kt files"
        lines = [f"layout   kt-kernel, {method}, {files} for {parts} NUMA nodes"]
        lines += plan_lines(plan, seconds, f"{gigabytes(plan.layer_bytes)} a layer")
        print_result({**facts, "layers": count, **plan_document(plan, seconds)}, lines, options.as_json)
        return
    stem = source.stem if source.suffix == ".gguf" else source.name
    target = options.out or source.absolute().with_name(f"{stem}-{method}-NUMA{parts}")
    with progress_bar("Converting", quiet=options.as_json, unit="bytes") as progress:
        done = convert_kt(plan, target, layers=selected, resume_layer=options.resume_layer, progress=progress)
    times = {str(layer): round(value, 3) for layer, value in done.layer_seconds.items()}
    lines = [f"layer {layer}: {format_duration(value)}" for layer, value in done.layer_seconds.items()]
    lines = lines if options.profile else []
    lines += done_lines(done, plan, done.kept_layers + len(times))
    lines += [f"{method} for kt-kernel with threadpool_count {parts}"] if done.whole else []
    print_result(
        {**done_document(done), **facts, "out_bytes": plan.out_bytes, "layer_seconds": times}, lines, options.as_json
    )


def run_plain(source: Path, options: QuantOptions) -> None:
    options.require_out()
    from ktransformers.quant.plain import check_plain_target, plan_plain, write_plain

    out = options.out
    if out is not None:
        check_plain_target(source, out)
    plan = plan_plain(source)
    for note in plan.source.notes:
        log(note)
    if out is None or options.dry_run:
        sizes = {"source_bytes": plan.source_bytes, "out_bytes": plan.out_bytes, "shards": len(plan.shards)}
        written = f"{gigabytes(plan.source_bytes)} -> {gigabytes(plan.out_bytes)} in {len(plan.shards)} files of bf16"
        print_result(sizes, [written], options.as_json)
        return
    with progress_bar("Converting", quiet=options.as_json, unit="bytes") as progress:
        done = write_plain(plan, out, progress)
    kept = f", {done.kept_shards} of them by an earlier call" if done.kept_shards else ""
    files = f"{done.shards} file{'s' if done.shards > 1 else ''}"
    lines = [f"{done.directory} ({gigabytes(done.bytes)}, {format_duration(done.seconds)})"]
    lines.append(f"{done.tensors} tensors in {files}{kept}; stock transformers opens it")
    print_result(done.to_json(), lines, options.as_json)


TARGETS = {"--layout packed": run_packed, "--layout kt-kernel": run_kt, "--plain": run_plain}


@with_options(QuantOptions)
def quant(options: QuantOptions) -> None:
    """Pack a checkpoint, so that it opens without reading. Also writes kt-kernel's files, and bf16."""
    from ktransformers.checkpoint.small_model import resolve_model

    source = options.model or options.input_path
    if not source:
        raise MissingArgumentError("MODEL", "the model to convert")
    if options.model and options.input_path:
        raise InputError("MODEL", "two", "one model to convert")
    if options.layout not in LAYOUTS:
        raise InputError("layout", options.layout, " or ".join(LAYOUTS))
    target = "--plain" if options.plain else f"--layout {options.layout}"
    check_options(options, target)
    TARGETS[target](Path(resolve_model(source)), options)
