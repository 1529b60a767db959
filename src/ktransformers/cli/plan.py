"""`kt plan`: the memory and time that a model takes on a machine, before anything is loaded.

ktransformers.plan decides; this module prints a table or one JSON document, and `plan_page.py` draws the memory.
Without `--train` and `--serve` both are planned, with the defaults of each.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ktransformers.cli import ask
from ktransformers.cli.options import Json
from ktransformers.cli.progress import log
from ktransformers.cli.sizes import gigabytes, table_line
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import KEEP, rest_word
from ktransformers.ground.progress import rough

if TYPE_CHECKING:
    from ktransformers.plan import Candidate, Machine, ModelShape, Plan, Serving, Training

POLICY_TEXTS = {
    "cpu": "on the CPU",
    "stream": "streamed to the GPU (KT_PLACE=stream)",
    "stream_all": "streamed to the GPU regardless of routing (KT_PLACE=stream_all)",
    "auto": "on the CPU or the GPU, in the modes below (KT_PLACE=auto)",
    "resident": "on the CPU and the GPU (KT_PLACE=resident)",
    "host_callback": "on the CPU and the GPU, by host callbacks when decoding (KT_PLACE=host_callback)",
    "split": "split between the CPU and the GPU (KT_PLACE=split)",
}


def choice_line(candidate: Candidate) -> str:
    choice = candidate.choice
    gpus = {0: "the CPU", 1: "one GPU"}.get(
        choice.gpus, f"{choice.gpus} GPUs, whole layers on each: heads are not split"
    )
    where = f"attention and the rest on {gpus}"
    residents = f", {choice.residents} of each layer resident there" if choice.residents else ""
    return f"experts in {choice.format} {POLICY_TEXTS[choice.policy]}{residents}; {where}"


def candidate_rows(candidate: Candidate, machine: Machine) -> list[tuple[str, str]]:
    memory = candidate.memory
    rows = [("how", choice_line(candidate))]
    for index, table in enumerate(memory.gpus):
        gpu = machine.gpus[index]
        rows.append(
            (f"gpu {index}", f"{gigabytes(sum(table.values()))} of {gigabytes(gpu.memory)}: {table_line(table)}")
        )
    rows.append(("host", f"{gigabytes(memory.host_bytes)} of {gigabytes(machine.memory)}: {table_line(memory.host)}"))
    if len(memory.nodes) > 1:
        rows.append(("nodes", ", ".join(gigabytes(size) for size in memory.nodes)))
    if memory.pinned:
        rows.append(("pinned", f"{gigabytes(memory.pinned)} of the host's"))
    if memory.mapped:
        rows.append(("mapped", f"{gigabytes(memory.mapped)} of the checkpoint's pages, in the page cache"))
    rows.append(("disk", table_line(memory.disk)))
    rows.append(("time", candidate.time.text))
    if candidate.missing:
        rows.append(("not yet", "this version lacks " + ", ".join(candidate.missing)))
    return rows


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    from ktransformers.plan.document import modes_of

    candidate = plan.nearest
    rows = candidate_rows(candidate, plan.machine)
    modes = (f"{name} at {tokens} tokens {decision.reason}" for name, (tokens, decision) in modes_of(plan).items())
    rows.insert(1, ("modes", "; ".join(modes)))
    if plan.best is None:
        lacking = ", ".join(f"{place} lacks {gigabytes(size)}" for place, size in candidate.lacking.items())
        rows.insert(0, ("no fit", f"{lacking}; this comes nearest:"))
        for number, remedy in enumerate(plan.remedies, 1):
            later = f" (this version lacks {', '.join(remedy.candidate.missing)})" if remedy.candidate.missing else ""
            rate = remedy.candidate.time.tokens_per_second
            rows.append((f"remedy {number}", f"{' and '.join(remedy.changes)}: {rate:.3g} tokens/s{later}"))
    for other in plan.others:
        size = gigabytes(other.memory.host_bytes)
        later = f" (this version lacks {', '.join(other.missing)})" if other.missing else ""
        rows.append(("other", f"{choice_line(other)}: host {size}, {other.time.tokens_per_second:.3g} tokens/s{later}"))
    rows += [("note", note) for note in plan.notes]
    return rows


def _join(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _place_name(place: str, gpus: int) -> str:
    if place == "host":
        return "host memory"
    return "GPU memory" if gpus == 1 else f"memory of GPU {place.removeprefix('gpu')}"


def _fit_text(plan: Plan) -> str:
    candidate = plan.nearest
    if plan.best is None:
        count = len(candidate.memory.gpus)
        lacking = [f"{gigabytes(size)} of {_place_name(place, count)}" for place, size in candidate.lacking.items()]
        return f"no, {_join(lacking)} {'is' if len(lacking) == 1 else 'are'} missing"
    choice = candidate.choice
    if not choice.gpus:
        return "yes, everything on the CPU"
    gpus = "the GPU" if choice.gpus == 1 else f"{choice.gpus} GPUs"
    experts = "computed on the CPU" if not choice.uses_engine else "computed on both"
    return f"yes, attention on {gpus}, experts in host memory and {experts}"


def _time_text(candidate: Candidate, steps: int | None) -> str:
    time = candidate.time
    rate = f"about {_two_digits(time.tokens_per_second)} tokens/s"
    if time.first_token is not None:
        return f"first token of an answer after about {rough_seconds(time.first_token)}, then {rate}"
    if steps is None:
        return f"about {rough_seconds(time.seconds)} a step, {rate}"
    return f"about {rough(steps * time.seconds)} for {steps} steps, {rate}"


def _two_digits(value: float) -> str:
    return f"{value:.2g}" if value < 99.5 else f"{float(f'{value:.2g}'):.0f}"


def rough_seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2g} s" if seconds < 9.5 else rough(seconds)


def _memory_text(plan: Plan) -> str:
    memory, machine, parts = plan.nearest.memory, plan.machine, list[str]()
    of = "of" if plan.best is not None else "where there are"
    for index, table in enumerate(memory.gpus):
        where = "on the GPU" if len(memory.gpus) == 1 else f"on GPU {index}"
        parts.append(f"{gigabytes(sum(table.values()))} {of} {gigabytes(machine.gpus[index].memory)} {where}")
    where = "free host memory" if memory.gpus else "free memory"
    return _join([*parts, f"{gigabytes(memory.host_bytes)} {of} {gigabytes(machine.memory)} {where}"])


def summary_rows(plan: Plan, steps: int | None = None) -> list[tuple[str, str]]:
    """What is shown before a run: whether it fits, how long it takes, how much memory. `steps` of training."""
    candidate = plan.nearest
    return [("fits", _fit_text(plan)), ("time", _time_text(candidate, steps)), ("memory", _memory_text(plan))]


def published_rows(model: ModelShape, work: str) -> list[tuple[str, str]]:
    rows = []
    for figure in model.published:
        if figure["work"] != work:
            continue
        host = f", {figure['host_gb']:g} GB of host memory" if figure.get("host_gb") else ""
        rate = f", {figure['tokens_per_second']:g} tokens/s" if figure.get("tokens_per_second") else ""
        rows.append(("published", f"{figure['gpu_gb']:g} GB of GPU memory{host}{rate}: {figure['source']}"))
    return rows


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


def _train_plan(
    file: Path,
    words: list[str],
    model: str,
    shape: ModelShape,
    machine: Machine,
    everything: bool,
    policies: tuple[str, ...],
) -> Plan:
    from ktransformers.plan import make_plan

    work, note = _train_work(file, words, model, shape, machine, policies)
    plan = make_plan(shape, work, machine, everything=everything, policies=policies)
    return plan if note is None else replace(plan, notes=(*plan.notes, note))


def _works(serve_alone: bool, size: int, serving: Serving) -> dict[str, Training | Serving]:
    """What is planned without a file: serving, and training unless serving alone is asked for."""
    from ktransformers.plan import Training

    training = Training(rest_bytes=size, linear_format=serving.linear_format)
    return {**({} if serve_alone else {"train": training}), "serve": serving}


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

    if as_json:
        machines = {name: {"cpu": one.cpu.name, "memory": one.memory} for name, one in profiles().items()}
        print(json.dumps(machines, indent=2))
        return
    for name, one in profiles().items():
        print(f"{name:<16} {one.cpu.name}, {gigabytes(one.memory)}")


def _is_fp8(kv_cache_dtype: str) -> bool:
    from ktransformers.ground.options.cache import CACHE_DTYPES, FP8_WORDS

    if kv_cache_dtype not in CACHE_DTYPES:
        raise InputError("kv-cache-dtype", kv_cache_dtype, "auto, bf16 or fp8")
    return kv_cache_dtype in FP8_WORDS


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
    """Plan memory by device, time, and the best configuration that fits."""
    from ktransformers.checkpoint.small_model import resolve_model
    from ktransformers.plan import Serving, make_plan, open_shape
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
    serving = Serving(context, prompt, sequences, size, linear_format, _is_fp8(kv_cache_dtype))
    policies = PLANNED_POLICIES if place is None else (place,)
    if hosts is not None:
        from ktransformers.cli.plan_hosts import plan_hosts, refuse_with_hosts
        from ktransformers.plan.hosts import parse_network

        refuse_with_hosts({"--html": html, "--place": place, "--all": everything, "--format": word, "--rest": rest})
        works = _works(serve, size, serving)
        if train is not None:
            works = {"train": _train_work(train, words or [], model, shape, target, policies)[0]}
        plan_hosts(shape, works, target, hosts, parse_network(net, round_trip * 1e-6), as_json)
        return
    if train is not None:
        plans = {"train": _train_plan(train, words or [], model, shape, target, everything, policies)}
    else:
        plans = {
            name: make_plan(
                shape, work, target, everything=everything, policies=policies, expert_format=_expert_format(word)
            )
            for name, work in _works(serve, size, serving).items()
        }
    _show_plans(plans, shape, target, html, as_json)
    if any(planned.best is None for planned in plans.values()):
        raise typer.Exit(2)


def _show_plans(plans: dict[str, Plan], shape: ModelShape, target: Machine, html: Path | None, as_json: bool) -> None:
    """Print the plans, or one JSON document; with `html` also write a page."""
    from ktransformers.plan.document import plan_document

    rows = {name: [*plan_rows(planned), *published_rows(shape, name)] for name, planned in plans.items()}
    numbers = f"{shape.numbers / 1e9:.4g} billion numbers, {shape.expert_numbers_total / shape.numbers:.0%} in experts"
    gpus = ", ".join(planned.name for planned in target.gpus) or "no GPU"
    machine_text = f"{target.cpu.name}: {target.cpu.isa}, {target.cpu.threads} threads; {gpus}"
    if html is not None:
        from ktransformers.cli.plan_page import plan_page
        from ktransformers.ground.files import write_text

        drawn = {name: (planned, rows[name]) for name, planned in plans.items()}
        write_text(html, plan_page(f"{shape.name}: {numbers}", machine_text, drawn))
    if as_json:
        print(json.dumps({name: plan_document(planned) for name, planned in plans.items()}, indent=2))
        return
    print(f"{'model':<10} {shape.name}: {numbers}")
    print(f"{'machine':<10} {machine_text}")
    for name, planned in plans.items():
        print(f"\n{name}: {'fits' if planned.best else 'does not fit'}")
        for row, value in rows[name]:
            print(f"{row:<10} {value}")
