"""What `fsdp`, `fsdp_config` and the variables of `accelerate launch` ask of FSDP2, and what cannot be had.

accelerate's own FSDP2 moves models to the meta device, loads random numbers on all ranks but the first and has no CPU,
none of which packed experts allow; so the keys of its config files are read here, and `parallel/sharding.py` calls
torch's `fully_shard`. `hide_from_accelerate` removes the variables from the environment afterwards: with them,
transformers would leave the weights of all ranks but the first empty. Options of FSDP1 that FSDP2 has no counterpart
for are accepted if they ask for nothing, and everything else that is not known is an error."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_yaml_mapping
from ktransformers.ground.rank_cores import int_variable
from ktransformers.train.settings import ShardSettings, TrainSettings

WORDS = ("full_shard", "shard_grad_op", "auto_wrap", "offload")  # of the `fsdp` key
# Key of fsdp_config, without its prefix -> why it has no effect.
NO_EFFECT = {
    "cpu_ram_efficient_loading": "experts are mapped, and each rank keeps its shards of the rest",
    "state_dict_type": "checkpoints are adapters of whole tensors",
    "sync_module_states": "the trained values of rank 0 are sent to all",
    "use_orig_params": "FSDP2 always does",
    "backward_prefetch": "FSDP2 always does",
    "backward_prefetch_policy": "FSDP2 always does",
    "forward_prefetch": "FSDP2 always does",
    "limit_all_gathers": "FSDP2 always does",
    "min_num_params": "layers are sharded whole",
    "enable_ram_efficient_loading": "experts are mapped, and each rank keeps its shards of the rest",
}
# Variable of accelerate launch -> key of fsdp_config.
VARIABLES = {
    "FSDP_VERSION": "version",
    "FSDP_OFFLOAD_PARAMS": "offload_params",
    "FSDP_RESHARD_AFTER_FORWARD": "reshard_after_forward",
    "FSDP_AUTO_WRAP_POLICY": "auto_wrap_policy",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "transformer_layer_cls_to_wrap",
    "FSDP_ACTIVATION_CHECKPOINTING": "activation_checkpointing",
    "FSDP_SHARDING_STRATEGY": "sharding_strategy",
    "FSDP_STATE_DICT_TYPE": "state_dict_type",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "cpu_ram_efficient_loading",
    "FSDP_SYNC_MODULE_STATES": "sync_module_states",
    "FSDP_USE_ORIG_PARAMS": "use_orig_params",
    "FSDP_BACKWARD_PREFETCH": "backward_prefetch",
    "FSDP_FORWARD_PREFETCH": "forward_prefetch",
    "FSDP_MIN_NUM_PARAMS": "min_num_params",
}
PRECISION_VARIABLE = "ACCELERATE_MIXED_PRECISION"  # read as `bf16: true` is, which a CPU may compute in float32
# What steps whole tensors and shards alike, element by element.
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
GATHERED = {"full_shard": True, "shard_grad_op": False, "1": True, "2": False}


def launcher_sharding(environment: Mapping[str, str]) -> dict[str, Any]:
    """The keys `fsdp` and `fsdp_config` that `accelerate launch` has put into the environment, empty without FSDP."""
    if environment.get("ACCELERATE_USE_FSDP", "false").lower() not in ("true", "1"):
        return {}
    config = {key: environment[name] for name, key in VARIABLES.items() if environment.get(name)}
    return {"fsdp": True, "fsdp_config": config}


def hide_from_accelerate(environment: MutableMapping[str, str]) -> None:
    for name in ("ACCELERATE_USE_FSDP", *VARIABLES):
        environment.pop(name, None)


def _flag(key: str, value: Any) -> bool:
    text = str(value).strip().lower()
    if text in GATHERED:  # FSDP1 had one word for the strategy
        return GATHERED[text]
    if text not in ("true", "false", "yes", "no", "0"):
        raise InputError(f"fsdp_config.{key}", repr(value), "true or false")
    return text in ("true", "yes")


def _names(value: Any) -> tuple[str, ...]:
    words = value.split(",") if isinstance(value, str) else value or ()
    return tuple(word.strip() for word in words if word.strip())


def _config(settings: ShardSettings) -> dict[str, Any]:
    config = settings.fsdp_config or {}
    if isinstance(config, str):
        path = Path(config)
        if not path.is_file():
            raise InputError("fsdp_config", config, "a mapping, or a JSON or YAML file with one")
        config = read_yaml_mapping(path)
        config = config.get("fsdp_config", config)  # a config file of accelerate
    return {str(key).removeprefix("fsdp_"): value for key, value in config.items()}


def read_shard_options(settings: TrainSettings) -> tuple[Any, list[str]]:
    """`ShardOptions`, None without FSDP, and notes. Raises InputError for what cannot be sharded."""
    words = settings.shard.fsdp
    if not words or words == ("",):
        return None, []
    from ktransformers.parallel.sharding import ShardOptions

    given = words.split() if isinstance(words, str) else () if isinstance(words, bool) else words
    listed = tuple(word for word in given if word.lower() not in ("true", "fsdp2"))
    for word in listed:
        if word not in WORDS:
            raise InputError("fsdp", word, f"true, or words of {', '.join(WORDS)}")
    offload, gathered_again = "offload" in listed, "shard_grad_op" not in listed
    classes: tuple[str, ...] = ()
    notes = []
    for key, value in _config(settings.shard).items():
        if key in ("cpu_offload", "offload_params"):
            offload = offload or _flag(key, value)
        elif key in ("reshard_after_forward", "sharding_strategy"):
            gathered_again = _flag(key, value)
        elif key in ("transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"):
            classes = _names(value)
        elif key in ("version", "fsdp_version"):
            if str(value) != "2":
                raise InputError(f"fsdp_config.{key}", value, "2", "FSDP1 is not supported; use fsdp_version: 2")
        elif key == "auto_wrap_policy":
            if str(value).upper() not in ("TRANSFORMER_BASED_WRAP", "NONE"):
                raise InputError(
                    f"fsdp_config.{key}", value, "TRANSFORMER_BASED_WRAP", "layers are gathered one by one"
                )
        elif key in ("activation_checkpointing", "activation_checkpointing_offload"):
            if _flag(key, value):
                remedy = "gradient checkpointing is on by default and keeps the experts' results"
                raise InputError(f"fsdp_config.{key}", value, "false", remedy)
        elif key in NO_EFFECT:
            notes.append(f"fsdp_config.{key}: has no effect, {NO_EFFECT[key]}")
        else:
            raise InputError(f"fsdp_config.{key}", repr(value), "an option of FSDP2", "docs/train.md lists them")
    _check_settings(settings)
    if int_variable("WORLD_SIZE", 1) < 2:
        return None, [*notes, "fsdp: has no effect in one process; torchrun or accelerate launch starts several"]
    return ShardOptions(cpu_offload=offload, reshard_after_forward=gathered_again, layer_classes=classes), notes


def _check_settings(settings: TrainSettings) -> None:
    optimizer = str(settings.trainer.get("optim", OPTIMIZERS[0]))
    if optimizer not in OPTIMIZERS:
        raise InputError("optim", optimizer, f"with fsdp one of {', '.join(OPTIMIZERS)}", "others need whole tensors")
    if settings.trainer.get("fp16"):
        raise InputError("fp16", True, "bf16 or float32 with fsdp", "the gradient scaler sees one shard at a time")
    if settings.experts.tokens_per_pass is not None:
        given = settings.experts.kt_tokens_per_batch
        remedy = "ranks gather layers together, so all must have as many passes in a step"
        raise InputError("kt_tokens_per_batch", given, "off or auto with fsdp", remedy)


def leave_out_attention_graphs(environment: MutableMapping[str, str] | None = None) -> None:
    """A captured graph would read weights where they were when it was captured; FSDP gathers them anew each time."""
    kept = [part for part in ("experts", "decode") if env.graphs_enabled(part)]
    (os.environ if environment is None else environment)["KT_GRAPHS"] = ",".join(kept) or "0"


def take_launcher_sharding(
    settings: TrainSettings, environment: MutableMapping[str, str] | None = None
) -> TrainSettings:
    """The settings with what `accelerate launch` asked for; keys of the file come first. Its variables are removed."""
    variables = os.environ if environment is None else environment
    asked = launcher_sharding(variables)
    hide_from_accelerate(variables)
    if not asked:
        return settings
    changes: dict[str, Any] = {}
    precision, trainer = variables.pop(PRECISION_VARIABLE, "no"), settings.trainer
    if precision in ("bf16", "fp16") and not (trainer.get("bf16") or trainer.get("fp16")):
        changes["trainer"] = {**trainer, precision: True}
    if not settings.shard.fsdp:
        changes["shard"] = ShardSettings.model_validate(asked)
    return settings.model_copy(update=changes)
