"""Packs the experts of stock transformers models, and loads models with packed experts, under kt-kernel's names.

`wrap_moe_layers_with_kt_wrapper` takes a model that exists. Its modules stay: its own router routes, names in state
dicts and for PEFT are the stock ones, and each experts module gets an `ExpertStore` and placeholders for its matrices
(`ktransformers.experts.interface`). Weights come from `kt_weight_path` or `kt_expert_checkpoint_path` (any source that
`ktransformers.nn.load_model` takes as `experts`), from `kt_checkpoint_files`, or from the model's own parameters.
Layers that are packed already, by `load_model` or by a prepared directory, are recorded as they are.

`load_kt_model` is `ktransformers.nn.load_model` with `KTConfig`: experts go from the files into stores and never exist
as tensors, everything else is loaded by stock transformers. Device maps and loading arguments are for programs that
call `from_pretrained` themselves and wrap the model afterwards; those hold all experts as tensors until they are
packed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kt_kernel.methods import METHODS, SKIP_LORA
from kt_kernel.sft.arch import MOEArchConfig
from kt_kernel.sft.config import LORA_INSTEAD, KTConfig
from kt_kernel.sft.full_experts import full_experts_store, has_full_experts
from kt_kernel.sft.layer import KTMoELayerWrapper, record_layers, wrapped_model
from kt_kernel.sft.runtime import KTAMXConfigError, KTAMXModelNotSupportedError
from kt_kernel.weights import LayerPlace, open_experts, store_from_tensors
from ktransformers import _core
from ktransformers.checkpoint.experts import ExpertChunk
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.checkpoint.recode import split
from ktransformers.checkpoint.sources import open_source
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import Contract, expert_modules, read_contract
from ktransformers.experts.interface import (
    attach_store,
    experts_of,
    pack_layer,
    pack_module,
    remove_parameters,
    select_implementation,
)
from ktransformers.experts.packed import PackedExperts
from ktransformers.experts.store import ExpertStore
from ktransformers.ground.log import logger
from ktransformers.ground.pool import default_pool, pool_for
from ktransformers.modeling.prepare import read_checkpoint_facts
from ktransformers.parallel.distributed import exclude_from_ddp
from ktransformers.place.placement import attach

log = logger(__name__)

# kt_expert_weight_format -> the method that takes it.
FORMAT_METHODS = {"bf16": "BF16", "int8": "AMXINT8", "fp8": "FP8", "rawint4": "RAWINT4", "mxfp4": "MXFP4"}


def wrap_moe_layers_with_kt_wrapper(model: Any, kt_plugin: Any) -> list[KTMoELayerWrapper]:
    """Pack every expert layer of the model. `kt_plugin` is what `KTConfig.from_object` takes."""
    config = KTConfig.from_object(kt_plugin)
    if config.kt_wrap_fn is not None:
        wrapped: list[KTMoELayerWrapper] = config.kt_wrap_fn(model, config, **(config.kt_wrap_kwargs or {}))
        return wrapped
    modules = expert_modules(model)
    if not modules:
        given = "no expert layers behind transformers' experts interface"
        raise KTAMXModelNotSupportedError(type(model).__name__, given, "at least one", "train it the stock way")
    pool, unpacked = expert_pool(config), [name for name in modules if packed_experts(modules[name]) is None]
    stores = _layer_source(config, pool) if unpacked else None
    for name in unpacked:
        _pack(name, modules[name], pool, stores, requested_method(config))
    _check_formats(config, modules)
    select_implementation(model)
    exclude_from_ddp(model)
    wrappers = record_layers(model, config)
    if config.kt_num_gpu_experts and next(model.parameters()).is_cuda:
        place_gpu_experts(model, config.kt_num_gpu_experts)
    elif config.kt_num_gpu_experts:
        log.warning("kt_num_gpu_experts: all experts are computed on the CPU until move_non_experts_to_gpu(model)")
    return wrappers


def place_gpu_experts(model: Any, count: int, device: torch.device | str | None = None) -> None:
    """Keep experts 0 to `count` - 1 of every layer on the GPU of its router, forward and backward; the CPU computes the
    others at the same time (`ktransformers.place`)."""
    placement = attach(model, policy="resident", device=device, streams=False)
    if placement is None or placement.left:
        given = "no CUDA device" if placement is None else "; ".join(placement.left.values())
        remedy = "move everything else to a GPU first: move_non_experts_to_gpu(model)"
        raise KTAMXConfigError("kt_num_gpu_experts", f"{count}, with {given}", "a model on a GPU", remedy)
    placement.place_residents(count=count)
    model._kt_placement = placement


def expert_pool(config: KTConfig) -> _core.Pool:
    """The threads that were asked for; kt-kernel's default of one thread is not applied."""
    threads = config.kt_num_threads if "kt_num_threads" in config.given else 0
    groups = config.kt_threadpool_count if config.kt_tp_enabled and "kt_threadpool_count" in config.given else 0
    return pool_for(threads, groups, log.info, names=("kt_num_threads", "kt_threadpool_count")) or default_pool()


