"""The output directory: one run at a time, errors of the file system in one line, and memory that does not suffice."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import LockedError, exclusive_lock
from ktransformers.ground.out_of_memory import asked_bytes, exhausted_memory
from ktransformers.plan import Choice, Training, profile
from ktransformers.plan.planner import evaluate
from ktransformers.train import output as output_module
from ktransformers.train import trainers
from ktransformers.train.checkpoints import find_problem, list_checkpoints
from ktransformers.train.out_of_memory import TrainingMemoryError, remedies
from ktransformers.train.output import LOCK_FILE, check_output, locked_output
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from tests.support.forked import Completed, Forked
from tests.support.training import recipe
from tests.support.training_runs import run

MAIN = "from ktransformers.cli.main import main; main()"
LIMITED = f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2); {MAIN}"


def kt_train(keys: dict[str, Any], folder: Path, *, code: str = MAIN, words: tuple[object, ...] = ()) -> Forked:
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(keys))
    return Forked(code, *words, "train", file)


def error_line(done: Completed) -> str:
    """The one line of a failed command."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if line.startswith("kt: ")]
    assert len(lines) == 1, done.stderr[-2000:]
    return lines[0]


def test_second_run_into_a_directory_is_refused(tiny: Path, tmp_path: Path) -> None:
    """While the first runs; a kill releases the directory."""
    output = tmp_path / "x"
    keys = recipe(tiny, output, max_steps=10_000, save_strategy="steps", save_steps=1, save_total_limit=2)
    first = kt_train(keys, tmp_path)
    limit = time.monotonic() + 120
    while not list_checkpoints(output) and time.monotonic() < limit and first.alive:
        time.sleep(0.02)
    try:
        second = error_line(kt_train(keys | {"seed": 1, "overwrite_output_dir": True}, tmp_path).wait())
        assert f"output_dir: given {output}, into which another run is training (process {first.pid} on " in second
        assert list_checkpoints(output), "nothing was removed"
    finally:
        first.kill()
        assert first.wait().returncode == -signal.SIGKILL
    last = int(list_checkpoints(output)[-1].name[11:])
    run(keys | {"max_steps": last + 1})
    assert not (output / LOCK_FILE).exists() and (output / "adapter_model.safetensors").exists()


def test_other_processes_of_a_run_follow_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with locked_output(tmp_path / "x"):
        with pytest.raises(InputError, match="another run is training"), locked_output(tmp_path / "x"):
            pass
        monkeypatch.setenv("RANK", "1")
        with locked_output(tmp_path / "x"):
            pass
        monkeypatch.delenv("RANK")
    assert not (tmp_path / "x").exists(), "a directory without files is removed"


def test_lock_of_a_removed_file_is_not_taken(tmp_path: Path) -> None:
    """A file that was removed by its holder and created again is another file."""
    with exclusive_lock(tmp_path / "lock") as handle:
        assert os.pread(handle, 100, 0).decode().startswith(f"process {os.getpid()} on ")
        with pytest.raises(LockedError, match=f"process {os.getpid()}"), exclusive_lock(tmp_path / "lock"):
            pass
        (tmp_path / "lock").unlink()
        with exclusive_lock(tmp_path / "lock"):
            pass


def test_file_where_a_directory_should_be(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match=rf"output_dir: given {output}, where {tmp_path / 'file'} is a file"):
            make_plan(read_settings(recipe(tiny, output)))
    told = error_line(kt_train(recipe(tiny, tmp_path / "file" / "run"), tmp_path).wait())
    assert "output_dir" in told and "is a file" in told


def test_directory_that_cannot_be_written(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"output_dir: given /proc/kt/run.* cannot be written"):
        run(recipe(tiny, Path("/proc/kt/run")))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(InputError, match=rf"where {tmp_path} cannot be written"):
        check_output(tmp_path / "x" / "y")


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_disk_without_room_is_refused_before_the_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = read_settings(recipe(tiny, tmp_path / "x", save_strategy="steps"))
    numbers = make_plan(settings).plan.trained_numbers
    assert numbers is not None
    tokenizer = sum(file.stat().st_size for file in tiny.glob("*token*"))  # with the adapter and with its checkpoint
    assert tokenizer > 0
    free = numbers * 16 + 2 * tokenizer - 1
    monkeypatch.setattr(output_module.shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))
    with pytest.raises(InputError, match=rf"GB free on its disk, expected .* an adapter of {numbers} numbers"):
        make_plan(settings)
    make_plan(read_settings(recipe(tiny, tmp_path / "x", save_strategy="no")))


