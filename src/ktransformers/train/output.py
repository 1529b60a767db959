"""The output directory of a run: its lock, the files that LLaMA-Factory and the HF Trainer write, and the manifest.

A run locks its directory, because the checkpoints of two runs would replace each other. What can be known of the
directory before a run (a file in its place, no permission, too little space) is checked before the model is loaded.

Everything but checkpoints is written at the end: first to a staging directory, then each file by one rename, the
manifest last, so that a directory with a manifest is complete. Before the rename the adapter is read back into the
model that was trained and must reproduce the log-probabilities of a few rows (`adapters/proof_record.py`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ktransformers.adapters import proof_record
from ktransformers.adapters.manifest import MANIFEST_FILE
from ktransformers.adapters.proof_record import ProofPrompt, ReloadCheck, check_reload, write_record
from ktransformers.experts.lora_shards import factor_shards
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import LockedError, exclusive_lock
from ktransformers.parallel.distributed import broadcast_tensors
from ktransformers.parallel.sharding import sharding_of
from ktransformers.parallel.whole_state import is_divided, whole_trained
from ktransformers.train.checkpoints import RUN_ID_FILE, ResumePoint, set_aside
from ktransformers.train.data.prepare import DataSplit
from ktransformers.train.data.render import PreferenceRow
from ktransformers.train.files import STAGING_DIR, move_files, reporting_full_disk, write_json, write_text
from ktransformers.train.manifest import add_saved_tensors, check_saved_tensors
from ktransformers.train.pictures import SVG_FILE, draw_final, plot_loss
from ktransformers.train.settings import TrainSettings

LOCK_FILE = ".kt_lock"  # in the output directory, while a run uses it
# Turns of a row whose prompts are recorded in addition to that of its first answer.
MAX_LATER_TURNS, MAX_TURN_TOKENS = 3, 4096

MODEL_CARD = """---
base_model: {base}
library_name: peft
pipeline_tag: text-generation
tags: [lora, mixture-of-experts, ktransformers, {stage}]
---

# {name}

A LoRA adapter (rank {rank}, alpha {alpha:g}) of `{base}`, trained by `kt train` with stage {stage} on {datasets}.

```python
from transformers import AutoModelForCausalLM
from peft import PeftModel

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{output}")
```

| | |
|---|---|
{rows}

`kt_manifest.json` lists every trained tensor and the hash of the base that it belongs to.
"""


def model_card(settings: TrainSettings, results: dict[str, Any]) -> str:
    lora, trainer = settings.lora, settings.trainer
    shown = {
        "targets": ", ".join(lora.lora_target),
        "template": settings.data.template or "the tokenizer's own",
        "learning rate": trainer.get("learning_rate", 5e-5),
        "epochs": round(float(results.get("epoch", 0.0)), 3),
        "seed": trainer.get("seed", 42),
    } | {name: f"{value:.4g}" for name, value in results.items() if name.endswith("loss")}
    return MODEL_CARD.format(
        base=settings.model.model_name_or_path,
        name=Path(settings.output_dir).name,
        output=settings.output_dir,
        stage=settings.data.stage,
        rank=lora.lora_rank,
        alpha=lora.lora_alpha or 2 * lora.lora_rank,
        datasets=", ".join(settings.data.dataset),
        rows="\n".join(f"| {name} | {value} |" for name, value in shown.items()),
    )


def _write_results(output: Path, results: dict[str, Any]) -> None:
    parts = {
        "train": {name: value for name, value in results.items() if not name.startswith("eval_")},
        "eval": {name: value for name, value in results.items() if name.startswith("eval_") or name == "epoch"},
    }
    for name, values in parts.items():
        if name == "train" or any(key != "epoch" for key in values):
            write_json(output / f"{name}_results.json", values)
    write_json(output / "all_results.json", results)


def _nearest_directory(path: Path) -> Path:
    """The path, or its first parent that exists."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def check_output(output: Path) -> None:
    """Raises if the directory cannot be created or written; creates nothing."""
    nearest = _nearest_directory(output)
    if not nearest.is_dir():
        raise InputError("output_dir", f"{output}, where {nearest} is a file", "a directory", "name another one")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError("output_dir", f"{output}, where {nearest} cannot be written", "a directory of yours")


def check_disk_space(settings: TrainSettings, trained_numbers: int, tokenizer_bytes: int) -> None:
    """Raises if the disk has no room for the adapter and, if checkpoints are saved, one of them as well, each with the
    tokenizer. Adam keeps two numbers for each that is trained; other optimizers keep fewer."""
    width = 2 if settings.model.pure_bf16 else 4
    needed = trained_numbers * width + tokenizer_bytes
    if str(settings.trainer.get("save_strategy", "steps")) != "no":
        adam = str(settings.trainer.get("optim", "adamw")).startswith("adam")
        state = 2 if adam and not settings.trainer.get("save_only_model") else 0
        needed += trained_numbers * width * (1 + state) + tokenizer_bytes
    nearest = _nearest_directory(Path(settings.output_dir))
    free = shutil.disk_usage(nearest).free
    if free < needed:
        raise InputError(
            "output_dir",
            f"{settings.output_dir} with {free / 1e9:.2f} GB free on its disk",
            f"{needed / 1e9:.2f} GB for an adapter of {trained_numbers} numbers and a checkpoint",
            "free space, name another directory, or give save_only_model: true or save_strategy: no",
        )