def _layer_source(config: KTConfig, pool: _core.Pool) -> Callable[[str, Contract], ExpertStore] | None:
    """What makes the store of a layer, from the files that the configuration names; None: it names none."""
    path = config.kt_weight_path or config.kt_expert_checkpoint_path
    if config.kt_weight_path and config.kt_expert_checkpoint_path:
        given = f"{config.kt_expert_checkpoint_path} and kt_weight_path"
        raise KTAMXConfigError("kt_expert_checkpoint_path", given, "one source of the experts")
    if path is not None and not Path(path).exists():
        raise KTAMXConfigError("kt_weight_path", f"{path}, which does not exist", "a directory or a GGUF file")
    if path is not None and has_full_experts(Path(path)):
        return lambda name, contract: full_experts_store(Path(path), name, contract, pool)
    if path is not None:
        source = open_experts(Path(path))
    elif config.kt_checkpoint_files:
        directory = Path(config.kt_checkpoint_files[0]).parent
        source = open_source(directory, read_checkpoint_facts(directory).rest, files=list(config.kt_checkpoint_files))
    else:
        return None

    def store(name: str, contract: Contract) -> ExpertStore:
        if isinstance(source, PackedExperts):
            return source.store(name, contract, pool=pool)
        try:
            return pack_layer(contract, source.layer(name, contract.shape, contract.interleaved), pool=pool)
        finally:
            source.release()

    return store


def _pack(name: str, module: nn.Module, pool: _core.Pool, stores: Any, method: str | None) -> None:
    """From files, or from the model's own parameters, encoded if a format was asked for that is not bf16."""
    if stores is None and any(parameter.is_meta for parameter in module.parameters()):
        remedy = "name their files in kt_weight_path, or load the model with ktransformers.nn.load_model"
        raise KTAMXConfigError(name, "experts on the meta device, which were not loaded", "weights", remedy)
    if stores is None and method in (None, "BF16"):
        pack_module(module, name=name, free=True, pool=pool)
        return
    contract = read_contract(name, module)
    store = _encode_parameters(name, module, contract, str(method)) if stores is None else stores(name, contract)
    attach_store(module, contract, store, remove_parameters(module, contract))


def _encode_parameters(name: str, module: nn.Module, contract: Contract, method: str) -> ExpertStore:
    shape, gate = contract.shape, contract.gate
    if not shape.gated or shape.biased or gate.activation not in ("silu", "swiglu_oai"):
        remedy = "`kt quant` writes the experts of every family for kt_weight_path"
        raise KTAMXConfigError(name, f"method {method} for these experts", "gated ones without biases", remedy)
    fused: Any = {role: module.get_parameter(f"{role}_proj").detach().cpu() for role in ("gate_up", "down")}
    by_role: Any = split(ExpertChunk(0, True, fused), transposed=shape.transposed, interleaved=contract.interleaved)
    sizes = (shape.num_experts, shape.hidden, shape.intermediate)
    place = LayerPlace(split_layer_name(name)[1], *sizes, gate.limit, gate.alpha)
    return store_from_tensors(by_role["gate"], by_role["up"], by_role["down"], place, method)


