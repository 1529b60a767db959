"""The configuration of one LLaMA-Factory process: its `kt_config` mapping and its `kt_...` arguments, read as `kt
train` reads the same keys.

LLaMA-Factory hands the mapping over by a function of its fork of transformers (`configure_kt` for inference,
`TrainingArguments.update_kt_config` for training), long before the model is loaded and without a reference to it; so it
is kept here, one for the process. Values that LLaMA-Factory derives from its other arguments (rank, paths, lengths) are
dropped from it: they reach us by those arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.log import logger
from ktransformers.train.keys import DERIVED_KEYS

if TYPE_CHECKING:
    from ktransformers.train.settings import TrainSettings

log = logger(__name__)

# Keys of LLaMA-Factory's ModelArguments, in some release or by `arguments.py`, that `kt train` knows.
ARGUMENT_KEYS = (
    "use_kt",
    "kt_weight_path",
    "kt_expert_checkpoint_path",
    "kt_non_expert_weight_path",
    "kt_cpu_activation",
    "kt_use_lora_experts",
    "kt_lora_expert_num",
    "kt_lora_expert_intermediate_size",
    "kt_optimize_rule",
    "cpu_infer",
    "chunk_size",
    "mode",
    "kt_maxlen",
    "kt_use_cuda_graph",
    "kt_mode",
    "kt_force_think",
    "disable_gradient_checkpointing",
)
_DERIVED_IN_MAPPING = {
    *("kt_share_cache_pool", "enabled", "kt_skip_expert_loading", "kt_model_max_length"),
    *DERIVED_KEYS,
    *ARGUMENT_KEYS,
}

_current: dict[str, Any] = {}


def configure_kt(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """`transformers.integrations.kt.configure_kt`: the mapping for models that this process loads from now on. The
    caller keeps the result for as long as it wants the configuration."""
    mode = values.get("kt_train_mode")
    if mode not in (None, "lora"):
        raise InputError("finetuning_type", mode, "lora", "packed experts are frozen; train an adapter")
    _current.clear()
    _current.update({key: value for key, value in values.items() if key not in _DERIVED_IN_MAPPING})
    return _current


def prepare_kt_pretrained_config(config: Any) -> None:
    """`transformers.integrations.kt_artifacts.prepare_kt_pretrained_config`: `loading.py` has read this configuration
    without its quantisation."""


def read_kt_settings(model_args: Any, *, on_gpu: bool, training: bool) -> TrainSettings:
    """The keys of this process as `kt train` would read them. What `kt train` also requires (data, an output) belongs
    to LLaMA-Factory here and is filled in with values that nothing uses."""
    from ktransformers.train.resolve import read_settings

    keys = {key: getattr(model_args, key, None) for key in ARGUMENT_KEYS}
    mapping = {**(getattr(model_args, "kt_config", None) or {}), **_current}
    given = {key: value for key, value in keys.items() if value is not None}
    if on_gpu and "kt_place" not in mapping:
        # `kt train` and `kt serve` plan the GPU's memory; without a plan, nothing stays on the GPU.
        mapping["kt_place"] = _default_policy({**mapping, **given}, training)
    required = {"model_name_or_path": str(model_args.model_name_or_path), "dataset": "identity", "output_dir": "."}
    settings = read_settings({**required, **given, "kt_config": mapping, "use_cpu": not on_gpu})
    for line in settings.notes:
        log.info("%s", line)
    return settings


def _default_policy(keys: Mapping[str, Any], training: bool) -> str | None:
    from ktransformers.ground.options.placement import DEFAULT_POLICIES, read_options

    if read_options(keys).policies != DEFAULT_POLICIES:
        return None  # given by another key, or by KT_PLACE
    return "stream" if training else "cpu"
