"""The plan of a run, made before weights are loaded: data read and tokenised, targets found on a meta-device model.

`--dry-run` prints this plan and `run` starts from it, so a dry run checks what a run uses. If the model is not on this
machine yet, the parts that need its tokenizer or config are skipped and a note says so.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers import plan as planning
from ktransformers.adapters.chat_templates import template_text
from ktransformers.checkpoint.model_config import read_model_config
from ktransformers.experts.partition import ExpertPartition
from ktransformers.ground.errors import InputError
from ktransformers.modeling.load import meta_model
from ktransformers.modeling.pretrained import read_generation_config
from ktransformers.plan.document import candidate_document
from ktransformers.train.arguments import (
    device_of,
    dtype_of,
    precision_notes,
    step_shape,
    trainer_arguments,
    uses_packing,
)
from ktransformers.train.checkpoints import ResumePoint, check_recipe, find_resume_point, process_count
from ktransformers.train.data.files import row_error
from ktransformers.train.data.prepare import DataSplit, ReadDataset, prepare, read_datasets
from ktransformers.train.data.render import PreferenceRow, Renderer, show_labels
from ktransformers.train.expert_parallel import check_ranks, make_partition
from ktransformers.train.forecast import try_plan_inputs
from ktransformers.train.grouping import (
    Grouping,
    RowLengths,
    decide_grouping,
    measure_rows,
    row_lengths,
    with_tokens_per_batch,
)
from ktransformers.train.model import base_directory, build_fake_model, check_dense_format
from ktransformers.train.output import check_disk_space, check_output
from ktransformers.train.packages import package_notes, require_packages
from ktransformers.train.packing import require_masked_layers
from ktransformers.train.placement import TrainPlacement, options_of
from ktransformers.train.reachable import predict_targets
from ktransformers.train.recipe import TrainRecipe, make_recipe
from ktransformers.train.settings import SECTIONS, TrainSettings
from ktransformers.train.sharding import read_shard_options
from ktransformers.train.targets import Targets, count_trained_parameters, find_targets
from ktransformers.train.tokenizer import check_template, load_tokenizer


@dataclass(frozen=True)
class DatasetPlan:
    name: str
    file: str
    rows: int


@dataclass(frozen=True)
class DataPlan:
    """Counts after tokenising."""

    train_rows: int
    evaluation_rows: int
    dropped_rows: int
    sequences: int  # sequences of the trainer: rows, or packed rows
    tokens: int
    learned_tokens: int
    learned_at_once: int  # maximum per batch
    longest: int
    steps_per_epoch: int
    steps: int
    example: str  # the first row, labelled text in « »
    question: str = ""  # the first user's message of the data, empty if it has none


@dataclass(frozen=True)
class TrainPlan:
    settings: TrainSettings
    model: str | None  # directory
    device: str
    dtype: str | None
    start: str
    datasets: tuple[DatasetPlan, ...]
    data: DataPlan | None
    targets: Targets | None
    trained_numbers: int | None
    forecast: planning.Plan | None  # of memory and time
    grouping: Grouping | None  # None without the model
    notes: tuple[str, ...]


@dataclass(frozen=True)
class PreparedRun:
    """A plan with the objects that a run needs and a report does not show."""

    plan: TrainPlan
    directory: Path | None
    tokenizer: Any
    split: DataSplit | None
    resume: ResumePoint
    recipe: TrainRecipe | None
    partition: ExpertPartition | None = None  # None: every process has all experts


def _summarise_data(split: DataSplit, measured: RowLengths, settings: TrainSettings, tokenizer: Any) -> DataPlan:
    lengths = [row_lengths(row) for row in split.train]
    count = len(measured.sizes)
    rows, batches = step_shape(settings)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    per_epoch = math.ceil(math.ceil(count / (rows * world)) / batches)
    max_steps = int(settings.trainer.get("max_steps", -1))
    epochs = float(settings.trainer.get("num_train_epochs", 3.0))
    first = split.train[0]
    if isinstance(first, PreferenceRow):
        prompt, chosen, rejected = (tokenizer.decode(ids) for ids in (first.prompt, first.chosen, first.rejected))
        example = f"{prompt}«{chosen}» rather than «{rejected}»"
    else:
        example = show_labels(first, tokenizer)
    return DataPlan(
        train_rows=len(split.train),
        evaluation_rows=len(split.evaluation),
        dropped_rows=split.dropped,
        sequences=count,
        tokens=sum(tokens for tokens, _, _ in lengths),
        learned_tokens=sum(labelled for _, labelled, _ in lengths),
        learned_at_once=measured.lengths(settings).labelled,
        longest=measured.longest,
        steps_per_epoch=per_epoch,
        steps=max_steps if max_steps > 0 else math.ceil(per_epoch * epochs),
        example=example,
    )


def _first_question(datasets: list[ReadDataset]) -> str:
    samples = (sample for dataset in datasets for _, sample in dataset.samples)
    return next((question for sample in samples for question in sample.questions), "")


def _check_kinds(datasets: list[ReadDataset], settings: TrainSettings) -> None:
    """Checks without a tokenizer that rows are pairs exactly if the stage needs pairs."""
    from ktransformers.train.data.formats import PreferencePair

    needs_pairs = settings.data.stage == "dpo"
    for dataset in datasets:
        for row, sample in dataset.samples:
            if isinstance(sample, PreferencePair) != needs_pairs:
                problem = "a row with one answer" if needs_pairs else "chosen and rejected"
                raise row_error(row, problem, f"a row for stage {settings.data.stage}")


def make_plan(settings: TrainSettings, *, download: bool = False, predict: bool = False) -> PreparedRun:
    """Raises InputError for whatever would stop the run. `predict`: targets are those that can be trained, as far as
    that can be told without weights; a run finds them once its model is loaded."""
    notes = list(settings.notes)
    require_packages(settings)
    check_ranks(settings)
    options_of(settings)  # raises for a policy that training does not have
    trainer_arguments(settings)
    if settings.data.template is not None:
        template_text(settings.data.template)
    check_output(Path(settings.output_dir))
    resume = find_resume_point(settings)
    notes += resume.notes
    notes += package_notes(settings)
    notes += read_shard_options(settings)[1]
    if uses_packing(settings):
        present = base_directory(settings.model, download=False)
        if present is not None:
            require_masked_layers(meta_model(present))
    datasets = read_datasets(settings.data.dataset, settings.data)
    held_out = read_datasets(settings.data.eval_dataset, settings.data)
    _check_kinds(datasets + held_out, settings)
    directory = base_directory(settings.model, download=download)
    seed = int(settings.trainer.get("seed", 42))
    tokenizer, split, data, targets, numbers, dtype, forecast, grouping, recipe, partition = (None,) * 10
    if directory is None:
        notes.append(f"{settings.model.model_name_or_path} is not on this machine: tokens and targets were not checked")
    else:
        # transformers reads it too, for the tokenizer, and does not name it in its errors
        check_dense_format(settings, dtype_of(settings, read_model_config(directory)))
        read_generation_config(directory)
        tokenizer, extra_notes = load_tokenizer(directory, settings)
        notes += extra_notes
        check_template(tokenizer, datasets + held_out)
        options = settings.data
        renderer = Renderer(tokenizer, options.cutoff_len, options.train_on_prompt, options.mask_history)
        split = prepare(datasets, held_out, renderer, options, seed)
        recipe = make_recipe(settings, directory, split, process_count())
        notes += check_recipe(resume, settings.output_dir, recipe)
        measured = measure_rows(split, settings, seed)
        settings, grouping, forecast, extra_notes = _plan_batching(settings, resume.checkpoint, directory, measured)
        notes += extra_notes
        data = replace(_summarise_data(split, measured, settings, tokenizer), question=_first_question(datasets))
        evaluates = settings.trainer.get("eval_strategy", "no")
        if str(evaluates) != "no" and not split.evaluation:
            raise InputError("eval_strategy", evaluates, "rows to evaluate on", "give val_size or eval_dataset")
        if split.dropped:
            notes.append(f"{split.dropped} rows have no answer within cutoff_len {options.cutoff_len} and are left out")
        if split.ends:
            notes.append(f"{split.ends} rows have an empty answer: they teach nothing but to end it")
        model = meta_model(directory)
        partition = make_partition(settings, model)
        notes += TrainPlacement(settings, forecast).plan_operators(model)[1]
        targets = find_targets(model, settings.lora)
        if predict and settings.lora.adapter_name_or_path is None:
            targets, left_out = predict_targets(build_fake_model(directory), settings.lora)
            notes += left_out
        numbers = count_trained_parameters(model, targets, settings.lora.lora_rank)
        check_disk_space(settings, numbers, sum(file.stat().st_size for file in directory.glob("*token*")))
        dtype = str(dtype_of(settings, read_model_config(directory))).removeprefix("torch.")
        _check_vocabulary(split, model, directory)
        if uses_packing(settings):
            require_masked_layers(model)
        notes += precision_notes(settings, read_model_config(directory))
    plan = TrainPlan(
        settings=settings,
        model=None if directory is None else str(directory),
        device=device_of(settings).type,
        dtype=dtype,
        start=resume.start,
        datasets=tuple(
            DatasetPlan(dataset.source.name, str(dataset.source.path), len(dataset.samples))
            for dataset in datasets + held_out
        ),
        data=data,
        targets=targets,
        trained_numbers=numbers,
        forecast=forecast,
        grouping=grouping,
        notes=tuple(notes),
    )
    return PreparedRun(plan, directory, tokenizer, split, resume, recipe, partition)


def _plan_batching(
    settings: TrainSettings, checkpoint: Path | None, directory: Path, measured: RowLengths
) -> tuple[TrainSettings, Grouping, planning.Plan | None, list[str]]:
    """The settings with the chosen device and batching, the grouping, its forecast, and notes."""
    inputs, notes = try_plan_inputs(settings, directory, read_model_config(directory))
    grouping = decide_grouping(settings, checkpoint, inputs, measured)
    chosen = with_tokens_per_batch(settings, grouping.tokens)
    forecast = None if inputs is None else inputs.forecast(chosen, measured.lengths(chosen))
    if forecast is not None and forecast.gpu_unused_reason:  # planned again: dtypes and losses may differ on a CPU
        on_cpu = settings.model_copy(update={"trainer": settings.trainer | {"use_cpu": True}})
        trainer_arguments(on_cpu)
        chosen, grouping, cpu_forecast, cpu_notes = _plan_batching(on_cpu, checkpoint, directory, measured)
        insist = "use_cpu: false insists on it"
        return (
            chosen,
            grouping,
            cpu_forecast,
            [f"everything on the CPU: {forecast.gpu_unused_reason}; {insist}", *cpu_notes],
        )
    if grouping.note is not None:
        notes.append(grouping.note)
    return chosen, grouping, forecast, notes


def _check_vocabulary(split: DataSplit, model: Any, directory: Path) -> None:
    size = model.get_input_embeddings().num_embeddings
    for row in split.train:
        ids = row.prompt + row.chosen + row.rejected if isinstance(row, PreferenceRow) else row.ids
        if max(ids) >= size:
            raise InputError(str(directory), f"token {max(ids)}", f"tokens below {size}, the model's vocabulary")


def plan_document(plan: TrainPlan) -> dict[str, Any]:
    """The plan as a JSON document, for --json."""
    settings = plan.settings
    sections = settings.model_dump(mode="json", include=set(SECTIONS))
    targets = plan.targets
    return {
        "model": plan.model,
        "device": plan.device,
        "dtype": plan.dtype,
        "start": plan.start,
        "datasets": [vars(part) for part in plan.datasets],
        "data": None if plan.data is None else vars(plan.data),
        "targets": None if targets is None else {"modules": targets.modules, "parameters": targets.parameters},
        "trained_numbers": plan.trained_numbers,
        "grouping": None if plan.grouping is None else vars(plan.grouping),
        "forecast": None if plan.forecast is None else candidate_document(plan.forecast.nearest),
        "settings": sections | {"trainer": settings.trainer},
        "notes": list(plan.notes),
    }