def requested_method(config: KTConfig) -> str | None:
    """The method whose formats were asked for by name; None: whatever the source has."""
    backend = str(config.kt_backend).removesuffix(SKIP_LORA)
    if "kt_backend" in config.given and backend == "AMXINT4":
        return "AMXINT4"
    if "kt_expert_weight_format" in config.given or ("kt_backend" in config.given and backend != "auto"):
        return FORMAT_METHODS[str(config.kt_expert_weight_format)]
    return None


def _check_formats(config: KTConfig, modules: dict[str, nn.Module]) -> None:
    """Raise if a format was asked for by name and the experts have another; files are never converted here."""
    method = requested_method(config)
    for name, module in modules.items() if method is not None else ():
        formats = experts_of(module).store.formats  # type: ignore[union-attr]  # it has them all
        if not METHODS[str(method)].takes(formats):
            given = f"{config.kt_expert_weight_format} ({config.kt_backend}), where {name} has {formats}"
            remedy = "`kt quant` writes the experts in another format for kt_weight_path"
            raise KTAMXConfigError("kt_expert_weight_format", given, "the format of the experts, or auto", remedy)


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
    from ktransformers.modeling.load import open_model
    from ktransformers.modeling.spec import ModelSpec, locate_model

    if kwargs:
        expected = "the arguments of load_kt_model"
        raise KTAMXConfigError("load_kt_model", f"the argument {sorted(kwargs)[0]}", expected, "leave it out")
    finetuning = getattr(finetuning_args, "finetuning_type", "lora")
    if finetuning != "lora":
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
    spec = ModelSpec(
        locate_model(name, "model_name_or_path", token=token),
        experts=kt_config.kt_weight_path or kt_config.kt_expert_checkpoint_path,
        dtype=torch_dtype,
        device=_default_device(),
        pool=expert_pool(kt_config),
    )
    model = open_model(spec)
    wrap_moe_layers_with_kt_wrapper(model, kt_config)
    return model


def _default_device() -> str:
    return f"cuda:{int(os.environ.get('LOCAL_RANK') or 0)}" if torch.cuda.is_available() else "cpu"


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
    return dict(_places(model, "", set(expert_modules(model)), device))


build_kt_device_map_simplified = build_kt_device_map


def _places(module: nn.Module, name: str, experts: set[str], device: str) -> Iterator[tuple[str, str]]:
    """(name, device) of the largest modules that lie on one device."""
    if name in experts or (name and not any(expert.startswith(f"{name}.") for expert in experts)):
        yield name, "cpu" if name in experts else device
        return
    prefix = f"{name}." if name else ""
    yield from ((prefix + parameter, device) for parameter, _ in module.named_parameters(recurse=False))
    for child, inner in module.named_children():
        yield from _places(inner, prefix + child, experts, device)


def move_non_experts_to_gpu(model: nn.Module, moe_config: MOEArchConfig | None = None, device: str = "cuda:0") -> None:
    """Move everything but the experts; packed experts and their LoRA stay in host memory whatever moves the model."""
    for name, module in expert_modules(model).items():
        if packed_experts(module) is None:
            remedy = "call wrap_moe_layers_with_kt_wrapper first"
            raise KTAMXConfigError(name, "experts that are not packed", "packed ones, which stay on the host", remedy)
    model.to(device)
    inner = wrapped_model(model)
    if inner._kt_config.kt_num_gpu_experts and torch.device(device).type == "cuda":
        place_gpu_experts(inner, inner._kt_config.kt_num_gpu_experts)


def get_expert_device(model: nn.Module, moe_config: MOEArchConfig | None = None) -> str:
    """The device of the first expert layer's parameters; "cpu" for packed experts."""
    for module in expert_modules(model).values():
        return str(next(module.parameters()).device)
    raise KTAMXConfigError(type(model).__name__, "no expert layers", "a model with experts")
