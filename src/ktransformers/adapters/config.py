"""Reads adapter_config.json with its rank and alpha patterns, and writes it for another dialect.

A rank or alpha is the value of the first pattern that matches the end of a name, else the default. That is PEFT's rule,
so a delta has the same value here and in PEFT. Unknown fields are kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ktransformers.adapters.lora import Adapter, PairForm
from ktransformers.adapters.names import split_layer_name
from ktransformers.errors import InputError

CONFIG_FILE = "adapter_config.json"


class AdapterConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    peft_type: str = "LORA"
    r: int = Field(gt=0)
    lora_alpha: float
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    lora_dropout: float = 0.0
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    layers_to_transform: list[int] | int | None = None
    base_model_name_or_path: str | None = None

    def rank(self, *names: str) -> int:
        return int(_match_pattern(self.rank_pattern, names, self.r))

    def scaling(self, rank: int, *names: str) -> float:
        alpha = float(_match_pattern(self.alpha_pattern, names, self.lora_alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @property
    def partial(self) -> bool:
        """Whether the configuration itself restricts the adapter to some layers."""
        names = [
            *(self.target_parameters or []),
            *(self.target_modules if isinstance(self.target_modules, list) else []),
        ]
        return self.layers_to_transform is not None or any(split_layer_name(name)[1] >= 0 for name in names)


def _match_pattern(patterns: Mapping[str, float], names: Iterable[str], default: float) -> float:
    for name in names:
        for pattern, value in patterns.items():
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
    return default


def read_config(directory: Path, lora_alpha: float | None = None) -> tuple[AdapterConfig, dict[str, Any]]:
    """(validated fields, all fields as they are in the file)."""
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise InputError(str(directory), f"no {CONFIG_FILE}", "one beside the tensors: rank and alpha are in it")
    try:
        fields = json.loads(file.read_text())
        fields = dict(fields)
    except (ValueError, TypeError) as error:
        raise InputError(
            str(file), f"a file that is not a JSON object ({error})", "PEFT's adapter_config.json"
        ) from error
    return parse_config(fields, str(file), lora_alpha), fields


def parse_config(fields: dict[str, Any], source: str, lora_alpha: float | None = None) -> AdapterConfig:
    if fields.get("lora_alpha") is None and lora_alpha is not None:
        fields["lora_alpha"] = lora_alpha
    present = {key: value for key, value in fields.items() if value is not None}
    try:
        config = AdapterConfig.model_validate(present)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        remedy = "give --lora-alpha" if field == "lora_alpha" else ""
        raise InputError(f"{source}: {field}", first["msg"], "a PEFT LoRA configuration", remedy) from error
    if config.peft_type.upper() != "LORA":
        raise InputError(f"{source}: peft_type", config.peft_type, "LORA", "other kinds of adapter are not converted")
    for field in ("use_dora", "lora_bias", "fan_in_fan_out"):
        if getattr(config, field):
            raise InputError(f"{source}: {field}", True, "false", "its delta is not a product of two factors")
    return config


def compact_number(value: float) -> int | float:
    """16 rather than 16.0: PEFT declares alpha an integer."""
    return int(value) if float(value).is_integer() else value


def build_patterns(values: Mapping[str, float], default: float) -> dict[str, int | float]:
    """PEFT patterns for names -> values: one pattern per path within a layer, full names where layers differ."""
    by_path: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        by_path.setdefault(split_layer_name(name)[2] or name, {})[name] = value
    result: dict[str, int | float] = {}
    for suffix, group in by_path.items():
        if len(set(group.values())) == 1:
            value = next(iter(group.values()))
            if value != default:
                result[re.escape(suffix)] = compact_number(value)
        else:
            result |= {re.escape(name): compact_number(value) for name, value in group.items() if value != default}
    return result


def build_config(adapter: Adapter, default: PairForm, named: Mapping[str, PairForm], **fields: Any) -> dict[str, Any]:
    """adapter_config.json of an adapter whose patterns come from `named`; `fields` override what was read."""
    read_fields = {key: value for key, value in adapter.config.items() if key != "peft_version"}
    return {
        **read_fields,
        "peft_type": "LORA",
        "task_type": read_fields.get("task_type") or "CAUSAL_LM",
        "bias": read_fields.get("bias") or "none",
        "r": default.rank,
        "lora_alpha": compact_number(default.alpha),
        "rank_pattern": build_patterns({name: form.rank for name, form in named.items()}, default.rank),
        "alpha_pattern": build_patterns({name: form.alpha for name, form in named.items()}, default.alpha),
        "use_rslora": False,
        "use_dora": False,
        **({"lora_dropout": 0.0} if adapter.experts else {}),
        **({} if adapter.extras else {"modules_to_save": None}),
        **fields,
    }
