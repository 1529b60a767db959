"""Training and export in LLaMA-Factory with `use_kt: true`: checkpointing, the check that expert LoRA was trained, the
form of the saved adapter.

LLaMA-Factory's checkpointing becomes non-reentrant, and with `kt_cpu_activation: retain` the experts' results are kept
(`experts/checkpointing.py`). A run in which the LoRA of some expert layer never received a gradient ends with an error
before its adapter is saved: LLaMA-Factory would call it a success.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ktransformers.ground.errors import InputError, KTError
from ktransformers.ground.log import logger
from ktransformers.train.llamafactory.sharded import take_sharding

log = logger(__name__)

# What a directory in PEFT's form and one in kt-kernel's have of the adapter itself.
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_config.json")


def use_checkpoint_context(module: Any) -> None:
    """In `llamafactory.model.model_utils.checkpointing`."""
    stock_prepare = module.prepare_model_for_training

    def prepare_model_for_training(model: Any, model_args: Any) -> None:
        if model_args.use_kt:
            model_args.use_reentrant_gc = False
        stock_prepare(model, model_args)
        if model_args.use_kt and not model_args.disable_gradient_checkpointing:
            options = checkpoint_options(model_args.kt_cpu_activation or "recompute")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)

    module.prepare_model_for_training = prepare_model_for_training


def checkpoint_options(cpu_activation: str) -> dict[str, Any]:
    """Arguments of torch's checkpoint function."""
    from ktransformers.experts.checkpointing import save_expert_outputs

    options: dict[str, Any] = {"use_reentrant": False}
    return options | ({"context_fn": save_expert_outputs} if cpu_activation == "retain" else {})


class ExpertTraining(TrainerCallback):
    """The callback of a run with packed experts: GPU placement at its begin, gradients of expert LoRA at its end."""

    def __init__(self, batch_tokens: int) -> None:
        self._batch_tokens = batch_tokens
        self._gradient_check: Any = None
        self._placement: Any = None
        self._first_step = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        from ktransformers.train.callbacks import GradientCheck

        self._gradient_check, self._first_step = GradientCheck(model), state.global_step
        self._placement = getattr(model, "kt_train_placement", None)
        if self._placement is not None:
            self._placement.trainer_built(lambda line: log.info("%s", line), (self._batch_tokens,))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._gradient_check.on_pre_optimizer_step(args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._placement is not None:
            self._placement.run_ended(lambda line: log.info("%s", line))
        require_trained_experts(self._gradient_check, state.global_step - self._first_step)


def require_trained_experts(gradient_check: Any, steps: int) -> None:
    """Raises unless the LoRA of every expert layer received a gradient in these steps."""
    experts = {name: trace for name, trace in gradient_check.traces.items() if trace.experts is not None}
    if not experts:
        raise KTError("use_kt: the adapter has no LoRA on experts; lora_target: all selects them")
    dead = [name for name, trace in experts.items() if not trace.alive]
    if steps and dead:
        shown = ", ".join(name.removeprefix("base_model.model.") for name in dead[:4])
        raise KTError(
            f"use_kt: {len(dead)} of {len(experts)} LoRA pairs on experts never received a gradient ({shown}); "
            "the adapter is not saved"
        )
    if steps:
        log.info("all %d LoRA pairs on experts received gradients in %d steps", len(experts), steps)


def check_runs(module: Any) -> None:
    """In `llamafactory.train.tuner`."""
    stock_train, stock_train_args, stock_infer_args = (
        module._training_function,
        module.get_train_args,
        module.get_infer_args,
    )

    def training_function(config: dict[str, Any]) -> None:
        parsed: list[Any] = []

        def get_train_args(args: Any = None) -> Any:
            parsed.extend(stock_train_args(args))
            model_args, data_args, training_args, finetuning_args, _ = parsed
            if model_args.use_kt:
                _prepare_run(training_args, finetuning_args)
                take_sharding(model_args, training_args, finetuning_args.stage)
                batch_tokens = training_args.per_device_train_batch_size * data_args.cutoff_len
                config["callbacks"].append(ExpertTraining(batch_tokens))
            return tuple(parsed)

        module.get_train_args = get_train_args
        try:
            stock_train(config)
        finally:
            module.get_train_args = stock_train_args
        model_args, _, training_args, _, _ = parsed
        trains_experts = model_args.use_kt and training_args.do_train
        if trains_experts and training_args.should_save and model_args.kt_adapter_format == "kt":
            write_kt_form(Path(training_args.output_dir))

    def get_infer_args(args: Any = None) -> Any:
        """Of `export`, the only caller: the adapter is merged into the checkpoint's own experts."""
        parsed = stock_infer_args(args)
        if parsed[0].use_kt:
            parsed[0].use_kt, parsed[0].kt_exporting = False, True
        return parsed

    module._training_function, module.get_infer_args = training_function, get_infer_args


def _prepare_run(training_args: Any, finetuning_args: Any) -> None:
    if finetuning_args.finetuning_type != "lora":
        remedy = "packed experts are frozen; train an adapter"
        raise InputError("finetuning_type", finetuning_args.finetuning_type, "lora with use_kt", remedy)
    if training_args.deepspeed:
        expected = "one process, or several as DDP or under FSDP2"
        raise InputError("use_kt", "DeepSpeed", expected, "experts are in host memory already")
    training_args._n_gpu = min(training_args.n_gpu, 1)  # one process per GPU, never DataParallel


def write_kt_form(output: Path) -> None:
    """Replace the adapter in `output`, in PEFT's form, by kt-kernel's: experts in a file of their own and a manifest.
    Checkpoints inside `output` stay in PEFT's form, from which LLaMA-Factory resumes."""
    from ktransformers.adapters import convert

    with tempfile.TemporaryDirectory(prefix=".kt_adapter_", dir=output) as folder:
        source, staging = Path(folder, "peft"), Path(folder, "kt")
        source.mkdir()
        for name in ADAPTER_FILES:
            shutil.copyfile(output / name, source / name)
        convert(source, staging, "kt", dtype="bfloat16")
        for file in staging.iterdir():
            os.replace(file, output / file.name)
    log.info("%s: adapter in kt-kernel's form", output)
