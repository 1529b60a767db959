"""Loads models with packed experts under kt-kernel's names of functions.

`load_kt_model` is `ktransformers.nn.load_model` with `KTConfig`: experts go from the files into stores and never exist
as tensors, everything else is loaded by stock transformers. Device maps and loading arguments are for programs that
call `from_pretrained` themselves and wrap the model afterwards; those hold all experts as tensors until they are
packed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kt_kernel.sft.arch import MOEArchConfig
from kt_kernel.sft.config import LORA_INSTEAD, KTConfig
from kt_kernel.sft.errors import KTAMXConfigError
from kt_kernel.sft.layers import expert_pool, wrap_moe_layers_with_kt_wrapper
from ktransformers import model_registry
from ktransformers.nn.contract import expert_modules

TRAIN_MODES = {"lora": "lora", "full": "full", "freeze": "hybrid", "galore": "full", "badam": "full"}


def load_kt_model(
    config: Any,
    model_args: Any = None,
    finetuning_args: Any = None,
    kt_plugin: Any = None,
    model_name_or_path: str | None = None,
    trust_remote_code: bool | None = None,
    token: str | None = None,
    torch_dtype: torch.dtype = torch.bfloat16,
    **kwargs: Any,
) -> nn.Module:
    """The model in a directory or on the hub, its experts packed, everything else on `cuda:LOCAL_RANK` or the CPU.

    `trust_remote_code` has no effect: models are built by the classes of transformers alone.
    """
    from ktransformers.nn import load_model

    if kwargs:
        expected = "the arguments of load_kt_model"
        raise KTAMXConfigError("load_kt_model", f"the argument {sorted(kwargs)[0]}", expected, "leave it out")
    finetuning = getattr(finetuning_args, "finetuning_type", "lora")
    if TRAIN_MODES.get(finetuning) != "lora":
        raise KTAMXConfigError("finetuning_type", finetuning, "lora: packed experts are frozen", LORA_INSTEAD)
    kt_config = KTConfig.from_object({} if kt_plugin is None else kt_plugin)
    name = (
        model_name_or_path or getattr(model_args, "model_name_or_path", None) or getattr(config, "_name_or_path", None)
    )
    if not name:
        raise KTAMXConfigError("model_name_or_path", name, "a model's directory, or a hub id")
    if kt_config.kt_checkpoint_files:
        remedy = "they are found in the model's directory"
        raise KTAMXConfigError("kt_checkpoint_files", "a list", "None for load_kt_model", remedy)
    model = load_model(
        _directory(name, token),
        experts=kt_config.kt_weight_path or kt_config.kt_expert_checkpoint_path,
        dtype=torch_dtype,
        device=_default_device(),
        pool=expert_pool(kt_config),
    )
    wrap_moe_layers_with_kt_wrapper(model, kt_config)
    return model


def _directory(name: str, token: str | None) -> Path:
    path = Path(model_registry.resolve(name))
    if path.exists():
        return path
    if name.startswith(("/", ".", "~")) or name.count("/") != 1:
        raise KTAMXConfigError(
            "model_name_or_path", f"{name}, which does not exist", "a model's directory, or a hub id"
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, token=token))


def _default_device() -> torch.device | None:
    if not torch.cuda.is_available():
        return None
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0))


def get_kt_loading_kwargs(
    config: Any,
    kt_plugin: Any,
    torch_dtype: torch.dtype = torch.bfloat16,
    trust_remote_code: bool | None = None,
    token: str | None = None,
) -> dict[str, Any]:
    """Arguments for stock `from_pretrained` before `wrap_moe_layers_with_kt_wrapper`."""
    KTConfig.from_object(kt_plugin)
    options = {"config": config, "torch_dtype": torch_dtype, "device_map": "cpu", "low_cpu_mem_usage": True}
    optional = {"trust_remote_code": trust_remote_code, "token": token}
    return options | {name: value for name, value in optional.items() if value is not None}


def build_kt_device_map(config: Any, kt_plugin: Any, device: str = "cuda:0") -> dict[str, str]:
    """A device map for `from_pretrained`: every module on `device`, the experts on the CPU. One entry for a layer's
    experts, which transformers 5 holds in one module."""
    from transformers import AutoModelForCausalLM

    KTConfig.from_object(kt_plugin)
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    experts = set(expert_modules(model))
    device_map: dict[str, str] = {}
    _map_modules(model, "", experts, device, device_map)
    return device_map


build_kt_device_map_simplified = build_kt_device_map


def _map_modules(module: nn.Module, name: str, experts: set[str], device: str, device_map: dict[str, str]) -> None:
    """Entries for the largest modules that lie on one device."""
    if name in experts:
        device_map[name] = "cpu"
    elif name and not any(expert.startswith(f"{name}.") for expert in experts):
        device_map[name] = device
    else:
        for parameter, _ in module.named_parameters(recurse=False):
            device_map[f"{name}.{parameter}" if name else parameter] = device
        for child, inner in module.named_children():
            _map_modules(inner, f"{name}.{child}" if name else child, experts, device, device_map)


def move_non_experts_to_gpu(model: nn.Module, moe_config: MOEArchConfig | None = None, device: str = "cuda:0") -> None:
    """Move everything but the experts; packed experts and their LoRA stay in host memory whatever moves the model."""
    for name, module in expert_modules(model).items():
        if not hasattr(module, "kt_store"):
            remedy = "call wrap_moe_layers_with_kt_wrapper first"
            raise KTAMXConfigError(name, "experts that are not packed", "packed ones, which stay on the host", remedy)
    model.to(device)


def get_expert_device(model: nn.Module, moe_config: MOEArchConfig | None = None) -> str:
    """The device of the first expert layer's parameters; "cpu" for packed experts."""
    for module in expert_modules(model).values():
        return str(next(module.parameters()).device)
    raise KTAMXConfigError(type(model).__name__, "no expert layers", "a model with experts")
