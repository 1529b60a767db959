"""The settings as TRL's configurations, and what follows from them: dtype, device, batch.

TRL changes some of the HF Trainer's defaults; a YAML that is silent about them means the HF Trainer's own, as it does
for LLaMA-Factory. Checkpointing of activations is switched on at the model (`model.py`), not here, because its way of
keeping the experts' work is a function, which a configuration file cannot hold.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ktransformers.errors import InputError
from ktransformers.system import bf16_is_fast
from ktransformers.train.resolve import trainer_fields
from ktransformers.train.settings import TrainSettings

if TYPE_CHECKING:
    from trl import DPOConfig, SFTConfig  # type: ignore[attr-defined]


def uses_packing(settings: TrainSettings) -> bool:
    return settings.data.packing or settings.data.neat_packing


def step_shape(settings: TrainSettings) -> tuple[int, int]:
    """Rows of one batch and batches of one optimiser step, of each process."""
    given = settings.trainer
    rows = int(given.get("per_device_train_batch_size", trainer_fields()["per_device_train_batch_size"]))
    parts = int(given.get("gradient_accumulation_steps", 1))
    return rows, parts


def device_of(settings: TrainSettings) -> torch.device:
    on_cpu = settings.trainer.get("use_cpu", False) or not torch.cuda.is_available()
    return torch.device("cpu" if on_cpu else "cuda")


def dtype_of(settings: TrainSettings, words: dict[str, Any]) -> torch.dtype:
    """Of everything but the experts: what bf16 and fp16 ask for, otherwise the checkpoint's, or float32 where this CPU
    is slow at bf16. `words`: config.json."""
    if settings.trainer.get("bf16") or settings.model.pure_bf16:
        return torch.bfloat16
    if settings.trainer.get("fp16"):
        return torch.float16
    text = words.get("text_config") or {}
    named = next((part[key] for part in (words, text) for key in ("dtype", "torch_dtype") if part.get(key)), "bfloat16")
    return torch.float32 if named == "float32" or not bf16_is_fast(device_of(settings).type) else torch.bfloat16


def trainer_arguments(settings: TrainSettings) -> SFTConfig | DPOConfig:
    """Raises InputError for what the Trainer refuses."""
    from trl import DPOConfig, SFTConfig  # type: ignore[attr-defined]

    kind = DPOConfig if settings.data.stage == "dpo" else SFTConfig
    theirs = {field.name: field.default for field in dataclasses.fields(kind)}
    values = {
        name: default
        for name, default in trainer_fields().items()
        if default is not None and name in theirs and theirs[name] != default
    }
    values |= {"prediction_loss_only": True, "report_to": "none", "do_train": True} | settings.trainer
    on_cpu = device_of(settings).type == "cpu"
    rows, parts = step_shape(settings)
    if settings.experts.tokens_at_once:
        rows, parts = rows * parts, 1
    values |= {
        "use_cpu": on_cpu,
        "bf16": bool(settings.trainer.get("bf16")) and not settings.model.pure_bf16,
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": parts,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "router_aux_loss_coef": settings.model.moe_aux_loss_coef or 0.0,
        "dataloader_pin_memory": values.get("dataloader_pin_memory", True) and not on_cpu,
        "trust_remote_code": settings.model.trust_remote_code,
    }
    values.setdefault("ddp_find_unused_parameters", False)  # every adapter has its part in every step
    if settings.data.disable_shuffling:
        values["train_sampling_strategy"] = "sequential"
    if kind is SFTConfig:
        values |= {"max_length": None, "packing": False, "padding_free": uses_packing(settings)}
        values |= {"dataset_kwargs": {"skip_prepare_dataset": True}}
    else:
        values |= {"max_length": None, "beta": settings.preference.pref_beta, "precompute_ref_log_probs": False}
        values |= {"disable_dropout": not settings.lora.lora_dropout}
    try:
        arguments = kind(**values)
    except (ValueError, TypeError, ImportError) as error:
        raise InputError("Trainer keys", " ".join(str(error).split()), "values that transformers takes") from error
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process drives one GPU: never DataParallel
    return arguments


def complete_checkpoints(output: Path) -> list[Path]:
    """checkpoint-N folders, oldest first. They appear by a rename, so each that is there is whole."""
    found = [path for path in output.glob("checkpoint-*") if path.is_dir() and path.name[11:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def find_resume_point(settings: TrainSettings) -> tuple[Path | None, str]:
    """The checkpoint to go on from, and the line that says so."""
    output, asked = Path(settings.output_dir), settings.run.resume_from_checkpoint
    if isinstance(asked, str):
        if not (Path(asked) / "trainer_state.json").is_file():
            raise InputError("resume_from_checkpoint", asked, "a checkpoint-N folder, or true")
        return Path(asked), f"goes on from {asked}"
    there = complete_checkpoints(output)
    if asked:
        return (there[-1], f"goes on from {there[-1]}") if there else (None, f"starts: no checkpoint in {output} yet")
    if settings.run.overwrite_output_dir:
        return None, f"starts anew; {len(there)} checkpoints in {output} are removed" if there else "starts"
    if there and asked is None:
        return there[-1], f"goes on from {there[-1]}; overwrite_output_dir: true starts anew"
    if (output / "adapter_model.safetensors").exists():
        raise InputError(
            "output_dir", f"{output}, which holds an adapter", "a new folder", "or overwrite_output_dir: true"
        )
    return None, "starts"
