"""Runs that are stopped, killed or starved of disk go on as if nothing had happened; two processes are one."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.adapters.manifest import read_manifest
from ktransformers.ground.errors import KTError
from ktransformers.train.callbacks import Interrupted
from ktransformers.train.files import reporting_full_disk
from tests.support.training import RunRecorder, recipe
from tests.support.training_runs import SCRIPT, adapter, difference, run, start_run


def test_resumed_run_equals_uninterrupted_run(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "whole", max_steps=6, save_strategy="steps", save_steps=2, lora_dropout=0.1)
    whole = RunRecorder()
    run(keys, whole)
    part = tmp_path / "part"
    shutil.copytree(tmp_path / "whole" / "checkpoint-4", part / "checkpoint-4")
    (part / ".kt_saving" / "checkpoint-6").mkdir(parents=True)  # what a kill in the middle of a save leaves
    again = RunRecorder()
    run(keys | {"output_dir": str(part), "resume_from_checkpoint": True}, again)
    assert "resumes from" in again.plans[0].start
    losses = [
        [(step.step, step.values["loss"]) for step in seen.steps if "loss" in step.values] for seen in (whole, again)
    ]
    assert losses[1] == losses[0][4:]
    assert difference(adapter(part), adapter(tmp_path / "whole")) < 1e-6
    manifest = read_manifest(part)
    assert all(tensor["gradient_seen"] for tensor in manifest["tensors"].values())


class Interrupting(RunRecorder):
    def on_step(self, progress: Any) -> None:
        super().on_step(progress)
        if progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_sigterm_saves_a_checkpoint_and_resumes(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_steps=5, save_strategy="steps", save_steps=100)
    with pytest.raises(Interrupted, match=r"SIGTERM: stopped after step \d, which was saved"):
        run(keys, Interrupting())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    (checkpoint,) = (tmp_path / "x").glob("checkpoint-*")
    assert not (tmp_path / "x" / "kt_manifest.json").exists()
    run(keys | {"resume_from_checkpoint": True})
    lines = [json.loads(line) for line in (tmp_path / "x" / "trainer_log.jsonl").read_text().splitlines()]
    assert [line["current_steps"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5]
    assert int(checkpoint.name[11:]) < 5 and (tmp_path / "x" / "kt_manifest.json").exists()


def test_sigkill_leaves_only_complete_checkpoints(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "x", max_steps=200, save_strategy="steps", save_steps=1, save_total_limit=3)
    process = start_run(keys, tmp_path / "x.yaml")
    limit = time.monotonic() + 120
    while len(list((tmp_path / "x").glob("checkpoint-*"))) < 2 and time.monotonic() < limit and process.alive:
        time.sleep(0.02)
    process.kill()
    ended = process.wait()
    there = sorted((tmp_path / "x").glob("checkpoint-*"))
    assert ended.returncode == -signal.SIGKILL and there, ended.stderr
    for checkpoint in there:
        adapter(checkpoint)
        assert json.loads((checkpoint / "trainer_state.json").read_text())["global_step"] == int(checkpoint.name[11:])
        torch.load(checkpoint / "optimizer.pt", weights_only=True)
    last = max(int(path.name[11:]) for path in there)
    watcher = RunRecorder()
    run(keys | {"resume_from_checkpoint": True, "max_steps": last + 2, "overwrite_output_dir": True}, watcher)
    assert [step.step for step in watcher.steps if "loss" in step.values] == [last + 1, last + 2]


@pytest.mark.slow
def test_sigkill_at_random_moments_is_recoverable(tiny: Path, tmp_path: Path) -> None:

    keys = recipe(tiny, tmp_path / "whole", max_steps=240, save_strategy="steps", save_steps=1, save_total_limit=2)
    whole = RunRecorder()
    run(keys, whole)
    output = tmp_path / "x"
    keys |= {"output_dir": str(output), "resume_from_checkpoint": True}
    draw = random.Random(7)

    def last() -> int:
        return max((int(path.name[11:]) for path in output.glob("checkpoint-*") if path.name[11:].isdigit()), default=0)

    killed = 0
    while killed < 20:
        before, process, limit = last(), start_run(keys, tmp_path / "x.yaml"), time.monotonic() + 120
        while last() == before and time.monotonic() < limit and process.alive:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 1))
        process.kill()
        process.wait()
        killed += 1
        assert last() > before or last() == 240
    watcher = RunRecorder()
    run(keys, watcher)
    losses = {step.step: step.values["loss"] for step in whole.steps if "loss" in step.values}
    assert all(losses[step.step] == step.values["loss"] for step in watcher.steps if "loss" in step.values)
    assert difference(adapter(output), adapter(tmp_path / "whole")) < 1e-6


def test_full_disk_is_reported_without_traceback(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    from ktransformers.train import trainers

    calls = []

    def full(folder: Path) -> None:
        calls.append(folder)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(trainers, "sync_tree", full)
    keys = recipe(tiny, tmp_path / "x", max_steps=4, save_strategy="steps", save_steps=1)
    with pytest.raises(KTError, match="no space left; earlier checkpoints are complete"):
        run(keys)
    left = [path.name for path in sorted((tmp_path / "x").iterdir())]
    assert left == ["checkpoint-1", "trainer_log.jsonl", "training.svg"]


def test_full_disk_is_reported_by_what_tokenizers_raises(tmp_path: Path) -> None:
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    with pytest.raises(KTError, match="no space left; earlier checkpoints"), reporting_full_disk(tmp_path):
        tokenizer.save("/dev/full")


@pytest.mark.slow
def test_two_processes_equal_one_with_twice_the_batch(tiny: Path, tmp_path: Path) -> None:
    keys = recipe(tiny, tmp_path / "one", optim="sgd", learning_rate=0.5, disable_shuffling=True, max_samples=16)
    keys |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4, "use_cpu": True}
    one = RunRecorder()
    run(keys, one)
    (tmp_path / "two.yaml").write_text(json.dumps(keys | {"output_dir": str(tmp_path / "two")}))
    (tmp_path / "two.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "two.py")]
    words = [str(tmp_path / "two.yaml"), "per_device_train_batch_size=2"]
    done = subprocess.run([*launch, *words], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [step.values["loss"] for step in one.steps if "loss" in step.values]
    lines = (tmp_path / "two" / "trainer_log.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(losses, rel=1e-4)
    assert difference(adapter(tmp_path / "two"), adapter(tmp_path / "one")) < 1e-4
