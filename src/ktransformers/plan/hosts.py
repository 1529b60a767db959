"""A workload on several nodes that share the routed experts: memory of every node, bytes on the wire, time, and the
best partition that fits.

Serving: host 0 has attention, routers, shared experts and the KV cache, and experts too; the others have experts alone.
Every layer of experts is a round trip: host 0 sends rows, computes its own experts and waits for the slowest host, and
all bytes cross the link of host 0. Training: every host has its own batch and everything but the experts whole; all
hosts exchange rows with all, and each holds LoRA, gradients and optimiser states of its experts.

A partition is by expert ids (each layer's experts in ranges of ids) or by layers (all experts of a layer on one host).
Under uniform routing, which the planner assumes, a partition by measured frequency equals one by ids. By layers a row
travels to one host instead of several, but one host computes a layer while the others wait. Only `placement: cpu` is
planned: experts of other hosts cannot be streamed to a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.plan.exchange import (
    Hosts,
    Network,
    TrafficForecast,
    Wire,
    backward_row,
    expected_max,
    forward_row,
    hit_probabilities,
    layer_exchange,
)
from ktransformers.plan.expert_time import cpu_layer_seconds, expected_experts
from ktransformers.plan.formats import counted_as
from ktransformers.plan.machine import Machine
from ktransformers.plan.memory import (
    SERVER_PROCESS_BYTES,
    MemoryPlan,
    Table,
    attention_lora_numbers,
    huge_pages,
    predict_memory,
    workspace_bytes,
)
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.planner import (
    MAX_REMEDIES,
    Candidate,
    Plan,
    Remedy,
    changes,
    describe_lacking,
    host_memory_for,
    lacking_bytes,
)
from ktransformers.plan.step_time import (
    PredictedTime,
    optimiser_seconds,
    serving_passes,
    serving_time,
    training_passes,
    training_time,
)
from ktransformers.plan.workload import Choice, Serving, Training, Work, expert_bytes

BY_EXPERTS, BY_LAYERS = "experts", "layers"
MAX_HOSTS = 64
FRAME_SHARE = 0.94  # of a link's rate that is payload: 1448 of 1538 bytes of a full Ethernet frame with TCP
ROUND_TRIP_SECONDS = 100e-6  # of an empty message over Ethernet and back, threads woken at both ends; estimated
# Of one exchange besides the round trip: Python packing rows, sockets, adding results. The shortest of 400 exchanges of
# one row over loopback, less the same experts in one process (bench/host_exchange.py, a busy Cascade Lake).
EXCHANGE_SECONDS = 0.8e-3
RATE_UNITS = {"": 1 / 8, "k": 1e3 / 8, "m": 1e6 / 8, "g": 1e9 / 8, "t": 1e12 / 8}


def parse_network(rate: str, round_trip: float = ROUND_TRIP_SECONDS) -> Network:
    """`25Gb`, `10Gbit`, `800Mb`: bits per second, as links are sold; `3GB`: bytes. `round_trip` in seconds."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kKmMgGtT]?)(b|B|bit|bits|bps)(?:/s)?\s*", rate)
    if match is None or not float(match[1]):
        raise InputError("net", rate, "a rate such as 25Gb (bits per second) or 3GB (bytes)")
    if not round_trip > 0:
        raise InputError("round-trip", f"{round_trip:g} s", "more than 0")
    size = float(match[1]) * RATE_UNITS[match[2].lower()] * (8 if match[3] == "B" else 1)
    return Network(rate.strip(), size * FRAME_SHARE, round_trip)


