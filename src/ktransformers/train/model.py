"""Locates and loads the model of a run with packed experts, and adds the adapter with stock PEFT.

With `kt_cpu_activation: retain` gradient checkpointing keeps the output of the expert operator: backward recomputes
attention but not the experts. PEFT refuses dropout on parameters, so the configuration says 0 if experts are adapted,
and the dropout of the layers is set afterwards.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktransformers.checkpoint.finite import all_finite
from ktransformers.checkpoint.gguf_directory import given_file
from ktransformers.experts.backend import packed_experts
from ktransformers.experts.checkpointing import save_expert_outputs
from ktransformers.experts.peft_lora import expert_adapters, set_lora_dropout
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import AS_RELEASED
from ktransformers.ground.log import logger
from ktransformers.ground.pool import pool_for
from ktransformers.modeling.load import model_from_config
from ktransformers.modeling.spec import ModelSpec, Progress, check_rest, find_model, locate_model
from ktransformers.place.backends import format_of_backend, isa_of_backend
from ktransformers.train.adapter_form import stored_as_peft
from ktransformers.train.arguments import device_of, rest_of
from ktransformers.train.expert_parallel import connect_ranks, own_shard
from ktransformers.train.settings import LoraSettings, ModelSettings, TrainSettings
from ktransformers.train.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from ktransformers.experts.partition import ExpertPartition
    from ktransformers.operators.plan import OperatorPlan

log = logger(__name__)

ATTENTION_IMPLEMENTATIONS = {
    "disabled": "eager",
    "sdpa": "sdpa",
    "fa2": "flash_attention_2",
    "fa3": "flash_attention_3",
}


def base_directory(settings: ModelSettings, *, download: bool) -> Path | None:
    """The base model's directory; None if it is on the hub and must not be downloaded now."""
    locate = locate_model if download else find_model
    hub: dict[str, Any] = {"revision": settings.model_revision, "cache_dir": settings.cache_dir}
    return locate(settings.model_name_or_path, "model_name_or_path", **hub)


def build_fake_model(directory: Path) -> PreTrainedModel:
    """The model of tensors that have shapes and gradients and no numbers: it can be called without its weights, inside
    of their `fake_mode`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ktransformers.experts.scaled_input_experts import adapt_experts

    with FakeTensorMode():
        model = model_from_config(directory)
    adapt_experts(model)
    return model


def check_formats(model: nn.Module, requested: str) -> None:
    """Raises unless the experts are stored in the requested format; loading never converts them."""
    if requested == "auto":
        return
    family = {"rawint4": "int4"}.get(requested, requested)
    for name, module in model.named_modules():
        kt = packed_experts(module)
        for matrix, stored in kt.store.formats.items() if kt is not None and kt.store is not None else ():
            if stored.partition(":")[0] != family:
                problem = f"{requested}, where {name} has {matrix} in {stored}"
                raise InputError("kt_expert_weight_format", problem, "auto", "or convert the experts with kt quant")


def open_trained(
    directory: Path,
    settings: TrainSettings,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    partition: ExpertPartition | None = None,
    operators: OperatorPlan | None = None,
    later_gpus: Sequence[str] = (),
    note: Callable[[str], None] = log.info,
) -> PreTrainedModel:
    """With a `partition`, this process's experts alone are loaded; the call is then collective. `later_gpus`: those
    that layers are moved to afterwards."""
    from ktransformers.modeling.load import open_model

    experts, spec = settings.experts, spec_of(directory, settings, operators, note, on_gpu=device.type != "cpu")
    shard = own_shard(partition)
    spec = replace(spec, dtype=dtype, device=device, rest=rest_of(settings), shard=shard, later_gpus=later_gpus)
    model = open_model(replace(spec, progress=progress))
    connect_ranks(model, partition)
    model.name_or_path = str(given_file(directory))  # PEFT writes it into adapter_config.json
    check_formats(model, experts.kt_expert_weight_format)
    if settings.model.flash_attn != "auto":
        try:
            model.set_attn_implementation(ATTENTION_IMPLEMENTATIONS[settings.model.flash_attn])
        except (ImportError, ValueError) as error:
            raise InputError("flash_attn", settings.model.flash_attn, "one that is installed", str(error)) from error
    model.config.use_cache = False
    return model


def spec_of(
    directory: Path,
    settings: TrainSettings,
    operators: OperatorPlan | None,
    note: Callable[[str], None],
    *,
    on_gpu: bool,
) -> ModelSpec:
    """The model with the experts that the settings ask for. A thread of the pool is spared to launch work of experts on
    a GPU."""
    from ktransformers.operators.load import with_rules

    experts = settings.experts
    spare = on_gpu and settings.place.policy != "cpu"
    names = ("kt_num_threads", "kt_threadpool_count")
    spec = ModelSpec(
        directory,
        experts=experts.kt_weight_path,
        precision=experts.precision,
        isa=isa_of_backend(experts.kt_backend),
        pool=pool_for(experts.kt_num_threads, experts.kt_threadpool_count, note, names=names, spare=spare),
    )
    return with_rules(spec, operators, format_of_backend(experts.kt_backend))


def check_dense_format(settings: TrainSettings, dtype: torch.dtype) -> None:
    """Raises for a format that dense weights cannot be stored in or trained on, before anything is loaded."""
    rest = settings.experts.rest
    check_rest(rest, dtype, device_of(settings).type)
    if rest not in AS_RELEASED and rest_of(settings) != rest:
        raise InputError("rest", f"{rest} on GPUs of several processes", "keep or bf16, or one process")


def build_lora_config(model: nn.Module, targets: Targets, settings: LoraSettings) -> LoraConfig:
    from peft import LoraConfig

    if settings.adapter_name_or_path:
        folder = stored_as_peft(settings.adapter_name_or_path)
        if not (Path(folder) / "adapter_config.json").is_file():
            expected = "a folder with adapter_config.json, or a GGUF file of an adapter"
            raise InputError("adapter_name_or_path", settings.adapter_name_or_path, expected)
        config: LoraConfig = LoraConfig.from_pretrained(folder)
        config.inference_mode = False
        return config
    parameters = targets.parameter_names(model)  # PEFT supports no dropout on parameters
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,  # type: ignore[arg-type]
        lora_dropout=0.0 if parameters else settings.lora_dropout,
        target_modules=targets.module_names(model),
        target_parameters=parameters or None,
        use_rslora=settings.use_rslora,
    )


def check_readable(model: Any) -> None:
    """Raises if stock PEFT would not read this adapter back: it renames tensors as transformers renames those of the
    model's released files, and a rule for these may also match names that need no renaming."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    with warnings.catch_warnings():
        # Where ranks divide the experts, a rank may have none of a layer; what is saved has all.
        warnings.filterwarnings("ignore", message=r".*LoRA tensor\(s\) have invalid shape")
        tensors = get_peft_model_state_dict(model)
    result: Any = set_peft_model_state_dict(model, tensors)
    if result.unexpected_keys:
        kind, name = model.config.model_type, result.unexpected_keys[0]
        given = f"{kind}, whose adapter stock PEFT does not read back (it looks for {name})"
        raise InputError("model_name_or_path", given, "a family whose adapters PEFT can load", "it cannot be trained")


