"""`kt bench`: the speed of a model on this machine, through the HTTP of `kt serve`, in llama-bench's words, with memory
and roofs of the same run; `kt microbench`: the kernels of one layer.

A model that is not on this machine is made of random weights of its released shapes (`cli/bench_run.py`). Records of
runs can be compared with each other and sent in (`cli/bench_record.py`). The benches of the kernels, with their
yardsticks, are in `bench/` of the source tree and of a wheel: `kt microbench` runs them there, and otherwise says where
to get them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.model import complete_names
from ktransformers.cli.options import Json
from ktransformers.ground.errors import InputError, KTError

BENCH_CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}
COMPONENTS = {"moe": "moe.py", "train-step": "train_step.py"}


def parse_counts(name: str, text: str) -> list[int]:
    """`512,2k,128k`: k is 1024."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if not words or not all(re.fullmatch(r"[1-9][0-9]*k?", word) for word in words):
        raise InputError(name, repr(text), "numbers above 0 with commas between, as in 512,2k,32k")
    return [int(word.removesuffix("k")) * (1024 if word.endswith("k") else 1) for word in words]


def bench(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help="A directory, a name of `kt model list`, or one of `kt model known`, whose weights are then random.",
            autocompletion=complete_names,
        ),
    ] = None,
    prompts: Annotated[
        str, typer.Option("--prompts", "--n-prompt", "-p", help="Tokens of a prompt; several with commas, k is 1024.")
    ] = "512",
    new: Annotated[int, typer.Option("--new", "--n-gen", "-n", min=1, help="New tokens behind each prompt.")] = 128,
    streams: Annotated[
        str, typer.Option("--streams", "--sequences", help="Concurrent requests; several with commas.")
    ] = "1",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Measured rounds of each cell.")] = 3,
    layers: Annotated[int | None, typer.Option(min=1, help="Random weights of the first so many layers.")] = None,
    word: Annotated[
        str | None, typer.Option("--format", help="Of random experts, as int4. [default: that of the release]")
    ] = None,
    linked: Annotated[
        bool | None,
        typer.Option(
            "--linked/--whole",
            help="Layers of random experts share a few files, or have one each. [default: whole where it fits]",
        ),
    ] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="As if the GPU had so much: 24GB.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Keep random weights and the server's log here.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the record here.")] = None,
    submit: Annotated[
        Path | None, typer.Option(help="Also write the record to send in: without paths, names and keys.")
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Measure nothing: compare two records.", metavar="A.json B.json")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure prompt and decode speed through HTTP. Further options are those of `kt serve`."""
    from ktransformers.cli import bench_record

    if compare is not None:
        rows = bench_record.compare(*map(bench_record.read_record, compare))
        print(json.dumps(rows, indent=2) if as_json else bench_record.comparison_table(rows))
        return
    from ktransformers.cli.bench_run import Request, run
    from ktransformers.serve.speed import SpeedCell

    model = ask.for_model(model, as_json)
    cells = [
        SpeedCell(prompt, new, count)
        for prompt in parse_counts("prompts", prompts)
        for count in parse_counts("streams", streams)
    ]
    request = Request(model, cells, repetitions, layers, word, linked, gpu_memory, tuple(context.args))
    record = run(request, folder, None if as_json else print)
    for file, document in ((output, record), (submit, bench_record.public(record))):
        if file is not None:
            from ktransformers.ground.files import write_json

            write_json(file, document)
    if as_json:
        print(json.dumps(record, indent=2))


def find_script(component: str, package: Path | None = None) -> Path:
    """The bench script of a component: in the package if a build put it there, or in the source tree around it."""
    if component not in COMPONENTS:
        raise InputError("component", repr(component), f"one of {', '.join(COMPONENTS)}")
    package = package or Path(__file__).resolve().parents[1]
    for folder in (package / "bench", package.parents[1] / "bench"):
        if (folder / COMPONENTS[component]).is_file():
            return folder / COMPONENTS[component]
    raise InputError(
        "component",
        f"{component}, whose bench is not in this installation",
        "the source tree",
        f"unpack the source distribution, and run `python bench/{COMPONENTS[component]}` in it",
    )


def microbench(
    component: Annotated[
        str, typer.Argument(help="moe: forward of a layer; train-step: with backward and LoRA.")
    ] = "moe",
    shapes: Annotated[str | None, typer.Option(help="As qwen3-30b,dsv2-lite. [default: all]")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", "-b", help="As 1,16,512. [default: the bench's]")] = None,
    isa: Annotated[str | None, typer.Option(help="CPU variants, `all` for those that run here.")] = None,
    cpu_threads: Annotated[int | None, typer.Option("--cpu-threads", "-t", min=1, help="[default: chosen]")] = None,
    seconds: Annotated[float | None, typer.Option(min=0, help="Measured time of each cell.")] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers to cycle through. [default: more than the caches hold]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="moe: few token counts, half the time.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON document here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Measure the kernels of one layer against the roofline."""
    command = [sys.executable, str(find_script(component))]
    options: dict[str, Any] = {"--shapes": shapes, "--tokens": tokens, "--isa": isa, "--threads": cpu_threads}
    options |= {"--seconds-per-cell": seconds, "--layers": layers, "--json": output}
    for flag, value in options.items():
        command += [] if value is None else [flag, str(value)]
    command += ["--quick"] if quick else []
    done = subprocess.run(command, stdout=subprocess.PIPE if as_json else None, text=True)
    if as_json and done.stdout:
        print(done.stdout.rstrip().rpartition("\n")[2])  # the JSON document is the last line
    if done.returncode:
        raise KTError(f"the bench ended with {done.returncode}") if done.returncode < 0 else typer.Exit(done.returncode)
