"""`kt eval`: evaluates a model, in this process or behind a URL, with and without adapters; `--compare` compares runs.

Every run has a folder in the output directory, named `base` or after its adapter, with one folder per task. With
adapters, or with `--compare`, a report of all runs is written into their directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.options import NoVerify
from ktransformers.cli.progress import log, progress_bar
from ktransformers.ground.errors import InputError, MissingArgumentError
from ktransformers.ground.packages import require_extra

if TYPE_CHECKING:
    from ktransformers.evaluate.backend import Backend
    from ktransformers.evaluate.compare import Comparison
    from ktransformers.evaluate.judge import Judge
    from ktransformers.evaluate.task import Task

BASE = "base"


def evaluate(
    targets: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL|URL", help="A directory, a name or a URL; runs with --compare.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="A task file, or the name of a task or suite; may be repeated.")
    ] = None,
    adapter: Annotated[
        list[str] | None, typer.Option(help="NAME=DIR, or NAME=served name with a URL; may be repeated.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Directory of the runs and of the report.")] = Path("eval"),
    compare: Annotated[bool, typer.Option("--compare", help="Compare finished runs instead of evaluating.")] = False,
    list_tasks: Annotated[bool, typer.Option("--list", help="List the tasks that come with the package.")] = False,
    base: Annotated[bool, typer.Option(help="Also evaluate the model without adapters.")] = True,
    limit: Annotated[int | None, typer.Option(min=1, help="At most that many items of each task.")] = None,
    data: Annotated[Path | None, typer.Option(help="A file in place of the task's own data.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a batch, or concurrent requests.")] = 8,
    engine: Annotated[str, typer.Option(help="kt, transformers, or auto: kt if the model has experts.")] = "auto",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32, or auto: bf16 where it is fast.")] = "auto",
    device: Annotated[str, typer.Option(help="Device of everything but the experts.")] = "cpu",
    experts: Annotated[
        Path | None, typer.Option(help="Experts from elsewhere. [default: those that the adapters were trained on]")
    ] = None,
    no_verify: NoVerify = False,
    served_model: Annotated[str | None, typer.Option(help="URL: the name of the base. [default: the first]")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="URL: the served model's tokenizer, to score chats.")] = None,
    judge_url: Annotated[str | None, typer.Option(help="OpenAI-compatible URL of a judge.")] = None,
    judge_model: Annotated[str | None, typer.Option(help="Its model. [default: the first]")] = None,
    key_variable: Annotated[str, typer.Option(help="Environment variable with the API key.")] = "OPENAI_API_KEY",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check tasks and data, count items, ask nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Evaluate a model, and what an adapter gained and cost."""
    if list_tasks:
        _print_tasks(as_json)
        return
    if compare:
        require_extra("kt eval", "eval")
        comparison = _compare(list(targets or []), out)
        _print_comparison(comparison, out, as_json)
        return
    if not targets:
        raise MissingArgumentError("MODEL|URL", "one directory or URL")
    if len(targets) != 1:
        raise InputError("MODEL|URL", targets, "one directory or URL", "--compare takes several runs")
    if not task:
        raise MissingArgumentError("task", "--task FILE or NAME", "`kt eval --list` lists the names")
    from ktransformers.evaluate.task import load_tasks
    from ktransformers.ground.openmp import limit_spinning

    limit_spinning()
    require_extra("kt eval", "eval")
    tasks = [loaded for name in task for loaded in load_tasks(name, limit, data)]
    names = [loaded.name for loaded in tasks]
    if len(set(names)) < len(names):
        raise InputError("task", ", ".join(names), "every task once")
    if dry_run:
        _print_counts(tasks, as_json)
        return
    adapters = _adapters(adapter or [])
    if not base and not adapters:
        raise InputError("no-base", "no adapter either", "something to evaluate")
    key = os.environ.get(key_variable)
    judge = _judge(judge_url, judge_model, key)
    if re.match(r"https?://", targets[0]):
        _require_tokenizer(tasks, tokenizer)
        runs = _remote(targets[0], served_model, adapters, base, tokenizer, key, batch_size)
    else:
        options = {"engine": engine, "dtype": dtype, "device": device, "batch_size": batch_size}
        runs = _local(targets[0], adapters, base, experts, options)
    results = _run(runs, base + len(adapters), tasks, out, judge, quiet=as_json)
    if len(results) > 1:
        _print_comparison(_compare(list(results), out), out, as_json)
    elif as_json:
        print(json.dumps({"directory": str(out), "results": results}, indent=2, ensure_ascii=False))
    else:
        _print_results(results, out)