def set_adapter_dropout(model: Any, rate: float) -> None:
    """Dropout before every adapter of a PEFT model, whose configuration says 0 because experts are adapted."""
    set_lora_dropout(model, rate)
    expert_layers = set(expert_adapters(model).values())
    for layer in model.modules():
        if layer not in expert_layers and isinstance(getattr(layer, "lora_dropout", None), nn.ModuleDict):
            for name in layer.lora_dropout:
                layer.lora_dropout[name] = nn.Dropout(rate)


def finish_adapter(model: Any, settings: TrainSettings) -> None:
    """Applies what PEFT's configuration cannot express, after the adapter was created."""
    lora = settings.lora
    check_readable(model)
    if lora.adapter_name_or_path:
        from peft import load_peft_weights, set_peft_model_state_dict

        weights = load_peft_weights(stored_as_peft(lora.adapter_name_or_path), device="cpu")
        for name, tensor in weights.items():
            if not all_finite(tensor):
                raise InputError(f"{lora.adapter_name_or_path}: {name}", "NaN or infinite numbers", "finite ones")
        result: Any = set_peft_model_state_dict(model, weights)
        missing = [name for name in result.missing_keys if "lora_" in name]
        if result.unexpected_keys or missing:
            first = (result.unexpected_keys or missing)[0]
            raise InputError(lora.adapter_name_or_path, f"{first}, which does not fit", "an adapter of this very model")
    if lora.lora_dropout and not model.peft_config["default"].lora_dropout:
        set_adapter_dropout(model, lora.lora_dropout)
    if settings.model.pure_bf16:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)


def checkpoint_activations(model: Any, settings: TrainSettings) -> None:
    requested = settings.trainer.get("gradient_checkpointing", True)
    if settings.model.disable_gradient_checkpointing or not requested:
        return
    options: dict[str, Any] = dict(settings.trainer.get("gradient_checkpointing_kwargs") or {})
    options.setdefault("use_reentrant", settings.model.use_reentrant_gc)
    if settings.experts.kt_cpu_activation == "retain":
        if options["use_reentrant"]:
            raise InputError("use_reentrant_gc", True, "false with kt_cpu_activation: retain")
        options["context_fn"] = save_expert_outputs
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.enable_input_require_grads()