@pytest.mark.parametrize("writer", ["safetensors", "torch"])
def test_failing_write_is_one_line(tiny: Path, tmp_path: Path, writer: str) -> None:
    """A limit on the size of files makes the adapter's safetensors or the optimizer's torch.save fail."""
    output = tmp_path / "x"
    keys = recipe(tiny, output, max_steps=2, save_strategy="steps", save_steps=1, lora_rank=64)
    numbers = make_plan(read_settings(keys)).plan.trained_numbers
    assert numbers is not None
    limit = numbers * 3 if writer == "safetensors" else numbers * 6  # the adapter has 4 bytes a number, the optimizer 8
    assert limit > max(file.stat().st_size for file in tiny.glob("*.json")), "files before it fit"
    told = error_line(kt_train(keys, tmp_path, code=LIMITED, words=(limit,)).wait())
    assert str(output) in told and "a file could not be written" in told and "resume_from_checkpoint=true" in told
    assert all(find_problem(folder) is None for folder in list_checkpoints(output))
    assert not (output / ".kt_saving").exists() and not (output / "adapter_model.safetensors").exists()


def test_out_of_host_memory_is_one_line(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(self: Any, model: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        return torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr(trainers.SupervisedTrainer, "compute_loss", allocate)
    keys = recipe(tiny, tmp_path / "x", per_device_train_batch_size=4, kt_tokens_per_batch="off")
    with pytest.raises(TrainingMemoryError) as raised:
        run(keys | {"disable_gradient_checkpointing": True})
    told = str(raised.value)
    assert "\n" not in told and "1048576.00 GiB asked for" in told and "of host memory" in told
    knobs = ["per_device_train_batch_size: 2 and gradient_accumulation_steps: 4 (", "int8 experts (kt quant "]
    places = [told.index(knob) for knob in knobs]
    assert places == sorted(places) and told.count(" less)") >= 2
    assert not (tmp_path / "x" / LOCK_FILE).exists()


@pytest.mark.parametrize(
    ("error", "place", "size"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"), "gpu", 5 << 29),
        (RuntimeError("CUDA error: out of memory"), "gpu", None),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1024 bytes."), "host", 1024),
        (MemoryError("std::bad_alloc"), "host", None),
        (RuntimeError("shapes cannot be multiplied"), None, None),
        (ValueError("tried to allocate"), None, None),
    ],
)
def test_errors_of_memory(error: Exception, place: str | None, size: int | None) -> None:
    assert exhausted_memory(error) == place
    if place is not None:
        assert asked_bytes(error) == size


def test_knobs_of_a_gpu_come_in_order(tiny: Path, tmp_path: Path) -> None:
    """A planned run on a GPU: every knob of the guides, with bytes that become free on the GPU."""
    keys = recipe(tiny, tmp_path / "x", per_device_train_batch_size=8, cutoff_len=1024, kt_tokens_per_batch="off")
    plan = make_plan(read_settings(keys | {"disable_gradient_checkpointing": True})).plan
    assert plan.forecast is not None
    machine = profile("desktop-4090")
    work = Training(tokens=8192, tokens_per_step=16384, sequence=1024, checkpointing=False)
    nearest = evaluate(plan.forecast.model, work, Choice("bf16", 1, 4, "resident"), machine)
    planned = replace(plan, forecast=replace(plan.forecast, machine=machine, nearest=nearest))
    shown = remedies(planned, "gpu")
    expected = ["per_device_train_batch_size: 4", "cutoff_len: 512", "disable_gradient_checkpointing: false"]
    expected += ["kt_num_gpu_experts: 2"]
    assert [line.split(" and ")[0].split(" (")[0] for line in shown][:4] == expected
    assert all(line.endswith("iB less)") for line in shown)
    assert remedies(replace(plan, forecast=None), "gpu")[0].startswith("per_device_train_batch_size below 8")
