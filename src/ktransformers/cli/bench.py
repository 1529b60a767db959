"""`kt bench`: a model's speed on this machine in llama-bench's tests and table; `kt microbench`: one layer's kernels.

`kt bench` is all in the package. The kernels' benches live in `bench/` of the source tree, with their peers and their
results, and are no part of a wheel: `kt microbench` runs them where it finds them, and says where to get them
otherwise.
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.model import names
from ktransformers.cli.sizes import gigabytes
from ktransformers.errors import InputError, KTError

if TYPE_CHECKING:
    from ktransformers.serve.engine.speed import Speed, SpeedTest

FORMATS = ("md", "csv", "json", "jsonl")
COMPONENTS = {"moe": "moe.py", "train-step": "train_step.py"}
HEADS = ("model", "size", "params", "variant", "threads", "test", "t/s")


def counts(name: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        found = [-1]
    if any(number < 0 for number in found):
        raise InputError(name, repr(text), "numbers with commas between, as in 128,512")
    return found


def bench(
    model: Annotated[
        str | None, typer.Argument(help="A directory, a name of `kt model list`, or a hub id.", autocompletion=names)
    ] = None,
    n_prompt: Annotated[str, typer.Option("--n-prompt", "-p", help="Tokens to read; several with commas.")] = "512",
    n_gen: Annotated[str, typer.Option("--n-gen", "-n", help="Tokens to write; several with commas.")] = "128",
    n_depth: Annotated[str, typer.Option("--n-depth", "-d", help="Tokens before the written ones.")] = "0",
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", min=1, help="Measured rounds of each test.")] = 5,
    sequences: Annotated[int, typer.Option("--sequences", min=1, help="Requests at a time.")] = 1,
    cpu_threads: Annotated[
        int | None, typer.Option("--cpu-threads", "-t", min=1, help="Of the experts. [default: chosen]")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda: everything but the experts.")] = None,
    dtype: Annotated[
        str, typer.Option(help="auto, bfloat16, float16 or float32: everything but the experts.")
    ] = "auto",
    form: Annotated[str, typer.Option("--format", "-f", help="md, csv, json or jsonl.")] = "md",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON document here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
) -> None:
    """Measure how fast a model reads and writes here: llama-bench's tests."""
    form = "json" if as_json else form
    if form not in FORMATS:
        raise InputError("format", repr(form), f"one of {', '.join(FORMATS)}")
    model = ask.for_model(model, form != "md")
    from ktransformers.serve.engine.speed import SpeedTest

    tests = [SpeedTest(prompt=number) for number in counts("n-prompt", n_prompt) if number]
    depths = counts("n-depth", n_depth) or [0]
    tests += [SpeedTest(new=number, depth=depth) for number in counts("n-gen", n_gen) if number for depth in depths]
    if not tests:
        raise InputError("n-prompt, n-gen", "nothing to measure", "a number above 0")
    document = _document(model, tests, repetitions, sequences, cpu_threads, device, dtype, form)
    if output is not None:
        from ktransformers.files import write_json

        write_json(output, document)
    if form == "json":
        print(json.dumps(document, indent=2))
    elif form == "csv":
        print(_csv(document), end="")


def _document(
    model: str,
    tests: list[SpeedTest],
    repetitions: int,
    sequences: int,
    threads: int | None,
    device: str | None,
    dtype: str,
    form: str,
) -> dict[str, Any]:
    """Measures, and prints what can be printed on the way."""
    from ktransformers import _core
    from ktransformers.checkpoint.verify import verify
    from ktransformers.serve.engine.speed import measure_speeds
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.launch import open_service
    from ktransformers.serve.target import resolve_target

    target = resolve_target(model)
    room = max(test.max_tokens for test in tests)
    launch = Launch(
        model, running=sequences, queued=sequences, tokens=max(64, room * sequences), context=room,
        threads=threads, device=device, dtype=dtype,
    )  # fmt: skip
    service = open_service(launch, target, lambda line: print(f"kt: {line}", file=sys.stderr, flush=True))
    found = verify(target.model, hashes=False)
    config = service.engine.forward.model.config
    used = threads or _core.Pool().threads
    facts = {"model": target.name, "model_type": config.model_type, "size": found.bytes, "params": found.numbers}
    facts |= {"variant": _core.isa(), "threads": used, "sequences": sequences}
    document: dict[str, Any] = {"bench": "model", "machine": dict(_core.machine()), **facts, "tests": []}
    if form == "md":
        _line(HEADS)
        _line(tuple("---" for _ in HEADS))
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    on_screen = form == "md" and sys.stderr.isatty()
    speeds = measure_speeds(
        service.engine, service.tokenizer, tests, vocabulary=vocabulary, repetitions=repetitions, sequences=sequences,
        progress=(lambda text: print(f"\r{text:<40}\r", end="", file=sys.stderr, flush=True)) if on_screen else None,
    )  # fmt: skip
    for speed in speeds:
        document["tests"].append(_record(speed))
        if form == "md":
            _line(_row(document, document["tests"][-1]))
        elif form == "jsonl":
            print(json.dumps({**facts, **document["tests"][-1]}), flush=True)
    return document


def _record(speed: Speed) -> dict[str, Any]:
    test = speed.test
    said = {"test": test.name, "n_prompt": test.prompt, "n_gen": test.new, "n_depth": test.depth}
    return said | {"avg_ts": speed.mean, "stddev_ts": speed.deviation, "samples_ts": list(speed.samples)}


def _row(document: dict[str, Any], record: dict[str, Any]) -> tuple[str, ...]:
    model = f"{document['model']} ({document['model_type']})"
    params = f"{document['params'] / 1e6:.1f} M" if document["params"] < 1e9 else f"{document['params'] / 1e9:.2f} B"
    test = record["test"] + (f" x {document['sequences']}" if document["sequences"] > 1 else "")
    rate = f"{record['avg_ts']:.2f} ± {record['stddev_ts']:.2f}"
    return model, gigabytes(document["size"]), params, document["variant"], str(document["threads"]), test, rate


def _line(cells: tuple[str, ...]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def _csv(document: dict[str, Any]) -> str:
    text = io.StringIO()
    facts = {
        name: document[name] for name in ("model", "model_type", "size", "params", "variant", "threads", "sequences")
    }
    rows = [
        {**facts, **{name: value for name, value in one.items() if name != "samples_ts"}} for one in document["tests"]
    ]
    table = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def script(component: str, package: Path | None = None) -> Path:
    """The bench of a component: in the package where a build put it there, or in the source tree around it."""
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
    seconds: Annotated[float | None, typer.Option(min=0, help="Of timed calls for each cell.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="To walk over. [default: beyond the caches]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="moe: few token counts, half the time.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the JSON document here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the table.")] = False,
) -> None:
    """Measure the kernels of one layer against the roof of this machine."""
    words = [sys.executable, str(script(component))]
    given: dict[str, Any] = {"--shapes": shapes, "--tokens": tokens, "--isa": isa, "--threads": cpu_threads}
    given |= {"--seconds-per-cell": seconds, "--layers": layers, "--json": output}
    for flag, value in given.items():
        words += [] if value is None else [flag, str(value)]
    words += ["--quick"] if quick else []
    done = subprocess.run(words, stdout=subprocess.PIPE if as_json else None, text=True)
    if as_json and done.stdout:
        print(done.stdout.rstrip().rpartition("\n")[2])  # the document is the last line
    if done.returncode:
        raise KTError(f"the bench ended with {done.returncode}") if done.returncode < 0 else typer.Exit(done.returncode)
