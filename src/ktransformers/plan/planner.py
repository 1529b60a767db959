"""The fastest configuration of a workload that fits on a machine, or what is missing and the three cheapest remedies.

Every choice (format, GPUs, policy, residents) is evaluated by `plan/memory.py` and `plan/step_time.py`; the fastest
that fits is the plan. Only what this version executes is proposed, unless `everything` is asked for. If nothing fits,
the work and the choice are changed in one step or two until it does: first changes that cost only time, then changes of
the work, then formats that this version lacks, at last more memory. A visible GPU is always used unless no
configuration fits on it (`Plan.gpu_unused_reason`), whatever the predicted seconds: runs use what the plan has chosen,
models so small that the CPU alone might be faster take seconds either way, and predictions of time are less certain
than those of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import DEFAULT_POLICY
from ktransformers.plan.exchange import Hosts
from ktransformers.plan.formats import LOSSLESS_FORMAT, PROPOSED, counted_as, format_of
from ktransformers.plan.machine import Machine
from ktransformers.plan.memory import MemoryPlan, predict_memory
from ktransformers.plan.model_shape import ModelShape
from ktransformers.plan.step_time import PredictedTime, predict_time
from ktransformers.plan.workload import (
    PLANNED_POLICIES,
    Choice,
    Serving,
    Training,
    Work,
    check_training_policy,
    expert_bytes,
)

HOST_MEMORY_SHARE = 0.97  # of the free memory that a plan may use; what it leaves to others is
MOST_SPARE_BYTES = 8_000_000_000  # at most: other programs take no more on a larger machine
GPU_MEMORY_SHARE = 0.95
MAX_REMEDIES = 3
RESIDENT_POLICIES = ("auto", "resident")  # policies that fill free GPU memory with residents (place/apply.py)


@dataclass(frozen=True)
class Candidate:
    """One configuration with its predicted memory and time, whether it fits or not."""

    work: Work
    choice: Choice
    memory: MemoryPlan
    time: PredictedTime
    lacking: dict[str, int]  # "host", "gpu0" or "node 2: gpu0" -> bytes that are missing; empty: it fits
    hosts: Hosts | None = None  # of a plan over several machines; `memory` is then that of the first

    @property
    def missing(self) -> tuple[str, ...]:
        """What this version cannot execute of it."""
        return self.choice.missing

    @property
    def fits(self) -> bool:
        return not self.lacking

    @property
    def seconds_per_token(self) -> float:
        return self.time.seconds / self.time.tokens


@dataclass(frozen=True)
class Remedy:
    """Changes that make a plan fit."""

    changes: tuple[str, ...]
    candidate: Candidate
    same_results: bool  # the changes do not alter results


@dataclass(frozen=True)
class Plan:
    model: ModelShape
    machine: Machine
    best: Candidate | None
    nearest: Candidate  # the best, or the one that lacks fewest bytes
    remedies: tuple[Remedy, ...]
    others: tuple[Candidate, ...]  # with `everything`: other configurations that fit, the fastest first
    notes: tuple[str, ...]
    gpu_unused_reason: str = ""  # why the best uses no GPU although there is one


def usable_host_bytes(memory: int) -> int:
    """Of a host with so much free memory."""
    return max(int(memory * HOST_MEMORY_SHARE), memory - MOST_SPARE_BYTES)


def host_memory_for(used: int) -> int:
    """Memory of a host in which a plan may use so much, in whole GB."""
    return round_up(min(used / HOST_MEMORY_SHARE, used + MOST_SPARE_BYTES))


def evaluate(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> Candidate:
    memory = predict_memory(model, work, choice, machine)
    return Candidate(
        work, choice, memory, predict_time(model, work, choice, machine), lacking_bytes(memory, machine, "host", "gpu")
    )


def lacking_bytes(memory: MemoryPlan, machine: Machine, host: str, gpu: str) -> dict[str, int]:
    """Bytes that are missing on the host and on GPUs, by their names here."""
    short = {host: memory.host_bytes + memory.mapped - usable_host_bytes(machine.memory)}
    for place, used in enumerate(memory.gpu_bytes):
        short[f"{gpu}{place}"] = used - int(machine.gpus[place].memory * GPU_MEMORY_SHARE)
    return {place: size for place, size in short.items() if size > 0}


def _residents(model: ModelShape, work: Work, choice: Choice, machine: Machine) -> int:
    """Residents per layer that fit into the GPUs' free memory."""
    bare = evaluate(model, work, choice, machine)
    free = sum(int(gpu.memory * GPU_MEMORY_SHARE) for gpu in machine.gpus[: choice.gpus]) - sum(bare.memory.gpu_bytes)
    count = max(0, min(model.experts, free // (model.expert_layers * expert_bytes(model, choice))))
    # Less free memory makes the expert cache smaller, and all of a layer's experts may be dequantised at once,
    # which takes more.
    while count and set(evaluate(model, work, replace(choice, residents=count), machine).lacking) - {"host"}:
        count -= 1
    return count


def choices(
    model: ModelShape,
    work: Work,
    machine: Machine,
    formats: Iterable[str] = PROPOSED,
    policies: Iterable[str] = PLANNED_POLICIES,
    residents: int | None = None,
) -> Iterator[Choice]:
    """Each format, on no GPU, one, or all of them; on a GPU with each policy, and with residents for policies that have
    them (`residents` per layer, else as many as fit)."""
    linear_format = work.linear_format
    for name, gpus in itertools.product(formats, sorted({0, min(1, len(machine.gpus)), len(machine.gpus)})):
        if not gpus:
            yield Choice(name, linear_format=linear_format)
        for policy in policies if gpus else ():
            bare, count = Choice(name, gpus, policy=policy, linear_format=linear_format), 0
            if policy in RESIDENT_POLICIES:
                count = _residents(model, work, bare, machine) if residents is None else min(residents, model.experts)
            yield replace(bare, residents=count)


def make_plan(
    model: ModelShape,
    work: Work,
    machine: Machine,
    *,
    everything: bool = False,
    policies: Collection[str] = (DEFAULT_POLICY,),
    residents: int | None = None,
    needs_gpu: bool = False,
    expert_format: str | None = None,
) -> Plan:
    """`expert_format`: of the experts, instead of that of the release. `policies`: placement policies to choose from.
    `residents`: per layer, instead of as many as fit. `needs_gpu`: a visible GPU is used even if no configuration fits
    on it."""
    if isinstance(work, Training):
        for policy in policies:
            check_training_policy("policy", policy)
    formats = PROPOSED if everything else (counted_as(model.stored),)
    if expert_format is not None:
        formats = (counted_as(expert_format),)
    all_choices = choices(model, work, machine, formats, policies, residents)
    candidates = [evaluate(model, work, choice, machine) for choice in all_choices]
    usable = [candidate for candidate in candidates if everything or not candidate.missing] or candidates
    fitting = sorted((candidate for candidate in usable if candidate.fits), key=lambda c: c.seconds_per_token)
    with_gpu = [candidate for candidate in usable if candidate.choice.gpus]
    best = next((c for c in fitting if c.choice.gpus), None)
    if best is None and not (with_gpu and needs_gpu):
        best = fitting[0] if fitting else None
    nearest = best or _nearest(with_gpu or usable)
    remedies = () if best is not None else _remedies(model, nearest, machine)
    gpu_unused_reason = _why_no_gpu(model, _nearest(with_gpu), machine) if with_gpu and not nearest.choice.gpus else ""
    notes = ((gpu_unused_reason,) if gpu_unused_reason else ()) + _notes(model, machine, nearest)
    others = tuple(candidate for candidate in fitting if candidate is not best) if everything else ()
    return Plan(model, machine, best, nearest, remedies, others, notes, gpu_unused_reason)


def _nearest(candidates: list[Candidate]) -> Candidate:
    return min(candidates, key=lambda c: (sum(c.lacking.values()), c.seconds_per_token))


def _why_no_gpu(model: ModelShape, nearest: Candidate, machine: Machine) -> str:
    """What is missing for a configuration with a GPU, and a remedy."""
    remedies = (
        remedy
        for remedy in _remedies(model, nearest, machine)
        if remedy.candidate.choice.gpus and not remedy.candidate.missing
    )
    words = next((f"; it would do with {' and '.join(remedy.changes)}" for remedy in remedies), "")
    return f"no GPU is used, because with one {describe_lacking(nearest.lacking)}{words}"


def describe_lacking(lacking: dict[str, int]) -> str:
    """Places that lack as much as the first are named with it."""
    first, *more = lacking.items()
    same = [place for place, size in more if size == first[1]]
    subject = f"{first[0]} and {len(same)} more lack" if same else f"{first[0]} lacks"
    words = [f"{subject} {first[1] / 1e9:.1f} GB"]
    words += [f"{place} lacks {size / 1e9:.1f} GB" for place, size in more if place not in same]
    return ", ".join(words)


def _notes(model: ModelShape, machine: Machine, chosen: Candidate) -> tuple[str, ...]:
    notes = []
    work = chosen.work
    if isinstance(work, Training) and work.checkpointing and not work.retain and chosen.fits:
        other = evaluate(model, replace(work, retain=True), chosen.choice, machine)
        if other.fits:
            gain = chosen.seconds_per_token / other.seconds_per_token
            more = (other.memory.host_bytes - chosen.memory.host_bytes) / 1e9
            notes.append(f"kt_cpu_activation: retain would fit: {gain:.2f} times as fast for {more:.1f} GB more")
    if model.stored != (counted := counted_as(model.stored)):
        notes.append(f"released in {model.stored}: its experts are counted as {counted}")
    if not model.counted:
        notes.append("from config.json alone; the checkpoint's headers would count every tensor")
    if not machine.measured:
        notes.append(f"rates of the profile {machine.name}, not of a measurement here")
    return tuple(notes)


@dataclass(frozen=True)
class _Change:
    kind: str  # a remedy has at most one change of a kind
    words: str
    work: Work
    choice: Choice
    same_results: bool


def _halvings(value: int, minimum: int) -> Iterator[int]:
    while value > minimum:
        value = max(minimum, value // 2)
        yield value


def _training_changes(work: Training, choice: Choice) -> Iterator[_Change]:
    def change(kind: str, words: str, same_results: bool, **fields: object) -> _Change:
        return _Change(kind, words, replace(work, **fields), choice, same_results)  # type: ignore[arg-type]

    if work.retain:
        yield change("recompute", "kt_cpu_activation: recompute", True, retain=False)
    if not work.checkpointing:
        yield change("recompute", "disable_gradient_checkpointing: false", True, checkpointing=True, retain=False)
    for tokens in _halvings(work.tokens, work.sequence):
        yield change("tokens", f"kt_tokens_per_batch: {tokens}", True, tokens=tokens)
    for length in _halvings(work.sequence, 256):
        tokens = max(length, work.tokens * length // work.sequence)
        per_step = max(tokens, work.tokens_per_step * length // work.sequence)
        words = f"cutoff_len: {length}"
        yield change("tokens", words, False, sequence=length, tokens=tokens, tokens_per_step=per_step)
    if work.trained_bytes == 4:
        yield change("trained", "pure_bf16: true", False, trained_bytes=2)
    for rank in _halvings(work.rank, 4):
        yield change("rank", f"lora_rank: {rank}", False, rank=rank)
    if work.adapts_experts and work.adapts_attention:
        yield change("rank", "lora_target: attention alone", False, adapts_experts=False)


def _serving_changes(work: Serving, choice: Choice) -> Iterator[_Change]:
    for count in _halvings(work.sequences, 1):
        yield _Change("sequences", f"{count} requests at a time", replace(work, sequences=count), choice, True)
    for length in _halvings(work.context, 512):
        changed = replace(work, context=length, prompt=min(work.prompt, length))
        yield _Change("context", f"a context of {length} tokens", changed, choice, False)


def changes(work: Work, choice: Choice, machine: Machine) -> Iterator[_Change]:
    yield from _training_changes(work, choice) if isinstance(work, Training) else _serving_changes(work, choice)
    if choice.uses_engine:
        yield _Change("place", "kt_place: cpu", work, replace(choice, residents=0, policy="cpu"), True)
    if choice.gpus:
        yield _Change("gpus", "no GPU: everything on the CPU", work, Choice(choice.format), True)
    if len(machine.gpus) > max(1, choice.gpus):
        yield _Change("gpus", "layers spread over all GPUs", work, replace(choice, gpus=len(machine.gpus)), True)
    if choice.format == "bf16":
        yield _Change(
            "format",
            f"experts in {LOSSLESS_FORMAT}, the same bits",
            work,
            replace(choice, format=LOSSLESS_FORMAT),
            True,
        )
    for name in PROPOSED:
        if name != choice.format and format_of(name).bytes_per_weight < format_of(choice.format).bytes_per_weight:
            yield _Change("format", f"experts in {name}", work, replace(choice, format=name), False)


def _with_hardware(model: ModelShape, candidate: Candidate, machine: Machine, words: tuple[str, ...]) -> Remedy:
    """The same configuration on a machine with as much memory as is lacking, in whole GB."""
    memory, gpus, more = machine.memory, list(machine.gpus), []
    for place, short in candidate.lacking.items():
        if place == "host":
            memory = host_memory_for(usable_host_bytes(memory) + short)
            more.append(f"{memory / 1e9:.0f} GB of host memory")
        else:
            index = int(place.removeprefix("gpu"))
            gpus[index] = replace(gpus[index], memory=round_up(candidate.memory.gpu_bytes[index] / GPU_MEMORY_SHARE))
            more.append(f"a GPU with {gpus[index].memory / 1e9:.0f} GB")
    larger = replace(machine, memory=memory, gpus=tuple(gpus))
    same_results = candidate.choice.format == counted_as(model.stored)
    return Remedy((*words, *more), evaluate(model, candidate.work, candidate.choice, larger), same_results)


def round_up(size: float) -> int:
    return -(-int(size) // 10**9) * 10**9


def _remedies(model: ModelShape, nearest: Candidate, machine: Machine) -> tuple[Remedy, ...]:
    singles = list(changes(nearest.work, nearest.choice, machine))
    fitting: list[tuple[frozenset[str], Remedy]] = []
    for change in singles:
        candidate = evaluate(model, change.work, change.choice, machine)
        if candidate.fits:
            fitting.append((frozenset({change.kind}), Remedy((change.words,), candidate, change.same_results)))
    sufficient = {words for _, remedy in fitting for words in remedy.changes}
    pairs = ((first, second) for first in singles for second in changes(first.work, first.choice, machine))
    for first, second in pairs:
        if first.kind == second.kind or {first.words, second.words} & sufficient:
            continue
        candidate = evaluate(model, second.work, second.choice, machine)
        if candidate.fits:
            remedy = Remedy((first.words, second.words), candidate, first.same_results and second.same_results)
            fitting.append((frozenset({first.kind, second.kind}), remedy))
    remedies: dict[frozenset[str], Remedy] = {}
    for kinds, remedy in sorted(fitting, key=lambda pair: _remedy_order(pair[1])):
        remedies.setdefault(kinds, remedy)
    with_hardware = [_with_hardware(model, nearest, machine, ())]
    formats = [change for change in singles if change.kind == "format"]
    for change in sorted(formats, key=lambda change: format_of(change.choice.format).bytes_per_weight):
        candidate = evaluate(model, change.work, change.choice, machine)
        if candidate.lacking:
            with_hardware.append(_with_hardware(model, candidate, machine, (change.words,)))
    return (*remedies.values(), *with_hardware)[:MAX_REMEDIES]


def _remedy_order(remedy: Remedy) -> tuple[bool, int, bool, float]:
    """Executable remedies first, then fewer changes, then unchanged results, then speed."""
    return (
        bool(remedy.candidate.missing),
        len(remedy.changes),
        not remedy.same_results,
        remedy.candidate.seconds_per_token,
    )


def require_fit(plan: Plan, *, force: bool = False) -> None:
    """Raise `InputError` if nothing fits, unless `force` is given."""
    if plan.best is not None or force:
        return
    remedy = "; or ".join(" and ".join(remedy.changes) for remedy in plan.remedies if not remedy.candidate.missing)
    raise InputError(
        plan.model.name,
        describe_lacking(plan.nearest.lacking),
        "a plan that fits",
        (remedy + "; " if remedy else "") + "--force tries it",
    )
