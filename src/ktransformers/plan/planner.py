"""The best way to do some work with a model on a machine, or what is missing and the three cheapest ways out.

Every choice (format, GPUs, policy, residents) is evaluated by `memory` and `cost`; the fastest that fits is the plan.
Only what this version executes is proposed unless `everything` is asked for. Where nothing fits, the work and the
choice are changed one step or two at a time until it does: first what costs time alone, then what changes the work,
then formats that this version lacks, at last more memory. The surprising decision: a GPU that is there is left out only
where nothing fits with it (`Plan.left_out`), whatever seconds say. Runs use what the plan has chosen, models of a size
for which the CPU alone might be faster take seconds either way, and seconds are less sure than bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ktransformers.errors import InputError
from ktransformers.plan.formats import PROPOSED, counted_as, format_of
from ktransformers.plan.machine import Machine
from ktransformers.plan.memory import MemoryPlan, memory_of
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.step_time import Time, time_of
from ktransformers.plan.workload import DEFAULT, PLANNED, Choice, Serving, Training, Work, expert_bytes

HOST_SHARE = 0.97  # of the free memory; the rest stays with the system
GPU_SHARE = 0.95
WAYS = 3
WITH_RESIDENTS = ("auto", "resident")  # policies that fill what is free (place/apply.py)


@dataclass(frozen=True)
class Candidate:
    """One way of doing it, fitting or not."""

    work: Work
    choice: Choice
    memory: MemoryPlan
    time: Time
    lacking: dict[str, int]  # place -> bytes that are missing there; empty: it fits

    @property
    def missing(self) -> tuple[str, ...]:
        """What this version lacks for it."""
        return self.choice.missing

    @property
    def fits(self) -> bool:
        return not self.lacking

    @property
    def seconds_per_token(self) -> float:
        return self.time.seconds / self.time.tokens


@dataclass(frozen=True)
class Remedy:
    """Out of a plan that does not fit."""

    changes: tuple[str, ...]
    candidate: Candidate
    same: bool  # the results stay what they were


@dataclass(frozen=True)
class Plan:
    model: ModelShape
    machine: Machine
    best: Candidate | None
    nearest: Candidate  # the best, or the one that lacks least
    ways: tuple[Remedy, ...]
    others: tuple[Candidate, ...]  # with `everything`: what fits besides the best, the fastest first
    notes: tuple[str, ...]
    left_out: str = ""  # why the best uses no GPU, where there is one


def evaluate(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> Candidate:
    memory = memory_of(model, work, choice, machine)
    lacking = {}
    short = memory.host_bytes + memory.mapped - int(machine.memory * HOST_SHARE)
    if short > 0:
        lacking["host"] = short
    for place, used in enumerate(memory.gpu_bytes):
        short = used - int(machine.gpus[place].memory * GPU_SHARE)
        if short > 0:
            lacking[f"gpu{place}"] = short
    return Candidate(work, choice, memory, time_of(model, work, choice, machine), lacking)


def _residents(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> int:
    """Experts of each layer that the GPUs have room for."""
    bare = evaluate(model, work, choice, machine)
    room = sum(int(gpu.memory * GPU_SHARE) for gpu in machine.gpus[: choice.gpus]) - sum(bare.memory.gpu_bytes)
    count = max(0, min(model.experts, room // (model.expert_layers * expert_bytes(model, choice))))
    # Less free memory has fewer slots, and beside those a layer's experts may be decoded at once, which takes more.
    while count and set(evaluate(model, work, replace(choice, residents=count), machine).lacking) - {"host"}:
        count -= 1
    return count


def choices(
    model: ModelShape,
    work: Work,
    machine: Machine,
    formats: Iterable[str] = PROPOSED,
    policies: Iterable[str] = PLANNED,
    residents: int | None = None,
) -> Iterator[Choice]:
    """Each format, on no GPU, one, or all of them; on a GPU by each policy, with residents where it has them (by itself
    as many as there is room for)."""
    for name, gpus in itertools.product(formats, sorted({0, min(1, len(machine.gpus)), len(machine.gpus)})):
        if not gpus:
            yield Choice(name)
        for policy in policies if gpus else ():
            bare, count = Choice(name, gpus, policy=policy), 0
            if policy in WITH_RESIDENTS:
                count = _residents(model, work, bare, machine) if residents is None else min(residents, model.experts)
            yield replace(bare, residents=count)


def make_plan(
    model: ModelShape,
    work: Work,
    machine: Machine,
    *,
    everything: bool = False,
    policies: Iterable[str] = (DEFAULT,),
    residents: int | None = None,
    needs_gpu: bool = False,
) -> Plan:
    """`policies`: where experts may be computed; by default where they are when nobody asks for anything else.
    `residents`: of each layer, in place of as many as there is room for. `needs_gpu`: a GPU that is there is not left
    out even where nothing fits with it."""
    formats = PROPOSED if everything else (counted_as(model.stored),)
    every = choices(model, work, machine, formats, tuple(policies), residents)
    found = [evaluate(model, work, choice, machine) for choice in every]
    usable = [candidate for candidate in found if everything or not candidate.missing]
    fitting = sorted((candidate for candidate in usable if candidate.fits), key=lambda c: c.seconds_per_token)
    with_gpu = [candidate for candidate in usable if candidate.choice.gpus]
    best = next((c for c in fitting if c.choice.gpus), None)
    if best is None and not (with_gpu and needs_gpu):
        best = fitting[0] if fitting else None
    nearest = best or _nearest(with_gpu or usable)
    ways = () if best is not None else _ways_out(model, nearest, machine)
    left_out = _left_out(model, _nearest(with_gpu), machine) if with_gpu and not nearest.choice.gpus else ""
    notes = ((left_out,) if left_out else ()) + _notes(model, machine, nearest)
    others = tuple(candidate for candidate in fitting if candidate is not best) if everything else ()
    return Plan(model, machine, best, nearest, ways, others, notes, left_out)


def _nearest(candidates: list[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: (sum(c.lacking.values()), c.seconds_per_token))


def _left_out(model: ModelShape, nearest: Candidate, machine: Machine) -> str:
    """What keeps the GPU out, and what would let it in."""
    ways = (
        way for way in _ways_out(model, nearest, machine) if way.candidate.choice.gpus and not way.candidate.missing
    )
    words = next((f"; it would do with {' and '.join(way.changes)}" for way in ways), "")
    return f"no GPU is used, because with one {_lacking(nearest)}{words}"


def _lacking(candidate: Candidate) -> str:
    return ", ".join(f"{place} lacks {size / 1e9:.1f} GB" for place, size in candidate.lacking.items())


def _notes(model: ModelShape, machine: Machine, found: Candidate) -> tuple[str, ...]:
    notes = []
    work = found.work
    if isinstance(work, Training) and work.checkpointing and not work.retain and found.fits:
        other = evaluate(model, replace(work, retain=True), found.choice, machine)
        if other.fits:
            gain = found.seconds_per_token / other.seconds_per_token
            more = (other.memory.host_bytes - found.memory.host_bytes) / 1e9
            notes.append(f"kt_cpu_activation: retain would fit: {gain:.2f} times as fast for {more:.1f} GB more")
    if model.stored != (counted := counted_as(model.stored)):
        notes.append(f"released in {model.stored}: its experts are counted as {counted}")
    if not model.checkpoint_bytes:
        notes.append("from config.json alone; the checkpoint's headers would count every tensor")
    if not machine.measured:
        notes.append(f"rates of the profile {machine.name}, not of a measurement here")
    return tuple(notes)


@dataclass(frozen=True)
class _Change:
    kind: str  # at most one of a kind
    words: str
    work: Work
    choice: Choice
    same: bool


def _halves(value: int, least: int) -> Iterator[int]:
    while value > least:
        value = max(least, value // 2)
        yield value


def _training_changes(work: Training, choice: Choice) -> Iterator[_Change]:
    def change(kind: str, words: str, same: bool, **fields: object) -> _Change:
        return _Change(kind, words, replace(work, **fields), choice, same)  # type: ignore[arg-type]

    if work.retain:
        yield change("recompute", "kt_cpu_activation: recompute", True, retain=False)
    if not work.checkpointing:
        yield change("recompute", "disable_gradient_checkpointing: false", True, checkpointing=True, retain=False)
    for tokens in _halves(work.tokens, work.sequence):
        yield change("tokens", f"kt_tokens_per_batch: {tokens}", True, tokens=tokens)
    for length in _halves(work.sequence, 256):
        tokens = max(length, work.tokens * length // work.sequence)
        per_step = max(tokens, work.tokens_per_step * length // work.sequence)
        words = f"cutoff_len: {length}"
        yield change("tokens", words, False, sequence=length, tokens=tokens, tokens_per_step=per_step)
    if work.trained_bytes == 4:
        yield change("trained", "pure_bf16: true", False, trained_bytes=2)
    for rank in _halves(work.rank, 4):
        yield change("rank", f"lora_rank: {rank}", False, rank=rank)
    if work.adapts_experts and work.adapts_attention:
        yield change("rank", "lora_target: attention alone", False, adapts_experts=False)


def _serving_changes(work: Serving, choice: Choice) -> Iterator[_Change]:
    for count in _halves(work.sequences, 1):
        yield _Change("sequences", f"{count} requests at a time", replace(work, sequences=count), choice, True)
    for length in _halves(work.context, 512):
        changed = replace(work, context=length, prompt=min(work.prompt, length))
        yield _Change("context", f"a context of {length} tokens", changed, choice, False)


def _changes(work: Work, choice: Choice, machine: Machine) -> Iterator[_Change]:
    yield from _training_changes(work, choice) if isinstance(work, Training) else _serving_changes(work, choice)
    if choice.uses_engine:
        yield _Change("place", "kt_place: cpu", work, replace(choice, residents=0, policy="cpu"), True)
    if choice.gpus:
        yield _Change("gpus", "no GPU: everything on the CPU", work, Choice(choice.format), True)
    if len(machine.gpus) > max(1, choice.gpus):
        yield _Change("gpus", "layers spread over all GPUs", work, replace(choice, gpus=len(machine.gpus)), True)
    for name in PROPOSED:
        if name != choice.format and format_of(name).bytes_per_weight < format_of(choice.format).bytes_per_weight:
            yield _Change("format", f"experts in {name}", work, replace(choice, format=name), False)


def _with_hardware(model: ModelShape, candidate: Candidate, machine: Machine, words: tuple[str, ...]) -> Remedy:
    """The same on a machine that has what is lacking, in round numbers."""
    memory, gpus, more = machine.memory, list(machine.gpus), []
    for place, short in candidate.lacking.items():
        if place == "host":
            memory = _round_up((memory * HOST_SHARE + short) / HOST_SHARE)
            more.append(f"{memory / 1e9:.0f} GB of host memory")
        else:
            index = int(place.removeprefix("gpu"))
            gpus[index] = replace(gpus[index], memory=_round_up(candidate.memory.gpu_bytes[index] / GPU_SHARE))
            more.append(f"a GPU with {gpus[index].memory / 1e9:.0f} GB")
    larger = replace(machine, memory=memory, gpus=tuple(gpus))
    same = candidate.choice.format == counted_as(model.stored)
    return Remedy((*words, *more), evaluate(model, candidate.work, candidate.choice, larger), same)


def _round_up(size: float) -> int:
    return -(-int(size) // 10**9) * 10**9


def _ways_out(model: ModelShape, nearest: Candidate, machine: Machine) -> tuple[Remedy, ...]:
    singles = list(_changes(nearest.work, nearest.choice, machine))
    found: list[tuple[frozenset[str], Remedy]] = []
    for change in singles:
        candidate = evaluate(model, change.work, change.choice, machine)
        if candidate.fits:
            found.append((frozenset({change.kind}), Remedy((change.words,), candidate, change.same)))
    enough = {words for _, way in found for words in way.changes}
    pairs = ((first, second) for first in singles for second in _changes(first.work, first.choice, machine))
    for first, second in pairs:
        if first.kind == second.kind or {first.words, second.words} & enough:
            continue
        candidate = evaluate(model, second.work, second.choice, machine)
        if candidate.fits:
            way = Remedy((first.words, second.words), candidate, first.same and second.same)
            found.append((frozenset({first.kind, second.kind}), way))
    ways: dict[frozenset[str], Remedy] = {}
    for kinds, way in sorted(found, key=lambda pair: _cost_of(pair[1])):
        ways.setdefault(kinds, way)
    bought = [_with_hardware(model, nearest, machine, ())]
    formats = [change for change in singles if change.kind == "format"]
    for change in sorted(formats, key=lambda change: format_of(change.choice.format).bytes_per_weight):
        candidate = evaluate(model, change.work, change.choice, machine)
        if candidate.lacking:
            bought.append(_with_hardware(model, candidate, machine, (change.words,)))
    return (*ways.values(), *bought)[:WAYS]


def _cost_of(way: Remedy) -> tuple[bool, int, bool, float]:
    """What can be run comes first, then fewer changes, then the same results, then speed."""
    return bool(way.candidate.missing), len(way.changes), not way.same, way.candidate.seconds_per_token


def refuse(plan: Plan, *, force: bool = False) -> None:
    """Raise where nothing fits; `force` goes on all the same."""
    if plan.best is not None or force:
        return
    remedy = "; or ".join(" and ".join(way.changes) for way in plan.ways if not way.candidate.missing)
    raise InputError(
        plan.model.name,
        _lacking(plan.nearest),
        "a plan that fits",
        (remedy + "; " if remedy else "") + "--force tries it",
    )
