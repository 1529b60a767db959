"""The model of a run: where it is, opened with packed experts, its adapter by stock PEFT.

Checkpointing keeps the output of the experts' operator where `kt_cpu_activation: retain` asks for it: attention is
computed again in backward, the experts are not. The adapter's dropout: PEFT refuses one on parameters, so the
configuration says 0 where experts are adapted, and the layers get theirs afterwards.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktransformers import model_registry
from ktransformers.errors import InputError
from ktransformers.nn.checkpointing import save_expert_outputs
from ktransformers.nn.peft_lora import expert_adapters, set_lora_dropout
from ktransformers.place.options import read_options
from ktransformers.train.resolve import isa_of
from ktransformers.train.settings import LoraSettings, ModelSettings, TrainSettings
from ktransformers.train.targets import Targets

if TYPE_CHECKING:
    from collections.abc import Callable

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from ktransformers import _core

ATTENTION = {"disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}


def locate_model(settings: ModelSettings, *, download: bool) -> Path | None:
    """The model's directory; None where it is on the hub and not to be fetched now."""
    given = settings.model_name_or_path
    path = Path(model_registry.resolve(given))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InputError("model_name_or_path", f"{given}, a folder without config.json", "a model's folder")
        return path
    if given.startswith(("/", ".", "~")) or given.count("/") != 1:
        raise InputError("model_name_or_path", f"{given}, which does not exist", "a model's folder, or a hub id")
    from huggingface_hub import snapshot_download

    options: Any = {"revision": settings.model_revision, "cache_dir": settings.cache_dir}
    try:
        return Path(snapshot_download(given, local_files_only=not download, **options))
    except Exception as error:  # the hub's own errors come from many places
        if not download:
            return None
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            "model_name_or_path", f"{given} ({reason})", "a folder, or a hub id that can be fetched"
        ) from error


def read_config(directory: Path) -> dict[str, Any]:
    try:
        words: dict[str, Any] = json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise InputError(str(directory / "config.json"), str(error), "a JSON object") from error
    return words


def skeleton(directory: Path) -> nn.Module:
    """The model without numbers, to find what is trained."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    from ktransformers.nn import load

    config = load.load_config(directory)  # what load_model will see; it refuses what it cannot open
    auto: Any = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    with torch.device("meta"):
        model: nn.Module = auto.from_config(config)
    return model


def check_formats(model: nn.Module, wanted: str) -> None:
    """Experts are never converted on the way: what was asked for must be what is stored."""
    if wanted == "auto":
        return
    family = {"rawint4": "int4"}.get(wanted, wanted)
    for name, module in model.named_modules():
        store = getattr(module, "kt_store", None)
        for matrix, stored in store.formats.items() if store is not None else ():
            if stored.partition(":")[0] != family:
                given = f"{wanted}, where {name} has {matrix} in {stored}"
                raise InputError("kt_expert_weight_format", given, "auto", "or convert the experts with kt quant")


def expert_pool(settings: TrainSettings, spare: bool) -> tuple[_core.Pool | None, list[str]]:
    """Threads as asked for, never more than this process may use; `spare`: a GPU's work is launched beside them."""
    from ktransformers import _core
    from ktransformers.nn.pool import set_default_pool

    experts = settings.experts
    if experts.kt_num_threads is None and experts.kt_threadpool_count is None and not spare:
        return None, []
    machine = _core.machine()
    notes, threads, groups = [], experts.kt_num_threads or 0, experts.kt_threadpool_count or 0
    if threads > machine["cpus"]:
        notes.append(f"kt_num_threads: {threads} asked for, {machine['cpus']} CPUs are here: the pool chooses")
        threads = 0
    if groups > machine["nodes"]:
        notes.append(f"kt_threadpool_count: {groups} asked for, {machine['nodes']} NUMA nodes are here: one each")
        groups = 0
    return set_default_pool(threads, groups, spare), notes


def open_model(
    directory: Path,
    settings: TrainSettings,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[PreTrainedModel, list[str]]:
    from ktransformers.nn import load_model

    places = device.type != "cpu" and read_options(settings.place.model_dump()).policy != "cpu"
    pool, notes = expert_pool(settings, spare=places)
    model = load_model(
        directory,
        experts=settings.experts.kt_weight_path,
        dtype=dtype,
        device=None if device.type == "cpu" else device,
        pool=pool,
        isa=isa_of(settings.experts.kt_backend),
        precision=settings.experts.precision,
        progress=progress,
    )
    check_formats(model, settings.experts.kt_expert_weight_format)
    if settings.model.flash_attn != "auto":
        try:
            model.set_attn_implementation(ATTENTION[settings.model.flash_attn])
        except (ImportError, ValueError) as error:
            raise InputError("flash_attn", settings.model.flash_attn, "one that is installed", str(error)) from error
    model.config.use_cache = False
    return model, notes


def lora_config(model: nn.Module, targets: Targets, settings: LoraSettings) -> LoraConfig:
    from peft import LoraConfig

    if settings.adapter_name_or_path:
        if not (Path(settings.adapter_name_or_path) / "adapter_config.json").is_file():
            raise InputError("adapter_name_or_path", settings.adapter_name_or_path, "a folder with adapter_config.json")
        config: LoraConfig = LoraConfig.from_pretrained(settings.adapter_name_or_path)
        config.inference_mode = False
        return config
    parameters = targets.parameter_names(model)  # PEFT knows no dropout on these
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha or 2 * settings.lora_rank,  # type: ignore[arg-type]
        lora_dropout=0.0 if parameters else settings.lora_dropout,
        target_modules=targets.module_names(model),
        target_parameters=parameters or None,
        use_rslora=settings.use_rslora,
    )


def finish_adapter(model: Any, settings: TrainSettings) -> None:
    """What PEFT's configuration cannot say, once the adapter is there."""
    lora = settings.lora
    if lora.adapter_name_or_path:
        from peft import load_peft_weights, set_peft_model_state_dict

        result: Any = set_peft_model_state_dict(model, load_peft_weights(lora.adapter_name_or_path, device="cpu"))
        missing = [name for name in result.missing_keys if "lora_" in name]
        if result.unexpected_keys or missing:
            first = (result.unexpected_keys or missing)[0]
            raise InputError(lora.adapter_name_or_path, f"{first}, which does not fit", "an adapter of this very model")
    if lora.lora_dropout and not model.peft_config["default"].lora_dropout:
        set_lora_dropout(model, lora.lora_dropout)
        ours = set(expert_adapters(model).values())
        for layer in model.modules():
            if layer not in ours and isinstance(getattr(layer, "lora_dropout", None), nn.ModuleDict):
                for name in layer.lora_dropout:
                    layer.lora_dropout[name] = nn.Dropout(lora.lora_dropout)
    if settings.model.pure_bf16:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)


def checkpoint_activations(model: Any, settings: TrainSettings) -> None:
    given = settings.trainer.get("gradient_checkpointing", True)
    if settings.model.disable_gradient_checkpointing or not given:
        return
    options: dict[str, Any] = dict(settings.trainer.get("gradient_checkpointing_kwargs") or {})
    options.setdefault("use_reentrant", settings.model.use_reentrant_gc)
    if settings.experts.kt_cpu_activation == "retain":
        if options["use_reentrant"]:
            raise InputError("use_reentrant_gc", True, "false with kt_cpu_activation: retain")
        options["context_fn"] = save_expert_outputs
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.enable_input_require_grads()
