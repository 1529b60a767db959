"""`kt plan --hosts N`: the rows of a plan over several machines: the partition, memory of every host, bytes on the
wire, time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from ktransformers.cli.sizes import gigabytes, table_line
from ktransformers.ground.errors import InputError

if TYPE_CHECKING:
    from ktransformers.plan import Machine, ModelShape, Plan, Serving, Training
    from ktransformers.plan.exchange import Hosts, Network, Wire
    from ktransformers.plan.memory import MemoryPlan

SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def refuse_with_hosts(given: Mapping[str, object]) -> None:
    """Options that a plan over several hosts has no answer to."""
    for name, value in given.items():
        if value:
            raise InputError(name, value, f"no {name} with --hosts", "experts of several hosts stay on their CPUs")


def size_text(size: float) -> str:
    for unit, name in SIZES:
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} bytes"


def partition_text(hosts: Hosts) -> str:
    """Which experts are where, ranges by host."""
    what = "experts of every layer" if hosts.form == "experts" else "layers of experts"
    first, parts = 0, []
    for host, share in enumerate(hosts.shares):
        parts.append(f"host {host}: {first} to {first + share - 1}" if share else f"host {host}: none")
        first += share
    return f"{what} by {'expert ids' if hosts.form == 'experts' else 'layers'}: {', '.join(parts)}"


def _host_rows(memory: tuple[MemoryPlan, ...], machine: Machine) -> list[tuple[str, str]]:
    """One row for hosts with equal tables."""
    rows, place = list[tuple[str, str]](), 0
    while place < len(memory):
        last = place
        while last + 1 < len(memory) and memory[last + 1] == memory[place]:
            last += 1
        name = f"host {place}" if last == place else f"hosts {place}-{last}"
        rows += _memory_rows(name, memory[place], machine)
        place = last + 1
    return rows


def _memory_rows(name: str, memory: MemoryPlan, machine: Machine) -> list[tuple[str, str]]:
    text = f"{gigabytes(memory.host_bytes)} of {gigabytes(machine.memory)}: {table_line(memory.host)}"
    if memory.mapped:
        text += f"; {gigabytes(memory.mapped)} mapped"
    rows = [(name, text)]
    for index, table in enumerate(memory.gpus):
        gpu = machine.gpus[index]
        size = gigabytes(sum(table.values()))
        rows.append((f"{name}, gpu", f"{size} of {gigabytes(gpu.memory)}: {table_line(table)}"))
    return rows


def wire_text(wire: Wire, training: bool) -> str:
    per_token = f"{size_text(wire.per_token)} a token, to {wire.hosts_of_token:.2f} other hosts in a layer on average"
    if training:
        reduced = f"; gradients of attention's LoRA {size_text(wire.reduced)}" if wire.reduced else ""
        return f"{size_text(wire.per_step)} a step and host ({per_token}){reduced}"
    return f"{per_token}; {size_text(wire.per_prompt)} a prompt"


def hosts_rows(plan: Plan) -> list[tuple[str, str]]:
    from ktransformers.plan.hosts import describe_lacking, hosts_of

    candidate, hosts = plan.nearest, hosts_of(plan.nearest)
    training = candidate.time.first_token is None
    where = "the GPU of host 0" if candidate.choice.gpus else "host 0"
    if training:
        where = "the GPU of every host" if candidate.choice.gpus else "every host"
    rows = [
        ("how", f"experts in {candidate.choice.format} on CPUs; attention and the rest on {where}"),
        ("partition", partition_text(hosts)),
        *_host_rows(hosts.memory, plan.machine),
        ("wire", wire_text(hosts.wire, training)),
        ("time", candidate.time.text),
    ]
    if plan.best is None:
        rows.insert(0, ("no fit", f"{describe_lacking(candidate.lacking)}; this comes nearest:"))
        for number, remedy in enumerate(plan.remedies, 1):
            rate = remedy.candidate.time.tokens_per_second
            rows.append((f"remedy {number}", f"{' and '.join(remedy.changes)}: {rate:.3g} tokens/s"))
    for other in plan.others:
        wire = wire_text(hosts_of(other).wire, training)
        text = f"{partition_text(hosts_of(other))}; {wire}; {other.time.tokens_per_second:.3g} tokens/s"
        rows.append(("other", text))
    return rows + [("note", note) for note in plan.notes]


def plan_hosts(
    shape: ModelShape,
    works: Mapping[str, Training | Serving],
    machine: Machine,
    hosts: int,
    network: Network,
    as_json: bool,
) -> None:
    """Print the plans; exit status 2 if one does not fit."""
    from ktransformers.plan.document import plan_document
    from ktransformers.plan.hosts import make_hosts_plan

    plans = {name: make_hosts_plan(shape, work, machine, hosts, network) for name, work in works.items()}
    if as_json:
        print(json.dumps({name: plan_document(plan) for name, plan in plans.items()}, indent=2))
    else:
        print(f"{'model':<12} {shape.name}: {shape.numbers / 1e9:.4g} billion numbers")
        gpus = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
        print(f"{'hosts':<12} {hosts} x {machine.cpu.name}, {gigabytes(machine.memory)}, {gpus}; {network.name} each")
        for name, plan in plans.items():
            print(f"\n{name}: {'fits' if plan.best else 'does not fit'}")
            for row, value in hosts_rows(plan):
                print(f"{row:<12} {value}")
    if any(plan.best is None for plan in plans.values()):
        raise typer.Exit(2)
