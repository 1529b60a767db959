"""Ends a run that is out of memory, on a GPU or in host memory, with one line: what was asked for, what was free, and
which keys to change, in order, with the bytes that the plan predicts for each.

First come changes with the same result (smaller batches, recomputing activations), then those of the work and of the
weights. A process that the kernel kills for its memory (SIGKILL) ends without a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ktransformers import system
from ktransformers.errors import KTError
from ktransformers.plan import Training
from ktransformers.plan.formats import format_of
from ktransformers.plan.planner import evaluate
from ktransformers.plan.workload import Choice
from ktransformers.train.arguments import step_shape
from ktransformers.train.plan import TrainPlan

ASKED_BYTES = re.compile(r"tried to allocate ([0-9.]+) ?(bytes|KiB|MiB|GiB)", re.IGNORECASE)
UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
HOST_MESSAGES = ("DefaultCPUAllocator", "not enough memory", "Cannot allocate memory", "std::bad_alloc")
GPU_MESSAGES = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
MIN_CUTOFF = 256


class TrainingMemoryError(KTError):
    """A run needed more memory than there is."""


def exhausted_place(error: BaseException) -> str | None:
    """`gpu` or `host` if the error is one of memory, else None."""
    if isinstance(error, torch.OutOfMemoryError):
        return "gpu"
    if isinstance(error, MemoryError):
        return "host"
    text = str(error) if isinstance(error, RuntimeError) else ""
    if any(message in text for message in GPU_MESSAGES):
        return "gpu"
    return "host" if any(message in text for message in HOST_MESSAGES) else None


def asked_bytes(error: BaseException) -> int | None:
    match = ASKED_BYTES.search(str(error))
    return None if match is None else int(float(match[1]) * UNITS[match[2].lower()])


def _free(place: str) -> str:
    if place == "gpu" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return f"{_size(free + reserved)} free of {_size(total)} on the GPU"
    memory = system.memory()
    return f"{_size(memory.available)} free of {_size(memory.total)} of host memory"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"


def _changes(plan: TrainPlan, work: Training, choice: Choice, place: str) -> Iterator[tuple[str, Training, Choice]]:
    """(keys to change, the changed work and choice), in the order in which to try them."""
    settings = plan.settings
    rows, batches = step_shape(settings)
    if settings.experts.tokens_per_pass and work.tokens > work.sequence:
        tokens = max(work.sequence, work.tokens // 2)
        yield f"kt_tokens_per_batch: {tokens}", replace(work, tokens=tokens), choice
    elif rows > 1 and not settings.experts.tokens_per_pass:
        half = rows // 2
        words = f"per_device_train_batch_size: {half} and gradient_accumulation_steps: {batches * rows // half}"
        yield words, replace(work, tokens=max(1, work.tokens * half // rows)), choice
    if work.sequence > MIN_CUTOFF:
        length = max(MIN_CUTOFF, work.sequence // 2)
        yield f"cutoff_len: {length}", replace(work, sequence=length, tokens=max(1, work.tokens // 2)), choice
    if not work.checkpointing:
        yield "disable_gradient_checkpointing: false", replace(work, checkpointing=True, retain=False), choice
    if work.retain:
        yield "kt_cpu_activation: recompute", replace(work, retain=False), choice
    if place == "gpu" and choice.residents:
        yield f"kt_num_gpu_experts: {choice.residents // 2}", work, replace(choice, residents=choice.residents // 2)
    if place == "gpu" and choice.uses_engine:
        yield "kt_place: cpu", work, replace(choice, residents=0, policy="cpu")
    if format_of(choice.format).bytes_per_weight > format_of("int8").bytes_per_weight:
        command = f"kt quant {settings.model.model_name_or_path} -o OUT --format int8"
        yield f"int8 experts ({command}, kt_weight_path: OUT)", work, replace(choice, format="int8")


def remedies(plan: TrainPlan, place: str) -> list[str]:
    """Keys to change, with the bytes that the plan predicts to become free at the exhausted place."""
    if plan.forecast is None or not isinstance(plan.forecast.nearest.work, Training):
        rows, batches = step_shape(plan.settings)
        smaller = f"per_device_train_batch_size below {rows} with more gradient_accumulation_steps than {batches}"
        length = f"cutoff_len below {plan.settings.data.cutoff_len}"
        return [smaller, length, "gradient checkpointing", "fewer kt_num_gpu_experts", "int8 experts"]
    forecast = plan.forecast
    nearest, work = forecast.nearest, forecast.nearest.work
    assert isinstance(work, Training)

    def used(work: Training, choice: Choice) -> int:
        memory = evaluate(forecast.model, work, choice, forecast.machine).memory
        return max(memory.gpu_bytes, default=0) if place == "gpu" else memory.host_bytes

    before = used(work, nearest.choice)
    lines = []
    for words, changed, choice in _changes(plan, work, nearest.choice, place):
        less = before - used(changed, choice)
        if less > 0:
            lines.append(f"{words} ({_size(less)} less)")
    return lines


@contextmanager
def reporting_out_of_memory(plan: TrainPlan) -> Iterator[None]:
    """Turns an error of memory into a TrainingMemoryError with what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        place = exhausted_place(error)
        if place is None:
            raise
        size = asked_bytes(error)
        asked = "memory that was asked for" if size is None else f"{_size(size)} asked for"
        shown = remedies(plan, place)
        order = f"; in this order: {'; '.join(shown)}" if shown else "; nothing that the plan knows would need less"
        raise TrainingMemoryError(f"out of memory: {asked}, {_free(place)}{order}") from error