def _require_tokenizer(tasks: list[Task], tokenizer: Path | None) -> None:
    """A server scores chats as the token ids of a prompt."""
    chats = [task.name for task in tasks if task.scores_chats]
    if chats and tokenizer is None:
        raise InputError(
            "tokenizer",
            f"none, and {chats[0]} needs log-probabilities of chat prompts",
            "the directory of the served model's tokenizer",
            "pass --tokenizer DIR, or set `format: plain` in the task",
        )


def _adapters(given: list[str]) -> dict[str, str]:
    adapters = {}
    for entry in given:
        name, _, directory = entry.partition("=")
        if not re.fullmatch(r"[\w.-]+", name) or name == BASE or name in adapters:
            raise InputError("adapter", repr(entry), f"NAME=DIR with a new name that is not {BASE!r}")
        adapters[name] = directory or name
    return adapters


def _judge(url: str | None, model: str | None, key: str | None) -> Judge | None:
    if url is None:
        return None
    from ktransformers.evaluate.judge import Judge
    from ktransformers.evaluate.remote import connect

    endpoint = connect(url, key)
    return Judge(endpoint, model or endpoint.models()[0])


def _remote(
    url: str,
    served: str | None,
    adapters: dict[str, str],
    base: bool,
    tokenizer: Path | None,
    key: str | None,
    parallel: int,
) -> Iterator[tuple[str, Backend]]:
    from ktransformers.adapters.adapter_template import read_adapter_template
    from ktransformers.evaluate.backend import PromptTokenizer
    from ktransformers.evaluate.remote import RemoteBackend, connect, model_roots

    endpoint = connect(url, key)
    tokens = None
    if tokenizer is not None:
        from ktransformers.modeling.pretrained import read_tokenizer

        tokens = PromptTokenizer(read_tokenizer(tokenizer), str(tokenizer))
    roots = model_roots(endpoint)
    listed = list(roots)
    if base:
        yield BASE, RemoteBackend(endpoint, served or listed[0], tokens, parallel)
    for name, served_name in adapters.items():
        if served_name not in listed:
            raise InputError("adapter", repr(served_name), f"one of those at {url}: {', '.join(listed)}")
        template = read_adapter_template(roots[served_name]) if roots[served_name] else None
        own = tokens if tokens is None else PromptTokenizer(tokens.tokenizer, str(tokenizer), template)
        yield name, RemoteBackend(endpoint, served_name, own, parallel)


def _local(
    target: str, adapters: dict[str, str], base: bool, experts: Path | None, options: dict[str, Any]
) -> Iterator[tuple[str, Backend]]:
    for name, path in adapters.items():
        if not (Path(path) / "adapter_config.json").is_file():
            raise InputError(f"adapter {name}", path, "a directory with an adapter_config.json")
    from ktransformers.checkpoint.gguf_directory import model_directory
    from ktransformers.checkpoint.small_model import resolve_model
    from ktransformers.evaluate.local import LocalModel, trained_experts

    directories = {name: Path(path) for name, path in adapters.items()}
    model = LocalModel.open(
        model_directory(Path(resolve_model(target))), experts=experts or trained_experts(directories), **options
    )
    if base:
        yield BASE, model.backend()
    model.add_adapters(directories)
    for name in adapters:
        if (note := model.template_note(name)) is not None:
            log(note)
        yield name, model.backend(name)


