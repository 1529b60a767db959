"""What a user may ask of the placement engine: one field for each flag and YAML key, with the same words.

`kt serve` reads them as `--kt-...` flags, `kt train` as keys, and both hand the same `PlacementOptions` to
`place/apply.py`. The words are those of the launch lines for SGLang with kt-kernel, with their meanings: a number of
residents for each layer, or a share of all, which wins; a strategy that says which; a number of tokens from which on a
batch is streamed to the GPU whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers import env
from ktransformers.errors import InputError
from ktransformers.plan.workload import DEFAULT, POLICIES

if TYPE_CHECKING:
    from ktransformers.plan.planner import Plan

STRATEGIES = ("uniform", "frequency", "front-loading", "random")
UNASKED = ("auto", "cpu")  # of training and serving, with a GPU: the first that fits, the faster of two
UPDATE_STEPS = 100


@dataclass(frozen=True)
class PlacementOptions:
    kt_place: str | None = None
    kt_num_gpu_experts: int | None = None  # residents of each layer
    kt_gpu_experts_ratio: float | None = None  # of all experts
    kt_expert_placement_strategy: str | None = None
    init_expert_location: Path | None = None  # statistics for `frequency`
    kt_gpu_prefill_token_threshold: int | None = None
    kt_enable_dynamic_expert_update: bool = False
    kt_expert_update_steps: int = UPDATE_STEPS  # of training, between two updates
    kt_max_deferred_experts_per_token: int = 0
    kt_w8a8: bool = False  # on the CPU
    kt_record_experts: Path | None = None  # where counts of routed tokens are written
    kt_optimize_rule: str | None = None

    def __post_init__(self) -> None:
        for name, known in (("kt_place", POLICIES), ("kt_expert_placement_strategy", STRATEGIES)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InputError(name, value, "one of " + ", ".join(known))
        for name, least in (
            ("kt_num_gpu_experts", 0),
            ("kt_gpu_prefill_token_threshold", 1),
            ("kt_expert_update_steps", 1),
            ("kt_max_deferred_experts_per_token", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise InputError(name, value, f"{least} or more")
        if self.kt_gpu_experts_ratio is not None and not 0 <= self.kt_gpu_experts_ratio <= 1:
            raise InputError("kt_gpu_experts_ratio", self.kt_gpu_experts_ratio, "a number from 0 to 1")
        if self.init_expert_location is not None and not self.init_expert_location.is_file():
            raise InputError("init_expert_location", self.init_expert_location, "a file of statistics")

    @property
    def policies(self) -> tuple[str, ...]:
        """Those that a plan may choose from: the one that is asked for, by word, by KT_PLACE, or by the other wishes,
        which all mean residents on the GPU beside the rest on the CPU. A rule says itself what is where."""
        word = self.kt_place or env.text("KT_PLACE")
        if not word and self.wants_gpu:
            word = "resident"
        if not word:
            return UNASKED if self.kt_optimize_rule is None else (DEFAULT,)
        if word not in POLICIES:
            raise InputError("KT_PLACE", word, "one of " + ", ".join(POLICIES))
        return (word,)

    @property
    def policy(self) -> str:
        return self.policies[0]

    @property
    def needs_gpu(self) -> bool:
        """Something was asked for that nothing but a GPU can do; without one it has no effect, but one that is there is
        not left out."""
        return self.kt_optimize_rule is not None or self.policies not in (UNASKED, (DEFAULT,))

    def as_planned(self, plan: Plan | None) -> PlacementOptions:
        """With the policy that a plan for `policies` has chosen. A plan without a GPU leaves alone what was asked for:
        who asked is told that there is none."""
        if plan is None:
            return self
        if plan.nearest.choice.gpus:
            return replace(self, kt_place=plan.nearest.choice.policy)
        return replace(self, kt_place=DEFAULT) if self.policies == UNASKED else self

    @property
    def wants_gpu(self) -> bool:
        return bool(
            self.kt_num_gpu_experts
            or self.kt_gpu_experts_ratio
            or self.kt_gpu_prefill_token_threshold
            or self.kt_max_deferred_experts_per_token
        )

    @property
    def strategy(self) -> str:
        """Statistics that are given are meant."""
        if self.kt_expert_placement_strategy is not None:
            return self.kt_expert_placement_strategy
        return "frequency" if self.init_expert_location is not None else "uniform"

    @property
    def by_bytes(self) -> bool:
        """Neither a count nor a share is given: what is free decides."""
        return self.kt_num_gpu_experts is None and self.kt_gpu_experts_ratio is None


def taken_from(found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a wish, taken out of a dictionary; those that say nothing are left out."""
    given = {field.name: found.pop(field.name, None) for field in fields(PlacementOptions)}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def read_options(*layers: Mapping[str, Any]) -> PlacementOptions:
    """From words of flags or YAML, the first that has a key wins; other keys are not looked at."""
    from pydantic import TypeAdapter, ValidationError

    given: dict[str, Any] = {}
    for layer in reversed(layers):
        flat = {**layer, **(layer.get("kt_config") or {})}
        given |= taken_from(flat)
    try:
        return TypeAdapter(PlacementOptions).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InputError):
            raise cause from None
        name = str(first["loc"][0]) if first["loc"] else "placement"
        raise InputError(name, repr(first.get("input")), first["msg"].removeprefix("Input should be ")) from error
