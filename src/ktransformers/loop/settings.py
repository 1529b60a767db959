"""The keys of a loop's YAML file, as pydantic models: the field's name is the key.

Words given after the file win: `train.keys.learning_rate=1e-4` reaches into the mappings. Options of a verb are its
own flags, `top_k: 4` for `--top-k 4`: they are its business and are checked by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ktransformers.errors import InputError

Options = dict[str, Any]


class LoopSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class LoopModel(LoopSection):
    path: str | None = Field(None, description="a directory, a name of `kt model list`, or a hub id")
    make: str | None = Field(None, description="instead: a model that `kt model make` knows")
    upcycle: str | None = Field(None, description="instead: a dense model for `kt model upcycle`")
    options: Options = Field(default_factory=dict, description="flags of `make` or `upcycle`")

    @model_validator(mode="after")
    def _one(self) -> LoopModel:
        given = [name for name in ("path", "make", "upcycle") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"one of path, make and upcycle, not {' and '.join(given) or 'none'}")
        return self


class TrainSettings(LoopSection):
    file: str | None = Field(None, description="a YAML file of `kt train`")
    keys: Options = Field(default_factory=dict, description="keys that win over the file's")
    minutes: float | None = Field(None, gt=0, description="as many steps as take about that long, by a measured pace")
    least_steps: int = Field(20, ge=1, description="with minutes: never fewer")
    pace_steps: int = Field(3, ge=2, description="with minutes: steps of the measurement, the first not counted")


class EvalSettings(LoopSection):
    tasks: tuple[str, ...] = Field((), description="tasks, suites or task files; none: nothing is judged")
    limit: int | None = Field(None, ge=1, description="at most that many items of each task")
    options: Options = Field(default_factory=dict, description="flags of `kt eval`, the same for base and adapter")

    @field_validator("tasks", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Loop(LoopSection):
    run: str = Field(description="the run's directory; everything it makes is in there")
    name: str = Field(
        "adapter", pattern=r"^[\w.-]+$", description="of the adapter: its folder, and what requests call it"
    )
    model: LoopModel
    plan: bool = Field(True, description="check keys, data, memory and time before anything is loaded")
    quantise: Options | None = Field(None, description="flags of `kt quant`; what it writes is trained, served, judged")
    train: TrainSettings
    prove: bool = Field(True, description="hold what is served against what was trained")
    eval: EvalSettings = Field(default_factory=lambda: EvalSettings.model_validate({}))
    serve: Options = Field(default_factory=dict, description="flags of `kt serve`")
    answers: int = Field(3, ge=0, description="answers that the report shows side by side")

    @field_validator("name")
    @classmethod
    def _free(cls, value: str) -> str:
        if value in RESERVED_NAMES:
            raise ValueError(f"a name that is not one of {', '.join(sorted(RESERVED_NAMES))}")
        return value


# Names that a run's directory, or the reports in it, have other uses for.
RESERVED_NAMES = {"base", "model", "quantised", "pace", "eval", "stages", "logs"}


def read_overrides(words: Iterable[str]) -> dict[str, Any]:
    """`a.b=value` as nested mappings, the value as YAML."""
    found: dict[str, Any] = {}
    for word in words:
        key, sign, value = word.partition("=")
        *path, last = key.strip().removeprefix("--").split(".")
        if not sign or not last or not all(path):
            raise InputError("argument", repr(word), "key=value, as in train.minutes=2")
        try:
            read = yaml.safe_load(value)
        except yaml.YAMLError:
            read = value
        inner = found
        for part in path:
            inner = inner.setdefault(part, {})
            if not isinstance(inner, dict):
                raise InputError("argument", repr(word), f"{part} either as a value or as a mapping")
        inner[last] = read
    return found


def merge_keys(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    both = dict(first)
    for key, value in second.items():
        if isinstance(value, dict) and isinstance(both.get(key), dict):
            both[key] = merge_keys(both[key], value)
        else:
            both[key] = value
    return both


def read_yaml(file: Path, what: str) -> dict[str, Any]:
    if not file.is_file():
        raise InputError(str(file), "no such file", what)
    try:
        found = yaml.safe_load(file.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(str(file), f"no YAML ({' '.join(str(error).split())})", what) from error
    if not isinstance(found, dict):
        raise InputError(str(file), type(found).__name__, f"{what}, a mapping")
    return found


def read_loop(file: Path, words: Iterable[str] = ()) -> Loop:
    raw = merge_keys(read_yaml(file, "a YAML file of a loop"), read_overrides(words))
    try:
        return Loop.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "loop"
        given = "nothing" if first["type"] == "missing" else repr(first.get("input"))
        if first["type"] == "extra_forbidden":
            raise InputError(key, "a key that is not known", "a key of docs/loop.md") from error
        message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise InputError(key, given, message) from error
