"""`KTConfig`, the settings of expert training, with every field of kt-kernel 0.7.2.

A field is resolved when the object is made: the value that was given, else the environment variable `ACCELERATE_` plus
the field's name in capitals (`ACCELERATE_KT_NUM_THREADS`), else the default. `given` lists the fields of the first two
kinds: a default of kt-kernel that would slow this library down (one thread) is shown but not applied. pydantic converts
texts of the environment and of YAML by the annotations of the fields.

Fields that size or share buffers of kt-kernel's kernels have no effect here: activations belong to autograd, backward
reads the one packed copy of the weights, and the number of tokens is not bounded. A format has none of kt-kernel's
restrictions on ranks, dropout, NUMA parts or token counts. What cannot be done is refused when the object is made,
before a run begins: training of the experts' base weights, extra experts on the GPU, weight trees in /dev/shm.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_type_hints

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from kt_kernel.methods import SKIP_LORA
from kt_kernel.sft.runtime import KTActivationPolicyError, KTAMXConfigError
from ktransformers.ground.errors import first_problem

WEIGHT_FORMATS = ("bf16", "int8", "fp8", "rawint4", "mxfp4")
# Backend -> the format of the experts that it names; None: whatever the files hold.
BACKENDS = {
    "auto": None,
    "INT8": "int8",
    "FP8": "fp8",
    "RAWINT4": "rawint4",
    "MXFP4": "mxfp4",
    "AMXBF16": "bf16",
    "AMXINT4": "bf16",
}
DEPRECATED_BACKENDS = {"AMXINT8": "INT8", "AMXFP8": "FP8", "AMXINT4_KGROUP": "RAWINT4"}
LORA_INSTEAD = "train LoRA on the experts (kt_train_mode: lora), or load the model without ktransformers"
# Fields that have one value here -> what is expected instead of another, and what to do.
ONE_VALUE = {
    "kt_train_mode": ("lora", "lora: packed experts are frozen", LORA_INSTEAD),
    "kt_full_weight_grad": (False, "false: packed experts are frozen", LORA_INSTEAD),
    "kt_use_lora_experts": (
        False,
        "false: no experts are added to a model",
        "expert LoRA (kt_lora_rank) trains the model's own experts",
    ),
    "kt_weight_lifecycle": ("persistent", "persistent", "packed files are mapped and shared by all processes"),
}
EXPECTED = {
    "bool_parsing": "true or false",
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "dataclass_type": 'a mapping such as {"cpu": "retain", "gpu": "recompute"}',
}


def _read_json(value: object) -> object:
    """A mapping may be given as JSON, as variables of the environment are."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):  # pydantic refuses what is no JSON
            return json.loads(value)
    return value


