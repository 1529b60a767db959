"""Builds TRL's configurations from the settings, and what follows from them: dtype, device, batch shape.

TRL changes some defaults of the HF Trainer; a YAML file that does not mention them means the HF Trainer's defaults, as
in LLaMA-Factory. Gradient checkpointing is enabled on the model (`model.py`), not here, because retaining the experts'
results needs a function, which a configuration file cannot hold.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import torch

from ktransformers.ground import system
from ktransformers.ground.errors import InputError
from ktransformers.ground.system import bf16_is_fast
from ktransformers.place.backends import isa_of_backend
from ktransformers.train.resolve import trainer_fields
from ktransformers.train.settings import TrainSettings

if TYPE_CHECKING:
    from trl import DPOConfig, SFTConfig  # type: ignore[attr-defined]

EXACT_ISAS = ("generic", "avx2", "neon")  # variants with f32 expert kernels


def uses_packing(settings: TrainSettings) -> bool:
    return settings.data.packing or settings.data.neat_packing


def step_shape(settings: TrainSettings) -> tuple[int, int]:
    """(rows per batch, batches per optimizer step) of each process."""
    trainer = settings.trainer
    rows = int(trainer.get("per_device_train_batch_size", trainer_fields()["per_device_train_batch_size"]))
    batches = int(trainer.get("gradient_accumulation_steps", 1))
    return rows, batches


def device_of(settings: TrainSettings) -> torch.device:
    use_cpu = settings.trainer.get("use_cpu")
    if use_cpu is False:
        system.require_supported("cuda", "use_cpu: false", "use_cpu: true, or CUDA_VISIBLE_DEVICES with another GPU")
    return torch.device("cpu" if use_cpu or not system.has_gpu() else "cuda")


def rest_of(settings: TrainSettings) -> str:
    """How dense linear layers are stored: dequantized on GPUs of several processes, which divide
    them."""
    many = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return "bf16" if many and device_of(settings).type != "cpu" else settings.experts.rest


def dtype_of(settings: TrainSettings, config: dict[str, Any], bf16_fast: bool | None = None) -> torch.dtype:
    """Dtype of all weights but the experts: as pure_bf16, bf16 and fp16 request, else the checkpoint's; where bf16 is
    slow, float32 instead of bf16, unless pure_bf16 is set. `config` is the parsed config.json; `bf16_fast` None: as on
    this machine."""
    if settings.model.pure_bf16:
        return torch.bfloat16
    if settings.trainer.get("fp16"):
        return torch.float16
    fast = bf16_is_fast(device_of(settings).type) if bf16_fast is None else bf16_fast
    if settings.trainer.get("bf16"):
        return torch.bfloat16 if fast else torch.float32
    text = config.get("text_config") or {}
    dtype_name = next(
        (part[key] for part in (config, text) for key in ("dtype", "torch_dtype") if part.get(key)), "bfloat16"
    )
    return torch.float32 if dtype_name == "float32" or not fast else torch.bfloat16


def bf16_note(settings: TrainSettings) -> str | None:
    """What becomes of `bf16: true`, which recipes for GPUs have, on a CPU that is slower in bf16."""
    if not settings.trainer.get("bf16") or settings.model.pure_bf16 or bf16_is_fast(device_of(settings).type):
        return None
    return "bf16: true: this CPU is slower in bf16, so all but the experts computes in float32; pure_bf16: true insists"


def precision_notes(settings: TrainSettings, config: dict[str, Any]) -> list[str]:
    """Notes on bf16 where it is slow and on f32 experts; raises if the requested CPU variant has none."""
    note = bf16_note(settings)
    notes = [] if note is None else [note]
    if settings.experts.precision == "bf16":
        return notes
    isa = isa_of_backend(settings.experts.kt_backend)
    if isa not in (None, *EXACT_ISAS):
        backend = settings.experts.kt_backend
        raise InputError(
            "precision", f"f32 with kt_backend {backend}", f"auto, {' or '.join(EXACT_ISAS)}", "leave kt_backend out"
        )
    dtype = dtype_of(settings, config)
    mixed = f", though the rest computes in {str(dtype).removeprefix('torch.')}" if dtype.itemsize < 4 else ""
    return [*notes, f"precision f32: experts take twice the memory of the forecast and more time{mixed}"]


def trainer_arguments(settings: TrainSettings) -> SFTConfig | DPOConfig:
    """Raises InputError for values that the Trainer rejects."""
    from trl import DPOConfig, SFTConfig  # type: ignore[attr-defined]

    config_class = DPOConfig if settings.data.stage == "dpo" else SFTConfig
    trl_defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    values = {
        name: default
        for name, default in trainer_fields().items()
        if default is not None and name in trl_defaults and trl_defaults[name] != default
    }
    values |= {"prediction_loss_only": True, "report_to": "none", "do_train": True} | settings.trainer
    on_cpu = device_of(settings).type == "cpu"
    rows, batches = step_shape(settings)
    if settings.experts.tokens_per_pass:
        rows, batches = rows * batches, 1
    values |= {
        "use_cpu": on_cpu,
        "bf16": bool(settings.trainer.get("bf16")) and not settings.model.pure_bf16 and bf16_note(settings) is None,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": batches,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "router_aux_loss_coef": settings.model.moe_aux_loss_coef or 0.0,
        "dataloader_pin_memory": values.get("dataloader_pin_memory", True) and not on_cpu,
        "trust_remote_code": settings.model.trust_remote_code,
    }
    values.setdefault("ddp_find_unused_parameters", False)  # every adapter gets a gradient in every step
    if settings.data.disable_shuffling:
        values["train_sampling_strategy"] = "sequential"
    if config_class is SFTConfig:
        values |= {"max_length": None, "packing": False, "padding_free": uses_packing(settings)}
        values |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
    else:
        values |= {"max_length": None, "beta": settings.preference.pref_beta, "precompute_ref_log_probs": False}
        values |= {"disable_dropout": not settings.lora.lora_dropout}
    try:
        arguments = config_class(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise InputError("Trainer keys", " ".join(str(error).split()), "values that transformers takes") from error
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process per GPU, never DataParallel
    return arguments
