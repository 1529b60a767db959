"""`kt plan`: the memory and time that a model takes on a machine, before anything is loaded.

ktransformers.plan decides; this module prints a table (`plan_text.py`) or one JSON document, and `plan_page.py` draws
the memory. Without `--train` and `--serve` both are planned, with the defaults of each.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.options import Json, print_result
from ktransformers.cli.plan_text import plan_rows, published_rows, summary_rows
from ktransformers.cli.progress import log
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import KEEP, rest_word
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.plan import Machine, ModelShape, Plan, Serving, Training


def _train_work(
    file: Path, words: list[str], model: str, shape: ModelShape, machine: Machine, policies: tuple[str, ...]
) -> tuple[Training, str | None]:
    """The workload of a file of `kt train`, with the tokens per step that it would choose if all rows had full length,
    and the note on that choice."""
    from ktransformers.checkpoint.model_config import read_model_config
    from ktransformers.train.arguments import dtype_of
    from ktransformers.train.forecast import PlanInputs, training_workload
    from ktransformers.train.grouping import decide_grouping, with_tokens_per_batch
    from ktransformers.train.resolve import read_settings

    config = Path(model) / "config.json"
    settings = read_settings(file, [*words, f"model_name_or_path={model}"])
    config_fields = read_model_config(model) if config.is_file() else {}
    size = dtype_of(settings, config_fields, _bf16_is_fast(machine)).itemsize
    grouping = decide_grouping(settings, None, PlanInputs(shape, machine, policies, size), None)
    return training_workload(with_tokens_per_batch(settings, grouping.tokens), size), grouping.note


def _bf16_is_fast(machine: Machine) -> bool:
    return bool(machine.gpus) or machine.cpu.products == "bfloat16"


def _choose_machine(name: str, gpu: str | None, ram: str | None, remeasure: bool) -> Machine:
    from ktransformers.plan import profile, with_gpus, with_memory
    from ktransformers.plan.calibrate import is_calibrated, this_machine

    if name == "this" and (remeasure or not is_calibrated()):
        log("measuring this machine, which takes a few seconds, once")  # a bar would take a core from it
    machine = this_machine(remeasure=remeasure) if name == "this" else profile(name)
    machine = machine if gpu is None else with_gpus(machine, gpu)
    return machine if ram is None else with_memory(machine, ram)


def _print_machines(as_json: bool) -> None:
    from ktransformers.plan import profiles

    machines = {name: {"cpu": one.cpu.name, "memory": one.memory} for name, one in profiles().items()}
    lines = [f"{name:<16} {one.cpu.name}, {gigabytes(one.memory)}" for name, one in profiles().items()]
    print_result(machines, lines, as_json)


def _linear_format(rest: str | None) -> str | None:
    """Of `--rest`, which is KEEP unless it is given; None: numbers."""
    from ktransformers import _core

    if rest in (None, KEEP):
        return KEEP
    if rest == "bf16":
        return None
    rest = rest_word(str(rest))
    try:
        row = _core.format(rest)
    except ValueError as error:
        raise InputError("rest", rest, str(error)) from error
    if not row["written"]:
        raise InputError("rest", rest, "keep, bf16, or a format that `kt quant` writes, such as int8 or int4:32")
    return rest


def _expert_format(word: str | None) -> str | None:
    """Of `--format`, without the group."""
    from ktransformers import _core

    if word is None:
        return None
    names = {row["name"] for row in _core.formats()}
    if (name := word.partition(":")[0]) not in names:
        raise InputError("format", word, "one of " + ", ".join(sorted(names)))
    return name


def serving_summary(model: str) -> list[tuple[str, str]]:
    """The three rows of serving a model on this machine."""
    from ktransformers.checkpoint.small_model import resolve_model
    from ktransformers.plan import Serving, make_plan, open_shape
    from ktransformers.plan.workload import PLANNED_POLICIES

    shape, machine = open_shape(resolve_model(model)), _choose_machine("this", None, None, False)
    work = Serving(rest_bytes=2 if _bf16_is_fast(machine) else 4, linear_format=KEEP)
    return summary_rows(make_plan(shape, work, machine, policies=PLANNED_POLICIES))


PlaceOption = Annotated[
    str | None,
    typer.Option(
        "--place",
        help="Mode of the experts: auto, cpu, resident, host_callback, stream, stream_all, split (with --serve). "
        "Default: the fastest of auto, cpu, stream and resident.",
    ),
]
RestOption = Annotated[
    str | None,
    typer.Option(
        "--rest",
        help="Dense (non-expert) linear layers: keep (as quantized in the checkpoint), bf16, or a  "
        "format, as int4:32. Default: keep.",
    ),
]


def plan(
    model: Annotated[
        str | None, typer.Argument(help="A folder with config.json, a name of `kt model list`, or a known hub id.")
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys that override those of --train's file.")
    ] = None,
    train: Annotated[Path | None, typer.Option("--train", help="Plan the training run of this YAML file.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Plan serving alone.")] = False,
    gpu: Annotated[str | None, typer.Option(help="GPUs: 24GB,24GB, names as rtx-4090, or none.")] = None,
    ram: Annotated[str | None, typer.Option(help="Host memory: 128GB.")] = None,
    machine: Annotated[str, typer.Option(help="`this`, or a profile; `list` shows them.")] = "this",
    context: Annotated[int, typer.Option(help="Serving: longest sequence, in tokens.")] = 8192,
    prompt: Annotated[int, typer.Option(help="Serving: tokens of a prompt.")] = 1024,
    sequences: Annotated[int, typer.Option(help="Serving: concurrent requests.")] = 1,
    place: PlaceOption = None,
    hosts: Annotated[int | None, typer.Option(help="Share the experts over so many machines like this one.")] = None,
    net: Annotated[str, typer.Option(help="With --hosts: rate of every host's link, 25Gb.")] = "25Gb",
    round_trip: Annotated[
        float, typer.Option("--round-trip", help="With --hosts: microseconds of a message and its answer.")
    ] = 100.0,
    word: Annotated[
        str | None, typer.Option("--format", help="Experts in this format, as int4, instead of the release's.")
    ] = None,
    rest: RestOption = None,
    kv_cache_dtype: Annotated[
        str, typer.Option("--kv-cache-dtype", help="Serving: keys and values in auto or fp8, as `kt serve` has it.")
    ] = "auto",
    everything: Annotated[bool, typer.Option("--all", help="Also other formats and slower plans.")] = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Measure this machine again.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Also write a page with memory by place, as bars.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan memory by device, time, and what fits best."""
    from ktransformers.checkpoint.small_model import resolve_model
    from ktransformers.ground.options.cache import CacheOptions
    from ktransformers.plan import Serving, Training, make_plan, open_shape
    from ktransformers.plan.workload import PLANNED_POLICIES, check_training_policy

    if machine == "list":
        _print_machines(as_json)
        return
    if place is not None and (train is not None or not serve):
        check_training_policy("--place", place, "serving has it: with --serve and without --train")
    model = resolve_model(ask.for_model(model, as_json))
    shape = open_shape(model)
    target = _choose_machine(machine, gpu, ram, calibrate)
    size = 2 if _bf16_is_fast(target) else 4  # as `kt train` and `kt serve` choose
    linear_format = _linear_format(rest)
    serving = Serving(
        context, prompt, sequences, size, linear_format, CacheOptions(kv_cache_dtype=kv_cache_dtype).fp8_cache
    )
    policies = PLANNED_POLICIES if place is None else (place,)
    works: dict[str, Training | Serving] = {"serve": serving}
    note = None
    if train is not None:
        work, note = _train_work(train, words or [], model, shape, target, policies)
        works = {"train": work}
    elif not serve:
        works = {"train": Training(rest_bytes=size, linear_format=linear_format), "serve": serving}
    if hosts is not None:
        from ktransformers.plan.hosts import make_hosts_plan, parse_network

        for name, value in {"html": html, "place": place, "all": everything, "format": word, "rest": rest}.items():
            if value:
                expected = f"no --{name} with --hosts"
                raise InputError(f"--{name}", value, expected, "experts of several hosts stay on their CPUs")
        network = parse_network(net, round_trip * 1e-6)
        plans = {name: make_hosts_plan(shape, work, target, hosts, network) for name, work in works.items()}
    else:
        options: dict[str, Any] = {"everything": everything, "policies": policies}
        options["expert_format"] = _expert_format(word)
        plans = {name: make_plan(shape, work, target, **options) for name, work in works.items()}
        if note is not None:
            plans["train"] = replace(plans["train"], notes=(*plans["train"].notes, note))
    _show_plans(plans, shape, target, html, as_json)
    if any(planned.best is None for planned in plans.values()):
        raise typer.Exit(2)