@contextmanager
def locked_output(output: Path) -> Iterator[None]:
    """Creates the directory and locks it for this run; the first of several processes does it for all. A directory that
    was created for a run which failed before it wrote anything is removed."""
    if int(os.environ.get("RANK", "0")) != 0:
        yield
        return
    check_output(output)
    is_new = not output.exists()
    with ExitStack() as stack:
        try:
            output.mkdir(parents=True, exist_ok=True)
            stack.callback(_remove_empty, output if is_new else None)
            stack.enter_context(exclusive_lock(output / LOCK_FILE))
        except LockedError as error:
            given = f"{output}, into which another run is training ({error.holder})"
            raise InputError(
                "output_dir", given, "a directory without a run", "wait for it, or name another one"
            ) from error
        except OSError as error:
            given = f"{output}, which cannot be written ({error.strerror})"
            raise InputError("output_dir", given, "a directory of yours on a disk with free space") from error
        yield


def _remove_empty(directory: Path | None) -> None:
    if directory is not None and not any(directory.iterdir()):
        directory.rmdir()


def prepare_output(output: Path, resume: ResumePoint) -> None:
    """Removes leftovers of an interrupted save, sets damaged checkpoints aside, and if the run starts from the
    beginning, removes the checkpoints and the adapter of an earlier run."""
    shutil.rmtree(output / STAGING_DIR, ignore_errors=True)
    (output / MANIFEST_FILE).unlink(missing_ok=True)
    set_aside(resume.damaged)
    if resume.checkpoint is None:
        for path in output.glob("checkpoint-*"):
            if path.is_dir() and (path / "trainer_state.json").is_file():
                shutil.rmtree(path)
        for name in ("adapter_model.safetensors", proof_record.PROOF_FILE, "trainer_log.jsonl", SVG_FILE):
            (output / name).unlink(missing_ok=True)
    if run_id := os.environ.get("TORCHELASTIC_RUN_ID"):  # from here on, checkpoints here are of this run
        write_text(output / RUN_ID_FILE, run_id)


def _token_ids(row: Any) -> list[int]:
    return [*row.prompt, *row.chosen] if isinstance(row, PreferenceRow) else row.ids


def _prompts(row: Any, tokenizer: Any) -> tuple[list[ProofPrompt], int]:
    """Prompts of the row's first answer and of its last ones, and how many turns were left out because a server would
    render them otherwise: a template may show earlier answers in another way once they are history, or the end of an
    answer may merge with what follows into other tokens."""
    ids, prompts, others = _token_ids(row), [], 0
    first, later = row.prompts[:1], row.prompts[1:][-MAX_LATER_TURNS:]
    for turn in (*first, *later):
        prompt = ProofPrompt(tuple(turn.messages), turn.tools, tuple(ids[: turn.tokens]))
        if not prompt.follows_answers:
            prompts.append(prompt)
        elif turn.tokens <= min(len(ids), MAX_TURN_TOKENS):
            text = tokenizer.apply_chat_template(
                turn.messages, tools=turn.tools, tokenize=False, add_generation_prompt=True
            )
            if tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) == prompt.tokens:
                prompts.append(prompt)
            else:
                others += 1
    return prompts, others


def write_output(
    trainer: Any, settings: TrainSettings, results: dict[str, Any], manifest: dict[str, Any], split: DataSplit
) -> ReloadCheck:
    """Where ranks divide the experts, all ranks of the first group call it, because the recorded rows need them all,
    and all ranks of a sharded model; the first writes."""
    output = Path(settings.output_dir)
    staging = output / STAGING_DIR
    trainer.finite_check.require_finite_weights(trainer.state.global_step)
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    writes = bool(trainer.args.should_save)
    rows = [row for row in split.evaluation or split.train if len(_token_ids(row)) > 1][-proof_record.MAX_PROOF_ROWS :]
    by_row = [_prompts(row, trainer.processing_class) for row in rows]
    proof = proof_record.record(
        model,
        [_token_ids(row) for row in rows],
        held_out=bool(split.evaluation),
        prompts=[prompt for prompts, _ in by_row for prompt in prompts],
        other_turns=sum(others for _, others in by_row),
    )
    whole = whole_trained(model) if is_divided(model) else None
    trained = whole or {name: value for name, value in model.named_parameters() if value.requires_grad}
    with reporting_full_disk(output):
        if writes:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True)
            model.save_pretrained(str(staging), state_dict=whole)
            trainer.processing_class.save_pretrained(str(staging))
            trainer.state.save_to_json(str(staging / "trainer_state.json"))
            if settings.run.plot_loss:
                plot_loss(output, staging / "training_loss.png")
            draw_final(output, staging)
            (staging / "README.md").write_text(model_card(settings, results))
            add_saved_tensors(manifest, staging / "adapter_model.safetensors")
            check_saved_tensors(manifest, trained)
        reload_check = check_reload(model, staging, proof, _saved_weights(model, staging, trained, writes))
        if writes:
            write_record(staging / proof_record.PROOF_FILE, proof)
            move_files(staging, output)
            _write_results(output, results)
            write_text(output / MANIFEST_FILE, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
    return reload_check


def _saved_weights(model: Any, folder: Path, trained: dict[str, Any], writes: bool) -> dict[str, Any] | None:
    """The tensors of the adapter's file that all ranks need, on the rank that wrote it all tensors: the others may not
    see the file. None if they need none. Factors of divided experts are not among those that all need."""
    from peft import get_peft_model_state_dict, load_peft_weights

    if sharding_of(model) is None:
        return None
    saved = load_peft_weights(str(folder), device="cpu") if writes else {}
    divided = factor_shards(model)
    on_all = {name: tensor for name, tensor in trained.items() if name not in divided}
    expected = get_peft_model_state_dict(model, state_dict=on_all)
    received = {name: saved[name] if writes else torch.empty_like(expected[name]).cpu() for name in sorted(expected)}
    broadcast_tensors([tensor.contiguous() for tensor in received.values()], dist.group.WORLD)
    return saved | received