def even_shares(total: int, hosts: int) -> tuple[int, ...]:
    """`total` in ranges whose sizes differ by one at most, the larger ones last, where attention is not."""
    return tuple(total * (host + 1) // hosts - total * host // hosts for host in range(hosts))


def _partitions(model: ModelShape, work: Work, hosts: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Even ones, and in serving those that leave host 0 less, down to nothing: it has everything else."""
    for form, total in ((BY_EXPERTS, model.experts), (BY_LAYERS, model.expert_layers)):
        if total < hosts:
            continue
        even = even_shares(total, hosts)
        yield form, even
        if isinstance(work, Serving):
            for part in (3, 2, 1, 0):
                first = even[0] * part // 4
                yield form, (first, *even_shares(total - first, hosts - 1))


def _expert_layer(
    model: ModelShape, tokens: float, machine: Machine, choice: Choice, share: float, touched: float, **options: Any
) -> float:
    """A host's share of a layer: `touched` experts, and of the rows the part `share`."""
    if not touched:
        return 0.0
    return cpu_layer_seconds(model, tokens * share, machine, choice, touched=touched, **options)


def _served_layers(
    model: ModelShape,
    work: Serving,
    choice: Choice,
    machine: Machine,
    network: Network,
    shares: tuple[int, ...],
    form: str,
    tokens: int,
) -> tuple[float, float, TrafficForecast]:
    """Seconds of computing experts, seconds of waiting for the network, and bytes, of all layers of one pass."""
    row = forward_row(model.hidden, model.top_k, work.rest_bytes)
    touched = expected_experts(model, tokens)
    if form == BY_LAYERS:
        remote = sum(shares[1:])
        whole = _expert_layer(model, tokens, machine, choice, 1.0, touched)
        one = layer_exchange(tokens, row, (0, model.experts), model.top_k, 0)
        waiting = remote * (_round_trip(network, one) + network.seconds(one.bytes))
        return model.expert_layers * whole, waiting, _times(one, remote)
    busiest = expected_max(shares, max(1, round(touched)), range(1, len(shares)))
    own = _expert_layer(model, tokens, machine, choice, shares[0] / model.experts, touched * shares[0] / model.experts)
    others = _expert_layer(model, tokens, machine, choice, busiest / max(1.0, touched), busiest)
    one = layer_exchange(tokens, row, shares, model.top_k, 0)
    computing = max(own, others)
    waiting = max(own, others + _round_trip(network, one) + network.seconds(one.bytes)) - computing
    return model.expert_layers * computing, model.expert_layers * waiting, _times(one, model.expert_layers)


def _round_trip(network: Network, exchange: TrafficForecast) -> float:
    return network.round_trip + EXCHANGE_SECONDS if exchange.peers else 0.0


def _times(exchange: TrafficForecast, layers: int) -> TrafficForecast:
    return TrafficForecast(exchange.sent * layers, exchange.returned * layers, exchange.peers)


def _serving(
    model: ModelShape,
    work: Serving,
    choice: Choice,
    machine: Machine,
    network: Network,
    form: str,
    shares: tuple[int, ...],
) -> tuple[PredictedTime, Wire]:
    alone = serving_time(model, work, choice, machine)
    passes = {
        name: (tokens, *_served_layers(model, work, choice, machine, network, shares, form, tokens))
        for name, (tokens, _) in serving_passes(work).items()
    }
    _, experts, waiting, decoded = passes["decode"]
    tokens, prompt_experts, prompt_waiting, prompted = passes["prefill"]
    whole = model.expert_layers * cpu_layer_seconds(model, tokens, machine, choice)
    assert alone.first_token is not None
    first = alone.first_token - whole + prompt_experts + prompt_waiting
    time = PredictedTime(alone.parts | {"experts": experts, "network": waiting}, work.sequences, first)
    wire = Wire(
        decoded.bytes / work.sequences, decoded.bytes, prompted.bytes, 0.0, _hosts_of_token(model, form, shares)
    )
    return time, wire


def _hosts_of_token(model: ModelShape, form: str, shares: tuple[int, ...]) -> float:
    if form == BY_LAYERS:
        return sum(shares[1:]) / sum(shares)
    return sum(hit_probabilities(shares, model.top_k)[1:])


def _training(
    model: ModelShape,
    work: Training,
    choice: Choice,
    machine: Machine,
    network: Network,
    form: str,
    shares: tuple[int, ...],
) -> tuple[PredictedTime, Wire]:
    hosts = len(shares)
    alone = training_time(model, work, choice, machine)
    parts = alone.parts | {"experts": 0.0, "network": 0.0}
    rank = work.rank if work.adapts_experts else 0
    touched = expected_experts(model, hosts * work.tokens)
    one_pass = 0.0
    for pass_ in (entry for entry in training_passes(model, work, choice, machine) if entry.experts):
        row = (backward_row if pass_.backward else forward_row)(model.hidden, model.top_k, work.rest_bytes)
        options: Any = {"rank": rank, "backward": pass_.backward}
        if form == BY_LAYERS:
            layer = _expert_layer(model, hosts * work.tokens, machine, choice, 1.0, touched, **options)
            exchange = layer_exchange((hosts - 1) * work.tokens, row, (0, model.experts), model.top_k, 0)
            mean = exchange.bytes / hosts  # the link of the layer's host carries all of them
        else:
            busiest = max(shares) / model.experts
            layer = _expert_layer(model, hosts * work.tokens, machine, choice, busiest, touched * busiest, **options)
            exchange = layer_exchange(work.tokens, row, shares, model.top_k, 0)
            mean = exchange.bytes
        # What a host sends for its tokens crosses its link together with what it returns for those of others.
        crossing = network.seconds(exchange.bytes) + _round_trip(network, exchange)
        parts["experts"] += work.batches * model.expert_layers * layer
        parts["network"] += work.batches * model.expert_layers * crossing
        one_pass += model.expert_layers * mean
    trained = attention_lora_numbers(model, work.rank) if work.adapts_attention else 0
    reduced = 2 * (hosts - 1) / hosts * trained * work.trained_bytes if hosts > 1 else 0.0
    parts["network"] += network.seconds(reduced)  # sent and received at the same time, in a ring
    own = replace(model, experts=max(shares)) if form == BY_EXPERTS else replace(model, expert_layers=max(shares))
    parts["optimiser"] = optimiser_seconds(own, work, choice, machine)
    per_token = one_pass / work.tokens
    wire = Wire(per_token, one_pass * work.batches, 0.0, reduced, _hosts_of_token(model, form, shares))
    return PredictedTime(parts, hosts * alone.tokens), wire


def _experts_bytes(model: ModelShape, choice: Choice, form: str, share: int) -> int:
    size = expert_bytes(model, choice)
    if form == BY_LAYERS:
        return share * huge_pages(model.experts * size)
    return model.expert_layers * huge_pages(share * size)


def _exchange_buffers(model: ModelShape, work: Work, hosts: int) -> int:
    """Rows and results of one layer, to and from every other host."""
    row = forward_row(model.hidden, model.top_k, work.rest_bytes)
    return work.tokens * (hosts - 1) * (row.sent + row.returned)


def _memory(
    model: ModelShape, work: Work, choice: Choice, machine: Machine, form: str, shares: tuple[int, ...]
) -> tuple[MemoryPlan, ...]:
    def whole(share: int) -> MemoryPlan:
        own = replace(model, experts=share) if form == BY_EXPERTS else replace(model, expert_layers=share)
        return predict_memory(own if isinstance(work, Training) else model, work, choice, machine)

    def with_experts(table: Table, share: int, hosts: int) -> Table:
        experts, buffers = _experts_bytes(model, choice, form, share), _exchange_buffers(model, work, hosts)
        return table | {"experts": experts, "exchange": buffers}

    tables = []
    for place, share in enumerate(shares):
        if isinstance(work, Serving) and place:  # experts alone
            table = {"process": SERVER_PROCESS_BYTES, "workspace": workspace_bytes(model, work, machine)}
            tables.append(MemoryPlan(with_experts(table, share, 2), (), {}, (), 0, 0))
        else:
            plan = whole(share)
            tables.append(replace(plan, host=with_experts(plan.host, share, len(shares))))
    return tuple(tables)


def evaluate_hosts(
    model: ModelShape,
    work: Work,
    choice: Choice,
    machine: Machine,
    network: Network,
    form: str,
    shares: tuple[int, ...],
) -> Candidate:
    memory, lacking = _memory(model, work, choice, machine, form, shares), dict[str, int]()
    for place, of_host in enumerate(memory):
        lacking |= lacking_bytes(of_host, machine, f"node {place}", f"node {place}: gpu")
    if isinstance(work, Training):
        time, wire = _training(model, work, choice, machine, network, form, shares)
    else:
        time, wire = _serving(model, work, choice, machine, network, form, shares)
    return Candidate(work, choice, memory[0], time, lacking, Hosts(network, form, shares, memory, wire))


def _candidates(
    model: ModelShape, work: Work, choice: Choice, machine: Machine, network: Network, hosts: int
) -> list[Candidate]:
    return [
        evaluate_hosts(model, work, choice, machine, network, form, shares)
        for form, shares in _partitions(model, work, hosts)
    ]


def _best(candidates: list[Candidate]) -> Candidate | None:
    return min((one for one in candidates if one.fits), key=lambda one: one.seconds_per_token, default=None)


def make_hosts_plan(model: ModelShape, work: Work, machine: Machine, hosts: int, network: Network) -> Plan:
    """The fastest partition over `hosts` machines like `machine` that fits, or what is missing, and remedies. A GPU is
    used unless nothing fits with it."""
    limit = max(model.experts, model.expert_layers)
    if not 2 <= hosts <= min(MAX_HOSTS, limit):
        raise InputError("hosts", hosts, f"2 to {min(MAX_HOSTS, limit)}", "one host is planned without --hosts")
    model = replace(model, mapped_experts=0)  # a node's part of packed files counts as memory of its own
    format = counted_as(model.stored)
    by_gpus = {
        gpus: _candidates(model, work, Choice(format, gpus), machine, network, hosts)
        for gpus in sorted({0, min(1, len(machine.gpus))}, reverse=True)
    }
    best = next((found for candidates in by_gpus.values() if (found := _best(candidates)) is not None), None)
    everything = [one for candidates in by_gpus.values() for one in candidates]
    coarse = 0.01 * machine.memory  # partitions that lack about as much differ in speed alone
    nearest = best or min(everything, key=lambda one: (sum(one.lacking.values()) // coarse, one.seconds_per_token))
    others = []
    if best is not None:
        for form in (BY_EXPERTS, BY_LAYERS):
            other = _best([one for one in by_gpus[best.choice.gpus] if hosts_of(one).form == form])
            if form != hosts_of(best).form and other is not None:
                others.append(other)
    notes = []
    if best is not None and machine.gpus and not best.choice.gpus:
        short = min(by_gpus[1], key=lambda one: sum(one.lacking.values())).lacking
        notes.append("no GPU is used, because with one " + describe_lacking(short))
    if model.stored != format:
        notes.append(f"released in {model.stored}: its experts are counted as {format}")
    notes.append(f"uniform routing; a round trip of {network.round_trip * 1e6:.0f} us is estimated, not measured")
    remedies = () if best is not None else _remedies(model, nearest, machine, network, hosts)
    return Plan(model, machine, best, nearest, remedies, tuple(others), tuple(notes))


def hosts_of(candidate: Candidate) -> Hosts:
    assert candidate.hosts is not None, "of make_hosts_plan"
    return candidate.hosts


def _remedies(
    model: ModelShape, nearest: Candidate, machine: Machine, network: Network, hosts: int
) -> tuple[Remedy, ...]:
    """More hosts of the same kind, one change of the work or the format, or more memory for each host."""
    work, choice = nearest.work, nearest.choice
    fitting = []
    for count in range(hosts + 1, min(MAX_HOSTS, max(model.experts, model.expert_layers)) + 1):
        if (found := _best(_candidates(model, work, choice, machine, network, count))) is not None:
            fitting.append(Remedy((f"{count} hosts",), found, True))
            break
    by_kind: dict[str, Remedy] = {}
    for change in changes(work, choice, machine):
        if change.choice.policy != "cpu" or change.choice.gpus > 1 or change.choice.missing:
            continue
        found = _best(_candidates(model, change.work, change.choice, machine, network, hosts))
        if found is not None:
            remedy = Remedy((change.words,), found, change.same_results)
            kept = by_kind.setdefault(change.kind, remedy)
            if found.seconds_per_token < kept.candidate.seconds_per_token:
                by_kind[change.kind] = remedy
    order = sorted(by_kind.values(), key=lambda one: (not one.same_results, one.candidate.seconds_per_token))
    partition = hosts_of(nearest)
    memory = max(of_host.host_bytes + of_host.mapped for of_host in partition.memory)
    larger = replace(machine, memory=max(machine.memory, host_memory_for(memory)))
    with_memory = evaluate_hosts(model, work, choice, larger, network, partition.form, partition.shares)
    words = f"{larger.memory / 1e9:.0f} GB of memory in every host"
    last = [Remedy((words,), with_memory, True)] if with_memory.fits else []
    return tuple([*fitting, *order, *last][:MAX_REMEDIES])