def _show_plans(plans: dict[str, Plan], shape: ModelShape, target: Machine, html: Path | None, as_json: bool) -> None:
    """Print the plans, or one JSON document; with `html` also write a page."""
    from ktransformers.plan.document import plan_document

    hosts = next(iter(plans.values())).nearest.hosts
    rows = {name: plan_rows(planned) for name, planned in plans.items()}
    numbers = f"{shape.numbers / 1e9:.4g} billion numbers, {shape.expert_numbers_total / shape.numbers:.0%} in experts"
    gpus = ", ".join(planned.name for planned in target.gpus) or "no GPU"
    machine_text = f"{target.cpu.name}: {target.cpu.isa}, {target.cpu.threads} threads; {gpus}"
    if hosts is not None:
        memory = gigabytes(target.memory)
        machine_text = f"{len(hosts.shares)} x {target.cpu.name}, {memory}, {gpus}; {hosts.network.name} each"
    else:
        rows = {name: [*of_plan, *published_rows(shape, name)] for name, of_plan in rows.items()}
    if html is not None:
        from ktransformers.cli.plan_text import plan_page
        from ktransformers.ground.files import write_text

        drawn = {name: (planned, rows[name]) for name, planned in plans.items()}
        write_text(html, plan_page(f"{shape.name}: {numbers}", machine_text, drawn))
    lines = [f"{'model':<10} {shape.name}: {numbers}", f"{'machine':<10} {machine_text}"]
    for name, planned in plans.items():
        lines.append(f"\n{name}: {'fits' if planned.best else 'does not fit'}")
        width = max(10, *(len(row) for row, _ in rows[name]))
        lines += [f"{row:<{width}} {value}" for row, value in rows[name]]
    print_result({name: plan_document(planned) for name, planned in plans.items()}, lines, as_json)
