"""Turns YAML and `key=value` overrides into `TrainSettings`: every key is used, translated, reported to have no effect,
or an error.

Overrides take precedence over the file. `kt_config` is flattened (its keys are unique). Keys that transformers removed
are translated. The HF Trainer's keys are the fields of the installed `TrainingArguments`, imported here because the
import takes seconds; each value is converted to its field's type, because YAML reads `1e-4` as a string.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ktransformers.ground import model_registry
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import find_example, merge_mappings, read_overrides, read_yaml_mapping
from ktransformers.ground.options.field import build
from ktransformers.operators.rules import summarise_for_training
from ktransformers.place.backends import format_of_backend, isa_of_backend
from ktransformers.train.keys import DERIVED_KEYS, NO_EFFECT_KEYS, RENAMED_KEYS, UNSUPPORTED_KEYS
from ktransformers.train.settings import SECTION_OF_KEY, SECTIONS, TrainSettings

TRANSLATED_KEYS = ("kt_config", "warmup_ratio", "group_by_length", "logging_dir", "adafactor")

# Keys of the HF Trainer that it does not check itself, or only after the model is loaded -> smallest value.
LEAST_VALUES = {
    "learning_rate": 0,
    "weight_decay": 0,
    "num_train_epochs": 0,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
}


@functools.cache
def trainer_fields() -> dict[str, Any]:
    """Key -> default of every key of the HF Trainer."""
    from transformers import TrainingArguments

    return {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(TrainingArguments)
        if field.init
    }


@functools.cache
def trainer_types() -> dict[str, type]:
    """Key -> scalar type, for keys that have one; the annotation decides, because a step count may be a fraction."""
    from transformers import TrainingArguments

    scalars = (bool, int, float, str)
    types = {field.name: field.type for field in dataclasses.fields(TrainingArguments)}
    types = {name: type_ if type_ in scalars else type(trainer_fields().get(name)) for name, type_ in types.items()}
    return {name: type_ for name, type_ in types.items() if type_ in scalars}


def known_keys() -> set[str]:
    return {
        *SECTION_OF_KEY,
        *NO_EFFECT_KEYS,
        *UNSUPPORTED_KEYS,
        *RENAMED_KEYS,
        *TRANSLATED_KEYS,
        *DERIVED_KEYS,
        *trainer_fields(),
    }


def read_yaml(path: str | Path) -> dict[str, Any]:
    file = Path(path)
    if not file.is_file():
        raise InputError(str(file), "no such file", "a YAML file with training keys", "examples/ holds some")
    return read_yaml_mapping(file)


def flatten_kt_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    flat = {key: value for key, value in raw.items() if key != "kt_config"}
    inner = raw.get("kt_config") or {}
    if not isinstance(inner, Mapping):
        raise InputError("kt_config", repr(inner), "a mapping of kt_ keys")
    for key, value in inner.items():
        if key in flat and flat[key] != value:
            raise InputError(f"kt_config.{key}", f"{value} there and {flat[key]} outside", "one value")
        flat[key] = value
    return flat


def unknown_key_error(key: str) -> InputError:
    matches = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.6)
    return InputError(
        key, "a key that is not known", f"`{matches[0]}`, perhaps" if matches else "a key of docs/train.md"
    )


def coerce(key: str, value: Any, type_: type | None) -> Any:
    """Converts a value to the type of the HF Trainer's field; without a scalar type it is left to the Trainer."""
    if type_ is None or isinstance(value, (list, dict)):
        return value
    if type_ is str:
        return "no" if value is False else value  # YAML reads `eval_strategy: no` as false
    try:
        return TypeAdapter(type_).validate_python(value)
    except ValidationError as error:
        raise InputError(key, repr(value), type_.__name__) from error


