"""`kt bench`: a model's speed on this machine in llama-bench's tests and table; `kt microbench`: the kernels of one
layer.

The benches of the kernels, with their yardsticks, are in `bench/` of the source tree and of a wheel: `kt microbench`
runs them there, and otherwise says where to get them.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.model import complete_names
from ktransformers.cli.progress import log, progress_bar
from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.serve.speed import Speed, SpeedTest

FORMATS = ("md", "csv", "json", "jsonl")
COMPONENTS = {"moe": "moe.py", "train-step": "train_step.py"}
COLUMNS = ("model", "size", "params", "variant", "threads", "test", "t/s")


def parse_counts(name: str, text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise InputError(name, repr(text), "numbers with commas between, as in 128,512")
    return numbers


def bench(
    model: Annotated[
        str | None,
        typer.Argument(help="A directory, a name of `kt model list`, or a hub id.", autocompletion=complete_names),
    ] = None,
    n_prompt: Annotated[
        str, typer.Option("--n-prompt", "-p", help="Prompt tokens of a prefill test; several with commas.")
    ] = "512",
    n_gen: Annotated[
        str, typer.Option("--n-gen", "-n", help="New tokens of a decode test; several with commas.")
    ] = "128",
    n_depth: Annotated[str, typer.Option("--n-depth", "-d", help="Prompt tokens before the new ones.")] = "0",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Measured rounds of each test.")] = 5,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Concurrent requests.")] = 1,
    cpu_threads: Annotated[
        int | None, typer.Option("--cpu-threads", "-t", min=1, help="Threads of the experts. [default: chosen]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda: everything but the experts.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32: everything but the experts.")
    ] = "auto",
    output_format: Annotated[str, typer.Option("--format", "-f", help="md, csv, json or jsonl.")] = "md",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON document here.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Also write a page with the table and charts.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Measure prefill and decode speed, by llama-bench's tests."""
    output_format = "json" if as_json else output_format
    if output_format not in FORMATS:
        raise InputError("format", repr(output_format), f"one of {', '.join(FORMATS)}")
    model = ask.for_model(model, output_format != "md")
    from ktransformers.serve.speed import SpeedTest

    tests = [SpeedTest(prompt=number) for number in parse_counts("n-prompt", n_prompt) if number]
    depths = parse_counts("n-depth", n_depth) or [0]
    tests += [
        SpeedTest(new=number, depth=depth) for number in parse_counts("n-gen", n_gen) if number for depth in depths
    ]
    if not tests:
        raise InputError("n-prompt, n-gen", "nothing to measure", "a number above 0")
    document = _measure(model, tests, repetitions, sequences, cpu_threads, device, dtype, output_format)
    if output is not None:
        from ktransformers.ground.files import write_json

        write_json(output, document)
    if html is not None:
        from ktransformers.ground.files import write_text

        write_text(html, bench_page(document))
    if output_format == "json":
        print(json.dumps(document, indent=2))
    elif output_format == "csv":
        print(_csv(document), end="")


def _measure(
    model: str,
    tests: list[SpeedTest],
    repetitions: int,
    sequences: int,
    threads: int | None,
    device: str | None,
    dtype: str,
    form: str,
) -> dict[str, Any]:
    """Measure all tests; md and jsonl rows are printed as they are measured."""
    from ktransformers import _core
    from ktransformers.checkpoint.verify import verify
    from ktransformers.cli.library_output import library_output
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.loading import open_service
    from ktransformers.serve.speed import measure_speeds
    from ktransformers.serve.target import resolve_target
    from ktransformers.serve.yaml_keys import with_yaml_keys

    target = resolve_target(model)
    max_tokens = max(test.max_tokens for test in tests)
    launch = Launch(
        model,
        max_running_requests=sequences,
        max_queued_requests=sequences,
        max_total_tokens=max(64, max_tokens * sequences),
        context_length=max_tokens,
        threads=threads,
        device=device,
        dtype=dtype,
    )
    with library_output():
        service = open_service(with_yaml_keys(launch, target.keys), target, log)
    files = verify(target.model, hashes=False)
    config = service.engine.forward.model.config
    used = threads or _core.Pool().threads
    facts = {"model": target.name, "model_type": config.model_type, "size": files.bytes, "params": files.numbers}
    facts |= {"variant": _core.isa(), "threads": used, "sequences": sequences}
    document: dict[str, Any] = {"bench": "model", "machine": dict(_core.machine()), **facts, "tests": []}
    if form == "md":
        _print_row(COLUMNS)
        _print_row(tuple("---" for _ in COLUMNS))
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    rounds = itertools.count()
    with progress_bar("Measuring", quiet=form == "json", still=True) as bar:
        speeds = measure_speeds(
            service.engine, service.tokenizer, tests, vocabulary=vocabulary, repetitions=repetitions,
            sequences=sequences, progress=lambda text: bar(next(rounds), len(tests) * (repetitions + 1), text),
        )  # fmt: skip
        for speed in speeds:
            document["tests"].append(_record(speed))
            if form == "md":
                _print_row(_table_row(document, document["tests"][-1]))
            elif form == "jsonl":
                print(json.dumps({**facts, **document["tests"][-1]}), flush=True)
    return document


def _record(speed: Speed) -> dict[str, Any]:
    test = speed.test
    record = {"test": test.name, "n_prompt": test.prompt, "n_gen": test.new, "n_depth": test.depth}
    return record | {"avg_ts": speed.mean, "stddev_ts": speed.deviation, "samples_ts": list(speed.samples)}


def _table_row(document: dict[str, Any], record: dict[str, Any]) -> tuple[str, ...]:
    model = f"{document['model']} ({document['model_type']})"
    params = f"{document['params'] / 1e6:.1f} M" if document["params"] < 1e9 else f"{document['params'] / 1e9:.2f} B"
    test = record["test"] + (f" x {document['sequences']}" if document["sequences"] > 1 else "")
    size, threads = gigabytes(document["size"]), str(document["threads"])
    return model, size, params, document["variant"], threads, test, _rate(record)


def bench_page(document: dict[str, Any]) -> str:
    """The table as printed, and a chart for each kind of test: their speeds have different scales."""
    from ktransformers.ground import report
    from ktransformers.ground.charts import Bar, bar_chart

    tests = document["tests"]
    blocks = [report.table(COLUMNS, [_table_row(document, record) for record in tests])]
    for title, key in (("prefill, tokens/s", "n_prompt"), ("decode, tokens/s", "n_gen")):
        bars = [Bar(record["test"], [(title, record["avg_ts"])], note=_rate(record)) for record in tests if record[key]]
        blocks += [report.chart(bar_chart(title, bars))] if bars else []
    return report.page(f"kt bench {document['model']}", blocks)


def _rate(record: dict[str, Any]) -> str:
    return f"{record['avg_ts']:.2f} ± {record['stddev_ts']:.2f}"


def _print_row(cells: tuple[str, ...]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _csv(document: dict[str, Any]) -> str:
    text = io.StringIO()
    facts = {
        name: document[name] for name in ("model", "model_type", "size", "params", "variant", "threads", "sequences")
    }
    rows = [
        {**facts, **{name: value for name, value in test.items() if name != "samples_ts"}} for test in document["tests"]
    ]
    table = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


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
