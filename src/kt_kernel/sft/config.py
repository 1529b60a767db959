"""`KTConfig`, the settings of expert training, with every field of kt-kernel 0.7.2.

A field is resolved when the object is made: the value that was given, else the environment variable `ACCELERATE_` plus
the field's name in capitals (`ACCELERATE_KT_NUM_THREADS`), else the default. `given` lists the fields of the first two
kinds: a default of kt-kernel that would slow this library down (one thread) is shown but not applied.

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
from typing import Any

from kt_kernel.sft.errors import KTActivationPolicyError, KTAMXConfigError

ACTIVATION_WORDS = ("retain", "recompute")
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
SKIP_LORA = "_SkipLoRA"
TRUE_WORDS, FALSE_WORDS = ("1", "true", "yes", "on", "y", "t"), ("0", "false", "no", "off", "n", "f")
LORA_INSTEAD = "train LoRA on the experts (kt_train_mode: lora), or load the model without ktransformers"


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
            if word not in ACTIVATION_WORDS:
                raise KTAMXConfigError(f"kt_activation_policy: {name}", repr(word), " or ".join(ACTIVATION_WORDS))
        if (self.cpu, self.gpu) == ("recompute", "retain"):
            raise KTActivationPolicyError(
                "kt_activation_policy",
                "cpu=recompute with gpu=retain",
                "another combination: experts are recomputed by the checkpointing of their block, which gpu=retain "
                "turns off",
                "use cpu=retain",
            )

    @classmethod
    def from_object(cls, value: object) -> KTActivationPolicy:
        """From a policy, a mapping with `cpu` and `gpu`, or JSON of one."""
        if isinstance(value, KTActivationPolicy):
            return value
        if isinstance(value, str):
            with contextlib.suppress(ValueError):  # what is no JSON is refused below
                value = json.loads(value)
        if not isinstance(value, Mapping) or not set(value) <= {"cpu", "gpu"}:
            expected = 'a mapping such as {"cpu": "retain", "gpu": "recompute"}'
            raise KTAMXConfigError("kt_activation_policy", repr(value), expected)
        return cls(**value)


@dataclass
class KTConfig:
    kt_backend: str | None = None
    kt_expert_weight_format: str | None = None
    kt_num_threads: int | None = None
    kt_tp_enabled: bool | None = None
    kt_threadpool_count: int | None = None
    kt_weight_path: str | None = None
    kt_expert_checkpoint_path: str | None = None
    kt_non_expert_weight_path: str | None = None
    kt_weight_lifecycle: str | None = None
    kt_num_gpu_experts: int | None = None
    kt_skip_expert_loading: bool | None = None
    kt_share_backward_bb: bool | None = None
    kt_share_cache_pool: bool | None = None
    kt_force_fused_expert_lora: bool | None = None
    kt_max_cache_depth: int | None = None
    kt_model_max_length: int | None = None
    kt_activation_policy: KTActivationPolicy | None = None
    kt_lora_rank: int | None = None
    kt_lora_alpha: float | None = None
    kt_lora_dropout: float | None = None
    kt_train_mode: str | None = None
    kt_full_weight_grad: bool | None = None
    kt_use_lora_experts: bool | None = None
    kt_lora_expert_num: int | None = None
    kt_lora_expert_intermediate_size: int | None = None
    kt_checkpoint_files: list[str] | None = None
    kt_sharded_metadata: dict[str, Any] | None = None
    kt_wrap_fn: Callable[..., Any] | None = None
    kt_wrap_kwargs: dict[str, Any] | None = None
    # Not a field of kt-kernel: `fields` of this class are what LLaMA-Factory accepts, so it is no init argument either.
    given = frozenset[str]()

    def __post_init__(self) -> None:
        configure_omp_threads()
        given = set()
        for entry in fields(self):
            if getattr(self, entry.name) is None and (text := os.environ.get(f"ACCELERATE_{entry.name.upper()}")):
                setattr(self, entry.name, text)
            if getattr(self, entry.name) is not None:
                given.add(entry.name)
        self.given = frozenset(given)
        self._convert()
        self._resolve_backend()
        self._resolve_activation_policy()
        self._resolve_defaults()
        self._refuse()

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

    def _convert(self) -> None:
        """Texts of the environment and of YAML into the types of the fields."""
        for entry in fields(self):
            value = getattr(self, entry.name)
            convert = next((_CONVERTERS[word] for word in _CONVERTERS if str(entry.type).startswith(word)), None)
            if value is not None and convert is not None:
                setattr(self, entry.name, convert(entry.name, value))

    def _resolve_backend(self) -> None:
        weight_format = self.kt_expert_weight_format
        if weight_format is not None:
            weight_format = weight_format.lower()
            if weight_format not in WEIGHT_FORMATS:
                raise KTAMXConfigError("kt_expert_weight_format", weight_format, ", ".join(WEIGHT_FORMATS))
        backend = self.kt_backend or ("AMXBF16" if weight_format in (None, "bf16") else "auto")
        skip = backend.lower().endswith(SKIP_LORA.lower())
        word = backend[: -len(SKIP_LORA)] if skip else backend
        if (current := DEPRECATED_BACKENDS.get(word.upper())) is not None:
            warnings.warn(f"kt_backend {word} is called {current}", FutureWarning, stacklevel=4)
            word = current
        names = {name.upper(): name for name in BACKENDS}
        if word.upper() not in names:
            raise KTAMXConfigError("kt_backend", backend, ", ".join(BACKENDS), f"each may end in {SKIP_LORA}")
        word = names[word.upper()]
        named = BACKENDS[word]
        if weight_format is not None and named is not None and named != weight_format:
            given = f"{weight_format} with kt_backend {backend}"
            raise KTAMXConfigError("kt_expert_weight_format", given, f"{named}, or kt_backend auto")
        self.kt_backend = word + (SKIP_LORA if skip else "")
        self.kt_expert_weight_format = weight_format or named or "bf16"

    def _resolve_activation_policy(self) -> None:
        if self.kt_activation_policy is None and os.environ.get("KT_REUSE_CHECKPOINT_FORWARD", "0") not in ("", "0"):
            self.kt_activation_policy = KTActivationPolicy(cpu="retain")
        self.kt_activation_policy = KTActivationPolicy.from_object(self.kt_activation_policy or KTActivationPolicy())

    def _resolve_defaults(self) -> None:
        assert self.kt_activation_policy is not None
        native_four_bit = self.kt_expert_weight_format in ("rawint4", "mxfp4")
        defaults: dict[str, Any] = {
            "kt_num_threads": 1,
            "kt_tp_enabled": False,
            "kt_threadpool_count": 1,
            "kt_weight_lifecycle": "persistent",
            "kt_num_gpu_experts": 0,
            "kt_share_backward_bb": not native_four_bit,
            "kt_share_cache_pool": self.kt_activation_policy.cpu == "recompute",
            "kt_force_fused_expert_lora": False,
            "kt_max_cache_depth": 2,
            "kt_lora_dropout": 0.0,
            "kt_train_mode": "lora",
            "kt_use_lora_experts": False,
        }
        for name, default in defaults.items():
            if getattr(self, name) is None:
                setattr(self, name, default)
        if self.kt_lora_alpha is None and self.kt_lora_rank is not None:
            self.kt_lora_alpha = 2.0 * self.kt_lora_rank
        if self.kt_full_weight_grad is None:
            self.kt_full_weight_grad = self.kt_train_mode in ("full", "hybrid")

    def _refuse(self) -> None:
        at_least = {"kt_num_threads": 1, "kt_threadpool_count": 1, "kt_max_cache_depth": 1, "kt_model_max_length": 1}
        for name, least in (at_least | {"kt_num_gpu_experts": 0, "kt_lora_rank": 1}).items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise KTAMXConfigError(name, value, f"at least {least}")
        assert self.kt_lora_dropout is not None
        if not 0 <= self.kt_lora_dropout < 1:
            raise KTAMXConfigError("kt_lora_dropout", self.kt_lora_dropout, "at least 0 and less than 1")
        if self.kt_train_mode not in ("lora", "full", "hybrid"):
            raise KTAMXConfigError("kt_train_mode", self.kt_train_mode, "lora")
        if self.kt_train_mode != "lora":
            raise KTAMXConfigError("kt_train_mode", self.kt_train_mode, "lora: packed experts are frozen", LORA_INSTEAD)
        if self.kt_full_weight_grad:
            raise KTAMXConfigError("kt_full_weight_grad", True, "false: packed experts are frozen", LORA_INSTEAD)
        if self.kt_use_lora_experts:
            remedy = "expert LoRA (kt_lora_rank) trains the model's own experts"
            raise KTAMXConfigError("kt_use_lora_experts", True, "false: no experts are added to a model", remedy)
        if self.kt_weight_lifecycle != "persistent":
            remedy = "packed files are mapped and shared by all processes"
            raise KTAMXConfigError("kt_weight_lifecycle", self.kt_weight_lifecycle, "persistent", remedy)


def _to_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise KTAMXConfigError(name, repr(value), "true or false")


def _to_int(name: str, value: object) -> int:
    number = _to_float(name, value)
    if not number.is_integer():
        raise KTAMXConfigError(name, repr(value), "a whole number")
    return int(number)


def _to_float(name: str, value: object) -> float:
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise ValueError
        return float(value)
    except ValueError:
        raise KTAMXConfigError(name, repr(value), "a number") from None


def _to_list(name: str, value: object) -> list[str]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)):
        return [os.fspath(part) for part in value]
    raise KTAMXConfigError(name, repr(value), "a list of paths")


def _to_dict(name: str, value: object) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise KTAMXConfigError(name, repr(value), "JSON of a mapping") from None
    if not isinstance(value, Mapping):
        raise KTAMXConfigError(name, repr(value), "a mapping")
    return dict(value)


# By the beginning of a field's annotation.
_CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "bool": _to_bool,
    "int": _to_int,
    "float": _to_float,
    "str": lambda _, value: os.fspath(value),
    "list": _to_list,
    "dict": _to_dict,
}


def configure_omp_threads() -> int:
    """Set OMP_NUM_THREADS for libraries that are loaded, and processes that are started, from now on: the value of
    ACCELERATE_KT_OMP_NUM_THREADS, else one that is set and greater than 1 (launchers set 1), else 1 on all but the
    first rank of a machine, else the number of cores."""
    from ktransformers import _core

    asked, current = os.environ.get("ACCELERATE_KT_OMP_NUM_THREADS"), os.environ.get("OMP_NUM_THREADS", "")
    if asked:
        threads = _to_int("ACCELERATE_KT_OMP_NUM_THREADS", asked)
        if threads < 1:
            raise KTAMXConfigError("ACCELERATE_KT_OMP_NUM_THREADS", asked, "at least 1")
    elif current.isdigit() and int(current) > 1:
        threads = int(current)
    elif os.environ.get("LOCAL_RANK", "0") not in ("", "0", "-1"):
        threads = 1
    else:
        threads = int(_core.machine()["cores"])
    os.environ["OMP_NUM_THREADS"] = str(threads)
    return threads
