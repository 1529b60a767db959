"""Runs `kt train` in several processes, as a launcher would start them, and in one; reads what they trained."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from pathlib import Path
from typing import Any

from tests.support.forked import Completed, Forked
from tests.support.packing import pack
from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER

ROOT = Path(__file__).resolve().parents[2]
SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_hidden_layers": 2}
# argv: the recipe, a folder for what each rank saw. Gradients are those of the first step.
RANK = """
import json, os, sys
from pathlib import Path
import torch
from transformers import TrainerCallback
import ktransformers.train.run as run
from ktransformers.parallel import sharding
from ktransformers.ground.pool import default_pool
from ktransformers.train.resolve import read_settings
from safetensors.torch import save_file
from tests.support.packing import mapped_pages
from tests.support.rank_memory import parameter_bytes
from tests.support.training import RunRecorder

file, folder = map(Path, sys.argv[1:])
rank = os.environ.get("RANK", "0")
seen = {}

class FirstGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if state.global_step == 0 and not seen:
            trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            grads = {name: sharding.whole_tensor(grad).clone() for name, grad in trained.items()}
            seen["bytes"] = parameter_bytes(model)
            seen["sharded"] = sum(sharding.is_sharded(p) for p in model.parameters())
            save_file(grads, folder / f"gradients-{rank}.safetensors")

    def on_train_end(self, args, state, control, **kwargs):
        packed = json.loads(file.read_text()).get("kt_weight_path")
        if packed and args.world_size > 1:
            torch.distributed.barrier()
            seen["whole"], seen["share"] = mapped_pages(os.getpid(), Path(packed))
            seen["threads"], seen["mask"] = default_pool().threads, sorted(os.sched_getaffinity(0))
            torch.distributed.barrier()

build_trainer = run.build_trainer
def watched(*args, **kwargs):
    trainer = build_trainer(*args, **kwargs)
    trainer.add_callback(FirstGradients())
    return trainer
run.build_trainer = watched
watcher = RunRecorder()
run.train(read_settings(file, []), watcher)
seen["steps"] = [[s.step, s.values["loss"], s.values["grad_norm"]] for s in watcher.steps if "loss" in s.values]
seen["eval"] = [s.values["eval_loss"] for s in watcher.steps if "eval_loss" in s.values]
seen["notes"] = [*watcher.notes, *watcher.plans[0].notes]
(folder / f"seen-{rank}.json").write_text(json.dumps(seen))
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def tiny_model(folder: Path, *, packed: bool = True) -> Path:
    """A float32 model with a tokenizer, and its experts packed beside it."""
    model = save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, **SIZES), folder / "model")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, model / file.name)
    if packed:
        pack(model, folder / "packed", "bf16")
    return model


def start_ranks(keys: dict[str, Any], folder: Path, count: int, **variables: str) -> list[Forked]:
    """`count` ranks, or one process without a launcher. `folder` gets their recipe and what they saw."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(keys))
    if count == 1:
        return [Forked(RANK, file, folder, **variables)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1"}
    where |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "PYTHONFAULTHANDLER": "1", **variables}
    return [Forked(RANK, file, folder, **where, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]


def run_ranks(keys: dict[str, Any], folder: Path, count: int, **variables: str) -> list[dict[str, Any]]:
    """What each rank saw. Raises if one failed."""
    ended: list[Completed] = [rank.wait(560) for rank in start_ranks(keys, folder, count, **variables)]
    said = "\n".join(f"exit code {rank.returncode}: {rank.stderr[-3000:]}" for rank in ended)
    assert not any(rank.returncode for rank in ended), said
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(count)]


def launcher_environment(tmp_path: Path) -> dict[str, str]:
    """For a launcher that is started as a command."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KT_")}
    paths = os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH", ""))))
    return env | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}


def torchrun(count: int, *options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count)]
    return [*launcher, "--master-port", free_port(), *options]
