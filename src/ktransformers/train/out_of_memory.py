"""Ends a run that is out of memory, on a GPU or in host memory, with one line: what was asked for, what was free, and
which keys to change, in order, with the bytes that the plan predicts for each.

First come changes with the same result (smaller batches, recomputing activations), then those of the work and of the
weights. A process that the kernel kills for its memory (SIGKILL) ends without a line.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from ktransformers.ground.errors import KTError
from ktransformers.ground.out_of_memory import GPU, describe_shortage, exhausted_memory, format_bytes
from ktransformers.plan import Training
from ktransformers.plan.formats import format_of
from ktransformers.plan.planner import evaluate
from ktransformers.plan.workload import Choice
from ktransformers.train.arguments import step_shape
from ktransformers.train.plan import TrainPlan

MIN_CUTOFF = 256


class TrainingMemoryError(KTError):
    """A run needed more memory than there is."""


def _changes(plan: TrainPlan, work: Training, choice: Choice, memory: str) -> Iterator[tuple[str, Training, Choice]]:
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
    if memory == GPU and choice.residents:
        yield f"kt_num_gpu_experts: {choice.residents // 2}", work, replace(choice, residents=choice.residents // 2)
    if memory == GPU and choice.uses_engine:
        yield "kt_place: cpu", work, replace(choice, residents=0, policy="cpu")
    if format_of(choice.format).bytes_per_weight > format_of("int8").bytes_per_weight:
        command = f"kt quant {settings.model.model_name_or_path} -o OUT --format int8"
        yield f"int8 experts ({command}, kt_weight_path: OUT)", work, replace(choice, format="int8")


def remedies(plan: TrainPlan, memory: str) -> list[str]:
    """Keys to change, with the bytes that the plan predicts to become free of the exhausted memory."""
    if plan.forecast is None or not isinstance(plan.forecast.nearest.work, Training):
        rows, batches = step_shape(plan.settings)
        smaller = f"per_device_train_batch_size below {rows} with more gradient_accumulation_steps than {batches}"
        length = f"cutoff_len below {plan.settings.data.cutoff_len}"
        return [smaller, length, "gradient checkpointing", "fewer kt_num_gpu_experts", "int8 experts"]
    forecast = plan.forecast
    nearest, work = forecast.nearest, forecast.nearest.work
    assert isinstance(work, Training)

    def used(work: Training, choice: Choice) -> int:
        needed = evaluate(forecast.model, work, choice, forecast.machine).memory
        return max(needed.gpu_bytes, default=0) if memory == GPU else needed.host_bytes

    before = used(work, nearest.choice)
    lines = []
    for words, changed, choice in _changes(plan, work, nearest.choice, memory):
        less = before - used(changed, choice)
        if less > 0:
            lines.append(f"{words} ({format_bytes(less)} less)")
    return lines


@contextmanager
def reporting_out_of_memory(plan: TrainPlan) -> Iterator[None]:
    """Turns an error of memory into a TrainingMemoryError with what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        memory = exhausted_memory(error)
        if memory is None:
            raise
        shown = remedies(plan, memory)
        order = f"; in this order: {'; '.join(shown)}" if shown else "; nothing that the plan knows would need less"
        told = f"out of memory: {describe_shortage(error, memory)}{order}"
        # The frames of the failed step hold its activations. In torch before 2.13 they also hold a generator of its
        # checkpointing, whose hooks would take the tensors that the next step saves for those of the failed one.
        traceback.clear_frames(error.__traceback__)
        raise TrainingMemoryError(told) from error
