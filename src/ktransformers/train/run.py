"""Runs training from plan to output directory: load the model, add an adapter, train, check, save.

Progress is reported to a `Watcher`; nothing is printed here. An interrupted run leaves complete checkpoints and raises
`Interrupted`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ktransformers.checkpoint.model_config import read_model_config
from ktransformers.ground.packages import require_compiler
from ktransformers.ground.system import frozen_gc
from ktransformers.modeling.load import meta_model
from ktransformers.operators.rules import operators_of
from ktransformers.parallel.rank_check import (
    Ranks,
    join_ranks,
    open_process_group,
    require_equal,
    require_equal_packages,
)
from ktransformers.parallel.rank_watch import RankWatch
from ktransformers.plan import Meter, PlanComparison, compare_with_plan, require_fit
from ktransformers.train.arguments import device_of, dtype_of
from ktransformers.train.build import build_trainer
from ktransformers.train.callbacks import ExpertClock, Interrupted, Progress, StepPosition, Stopper, TrainLog
from ktransformers.train.checkpoints import list_checkpoints
from ktransformers.train.expert_parallel import is_writer
from ktransformers.train.manifest import (
    base_hash,
    check_gradients,
    expert_formats,
    experts_source,
    files_hash,
    make_manifest,
    text_hash,
)
from ktransformers.train.model import open_trained
from ktransformers.train.out_of_memory import reporting_out_of_memory
from ktransformers.train.output import locked_output, prepare_output, write_output
from ktransformers.train.packed_attention import restore_sdpa
from ktransformers.train.placement import TrainPlacement
from ktransformers.train.plan import PreparedRun, TrainPlan, make_plan
from ktransformers.train.preference import REFERENCE_FREE_LOSSES, add_reference
from ktransformers.train.reachable import drop_untrained
from ktransformers.train.settings import TrainSettings
from ktransformers.train.sharding import leave_out_attention_graphs, read_shard_options, take_launcher_sharding

DDP_SECONDS = 1800.0  # until a collective fails, as in transformers
RANK_REMEDY = "copy the model, the experts, the data and the recipe to all hosts, or put them on a shared disk"


class Watcher(Protocol):
    """Receives the progress of a run."""

    def on_plan(self, plan: TrainPlan) -> None: ...
    def on_load(self, done: int, layers: int) -> None: ...
    def on_reference(self, done: int, rows: int) -> None: ...
    def on_note(self, line: str) -> None: ...
    def on_position(self, position: StepPosition) -> None: ...
    def on_step(self, progress: Progress) -> None: ...


@dataclass(frozen=True)
class Result:
    output: Path
    results: dict[str, Any]
    manifest: dict[str, Any]
    comparison: tuple[PlanComparison, ...] = ()  # forecast against measurement


def train(settings: TrainSettings, watcher: Watcher, *, force: bool = False) -> Result:
    """`force` continues although the plan predicts that memory is insufficient."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    settings = take_launcher_sharding(settings)
    ranks = join_ranks()
    require_equal_packages(ranks)
    _open_process_group(ranks, settings)
    with locked_output(Path(settings.output_dir)):
        prepared = make_plan(settings, download=True)
        require_equal_runs(ranks, prepared)
        with RankWatch(ranks, lambda: _restart_hint(Path(settings.output_dir))), reporting_out_of_memory(prepared.plan):
            return _train(prepared, watcher, force)


def _open_process_group(ranks: Ranks | None, settings: TrainSettings) -> None:
    """Before transformers does it, which would use the store as launchers give it."""
    backend, seconds = settings.trainer.get("ddp_backend"), float(settings.trainer.get("ddp_timeout", DDP_SECONDS))
    open_process_group(ranks, cpu=device_of(settings).type == "cpu", backend=backend, seconds=seconds)


def _restart_hint(output: Path) -> str:
    checkpoints = list_checkpoints(output)
    if not checkpoints:
        return "; no checkpoint was saved before"
    return f"; started again it goes on from {checkpoints[-1]} (torchrun --max-restarts does it by itself)"


def require_equal_runs(ranks: Ranks | None, prepared: PreparedRun) -> None:
    """Ranks with another model, other rows, other settings or another checkpoint are refused."""
    settings, recipe, checkpoint = prepared.plan.settings, prepared.recipe, prepared.resume.checkpoint
    if ranks is None or recipe is None:
        return
    settings_text = json.dumps(settings.model_dump(mode="json", exclude={"notes"}), sort_keys=True, default=str)
    facts: dict[str, Any] = {
        "files of the model": recipe.base,
        "files of the experts": files_hash(settings.experts.kt_weight_path),
        "rows": recipe.rows,
        "checkpoint": None if checkpoint is None else checkpoint.name,
        **{f"setting {key}": value for key, value in recipe.settings.items() if key != "kt_weight_path"},
        "settings": text_hash(settings_text),
    }
    require_equal(ranks, facts, RANK_REMEDY)


def _train(prepared: PreparedRun, watcher: Watcher, force: bool) -> Result:
    """prepare -> load -> build -> fit -> write"""
    watcher.on_plan(prepared.plan)
    _prepare(prepared, force)
    model, placing = _load(prepared, watcher)
    trainer = _build(model, prepared, watcher)
    metrics, meter = _fit(model, trainer, placing, prepared, watcher)
    return _write(model, trainer, prepared, watcher, metrics, meter)


def _prepare(prepared: PreparedRun, force: bool) -> None:
    settings = prepared.plan.settings  # including the plan's choices
    if prepared.plan.forecast is not None:
        require_fit(prepared.plan.forecast, force=force)
    require_compiler(device_of(settings).type, "use_cpu=true")
    if int(os.environ.get("RANK", "0")) == 0:
        prepare_output(Path(settings.output_dir), prepared.resume)
    if read_shard_options(settings)[0] is not None:
        leave_out_attention_graphs()


