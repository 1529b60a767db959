"""Options of the placement engine: one field per CLI flag and YAML key, under the same name.

`kt serve` reads them as `--kt-...` flags, `kt train` as keys, and both pass the same `PlacementOptions` to
`place/apply.py`. Names and meanings are those of the launch lines for SGLang with kt-kernel: a number of residents per
layer, or a share of all experts, which wins; a strategy that selects them; a number of tokens from which on a batch is
streamed to the GPU. Deferred experts and dynamic expert update are accepted for such lines and not done (`notes`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.plan.workload import DEFAULT_POLICY, POLICIES

if TYPE_CHECKING:
    from ktransformers.plan.planner import Plan

STRATEGIES = ("uniform", "frequency", "front-loading", "random")
DEFAULT_POLICIES = ("auto", "cpu")  # that the planner chooses from when none is given and there is a GPU
DEFERRAL_NOTE = (
    "kt_max_deferred_experts_per_token: not done here: exact decode steps in CUDA graphs are faster, see docs/place.md"
)
UPDATE_NOTE = "kt_enable_dynamic_expert_update: accepted, has no effect yet; the word is reserved for an expert cache"


@dataclass(frozen=True)
class PlacementOptions:
    kt_place: str | None = None
    kt_num_gpu_experts: int | None = None  # residents of each layer
    kt_gpu_experts_ratio: float | None = None  # residents as a share of all experts
    kt_expert_placement_strategy: str | None = None
    init_expert_location: Path | None = None  # statistics for `frequency`
    kt_gpu_prefill_token_threshold: int | None = None
    kt_enable_dynamic_expert_update: bool = False
    kt_expert_update_steps: int = 100
    kt_max_deferred_experts_per_token: int = 0
    kt_w8a8: bool = False  # 8-bit activations on the CPU
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
        """The policies that the planner may choose from: the one that is given by `kt_place`, by KT_PLACE or by options
        that imply residents on the GPU; otherwise the default ones. With a rule, whose devices are fixed, `cpu`."""
        policy = self.kt_place or env.text("KT_PLACE")
        if not policy and self.wants_gpu:
            policy = "resident"
        if not policy:
            return DEFAULT_POLICIES if self.kt_optimize_rule is None else (DEFAULT_POLICY,)
        if policy not in POLICIES:
            raise InputError("KT_PLACE", policy, "one of " + ", ".join(POLICIES))
        return (policy,)

    @property
    def policy(self) -> str:
        return self.policies[0]

    @property
    def needs_gpu(self) -> bool:
        """An option that only a GPU can serve is given: without a GPU it has no effect, but a visible GPU is used
        even if the plan does not fit on it."""
        return self.kt_optimize_rule is not None or self.policies not in (DEFAULT_POLICIES, (DEFAULT_POLICY,))

    def as_planned(self, plan: Plan | None) -> PlacementOptions:
        """With the policy that a plan for `policies` has chosen. A plan without a GPU does not override a given policy;
        the run then warns that there is no GPU."""
        if plan is None:
            return self
        if plan.nearest.choice.gpus:
            return replace(self, kt_place=plan.nearest.choice.policy)
        return replace(self, kt_place=DEFAULT_POLICY) if self.policies == DEFAULT_POLICIES else self

    @property
    def wants_gpu(self) -> bool:
        return bool(self.kt_num_gpu_experts or self.kt_gpu_experts_ratio or self.kt_gpu_prefill_token_threshold)

    @property
    def notes(self) -> list[str]:
        """Lines on options that are accepted and have no effect."""
        given = {
            DEFERRAL_NOTE: self.kt_max_deferred_experts_per_token > 0,
            UPDATE_NOTE: self.kt_enable_dynamic_expert_update,
        }
        return [note for note, on in given.items() if on]

    @property
    def strategy(self) -> str:
        """`frequency` if statistics are given and no strategy is."""
        if self.kt_expert_placement_strategy is not None:
            return self.kt_expert_placement_strategy
        return "frequency" if self.init_expert_location is not None else "uniform"

    @property
    def by_bytes(self) -> bool:
        """Neither a count nor a share of residents is given: free GPU memory decides."""
        return self.kt_num_gpu_experts is None and self.kt_gpu_experts_ratio is None


def take_options(words: dict[str, Any]) -> dict[str, Any]:
    """Pop the fields of `PlacementOptions` from a dictionary; unset ones are left out."""
    given = {field.name: words.pop(field.name, None) for field in fields(PlacementOptions)}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def read_options(*layers: Mapping[str, Any]) -> PlacementOptions:
    """Options from mappings of flags or YAML keys; the first mapping that has a key wins, other keys are ignored."""
    from pydantic import TypeAdapter, ValidationError

    given: dict[str, Any] = {}
    for layer in reversed(layers):
        flat = {**layer, **(layer.get("kt_config") or {})}
        given |= take_options(flat)
    try:
        return TypeAdapter(PlacementOptions).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, InputError):
            raise cause from None
        name = str(first["loc"][0]) if first["loc"] else "placement"
        raise InputError(name, repr(first.get("input")), first["msg"].removeprefix("Input should be ")) from error
