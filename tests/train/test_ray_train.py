"""`kt train FILE --nodes N` on a Ray of this machine: losses of two ranks as torchrun starts them, also when workers
are killed. `make test-ray` runs it; KT_KILLS sets how often."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ktransformers.train.checkpoints import list_checkpoints
from tests.support.rank_runs import launcher_environment, run_ranks, tiny_model
from tests.support.ray_cluster import ENVIRONMENT, RAY_PROCESSES, actors, processes, require_nothing_left
from tests.support.training import recipe
from tests.support.training_runs import adapter, difference

pytest.importorskip("ray", reason="ray is not installed: pip install 'ktransformers[ray]'")

KILLS = min(10, int(os.environ.get("KT_KILLS", "10")))
KEYS: dict[str, Any] = {"use_cpu": True, "max_samples": 32, "seed": 3, "gradient_accumulation_steps": 1}
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
KT = "from ktransformers.cli.main import main; main()"
WORKER = "RayTrainWorker"


def losses(run: Path) -> dict[int, float]:
    lines = map(json.loads, (run / "trainer_log.jsonl").read_text().splitlines())
    return {line["current_steps"]: line["loss"] for line in lines if "loss" in line}


def last_step(run: Path) -> int:
    return max((int(path.name[11:]) for path in list_checkpoints(run)), default=0)


@pytest.mark.ray
@pytest.mark.parametrize("kills", sorted({0, KILLS}))
def test_losses_are_those_of_torchrun(tmp_path: Path, kills: int) -> None:
    before, shared = set(processes(*RAY_PROCESSES)), set(os.listdir("/dev/shm"))
    model, steps = tiny_model(tmp_path, packed=False), 6 + 3 * kills
    keys = recipe(model, tmp_path / "whole" / "run", **KEYS | SAVING, max_steps=steps, lr_scheduler_type="constant")
    keys |= {"kt_expert_parallel": 2}
    run_ranks(keys, tmp_path / "whole", 2)
    run = tmp_path / "nodes" / "run"
    (tmp_path / "keys.yaml").write_text(json.dumps(keys | {"output_dir": str(run), "overwrite_output_dir": True}))
    environment = launcher_environment(tmp_path) | ENVIRONMENT
    with (tmp_path / "log").open("w") as log:
        line = [sys.executable, "-c", KT, "train", str(tmp_path / "keys.yaml"), "--nodes", "2"]
        launched = subprocess.Popen(line, stdout=log, stderr=log, env=environment)
        for kill in range(kills):
            reached = last_step(run)
            while last_step(run) <= reached:
                assert launched.poll() is None, (tmp_path / "log").read_text()[-4000:]
                time.sleep(0.05)
            workers = sorted(set(actors(WORKER)) - before)
            os.kill(workers[kill % len(workers)], signal.SIGKILL)
        assert launched.wait(900) == 0, (tmp_path / "log").read_text()[-4000:]
    assert list(losses(run)) == list(range(1, steps + 1))
    assert losses(run) == pytest.approx(losses(tmp_path / "whole" / "run"), rel=1e-6)
    assert difference(adapter(run), adapter(tmp_path / "whole" / "run")) < 1e-5
    require_nothing_left(before, shared)
