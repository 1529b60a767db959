"""From YAML and `key=value` words to `TrainSettings`: every key is honoured, mapped, said to be moot, or an error.

Order: the file, then the words, which win. `kt_config` is flattened (its keys are unique). Keys that left transformers
are mapped. The HF Trainer's keys are those of the installed `TrainingArguments`: the import costs seconds, so it is
left to here, and each value is brought to its field's type, because YAML reads `1e-4` as a word.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from ktransformers import model_registry
from ktransformers.errors import InputError
from ktransformers.train.keys import DERIVED_KEYS, NO_EFFECT_KEYS, RENAMED_KEYS, UNSUPPORTED_KEYS
from ktransformers.train.rules import read_rule
from ktransformers.train.settings import SECTION_OF_KEY, SECTIONS, TrainSettings

TRANSLATED_KEYS = (
    "kt_config",
    "warmup_ratio",
    "group_by_length",
    "logging_dir",
    "adafactor",
)


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
    """Key -> plain type, of those that have one; a step count may be a share, so the annotation counts."""
    from transformers import TrainingArguments

    plain = (bool, int, float, str)
    kinds = {field.name: field.type for field in dataclasses.fields(TrainingArguments)}
    kinds = {name: kind if kind in plain else type(trainer_fields().get(name)) for name, kind in kinds.items()}
    return {name: kind for name, kind in kinds.items() if kind in plain}


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
    try:
        found = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(str(file), f"no YAML ({' '.join(str(error).split())})", "lines of `key: value`") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise InputError(str(file), type(found).__name__, "a mapping, lines of `key: value`")
    return found


def read_overrides(words: Iterable[str]) -> dict[str, Any]:
    """`key=value`, the value as YAML; `kt_config.kt_backend=auto` reaches into the mapping."""
    found: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        if not sign or not key.strip():
            raise InputError("argument", repr(word), "key=value")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            read = value
        outer, _, inner = key.strip().removeprefix("--").partition(".")
        if inner:
            found.setdefault(outer, {})[inner] = read
        else:
            found[outer] = read
    return found


def merge_overrides(file: Mapping[str, Any], words: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(file)
    for key, value in words.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = {**merged[key], **value} if both else value
    return merged


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
    near = difflib.get_close_matches(key, known_keys(), n=1, cutoff=0.6)
    return InputError(key, "a key that is not known", f"`{near[0]}`, perhaps" if near else "a key of docs/train.md")


def coerce(key: str, value: Any, kind: type | None) -> Any:
    """Bring a value of the HF Trainer to its type; what has no plain type is left to the Trainer."""
    if kind is None or isinstance(value, (list, dict)):
        return value
    if kind is str:
        return "no" if value is False else value  # what YAML makes of `eval_strategy: no`
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise InputError(key, repr(value), kind.__name__) from error


class _KeySorter:
    """Walks over the given keys once and sorts them; `notes` collects what the user should read."""

    def __init__(self) -> None:
        self.sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
        self.trainer: dict[str, Any] = {}
        self.notes: list[str] = []

    def take(self, key: str, value: Any) -> None:
        if key in RENAMED_KEYS:
            self.notes.append(f"{key}: taken as {RENAMED_KEYS[key]}")
            self.take(RENAMED_KEYS[key], value)
        elif key in DERIVED_KEYS:
            raise InputError(key, repr(value), "nothing", "it follows from other keys; leave it out")
        elif key in TRANSLATED_KEYS:
            self.special(key, value)
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

    def special(self, key: str, value: Any) -> None:
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


def _build_section(name: str, values: dict[str, Any]) -> Any:
    try:
        return SECTIONS[name](**values)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else name
        given = "nothing" if first["type"] == "missing" else repr(first.get("input"))
        message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        field = SECTIONS[name].model_fields.get(key)
        raise InputError(key, given, message, field.description or "" if field else "") from error


def read_settings(source: str | Path | Mapping[str, Any], words: Iterable[str] = ()) -> TrainSettings:
    """The settings of a run, every key accounted for."""
    file = source if isinstance(source, Mapping) else read_yaml(source)
    flat = flatten_kt_config(merge_overrides(file, read_overrides(words)))
    if isinstance(flat.get("model_name_or_path"), str):  # a name of this machine means nothing to who gets the adapter
        flat["model_name_or_path"] = model_registry.written_down(flat["model_name_or_path"])
    taker = _KeySorter()
    for key, value in sorted(
        flat.items(), key=lambda item: item[0] in TRANSLATED_KEYS
    ):  # explicit keys before mapped ones
        taker.take(key, value)
    sections = {name: _build_section(name, values) for name, values in taker.sections.items()}
    if sections["place"].kt_optimize_rule is not None:
        taker.notes.append(read_rule(sections["place"].kt_optimize_rule)[1])
    settings = TrainSettings(**sections, trainer=taker.trainer, notes=tuple(taker.notes))
    return _check(settings)


def _check(settings: TrainSettings) -> TrainSettings:
    data, experts, trainer = settings.data, settings.experts, settings.trainer
    if not trainer.get("output_dir"):
        raise InputError("output_dir", "nothing", "a folder for the adapter, as in saves/my-run")
    if not trainer.get("do_train", True):
        raise InputError("do_train", False, "true", "kt train trains")
    if not data.dataset:
        raise InputError("dataset", "nothing", "a name of dataset_info.json or a file", "`identity` ships with kt")
    if not experts.use_kt:
        raise InputError("use_kt", False, "true", "without it, use llamafactory-cli or TRL themselves")
    if experts.kt_weight_path and not Path(experts.kt_weight_path).exists():
        raise InputError("kt_weight_path", experts.kt_weight_path, "a packed directory, GGUF or kt-kernel's files")
    isa_of_backend(experts.kt_backend)
    if trainer.get("bf16") and trainer.get("fp16"):
        raise InputError("fp16", "true beside bf16", "one of them")
    packing = data.packing or data.neat_packing
    if packing and data.stage == "dpo":
        raise InputError("packing", True, "false with stage: dpo", "pairs are not packed")
    at_once = experts.tokens_at_once
    if packing and at_once:
        raise InputError("kt_tokens_per_batch", at_once, "no packing beside it", "choose one of them")
    if settings.model.moe_aux_loss_coef and at_once:
        raise InputError("moe_aux_loss_coef", settings.model.moe_aux_loss_coef, "no kt_tokens_per_batch beside it")
    if settings.run.early_stopping_steps and not trainer.get("load_best_model_at_end"):
        given = settings.run.early_stopping_steps
        raise InputError("early_stopping_steps", given, "load_best_model_at_end: true and eval_strategy beside it")
    if data.mask_history and data.train_on_prompt:
        raise InputError("mask_history", True, "not together with train_on_prompt", "choose one of them")
    if experts.kt_cpu_activation == "recompute" and settings.model.disable_gradient_checkpointing:
        raise InputError("kt_cpu_activation", "recompute", "retain with disable_gradient_checkpointing: true")
    if at_once and at_once < data.cutoff_len:
        raise InputError("kt_tokens_per_batch", at_once, f"at least cutoff_len, {data.cutoff_len}")
    return settings


ISAS = {"AMX": "amx", "AVX512": "avx512", "AVX512_BF16": "avx512_bf16", "AVX2": "avx2"}


def isa_of_backend(backend: str | None) -> str | None:
    """The CPU variant that `kt_backend` names; None leaves the choice to the core.

    AMXBF16 was how AMX machines were told to train in bf16: where there is no AMX, the best variant does the same.
    """
    word = (backend or "auto").upper()
    if word in ("AUTO", "BF16", "LLAMAFILE", "AMXBF16", "AMXBF16_SFT"):
        return None
    kind = word.removesuffix("_SFT").removesuffix("BF16").rstrip("_") if not word.startswith("AVX512_BF16") else word
    if kind in ISAS and "INT" not in word:
        return ISAS[kind]
    raise InputError("kt_backend", backend, "auto, AMXBF16, AVX512BF16 or AVX2BF16", "experts train in bf16")