class _KeySorter:
    """Assigns each given key to its section; `notes` collects messages for the user."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        self.trainer: dict[str, Any] = {}
        self.notes: list[str] = []

    def add(self, key: str, value: Any) -> None:
        if key in RENAMED_KEYS:
            self.notes.append(f"{key}: taken as {RENAMED_KEYS[key]}")
            self.add(RENAMED_KEYS[key], value)
        elif key in DERIVED_KEYS:
            raise InputError(key, repr(value), "nothing", "it follows from other keys; leave it out")
        elif key in TRANSLATED_KEYS:
            self._translate(key, value)
        elif key in NO_EFFECT_KEYS:
            self.notes.append(f"{key}: has no effect, {NO_EFFECT_KEYS[key]}")
        elif key in UNSUPPORTED_KEYS:
            if value not in UNSUPPORTED_KEYS[key].values:
                raise InputError(key, repr(value), "a run without it", UNSUPPORTED_KEYS[key].remedy)
            if value is not None and key in trainer_fields():
                self.trainer[key] = value
        elif key in SECTION_OF_KEY:
            if value is not None:
                self.sections[SECTION_OF_KEY[key]][key] = value
        elif key in trainer_fields():
            if value is not None:
                self.trainer[key] = coerce(key, value, trainer_types().get(key))
        else:
            raise unknown_key_error(key)

    def _translate(self, key: str, value: Any) -> None:
        if value is None or value is False:
            return
        if key == "warmup_ratio":
            share = coerce(key, value, float)
            if not 0 <= share < 1:
                raise InputError(key, value, "a share of the steps, at least 0 and below 1")
            if share and "warmup_steps" not in self.trainer:
                self.trainer["warmup_steps"] = share
                self.notes.append(f"warmup_ratio: taken as warmup_steps: {share}, a share of all steps")
        elif key == "group_by_length":
            self.trainer["train_sampling_strategy"] = "group_by_length"
            self.notes.append("group_by_length: taken as train_sampling_strategy: group_by_length")
        elif key == "adafactor":
            self.trainer["optim"] = "adafactor"
            self.notes.append("adafactor: taken as optim: adafactor")
        else:
            self.notes.append("logging_dir: has no effect, it left transformers; TENSORBOARD_LOGGING_DIR sets it")


def read_settings(source: str | Path | Mapping[str, Any], overrides: Iterable[str] = ()) -> TrainSettings:
    """The settings of a run, with every key accounted for."""
    file = source if isinstance(source, Mapping) else read_yaml(find_example(source))
    flat = flatten_kt_config(merge_mappings(file, read_overrides(overrides)))
    if isinstance(flat.get("model_name_or_path"), str):  # a local registry name means nothing on another machine
        flat["model_name_or_path"] = model_registry.portable_name(flat["model_name_or_path"])
    sorter = _KeySorter()
    # Explicit keys come before translated ones.
    for key, value in sorted(flat.items(), key=lambda item: item[0] in TRANSLATED_KEYS):
        sorter.add(key, value)
    sections: dict[str, Any] = {name: build(SECTIONS[name], values) for name, values in sorter.sections.items()}
    if sections["place"].kt_optimize_rule is not None:
        sorter.notes.append(summarise_for_training(sections["place"].kt_optimize_rule)[1])
    settings = TrainSettings(**sections, trainer=sorter.trainer, notes=tuple(sorter.notes))
    return _check(settings)


def _check(settings: TrainSettings) -> TrainSettings:
    data, experts, trainer = settings.data, settings.experts, settings.trainer
    if not trainer.get("output_dir"):
        raise InputError("output_dir", "nothing", "a folder for the adapter, as in saves/my-run")
    for key, least in LEAST_VALUES.items():
        value = trainer.get(key, least)
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
            raise InputError(key, value, f"a number, at least {least}")
    if not trainer.get("do_train", True):
        raise InputError("do_train", False, "true", "kt train trains")
    if not data.dataset:
        raise InputError("dataset", "nothing", "a name of dataset_info.json or a file", "`identity` ships with kt")
    if not experts.use_kt:
        raise InputError("use_kt", False, "true", "without it, use llamafactory-cli or TRL themselves")
    if experts.kt_weight_path and not Path(experts.kt_weight_path).exists():
        raise InputError("kt_weight_path", experts.kt_weight_path, "a packed directory, GGUF or kt-kernel's files")
    isa_of_backend(experts.kt_backend)
    encoded, expected = format_of_backend(experts.kt_backend), experts.kt_expert_weight_format
    if encoded is not None and expected not in ("auto", encoded.partition(":")[0]):
        given = f"{expected} with kt_backend {experts.kt_backend}"
        raise InputError("kt_expert_weight_format", given, f"auto or {encoded.partition(':')[0]}")
    if trainer.get("bf16") and trainer.get("fp16"):
        raise InputError("fp16", "true with bf16: true", "one of the two; they are mutually exclusive")
    packing = data.packing or data.neat_packing
    if packing and data.stage == "dpo":
        raise InputError("packing", True, "false with stage: dpo", "pairs are not packed")
    tokens_per_batch = experts.tokens_per_pass
    if packing and tokens_per_batch:
        raise InputError("kt_tokens_per_batch", tokens_per_batch, "no packing with it", "choose one of them")
    if settings.model.moe_aux_loss_coef and tokens_per_batch:
        raise InputError("moe_aux_loss_coef", settings.model.moe_aux_loss_coef, "no kt_tokens_per_batch with it")
    if settings.run.early_stopping_steps and not trainer.get("load_best_model_at_end"):
        early_stopping_steps = settings.run.early_stopping_steps
        raise InputError(
            "early_stopping_steps", early_stopping_steps, "load_best_model_at_end: true and eval_strategy with it"
        )
    if data.mask_history and data.train_on_prompt:
        raise InputError("mask_history", True, "not together with train_on_prompt", "choose one of them")
    if experts.kt_cpu_activation == "recompute" and settings.model.disable_gradient_checkpointing:
        raise InputError("kt_cpu_activation", "recompute", "retain with disable_gradient_checkpointing: true")
    if tokens_per_batch and tokens_per_batch < data.cutoff_len:
        raise InputError("kt_tokens_per_batch", tokens_per_batch, f"at least cutoff_len, {data.cutoff_len}")
    return settings
