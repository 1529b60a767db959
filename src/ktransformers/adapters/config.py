"""adapter_config.json: read with its patterns, and written again for another dialect.

PEFT resolves a rank or alpha by the first pattern that matches the end of a name, else takes the default; the same rule
is followed here, so that a delta means here what it means there. Fields that we do not know are kept as they are.
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
        """Whether it says itself that not every layer is adapted."""
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
    """The checked fields, and everything as it stands in the file."""
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


def parse_config(fields: dict[str, Any], where: str, lora_alpha: float | None = None) -> AdapterConfig:
    if fields.get("lora_alpha") is None and lora_alpha is not None:
        fields["lora_alpha"] = lora_alpha
    present = {key: value for key, value in fields.items() if value is not None}
    try:
        config = AdapterConfig.model_validate(present)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        remedy = "give --lora-alpha" if field == "lora_alpha" else ""
        raise InputError(f"{where}: {field}", first["msg"], "a PEFT LoRA configuration", remedy) from error
    if config.peft_type.upper() != "LORA":
        raise InputError(f"{where}: peft_type", config.peft_type, "LORA", "other kinds of adapter are not converted")
    for field in ("use_dora", "lora_bias", "fan_in_fan_out"):
        if getattr(config, field):
            raise InputError(f"{where}: {field}", True, "false", "its delta is not a product of two factors")
    return config


def compact_number(value: float) -> int | float:
    """16 rather than 16.0: PEFT declares alpha an integer."""
    return int(value) if float(value).is_integer() else value


def build_patterns(values: Mapping[str, float], default: float) -> dict[str, int | float]:
    """PEFT's patterns for names -> values: one for the same place in every layer, full names where layers differ."""
    by_place: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        by_place.setdefault(split_layer_name(name)[2] or name, {})[name] = value
    found: dict[str, int | float] = {}
    for suffix, group in by_place.items():
        if len(set(group.values())) == 1:
            value = next(iter(group.values()))
            if value != default:
                found[re.escape(suffix)] = compact_number(value)
        else:
            found |= {re.escape(name): compact_number(value) for name, value in group.items() if value != default}
    return found


def build_config(adapter: Adapter, default: PairForm, named: Mapping[str, PairForm], **fields: Any) -> dict[str, Any]:
    """adapter_config.json of an adapter whose patterns are resolved by `named`; `fields` win over what was read."""
    kept = {key: value for key, value in adapter.config.items() if key != "peft_version"}
    return {
        **kept,
        "peft_type": "LORA",
        "task_type": kept.get("task_type") or "CAUSAL_LM",
        "bias": kept.get("bias") or "none",
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
