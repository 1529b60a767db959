"""A rank that is killed ends the run within seconds, with one line that names it; started again the run goes on from
its last checkpoint with the same losses."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ktransformers.parallel.rank_watch import EXIT_CODE
from ktransformers.train.checkpoints import RUN_ID_FILE, find_problem, find_resume_point, list_checkpoints
from ktransformers.train.resolve import read_settings
from tests.support.rank_runs import free_port, launcher_environment, run_ranks, start_ranks, tiny_model
from tests.support.training import recipe
from tests.support.training_runs import adapter, difference

KEYS: dict[str, Any] = {"use_cpu": True, "max_samples": 32, "seed": 3, "gradient_accumulation_steps": 1, "fsdp": True}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
KILLS = int(os.environ.get("KT_KILLS", "20"))
# argv: port, restarts, recipe. torchrun's agent with its default rendezvous; ranks are forks of it, because importing
# their packages would take most of the time between two kills.
LAUNCHER = """
import sys
import transformers.models.qwen3_moe.modeling_qwen3_moe
import trl.trainer.sft_trainer
import typer
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import ktransformers.train.run, ktransformers.train.trainers
from ktransformers.cli.train import train

def rank(file):
    sys.argv = ["kt-train", file]
    typer.run(train)

port, restarts, file = sys.argv[1:]
options = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{port}", "rdzv_configs": {"rank": 0}}
options |= {"run_id": "none", "max_restarts": int(restarts), "start_method": "fork", "monitor_interval": 0.1}
elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **options), rank)(file)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("faults"), packed=False)


def wait_for_step(run: Path, step: int, seconds: float, alive: Any) -> None:
    deadline = time.monotonic() + seconds
    while not any(int(path.name[11:]) >= step for path in list_checkpoints(run)):
        assert alive() and time.monotonic() < deadline, f"step {step} of {run} was not reached"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named_and_ends_the_run(model: Path, tmp_path: Path, victim: int) -> None:
    keys = recipe(model, tmp_path / "run", **KEYS | SAVING, max_steps=500)
    ranks = start_ranks(keys, tmp_path, 2)
    wait_for_step(tmp_path / "run", 2, 300, lambda: all(rank.alive for rank in ranks))
    os.kill(ranks[victim].pid, signal.SIGKILL)
    killed = time.monotonic()
    time.sleep(0.1)
    os.kill(ranks[1 - victim].pid, signal.SIGTERM)  # torchrun does so when it sees that a rank has ended
    while ranks[1 - victim].alive and time.monotonic() - killed < 60:
        time.sleep(0.05)
    seconds = time.monotonic() - killed
    left = ranks[1 - victim].wait(1)
    ranks[victim].wait(1)
    assert left.returncode == EXIT_CODE, left.stderr[-2000:]
    lines = [line for line in left.stderr.splitlines() if line.startswith("kt: ")]
    assert (
        len(lines) == 1 and f"rank {victim} on " in lines[0] and f"process {ranks[victim].pid}, has ended" in lines[0]
    )
    assert "started again it goes on from" in lines[0] and "Traceback" not in left.stderr
    assert seconds < 30  # two seconds on an idle machine
    assert find_problem(list_checkpoints(tmp_path / "run")[-1]) is None


def test_restarted_run_goes_on_although_it_was_asked_to_start_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktransformers.train.checkpoints.find_problem", lambda folder, resumed=True: None)
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    settings = read_settings(recipe(Path("m"), tmp_path / "run", overwrite_output_dir=True))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert find_resume_point(settings).checkpoint is None  # the checkpoint is of an earlier run
    (tmp_path / "run" / RUN_ID_FILE).write_text("a")
    assert find_resume_point(settings).checkpoint == tmp_path / "run" / "checkpoint-3"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert find_resume_point(settings).checkpoint is None


@pytest.mark.soak
@pytest.mark.parametrize("parallel", [1, 2])
def test_kills_of_random_ranks_lose_nothing(model: Path, tmp_path: Path, parallel: int) -> None:
    """Restarted by torchrun's agent; KT_KILLS says how often."""
    steps = 4 * KILLS + 8
    keys = recipe(model, tmp_path / "whole" / "run", **KEYS | SAVING, max_steps=steps, lr_scheduler_type="constant")
    keys |= {"kt_expert_parallel": parallel}
    run_ranks(keys, tmp_path / "whole", 2)
    run, choose = tmp_path / "killed" / "run", random.Random(7)
    (tmp_path / "keys.yaml").write_text(json.dumps(keys | {"output_dir": str(run), "overwrite_output_dir": True}))
    (tmp_path / "launch.py").write_text(LAUNCHER)
    command = [sys.executable, str(tmp_path / "launch.py"), free_port(), str(KILLS + 2), str(tmp_path / "keys.yaml")]
    with (tmp_path / "log").open("w") as log:
        launched = subprocess.Popen(command, stdout=log, stderr=log, env=launcher_environment(tmp_path))
        for _ in range(KILLS):
            if choose.random() < 0.7:  # while it trains or saves; otherwise at any moment, also while it starts
                wait_for_step(run, last_step(run) + 1, 300, lambda: launched.poll() is None)
            time.sleep(choose.random())
            while len(ranks := rank_processes(launched.pid)) < 2:
                assert launched.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(0.05)
            os.kill(choose.choice(ranks), signal.SIGKILL)
        assert launched.wait(600) == 0, (tmp_path / "log").read_text()[-4000:]
    named = [line for line in (tmp_path / "log").read_text().splitlines() if "has ended; this run stops" in line]
    assert len(named) >= KILLS // 2  # torchrun alone reports a kill before the ranks know each other
    logs = [(folder / "trainer_log.jsonl").read_text().splitlines() for folder in (tmp_path / "whole" / "run", run)]
    losses = [{line["current_steps"]: line["loss"] for line in map(json.loads, log) if "loss" in line} for log in logs]
    assert list(losses[1]) == list(range(1, steps + 1)) and losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert difference(adapter(run), adapter(tmp_path / "whole" / "run")) < 1e-5


def last_step(run: Path) -> int:
    return max((int(path.name[11:]) for path in list_checkpoints(run)), default=0)


def rank_processes(launcher: int) -> list[int]:
    ranks: list[int] = []
    with contextlib.suppress(OSError):  # a thread of the launcher has ended
        for file in Path(f"/proc/{launcher}/task").glob("*/children"):
            ranks += map(int, file.read_text().split())
    return ranks
