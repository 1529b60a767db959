"""What `kt plan` and the verbs that start from a plan print of it: rows of a name and a text, in full or as a summary
of three."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ktransformers.ground import report
from ktransformers.ground.charts import Bar, bar_chart
from ktransformers.ground.progress import rough
from ktransformers.ground.report import gigabytes, table_line

if TYPE_CHECKING:
    from ktransformers.plan import Candidate, Machine, ModelShape, Plan
    from ktransformers.plan.exchange import Hosts
if TYPE_CHECKING:
    from ktransformers.plan import Plan

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


def candidate_rows(candidate: Candidate, model: ModelShape, machine: Machine) -> list[tuple[str, str]]:
    from ktransformers.plan.workload import expert_bytes

    memory = candidate.memory
    rows = [("how", choice_line(candidate))]
    for index, table in enumerate(memory.gpus):
        used = f"{gigabytes(sum(table.values()))} of {gigabytes(machine.gpus[index].memory)}"
        rows.append((f"gpu {index}", f"{used}: {table_line(table)}"))
    if slots := memory.gpus[0].get("slots", 0) if memory.gpus else 0:
        experts = slots // expert_bytes(model, candidate.choice)
        layers = f"{experts / model.experts:.2g} layers"
        rows.append(("stream", f"a buffer of {gigabytes(slots)} on each GPU: {experts} experts, {layers}"))
    rows.append(("host", f"{gigabytes(memory.host_bytes)} of {gigabytes(machine.memory)}: {table_line(memory.host)}"))
    if len(memory.nodes) > 1:
        rows.append(("nodes", ", ".join(gigabytes(size) for size in memory.nodes)))
    if memory.pinned:
        rows.append(("pinned", f"{gigabytes(memory.pinned)} of the host's"))
    if memory.mapped:
        rows.append(("mapped", f"{gigabytes(memory.mapped)} of the files' pages, in the page cache"))
    rows.append(("disk", table_line(memory.disk)))
    rows.append(("time", candidate.time.text))
    if candidate.missing:
        rows.append(("not yet", "this version lacks " + ", ".join(candidate.missing)))
    return rows


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    from ktransformers.plan.document import modes_of
    from ktransformers.plan.planner import describe_lacking

    candidate = plan.nearest
    if candidate.hosts is not None:
        rows = hosts_rows(candidate, candidate.hosts, plan.machine)
    else:
        rows = candidate_rows(candidate, plan.model, plan.machine)
        modes = (f"{name} at {tokens} tokens {decision.reason}" for name, (tokens, decision) in modes_of(plan).items())
        rows.insert(1, ("modes", "; ".join(modes)))
    if plan.best is None:
        rows.insert(0, ("no fit", f"{describe_lacking(candidate.lacking)}; this comes nearest:"))
    for number, remedy in enumerate(plan.remedies, 1):
        rows.append((f"remedy {number}", f"{' and '.join(remedy.changes)}: {_rate_text(remedy.candidate)}"))
    for other in plan.others:
        if other.hosts is not None:
            how = f"{partition_text(other.hosts)}; {_wire_text(other, other.hosts)};"
        else:
            how = f"{choice_line(other)}: host {gigabytes(other.memory.host_bytes)},"
        rows.append(("other", f"{how} {_rate_text(other)}"))
    return rows + [("note", note) for note in plan.notes]


def _rate_text(candidate: Candidate) -> str:
    later = f" (this version lacks {', '.join(candidate.missing)})" if candidate.missing else ""
    return f"{candidate.time.tokens_per_second:.3g} tokens/s{later}"


def hosts_rows(candidate: Candidate, hosts: Hosts, machine: Machine) -> list[tuple[str, str]]:
    where = "node 0" if candidate.time.first_token is not None else "every node"
    where = f"the GPU of {where}" if candidate.choice.gpus else where
    how = f"experts in {candidate.choice.format} on CPUs; attention and the rest on {where}"
    rows, first = [("how", how), ("partition", partition_text(hosts))], 0
    for memory, group in itertools.groupby(hosts.memory):  # one row for hosts with equal tables
        last = first + len(list(group)) - 1
        name = f"node {first}" if last == first else f"nodes {first}-{last}"
        mapped = f"; {gigabytes(memory.mapped)} mapped" if memory.mapped else ""
        used = f"{gigabytes(memory.host_bytes)} of {gigabytes(machine.memory)}"
        rows.append((name, f"{used}: {table_line(memory.host)}{mapped}"))
        for index, table in enumerate(memory.gpus):
            used = f"{gigabytes(sum(table.values()))} of {gigabytes(machine.gpus[index].memory)}"
            rows.append((f"{name}, gpu", f"{used}: {table_line(table)}"))
        first = last + 1
    return [*rows, ("wire", _wire_text(candidate, hosts)), ("time", candidate.time.text)]


def partition_text(hosts: Hosts) -> str:
    """Which experts are where, ranges by host."""
    by_ids = hosts.form == "experts"
    ends = list(itertools.accumulate(hosts.shares))
    parts = [
        f"node {host}: {end - share} to {end - 1}" if share else f"node {host}: none"
        for host, (share, end) in enumerate(zip(hosts.shares, ends, strict=True))
    ]
    what = "experts of every layer by expert ids" if by_ids else "layers of experts by layers"
    return f"{what}: {', '.join(parts)}"


def _wire_text(candidate: Candidate, hosts: Hosts) -> str:
    wire = hosts.wire
    per_token = f"{size_text(wire.per_token)} a token, to {wire.hosts_of_token:.2f} other hosts in a layer on average"
    if candidate.time.first_token is not None:
        return f"{per_token}; {size_text(wire.per_prompt)} a prompt"
    reduced = f"; gradients of attention's LoRA {size_text(wire.reduced)}" if wire.reduced else ""
    return f"{size_text(wire.per_step)} a step and host ({per_token}){reduced}"


def size_text(size: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"


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
    return _join([*parts, f"{gigabytes(memory.host_bytes + memory.mapped)} {of} {gigabytes(machine.memory)} {where}"])


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


MIN_SHARE = 0.02  # of a place's memory, that is named in the chart; the rows name all
Rows = Sequence[tuple[str, str]]


def _bar(label: str, table: Mapping[str, int], available: int, lacking: int) -> Bar:
    total = sum(table.values())
    segments = [(name, float(size)) for name, size in table.items() if size >= MIN_SHARE * total]
    segments.sort(key=lambda segment: -segment[1])
    segments.append(("other", total - sum(size for _, size in segments)))
    missing = f", {gigabytes(lacking)} missing" if lacking else ""
    note = f"{gigabytes(total)} of {gigabytes(available)}{missing}"
    return Bar(label, segments, float(available), note)


def memory_charts(plan: Plan) -> list[str]:
    """One chart for the GPUs and one for the host, each with its own scale. A place that has less than the plan takes
    is framed in red, and the missing size is named."""
    memory, machine, lacking = plan.nearest.memory, plan.machine, plan.nearest.lacking
    gpus = [
        _bar(f"GPU {index}", table, machine.gpus[index].memory, lacking.get(f"gpu{index}", 0))
        for index, table in enumerate(memory.gpus)
    ]
    host = [_bar("host", memory.host, machine.memory, lacking.get("host", 0))]
    titles = (
        ("memory of the GPUs; the frame is what is there", gpus),
        ("host memory; the frame is what is there", host),
    )
    return [bar_chart(title, bars, gigabytes) for title, bars in titles if bars]


def plan_page(model: str, machine: str, plans: Mapping[str, tuple[Plan, Rows]]) -> str:
    """`plans`: train, serve -> the plan and its rows as the terminal shows them."""
    blocks = [report.paragraph(machine)]
    for name, (plan, rows) in plans.items():
        blocks.append(report.heading(f"{name}: {'fits' if plan.best is not None else 'does not fit'}"))
        blocks += [*map(report.chart, memory_charts(plan)), report.table(["", ""], rows, left=2)]
    return report.page(f"Plan of {model}", blocks)