def _load(prepared: PreparedRun, watcher: Watcher) -> tuple[Any, TrainPlacement]:
    settings, directory = prepared.plan.settings, prepared.directory
    assert directory is not None
    placing, skeleton = TrainPlacement(settings, prepared.plan.forecast), meta_model(directory)
    operators, _ = placing.plan_operators(skeleton)
    model = open_trained(
        directory,
        settings,
        dtype_of(settings, read_model_config(directory)),
        placing.loading_device,
        watcher.on_load,
        prepared.partition,
        operators,
        placing.gpus_of_layers(skeleton),
        watcher.on_note,
    )
    placing.model_loaded(model)
    return model, placing


def _build(model: Any, prepared: PreparedRun, watcher: Watcher) -> Any:
    """The trainer; for preferences its rows get the reference, and a resumed run what it had seen of gradients."""
    settings, directory = prepared.plan.settings, prepared.directory
    assert directory is not None
    trainer = build_trainer(model, prepared)
    for line in trainer.target_notes:
        watcher.on_note(line)
    if settings.data.stage == "dpo" and settings.preference.pref_loss not in REFERENCE_FREE_LOSSES:
        budget = max(4 * settings.data.cutoff_len, settings.experts.tokens_per_pass or 0)
        reference_id = [base_hash(directory), str(experts_source(settings, directory)), expert_formats(model)]
        reference_id += [str(rule) for rule in operators_of(settings.place.kt_optimize_rule)]
        if not add_reference(trainer, " ".join(reference_id), budget, watcher.on_reference):
            watcher.on_note("reference log-probabilities are reused from the earlier run")
    if prepared.resume.checkpoint is not None:
        trainer.gradient_check.restore(prepared.resume.checkpoint)
    return trainer


def _fit(
    model: Any, trainer: Any, placing: TrainPlacement, prepared: PreparedRun, watcher: Watcher
) -> tuple[dict[str, Any], Meter]:
    """Metrics of the training, and the memory that it took; Interrupted if a signal ended it."""
    settings, checkpoint = prepared.plan.settings, prepared.resume.checkpoint
    clock, stopper = ExpertClock(model), Stopper()
    log = TrainLog(
        Path(settings.output_dir), clock, watcher.on_step, watcher.on_position, lambda: trainer.finite_check.step_loss
    )
    rows = trainer.args.per_device_train_batch_size
    placing.trainer_built(watcher.on_note, (settings.experts.tokens_per_pass or rows * settings.data.cutoff_len,))
    for callback in (trainer.gradient_check, log, stopper, *_early_stopping(settings)):
        trainer.add_callback(callback)
    with frozen_gc(), stopper.listening(), Meter() as meter:
        outcome = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    clock.close()
    restore_sdpa(model)
    placing.run_ended(watcher.on_note)
    if stopper.received is not None and trainer.state.global_step < trainer.state.max_steps:
        raise Interrupted(stopper.received, trainer.state.global_step)
    return dict(outcome.metrics), meter


def _write(
    model: Any, trainer: Any, prepared: PreparedRun, watcher: Watcher, results: dict[str, Any], meter: Meter
) -> Result:
    """Check what was trained, evaluate, and write the output directory."""
    settings, directory, split = prepared.plan.settings, prepared.directory, prepared.split
    assert directory is not None and split is not None
    trainer.gradient_check.share()
    if trainer.state.global_step:
        for line in drop_untrained(trainer.accelerator.unwrap_model(trainer.model), trainer.gradient_check):
            watcher.on_note(line)
    check_gradients(trainer.gradient_check, trainer.state.global_step)
    if trainer.eval_dataset is not None:
        results |= _last_evaluation(trainer) or trainer.evaluate()
    facts = {
        "rows": len(trainer.train_dataset),
        "steps": trainer.state.global_step,
        "template": settings.data.template,
        "chat_template": text_hash(prepared.tokenizer.chat_template and str(prepared.tokenizer.chat_template)),
    }
    manifest = make_manifest(trainer.model, settings, trainer.gradient_check, directory, facts)
    takes_part, is_main = is_writer(model)
    if takes_part or trainer.sharding is not None:  # all ranks gather a sharded model's layers
        reloaded = write_output(trainer, settings, results, manifest, split)
        if is_main:
            watcher.on_note(str(reloaded))
    return Result(Path(settings.output_dir), results, manifest, _compare(prepared.plan, meter, results))


def _compare(plan: TrainPlan, meter: Meter, results: dict[str, Any]) -> tuple[PlanComparison, ...]:
    if plan.forecast is None or plan.data is None:
        return ()
    import torch

    gpu = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    trained_tokens = float(results.get("epoch", 0.0)) * plan.data.tokens
    rate = trained_tokens / max(float(results.get("train_runtime", 0.0)), 1e-9)
    return compare_with_plan(plan.forecast.nearest, host=meter.peak, gpu=gpu, tokens_per_second=rate)


def _last_evaluation(trainer: Any) -> dict[str, Any]:
    """Metrics of an evaluation at the last step, if there was one."""
    entries = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    if not entries or entries[-1]["step"] != trainer.state.global_step:
        return {}
    return {name: value for name, value in entries[-1].items() if name != "step"}


def _early_stopping(settings: TrainSettings) -> list[Any]:
    if settings.run.early_stopping_steps is None:
        return []
    from transformers import EarlyStoppingCallback

    return [EarlyStoppingCallback(early_stopping_patience=settings.run.early_stopping_steps)]
