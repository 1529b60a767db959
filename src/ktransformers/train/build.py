"""The trainer of a run: targets, data set, TRL's trainer with the adapter, and what its steps are checked by.

The order matters: the adapter exists before dropout, checkpointing and packing change it, and everything else before
the model is sharded, which replaces its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset  # type: ignore[import-untyped]
from transformers import PrinterCallback, ProgressCallback

from ktransformers.train.arguments import device_of, trainer_arguments, uses_packing
from ktransformers.train.callbacks import GradientCheck
from ktransformers.train.data.render import PreferenceRow
from ktransformers.train.expert_parallel import check_trained
from ktransformers.train.finite import FiniteCheck
from ktransformers.train.grouping import trainer_sequences
from ktransformers.train.model import build_lora_config, checkpoint_activations, finish_adapter
from ktransformers.train.packed_attention import use_packed_attention
from ktransformers.train.packing import separate_rows
from ktransformers.train.plan import PreparedRun
from ktransformers.train.reachable import trainable_targets
from ktransformers.train.settings import TrainSettings
from ktransformers.train.sharding import read_shard_options
from ktransformers.train.targets import find_targets
from ktransformers.train.trainers import PreferenceTrainer, SupervisedTrainer


def _build_dataset(rows: list[Any], settings: TrainSettings) -> Any:
    """Rows in the columns that TRL's trainers expect."""
    if settings.data.stage == "dpo":
        pairs: list[PreferenceRow] = rows
        return Dataset.from_dict(
            {
                "prompt_ids": [pair.prompt for pair in pairs],
                "chosen_ids": [pair.chosen for pair in pairs],
                "rejected_ids": [pair.rejected for pair in pairs],
            }
        )
    if uses_packing(settings):
        packed = trainer_sequences(rows, settings)
        return Dataset.from_dict(
            {
                "input_ids": [[token for row in part for token in row.ids] for part in packed],
                "labels": [[label for row in part for label in row.labels] for part in packed],
                "seq_lengths": [[len(row.ids) for row in part] for part in packed],
            }
        )
    return Dataset.from_dict({"input_ids": [row.ids for row in rows], "labels": [row.labels for row in rows]})


def build_trainer(model: Any, prepared: PreparedRun) -> Any:
    """TRL's trainer for the loaded model, with the adapter created and every check of a step in place."""
    settings, split = prepared.plan.settings, prepared.split
    assert split is not None
    continued = settings.lora.adapter_name_or_path is not None  # then the adapter names its modules
    targets, notes = (find_targets(model, settings.lora), []) if continued else trainable_targets(model, settings.lora)
    trainer_class: Any = PreferenceTrainer if settings.data.stage == "dpo" else SupervisedTrainer
    trainer = trainer_class(
        model=model,
        args=trainer_arguments(settings),
        train_dataset=_build_dataset(split.train, settings),
        eval_dataset=_build_dataset(split.evaluation, settings) if split.evaluation else None,
        processing_class=prepared.tokenizer,
        peft_config=build_lora_config(model, targets, settings.lora),
    )
    assert prepared.recipe is not None
    pairs = settings.data.stage == "dpo"
    finite = FiniteCheck(trainer.model, Path(settings.output_dir), split.train, prepared.tokenizer, pairs)
    trainer.guard(finite, prepared.recipe)
    check_trained(trainer.model)
    finish_adapter(trainer.model, settings)
    checkpoint_activations(trainer.model, settings)
    if uses_packing(settings):
        if device_of(settings).type == "cpu":
            use_packed_attention(model)
        separate_rows(model)
    options, _ = read_shard_options(settings)
    if options is not None:
        trainer.shard(options)
    trainer.begin_run(settings, GradientCheck(trainer.model), tuple(notes))
    for callback in (PrinterCallback, ProgressCallback):  # TrainLog reports instead
        trainer.remove_callback(callback)
    return trainer
