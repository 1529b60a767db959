"""`wrap_moe_layers_with_kt_wrapper`: packs the experts of a stock transformers model and records its expert layers.

The modules of the model stay: its own router routes, names in state dicts and for PEFT are the stock ones, and each
experts module gets an `ExpertStore` and placeholders for its matrices (`ktransformers.nn.experts`). `KTMoELayerWrapper`
is a record of one such layer, not a module. Weights come from `kt_weight_path` or `kt_expert_checkpoint_path` (any
source that `ktransformers.nn.load_model` takes as `experts`), from `kt_checkpoint_files`, or from the model's own
parameters. Layers that are packed already, by `load_model` or by a prepared directory, are recorded as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from kt_kernel.methods import METHODS
from kt_kernel.sft.checkpointing import set_activation_policy
from kt_kernel.sft.config import SKIP_LORA, KTConfig
from kt_kernel.sft.errors import KTAMXConfigError, KTAMXModelNotSupportedError
from kt_kernel.weights import LayerPlace, store_from_tensors
from ktransformers import _core
from ktransformers.adapters.names import split_layer_name
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.sources import open_source
from ktransformers.nn.contract import Contract, expert_modules, read_contract
from ktransformers.nn.distributed import exclude_from_ddp
from ktransformers.nn.experts import attach_store, pack_layer, pack_module, remove_parameters, select_implementation
from ktransformers.nn.load import open_expert_source, read_checkpoint_facts
from ktransformers.nn.pack_inputs import as_matrices, split_fused
from ktransformers.nn.packed import PackedExperts
from ktransformers.nn.pool import default_pool, set_default_pool
from ktransformers.nn.store import ExpertStore

# kt_expert_weight_format -> the method that takes it.
FORMAT_METHODS = {"bf16": "BF16", "int8": "AMXINT8", "fp8": "FP8", "rawint4": "RAWINT4", "mxfp4": "MXFP4"}


@dataclass(eq=False)
class KTMoELayerWrapper:
    """One expert layer of a wrapped model."""

    name: str  # of the experts module
    layer_idx: int
    experts: nn.Module
    hidden_size: int
    # Six tensors by name if this library owns the layer's LoRA; empty if PEFT does, or if there is none.
    fused_expert_lora_params: dict[str, nn.Parameter] = field(default_factory=dict)
    _is_kt_moe_wrapper = True

    @property
    def wrapper(self) -> ExpertStore:
        """The packed experts."""
        store = self.experts.kt_store
        assert isinstance(store, ExpertStore)
        return store

    @property
    def contract(self) -> Contract:
        contract = self.experts.kt_contract
        assert isinstance(contract, Contract)
        return contract


def wrap_moe_layers_with_kt_wrapper(model: Any, kt_plugin: Any) -> list[KTMoELayerWrapper]:
    """Pack every expert layer of the model. `kt_plugin` is what `KTConfig.from_object` takes."""
    config = KTConfig.from_object(kt_plugin)
    if config.kt_wrap_fn is not None:
        wrapped: list[KTMoELayerWrapper] = config.kt_wrap_fn(model, config, **(config.kt_wrap_kwargs or {}))
        return wrapped
    if config.kt_num_gpu_experts:
        remedy = "KT_PLACE=auto and ktransformers.place.attach put experts on the GPU; `kt train` does it by itself"
        raise KTAMXConfigError("kt_num_gpu_experts", config.kt_num_gpu_experts, "0", remedy)
    modules = expert_modules(model)
    if not modules:
        given = "no expert layers behind transformers' experts interface"
        raise KTAMXModelNotSupportedError(type(model).__name__, given, "at least one", "train it the stock way")
    unpacked = {name: module for name, module in modules.items() if not hasattr(module, "kt_store")}
    pool = expert_pool(config)
    if unpacked:
        pack = _packer(config, pool)
        for name, module in unpacked.items():
            pack(name, module)
    _check_formats(config, modules)
    select_implementation(model)
    exclude_from_ddp(model)
    wrappers = [_record(name, module) for name, module in modules.items()]
    model._kt_wrappers, model._kt_config = wrappers, config
    model._kt_tp_enabled, model._kt_use_lora_experts = config.kt_tp_enabled, False
    model._kt_train_mode, model._kt_full_weight_grad = "lora", False
    model._kt_expert_weight_format = config.kt_expert_weight_format
    assert config.kt_activation_policy is not None
    set_activation_policy(model, config.kt_activation_policy)
    return wrappers


def _record(name: str, module: Any) -> KTMoELayerWrapper:
    return KTMoELayerWrapper(name, split_layer_name(name)[1], module, module.kt_store.hidden_size)


def wrapped_model(model: nn.Module) -> Any:
    """The module inside `model` (PEFT, DDP and others may be around it) that was wrapped."""
    for module in model.modules():
        if "_kt_wrappers" in module.__dict__:
            return module
    remedy = "call wrap_moe_layers_with_kt_wrapper(model, kt_config) first"
    raise KTAMXModelNotSupportedError(type(model).__name__, "a model that was not wrapped", "a wrapped one", remedy)


def is_wrapped(model: nn.Module) -> bool:
    return any("_kt_wrappers" in module.__dict__ for module in model.modules())


def expert_pool(config: KTConfig) -> _core.Pool:
    """The threads that were asked for; kt-kernel's default of one thread is not applied."""
    threads = config.kt_num_threads if "kt_num_threads" in config.given else 0
    groups = config.kt_threadpool_count if config.kt_tp_enabled and "kt_threadpool_count" in config.given else 0
    machine = _core.machine()
    # A recipe of a larger machine: more threads than CPUs or more parts than NUMA nodes would only compete.
    threads = 0 if not threads or threads > machine["cpus"] else threads
    groups = 0 if not groups or groups > machine["nodes"] else groups
    return set_default_pool(threads, groups) if threads or groups else default_pool()


