"""The recipe of a run: what decides which numbers it learns, so that a directory is not continued with another one.

A recipe has the settings that change results, the hash of the base and the hash of the tokenised rows; threads,
placement, logging, saving and the length of the run are not part of it. `per_device_train_batch_size` and
`gradient_accumulation_steps` count as their product over all processes, because a step has the same gradient however it
is split, over processes too. Settings that only choose rows (`dataset`, `cutoff_len`, `template`, ...) explain a
difference of the rows and are compared only if the rows differ: the same rows under another name are the same data.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from ktransformers.operators.rules import operators_of
from ktransformers.place.backends import format_of_backend
from ktransformers.train.arguments import step_shape, uses_packing
from ktransformers.train.data.prepare import DataSplit
from ktransformers.train.data.render import PreferenceRow
from ktransformers.train.manifest import base_hash, experts_source
from ktransformers.train.resolve import trainer_fields
from ktransformers.train.settings import TrainSettings

TRAINER_KEYS = (
    "learning_rate",
    "seed",
    "data_seed",
    "optim",
    "optim_args",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "weight_decay",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "max_grad_norm",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "train_sampling_strategy",
    "dataloader_drop_last",
    "bf16",
    "fp16",
)
ROW_KEYS = (
    "dataset",
    "template",
    "default_system",
    "enable_thinking",
    "cutoff_len",
    "train_on_prompt",
    "mask_history",
    "max_samples",
    "val_size",
    "mix_strategy",
    "interleave_probs",
    "identity_name",
    "identity_author",
)
SHOWN_CHARACTERS = 60  # of a value in a message


class TrainRecipe(BaseModel):
    model_config = ConfigDict(frozen=True, protected_namespaces=())

    settings: dict[str, Any]  # key -> value, compared one by one
    base: str  # hash of the base
    base_settings: dict[str, Any]  # explain a difference of `base`
    rows: str  # number and hash of the tokenised rows
    row_settings: dict[str, Any]  # explain a difference of `rows`

    def differences(self, now: TrainRecipe) -> list[str]:
        """`key: before, now after` of each difference; empty for the same recipe."""
        found = _compare(self.settings, now.settings)
        if self.base != now.base:
            found += _compare(self.base_settings, now.base_settings) or ["the weights or the config of the base"]
        if self.rows != now.rows:
            found += _compare(self.row_settings, now.row_settings)
            found.append(f"rows: {self.rows}, now {now.rows}")
        return found


def _compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Keys that one side lacks come from another version and are not compared."""
    changed = [key for key in now if key in before and before[key] != now[key]]
    return [f"{key}: {_shown(before[key])}, now {_shown(now[key])}" for key in changed]


def _shown(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def _rows_hash(rows: list[Any]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        parts = (row.prompt, row.chosen, row.rejected) if isinstance(row, PreferenceRow) else (row.ids, row.labels)
        for part in parts:
            digest.update(array("q", part).tobytes())
            digest.update(b"|")
    return f"{len(rows)} (sha256 {digest.hexdigest()[:16]})"


def make_recipe(settings: TrainSettings, directory: Path, split: DataSplit, processes: int) -> TrainRecipe:
    trainer = {key: settings.trainer.get(key, trainer_fields().get(key)) for key in TRAINER_KEYS}
    rows, batches = step_shape(settings)
    lora = settings.lora.model_dump(mode="json", exclude={"finetuning_type"})
    compared: dict[str, Any] = {
        "stage": settings.data.stage,
        **lora,
        "lora_alpha": settings.lora.lora_alpha or 2 * settings.lora.lora_rank,
        **trainer,
        "rows of a step": rows * batches * processes,
        "packing": uses_packing(settings),
        "disable_shuffling": settings.data.disable_shuffling,
        "moe_aux_loss_coef": settings.model.moe_aux_loss_coef,
        "pure_bf16": settings.model.pure_bf16,
        "precision": settings.experts.precision,
        "kt_weight_path": experts_source(settings, directory),
        "kt_backend": format_of_backend(settings.experts.kt_backend),
        "kt_optimize_rule": operators_of(settings.place.kt_optimize_rule),
        "rest": settings.experts.rest,
    }
    if settings.data.stage == "dpo":
        compared |= settings.preference.model_dump(mode="json")
    row_settings = {key: getattr(settings.data, key) for key in ROW_KEYS} | {"seed": trainer["seed"]}
    return TrainRecipe(
        settings=_as_json(compared),
        base=base_hash(directory),
        base_settings={"model_name_or_path": settings.model.model_name_or_path},
        rows=_rows_hash(split.train),
        row_settings=_as_json(row_settings),
    )


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """As the values are after they were written and read; enumerations become their values."""
    converted: dict[str, Any] = json.loads(
        json.dumps(values, default=lambda value: str(getattr(value, "value", value)))
    )
    return converted