def _split(value: object) -> object:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _as_text(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


Text = Annotated[str, BeforeValidator(_as_text)]
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class KTActivationPolicy:
    """What gradient checkpointing does with the outputs of the experts (`cpu`) and of everything else (`gpu`).

    With cpu=retain a layer's experts are computed once a step and their outputs kept; with cpu=recompute they are
    computed twice. gpu=retain says that the program does not checkpoint.
    """

    cpu: str = "recompute"
    gpu: str = "recompute"

    def __post_init__(self) -> None:
        for name, word in (("cpu", self.cpu), ("gpu", self.gpu)):
            if word not in ("retain", "recompute"):
                raise KTAMXConfigError(f"kt_activation_policy: {name}", repr(word), "retain or recompute")
        if (self.cpu, self.gpu) == ("recompute", "retain"):
            raise KTActivationPolicyError(
                "kt_activation_policy",
                "cpu=recompute with gpu=retain",
                "another combination: experts are recomputed by the checkpointing of their block, which gpu=retain "
                "turns off",
                "use cpu=retain",
            )


@dataclass
class KTConfig:
    kt_backend: Text | None = None
    kt_expert_weight_format: Text | None = None
    kt_num_threads: Positive | None = None
    kt_tp_enabled: bool | None = None
    kt_threadpool_count: Positive | None = None
    kt_weight_path: Text | None = None
    kt_expert_checkpoint_path: Text | None = None
    kt_non_expert_weight_path: Text | None = None
    kt_weight_lifecycle: Text | None = None
    kt_num_gpu_experts: Annotated[int, Field(ge=0)] | None = None
    kt_skip_expert_loading: bool | None = None
    kt_share_backward_bb: bool | None = None
    kt_share_cache_pool: bool | None = None
    kt_force_fused_expert_lora: bool | None = None
    kt_max_cache_depth: Positive | None = None
    kt_model_max_length: Positive | None = None
    kt_activation_policy: Annotated[KTActivationPolicy, BeforeValidator(_read_json)] | None = None
    kt_lora_rank: Positive | None = None
    kt_lora_alpha: float | None = None
    kt_lora_dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    kt_train_mode: Text | None = None
    kt_full_weight_grad: bool | None = None
    kt_use_lora_experts: bool | None = None
    kt_lora_expert_num: int | None = None
    kt_lora_expert_intermediate_size: int | None = None
    kt_checkpoint_files: Annotated[list[Text], BeforeValidator(_split)] | None = None
    kt_sharded_metadata: Annotated[dict[str, Any], BeforeValidator(_read_json)] | None = None
    kt_wrap_fn: Callable[..., Any] | None = None
    kt_wrap_kwargs: Annotated[dict[str, Any], BeforeValidator(_read_json)] | None = None
    # Not a field of kt-kernel: `fields` of this class are what LLaMA-Factory accepts, so it is no init argument either.
    given = frozenset[str]()

    def __post_init__(self) -> None:
        configure_omp_threads()
        types = get_type_hints(KTConfig, include_extras=True)
        given = set()
        for name in (entry.name for entry in fields(self)):
            value = getattr(self, name)
            if value is None:
                value = os.environ.get(f"ACCELERATE_{name.upper()}") or None
            if value is not None:
                given.add(name)
                setattr(self, name, _convert(name, types[name], value))
        self.given = frozenset(given)
        self._resolve_backend()
        self._resolve_defaults()
        for name, (only, expected, remedy) in ONE_VALUE.items():
            if getattr(self, name) != only:
                raise KTAMXConfigError(name, getattr(self, name), expected, remedy)

    @classmethod
    def from_object(cls, source: Any) -> KTConfig:
        """From a KTConfig, a mapping of its fields (`enabled` may be among them), or an object that holds one of these
        as `kt_config` or `config`."""
        if isinstance(source, KTConfig):
            return source
        if isinstance(source, Mapping):
            options = {key: value for key, value in source.items() if key != "enabled"}
            unknown = sorted(set(options) - {entry.name for entry in fields(cls)})
            if unknown:
                raise TypeError(
                    f"KTConfig: given the unknown key {unknown[0]!r}, expected fields of KTConfig such as "
                    "kt_weight_path and kt_num_threads, or `enabled`"
                )
            return cls(**options)
        for name in ("kt_config", "config"):
            if (held := getattr(source, name, None)) is not None:
                return cls.from_object(held)
        raise TypeError(
            f"KTConfig: given a {type(source).__name__}, expected a KTConfig, a mapping of its fields, or an object "
            "with `kt_config`"
        )

    @property
    def trains_experts(self) -> bool:
        """False for the backends `*_SkipLoRA`, whose experts get no LoRA."""
        return not str(self.kt_backend).endswith(SKIP_LORA)

    def _resolve_backend(self) -> None:
        weight_format = self.kt_expert_weight_format
        if weight_format is not None:
            weight_format = weight_format.lower()
            if weight_format not in WEIGHT_FORMATS:
                raise KTAMXConfigError("kt_expert_weight_format", weight_format, ", ".join(WEIGHT_FORMATS))
        backend = self.kt_backend or ("AMXBF16" if weight_format in (None, "bf16") else "auto")
        word = backend.upper().removesuffix(SKIP_LORA.upper())
        if (current := DEPRECATED_BACKENDS.get(word)) is not None:
            warnings.warn(f"kt_backend {word} is called {current}", FutureWarning, stacklevel=4)
            word = current
        names = {name.upper(): name for name in BACKENDS}
        if word not in names:
            raise KTAMXConfigError("kt_backend", backend, ", ".join(BACKENDS), f"each may end in {SKIP_LORA}")
        named = BACKENDS[names[word]]
        if weight_format is not None and named is not None and named != weight_format:
            given = f"{weight_format} with kt_backend {backend}"
            raise KTAMXConfigError("kt_expert_weight_format", given, f"{named}, or kt_backend auto")
        self.kt_backend = names[word] + (SKIP_LORA if backend.lower().endswith(SKIP_LORA.lower()) else "")
        self.kt_expert_weight_format = weight_format or named or "bf16"

    def _resolve_defaults(self) -> None:
        if self.kt_activation_policy is None:
            retains = os.environ.get("KT_REUSE_CHECKPOINT_FORWARD", "0") not in ("", "0")
            self.kt_activation_policy = KTActivationPolicy(cpu="retain" if retains else "recompute")
        defaults: dict[str, Any] = {
            "kt_num_threads": 1,
            "kt_tp_enabled": False,
            "kt_threadpool_count": 1,
            "kt_weight_lifecycle": "persistent",
            "kt_num_gpu_experts": 0,
            "kt_share_backward_bb": self.kt_expert_weight_format not in ("rawint4", "mxfp4"),
            "kt_share_cache_pool": self.kt_activation_policy.cpu == "recompute",
            "kt_force_fused_expert_lora": False,
            "kt_max_cache_depth": 2,
            "kt_lora_alpha": None if self.kt_lora_rank is None else 2.0 * self.kt_lora_rank,
            "kt_lora_dropout": 0.0,
            "kt_train_mode": "lora",
            "kt_full_weight_grad": self.kt_train_mode in ("full", "hybrid"),
            "kt_use_lora_experts": False,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)


def _convert(name: str, kind: Any, value: object) -> Any:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        _, given, expected = first_problem(error)
        kinds = [problem["type"] for problem in error.errors()]
        raise KTAMXConfigError(name, given, EXPECTED.get(kinds[0], expected)) from None


def configure_omp_threads() -> int:
    """Set OMP_NUM_THREADS for libraries that are loaded, and processes that are started, from now on: the value of
    ACCELERATE_KT_OMP_NUM_THREADS, else one that is set and greater than 1 (launchers set 1), else 1 on all but the
    first rank of a machine, else the number of cores."""
    from ktransformers import _core

    asked, current = os.environ.get("ACCELERATE_KT_OMP_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS", "")
    if asked:
        threads = int(_convert("ACCELERATE_KT_OMP_NUM_THREADS", Positive, asked))
    elif current.isdigit() and int(current) > 1:
        threads = int(current)
    elif os.environ.get("LOCAL_RANK", "0") not in ("", "0", "-1"):
        threads = 1
    else:
        threads = int(_core.machine()["cores"])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads
