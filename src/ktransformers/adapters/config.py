"""Reads adapter_config.json with its rank and alpha patterns, and writes it for another format.

A rank or alpha is the value of the first pattern that matches the end of a name, else the default. That is PEFT's rule,
so a delta has the same value here and in PEFT. Unknown fields are kept. Patterns are regular expressions of a
downloaded file, so they run under the limits of `patterns.py`, and `check_for_peft` runs those that PEFT will run
before it does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from ktransformers.adapters.lora import Adapter, PairForm
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object, validate
from ktransformers.ground.patterns import FilePatterns

CONFIG_FILE = "adapter_config.json"
MAX_RANK = 1 << 20
ALL_LINEAR = "all-linear"  # target_modules: a word of PEFT, not a pattern
SUFFIX_RULE = r"(.*\.)?({})$"  # how PEFT applies rank_pattern and alpha_pattern
PEFT_PATTERNS = {  # key -> how PEFT applies its regular expressions
    "target_modules": "{}", "exclude_modules": "{}", "rank_pattern": SUFFIX_RULE, "alpha_pattern": SUFFIX_RULE,
    "modules_to_save": r"(^|.*\.){}($|\..*)", "layers_pattern": r"(?:^|.*?\.){}\.(\d+)\.",
}  # fmt: skip


class AdapterConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    peft_type: str = "LORA"
    r: int = Field(gt=0, le=MAX_RANK)
    lora_alpha: float = Field(allow_inf_nan=False)
    rank_pattern: dict[str, Annotated[int, Field(gt=0, le=MAX_RANK)]] = {}
    alpha_pattern: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    use_rslora: bool = False
    use_dora: bool = False
    lora_bias: bool = False
    fan_in_fan_out: bool = False
    lora_dropout: float = 0.0
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    base_model_name_or_path: str | None = None
    _matchers: dict[str, FilePatterns] = PrivateAttr(default_factory=dict)

    def compile_patterns(self, source: str) -> None:
        """Compile the regular expressions of the file `source`; an invalid one is an error that names its key."""
        for key, patterns in (("rank_pattern", self.rank_pattern), ("alpha_pattern", self.alpha_pattern)):
            self._matchers[key] = FilePatterns(f"{source}: {key}", list(patterns), "match", SUFFIX_RULE)
        for key, listed in (("target_modules", self.target_modules), ("exclude_modules", self.exclude_modules)):
            if isinstance(listed, str) and listed != ALL_LINEAR:
                self._matchers[key] = FilePatterns(f"{source}: {key}", [listed])

    def prefetch(self, names: Iterable[str]) -> None:
        """Match all names at once rather than one by one."""
        listed = list(names)
        for matcher in self._matchers.values():
            matcher.prefetch(listed)

    def targets(self, name: str) -> bool:
        """Whether target_modules or target_parameters name the module, as PEFT decides it."""
        if isinstance(self.target_modules, str):
            return self.target_modules == ALL_LINEAR or self._matchers["target_modules"].fits(name)
        parameters = (target.removesuffix(".weight") for target in self.target_parameters or [])
        named = [*(self.target_modules or []), *parameters]
        return not named or any(name == target or name.endswith(f".{target}") for target in named)

    def rank(self, *names: str) -> int:
        return int(self._match("rank_pattern", self.rank_pattern, names, self.r))

    def scaling(self, rank: int, *names: str) -> float:
        alpha = float(self._match("alpha_pattern", self.alpha_pattern, names, self.lora_alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    @property
    def partial(self) -> bool:
        """Whether the configuration itself restricts the adapter to some layers."""
        names = [
            *(self.target_parameters or []),
            *(self.target_modules if isinstance(self.target_modules, list) else []),
        ]
        return self.layers_to_transform is not None or any(split_layer_name(name)[1] >= 0 for name in names)

    def _match(self, key: str, patterns: Mapping[str, float], names: Iterable[str], default: float) -> float:
        if not patterns:
            return default
        values = list(patterns.values())
        indices = (self._matchers[key].first(name) for name in names)
        return next((values[index] for index in indices if index is not None), default)


def read_config(directory: Path, lora_alpha: float | None = None) -> tuple[AdapterConfig, dict[str, Any]]:
    """(validated fields, all fields as they are in the file)."""
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise InputError(
            str(directory), f"no {CONFIG_FILE}", "it in the directory of the tensors: rank and alpha are in it"
        )
    fields = read_json_object(file, "PEFT's adapter_config.json, a JSON object")
    return parse_config(fields, str(file), lora_alpha), fields


def parse_config(fields: dict[str, Any], source: str, lora_alpha: float | None = None) -> AdapterConfig:
    if fields.get("lora_alpha") is None and lora_alpha is not None:
        fields["lora_alpha"] = lora_alpha
    present = {key: value for key, value in fields.items() if value is not None}
    if "lora_alpha" not in present:
        raise InputError(f"{source}: lora_alpha", "nothing", "a number", "give --lora-alpha")
    config = validate(AdapterConfig, present, source)
    if config.peft_type.upper() != "LORA":
        raise InputError(f"{source}: peft_type", config.peft_type, "LORA", "other kinds of adapter are not converted")
    for field in ("use_dora", "lora_bias", "fan_in_fan_out"):
        if getattr(config, field):
            raise InputError(f"{source}: {field}", True, "false", "its delta is not a product of two factors")
    config.compile_patterns(source)
    return config


def check_for_peft(directory: str | Path, model: Any) -> None:
    """Check the patterns of an adapter of any kind before PEFT opens it for `model`: PEFT runs them without a limit."""
    file = Path(directory) / CONFIG_FILE
    fields = read_json_object(file, "PEFT's adapter_config.json, a JSON object")
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    for key, template in PEFT_PATTERNS.items():
        listed = fields.get(key) or []
        if isinstance(listed, str):
            patterns = [] if listed == ALL_LINEAR else [listed]
        else:
            patterns = [] if template == "{}" else [str(pattern) for pattern in listed]  # a list of names, not patterns
        if patterns:
            method = "fullmatch" if template == "{}" else "match"
            FilePatterns(f"{file}: {key}", patterns, method, template).prefetch(names)


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
