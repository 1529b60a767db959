"""The keys of a loop's YAML file, as pydantic models: a field's name is the key.

Overrides after the file take precedence: `train.keys.learning_rate=1e-4` sets a nested key. Options of a command are
its flags, `top_k: 4` for `--top-k 4`, and are validated by that command.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import merge_mappings, read_overrides, read_yaml_mapping, short

Options = dict[str, Any]
IGNORED = "accepted, and ignored: `max_steps` or `num_train_epochs` of keys says how long to train"


class LoopSection(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class LoopModel(LoopSection):
    path: str | None = Field(None, description="a directory, a name of `kt model list`, or a hub id")
    make: str | None = Field(None, description="instead: a model that `kt model make` knows")
    upcycle: str | None = Field(None, description="instead: a dense model for `kt model upcycle`")
    options: Options = Field(default_factory=dict, description="flags of `make` or `upcycle`")

    @model_validator(mode="after")
    def _check_source(self) -> LoopModel:
        sources = [name for name in ("path", "make", "upcycle") if getattr(self, name)]
        if len(sources) != 1:
            raise ValueError(f"one of path, make and upcycle, not {' and '.join(sources) or 'none'}")
        return self


class LoopTraining(LoopSection):
    file: str | None = Field(None, description="a YAML file of `kt train`")
    keys: Options = Field(default_factory=dict, description="keys that override the file's")
    minutes: float | None = Field(None, gt=0, description=IGNORED)
    least_steps: int | None = Field(None, ge=1, description=IGNORED)
    pace_steps: int | None = Field(None, ge=2, description=IGNORED)


class LoopEvaluation(LoopSection):
    tasks: tuple[str, ...] = Field((), description="tasks, suites or task files; none: no evaluation")
    limit: int | None = Field(None, ge=1, description="maximum items of each task")
    options: Options = Field(default_factory=dict, description="flags of `kt eval`, the same for base and adapter")

    @field_validator("tasks", mode="before")
    @classmethod
    def _split_list(cls, value: Any) -> Any:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


class Loop(LoopSection):
    run: str = Field(description="the run's directory, for all outputs")
    name: str = Field(
        "adapter", pattern=r"^[\w.-]+$", description="name of the adapter: its folder, and its model name in requests"
    )
    model: LoopModel
    plan: bool = Field(True, description="check keys, data and memory before anything is loaded")
    quantise: Options | None = Field(
        None, description="flags of `kt quant`; its output is trained, served and evaluated"
    )
    train: LoopTraining
    prove: bool = Field(True, description="check that the served adapter equals the trained one (`kt prove`)")
    eval: LoopEvaluation = Field(default_factory=lambda: LoopEvaluation.model_validate({}))
    serve: Options = Field(default_factory=dict, description="flags of `kt serve`")
    questions: tuple[str, ...] = Field(
        (), description="asked of base and adapter once training has ended; default the first question of the data"
    )
    answers: int = Field(3, ge=0, description="sample answers in the report")
    sweep: dict[str, list[Any]] = Field(
        default_factory=dict, description="values of keys of `kt train`; every combination is one run"
    )

    @property
    def notes(self) -> list[str]:
        """Keys of the file that change nothing."""
        return [
            f"train.{name}: {field.description}"
            for name, field in LoopTraining.model_fields.items()
            if field.description == IGNORED and getattr(self.train, name) is not None
        ]

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        if value in RESERVED_NAMES:
            raise ValueError(f"a name that is not one of {', '.join(sorted(RESERVED_NAMES))}")
        return value

    @field_validator("serve")
    @classmethod
    def _check_serve(cls, value: Options) -> Options:
        if OWN_SERVE_KEYS & {key.replace("-", "_") for key in value}:
            raise ValueError(f"flags of `kt serve` other than {', '.join(sorted(OWN_SERVE_KEYS))}")
        return value


# Flags of `kt serve` that a loop gives itself; with another address or a key its stages would not reach the server.
OWN_SERVE_KEYS = {"host", "port", "api_key", "served_model_name"}
# Names with another use in the run's directory or its reports; earlier versions timed steps in `pace`.
RESERVED_NAMES = {"base", "model", "quantised", "pace", "planned", "eval", "stages", "logs"}


def read_loop(file: Path, arguments: Iterable[str] = (), sweep: dict[str, list[Any]] | None = None) -> Loop:
    """`sweep` replaces the file's."""
    raw = merge_mappings(read_yaml_mapping(file, "a YAML file of a loop"), read_overrides(arguments))
    raw |= {"sweep": sweep} if sweep else {}
    try:
        return Loop.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "loop"
        value = "nothing" if first["type"] == "missing" else short(first.get("input"))
        if first["type"] == "extra_forbidden":
            raise InputError(key, "a key that is not known", "a key of docs/loop.md") from error
        message = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise InputError(key, value, message) from error
