"""Options of the placement engine, for the flags of `kt serve`, for YAML keys and for SGLang's parser.

Names and meanings are those of the launch lines for SGLang with kt-kernel: a number of residents per layer, or a share
of all experts, which wins; a strategy that selects them; a number of tokens from which on a batch is streamed to the
GPU. Deferred experts and dynamic expert update are accepted for such lines and not done (`notes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, get_args

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.field import CLOSED, build, option, options_of

# One mode (`plan/modes.py`) for every pass, or auto.
Policy = Literal["auto", "cpu", "resident", "host_callback", "stream", "stream_all", "split"]
Strategy = Literal["uniform", "frequency", "front-loading", "random"]
POLICIES = get_args(Policy)
STRATEGIES = get_args(Strategy)
DEFAULT_POLICY: Final = "cpu"  # without a GPU, and of a rule, whose devices are fixed
DEFAULT_POLICIES = ("auto", "cpu")  # that the planner chooses from when none is given and there is a GPU


@dataclass(frozen=True, config=CLOSED)
class PlacementOptions:
    kt_place: Policy | None = option(
        None, "--kt-place", f"where experts are computed: {', '.join(POLICIES)}; default: KT_PLACE, then auto"
    )
    kt_num_gpu_experts: int | None = option(
        None, "--kt-num-gpu-experts --gpu-experts", "experts of each layer that stay on the GPU", ge=0
    )
    kt_gpu_experts_ratio: float | None = option(
        None,
        "--kt-gpu-experts-ratio",
        "share of all experts that stay on the GPU, 0 to 1; overrides a number for each layer",
        ge=0,
        le=1,
    )
    kt_expert_placement_strategy: Strategy | None = option(
        None,
        "--kt-expert-placement-strategy",
        "how experts on the GPU are chosen: uniform, frequency, front-loading or random; default: frequency with "
        "statistics, else uniform",
    )
    init_expert_location: Path | None = option(
        None, "--init-expert-location", "statistics for frequency: our JSON or safetensors, or kt-kernel's .pt"
    )
    kt_gpu_prefill_token_threshold: int | None = option(
        None,
        "--kt-gpu-prefill-token-threshold --kt-gpu-prefill-threshold",
        "batches of at least so many tokens stream all experts to the GPU",
        ge=1,
    )
    kt_enable_dynamic_expert_update: bool = option(
        False,
        "--kt-enable-dynamic-expert-update",
        "accepted, has no effect yet; the word is reserved for an expert cache",
    )
    kt_expert_update_steps: int = option(100, "", "accepted, has no effect yet, like the update itself", ge=1)
    kt_max_deferred_experts_per_token: int | None = option(
        None,
        "--kt-max-deferred-experts-per-token",
        "accepted, not done here: exact decode steps in CUDA graphs are faster; see docs/place.md",
        ge=0,
    )
    kt_w8a8: bool = option(
        False, "--kt-w8a8", "8-bit activations on the CPU, for experts in int8, int4 or GGUF's types, an approximation"
    )
    kt_record_experts: Path | None = option(
        None, "--kt-record-experts", "write counts of routed tokens to this file at the end"
    )
    kt_optimize_rule: str | None = option(
        None,
        "--kt-optimize-rule --optimize-config-path --optimize_config_path",
        "operators and devices by rule: a YAML file, or a name that says how many GPUs; see docs/operators.md",
    )

    @field_validator("init_expert_location")
    @classmethod
    def _is_file(cls, path: Path | None) -> Path | None:
        if path is not None and not path.is_file():
            raise InputError("init_expert_location", path, "a file of statistics")
        return path

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

    @property
    def wants_gpu(self) -> bool:
        return bool(self.kt_num_gpu_experts or self.kt_gpu_experts_ratio or self.kt_gpu_prefill_token_threshold)

    @property
    def notes(self) -> list[str]:
        """Lines on options that are accepted and have no effect."""
        without_effect = ("kt_max_deferred_experts_per_token", "kt_enable_dynamic_expert_update")
        helps = options_of(type(self))
        return [f"{name}: {helps[name].help}" for name in without_effect if getattr(self, name)]

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
    given = {name: words.pop(name, None) for name in options_of(PlacementOptions)}
    return {name: value for name, value in given.items() if value is not None and value is not False}


def read_options(*layers: Mapping[str, Any]) -> PlacementOptions:
    """Options from mappings of flags or YAML keys; the first mapping that has a key wins, other keys are ignored."""
    given: dict[str, Any] = {}
    for layer in reversed(layers):
        given |= take_options({**layer, **(layer.get("kt_config") or {})})
    return build(PlacementOptions, given)
