"""`accelerate launch` with a config file in the form of LLaMA-Factory's `fsdp2_kt_*.yaml`, end to end: two processes
under FSDP2 train what one process trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_runs import free_port, launcher_environment, run_ranks, tiny_model
from tests.support.training import recipe
from tests.support.training_runs import SCRIPT, adapter, difference

pytestmark = pytest.mark.slow
CONFIG = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def launch(config: Path, keys: dict[str, Any], folder: Path) -> str:
    """What the processes printed. The launcher of accelerate's command line."""
    folder.mkdir()
    (folder / "keys.yaml").write_text(json.dumps(keys))
    (folder / "kt.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--main_process_port", free_port(), str(folder / "kt.py"), str(folder / "keys.yaml")]
    environment = launcher_environment(folder)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_config_file_of_accelerate_shards_and_trains_what_one_process_trains(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    config = tmp_path / "fsdp2_kt_bf16.yaml"
    config.write_text(CONFIG)
    keys = recipe(model, tmp_path / "one" / "run", use_cpu=True, max_samples=32, seed=3, max_steps=3)
    keys |= {"kt_weight_path": str(tmp_path / "packed"), "gradient_accumulation_steps": 2}
    run_ranks(keys, tmp_path / "one", 1)
    two = keys | {"gradient_accumulation_steps": 1, "output_dir": str(tmp_path / "two" / "run")}
    printed = launch(config, two, tmp_path / "two")
    divided = two | {"output_dir": str(tmp_path / "divided" / "run"), "kt_expert_parallel": 2}
    launch(config, divided, tmp_path / "divided")
    assert "fsdp_config.cpu_ram_efficient_loading: has no effect" in printed
    for name in ("two", "divided"):
        run = tmp_path / name / "run"
        assert difference(adapter(run), adapter(tmp_path / "one" / "run")) < 2e-4
        logs = [(folder / "trainer_log.jsonl").read_text() for folder in (run, tmp_path / "one" / "run")]
        losses = [[line["loss"] for line in map(json.loads, log.splitlines()) if "loss" in line] for log in logs]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and len(losses[0]) == 3