def _run(
    runs: Iterator[tuple[str, Backend]], count: int, tasks: list[Task], out: Path, judge: Judge | None, quiet: bool
) -> dict[str, dict[str, Any]]:
    """One bar over all tasks of the `count` runs."""
    from ktransformers.cli.library_output import library_output
    from ktransformers.evaluate.run import evaluate as ask

    work = {task.name: _work_of(task) for task in tasks}
    total, before = round(count * sum(work.values())), 0.0
    results: dict[str, dict[str, Any]] = {}
    with (
        progress_bar("Loading the model", quiet=quiet, unit="%") as bar,
        library_output(lambda title, done, of, unit: bar(done, of, title)),
    ):
        for name, backend in runs:
            results[name] = {}
            for task in tasks:

                def report(done: int, items: int, task: Task = task, start: float = before, name: str = name) -> None:
                    bar(round(start + work[task.name] * done / items), total, f"{name}: {task.name}, {done}/{items}")

                results[name][task.name] = ask(backend, task, out / name / task.name, judge=judge, progress=report)
                before += work[task.name]
    return results


def _work_of(task: Task) -> float:
    """The share of a task in the work of all, in tokens: one that is written takes about as long as two that are read,
    and every prompt has some of a template."""
    row = _count(task)
    return row["characters"] / 4 + 40 * row["items"] + 2 * row["new_tokens"]


def _compare(runs: list[str], out: Path) -> Comparison:
    from ktransformers.evaluate.compare import compare
    from ktransformers.evaluate.report import write_report

    directories = [out / run if (out / run).is_dir() else Path(run) for run in runs]
    comparison = compare(directories)
    write_report(comparison, out)
    return comparison


def _print_comparison(comparison: Comparison, out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"directory": str(out), **comparison.as_json()}, indent=2, ensure_ascii=False))
        return
    from ktransformers.evaluate.report import terminal_lines

    print("\n".join(terminal_lines(comparison)))
    print(f"{out / 'report.md'}, report.json, report.html")


def _print_results(results: dict[str, dict[str, Any]], out: Path) -> None:
    for run, tasks in results.items():
        for task, result in tasks.items():
            print(f"{run}: {task}, {result['items']} items, {result['seconds']:.1f} s")
            for name, metric in result["metrics"].items():
                star = "*" if name == result["primary"] else " "
                print(f" {star} {name:<20} {metric['value']:>8.2f}  [{metric['low']:.2f}, {metric['high']:.2f}]")
    print(out)


def _count(task: Task) -> dict[str, int]:
    """What a task asks: items, characters that the model reads, tokens that it writes at most."""
    from ktransformers.evaluate.items import read_items
    from ktransformers.evaluate.run import GENERATED_METRICS

    items = read_items(task)
    characters = sum(len(item.prompt) + len(item.reference) + sum(map(len, item.choices)) for item in items)
    new_tokens = len(items) * task.max_new_tokens if GENERATED_METRICS & set(task.metric_groups) else 0
    return {"items": len(items), "characters": characters, "new_tokens": new_tokens}


def _print_counts(tasks: list[Task], as_json: bool) -> None:
    rows = [
        {"name": task.name, "data": str(task.data), **_count(task), "work": round(_work_of(task))} for task in tasks
    ]
    if as_json:
        print(json.dumps({"tasks": rows}, indent=2))
        return
    for row in rows:
        print(f"{row['name']:<20} {row['items']:>5} items")


def _print_tasks(as_json: bool) -> None:
    from ktransformers.evaluate.items import read_items
    from ktransformers.evaluate.task import load_tasks, task_names

    rows = []
    for name in task_names():
        tasks = load_tasks(name)
        suite = [task.name for task in tasks] if [task.name for task in tasks] != [name] else []
        title = f"suite of {', '.join(suite)}" if suite else tasks[0].title
        # A task that reads a file of the user's has no items before it is given.
        items = None if any(task.data is None for task in tasks) else sum(len(read_items(task)) for task in tasks)
        rows.append({"name": name, "items": items, "title": title, "suite": suite})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['name']:<20} {'--data' if row['items'] is None else row['items']:>6}  {row['title']}")