def _packer(config: KTConfig, pool: _core.Pool) -> Callable[[str, nn.Module], None]:
    """The function that packs one layer, from the source that the configuration names."""
    path = config.kt_weight_path or config.kt_expert_checkpoint_path
    if config.kt_weight_path and config.kt_expert_checkpoint_path:
        given = f"{config.kt_expert_checkpoint_path} beside kt_weight_path"
        raise KTAMXConfigError("kt_expert_checkpoint_path", given, "one source of the experts")
    if path is not None and not Path(path).exists():
        raise KTAMXConfigError("kt_weight_path", f"{path}, which does not exist", "a directory or a GGUF file")
    if path is not None and is_packed(Path(path)):
        packed = PackedExperts(Path(path))
        return lambda name, module: _attach(name, module, lambda contract: packed.store(name, contract, pool=pool))
    if path is not None:
        facts = read_checkpoint_facts(Path(path))
        source = open_expert_source(facts, None) or open_source(path, facts.rest)
    elif config.kt_checkpoint_files:
        directory = Path(config.kt_checkpoint_files[0]).parent
        facts = read_checkpoint_facts(directory)
        source = open_source(directory, facts.rest, files=list(config.kt_checkpoint_files))
    else:
        return lambda name, module: _pack_parameters(name, module, pool, requested_method(config))

    def pack(name: str, module: nn.Module) -> None:
        def store(contract: Contract) -> ExpertStore:
            return pack_layer(contract, source.layer(name, contract.shape, contract.interleaved), pool=pool)

        _attach(name, module, store)
        source.release()

    return pack


def _attach(name: str, module: nn.Module, make_store: Callable[[Contract], ExpertStore]) -> None:
    contract = read_contract(name, module)
    store = make_store(contract)
    attach_store(module, contract, store, remove_parameters(module, contract))


def _pack_parameters(name: str, module: nn.Module, pool: _core.Pool, method: str | None) -> None:
    """From the model's own parameters, encoded if a format was asked for that is not bf16."""
    if any(parameter.is_meta for parameter in module.parameters()):
        remedy = "name their files in kt_weight_path, or load the model with ktransformers.nn.load_model"
        raise KTAMXConfigError(name, "experts on the meta device, which were not loaded", "weights", remedy)
    if method in (None, "BF16"):
        pack_module(module, name=name, free=True, pool=pool)
    else:
        _attach(name, module, lambda contract: _encode_parameters(name, module, contract, str(method)))


def _encode_parameters(name: str, module: nn.Module, contract: Contract, method: str) -> ExpertStore:
    shape, gate = contract.shape, contract.gate
    if not shape.gated or shape.biased or gate.activation not in ("silu", "swiglu_oai"):
        remedy = "`kt quant` writes the experts of every family for kt_weight_path"
        raise KTAMXConfigError(name, f"method {method} for these experts", "gated ones without biases", remedy)
    fused: Any = module.get_parameter("gate_up_proj")
    rows = as_matrices("gate_up_proj", fused.detach().cpu(), 2 * shape.intermediate, shape.hidden, shape.transposed)
    gate_proj, up_proj = split_fused(rows, contract.interleaved)
    down: Any = module.get_parameter("down_proj")
    down_proj = as_matrices("down_proj", down.detach().cpu(), shape.hidden, shape.intermediate, shape.transposed)
    sizes = (shape.num_experts, shape.hidden, shape.intermediate)
    place = LayerPlace(split_layer_name(name)[1], *sizes, gate.limit, gate.alpha)
    return store_from_tensors(gate_proj, up_proj, down_proj, place, method)


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
        store: Any = module.kt_store
        if not METHODS[str(method)].takes(store.formats):
            given = f"{config.kt_expert_weight_format} ({config.kt_backend}), where {name} has {store.formats}"
            remedy = "`kt quant` writes the experts in another format for kt_weight_path"
            raise KTAMXConfigError("kt_expert_weight_format", given, "the format of the experts, or auto", remedy)
