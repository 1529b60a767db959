"""Two ranks on one machine: they train on one packed copy of the experts, each with its part of the cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.ground import rank_cores
from tests.support.packing import pack
from tests.support.tiny_models import build, save
from tests.support.training import TOKENIZER, recipe

for package in ("trl", "datasets"):
    pytest.importorskip(package)

SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_hidden_layers": 2}
ROOT = Path(__file__).resolve().parents[2]

RANK = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from ktransformers.ground.pool import default_pool
from ktransformers.train.run import train
from ktransformers.train.resolve import read_settings
from tests.support.packing import mapped_pages
from tests.support.training import RunRecorder
from transformers import TrainerCallback

file, packed, out = map(Path, sys.argv[1:])
import ktransformers.train.run as run

class Looking(TrainerCallback):
    def on_train_end(self, args, state, control, **kwargs):
        dist.barrier()  # both have trained, and both are there
        whole, share = mapped_pages(os.getpid(), packed)
        pool = default_pool()
        found = {"whole": whole, "share": share, "threads": pool.threads, "cpus": pool.cpus}
        found["mask"] = sorted(os.sched_getaffinity(0))
        found["steps"] = state.global_step
        (out / f"{dist.get_rank()}.json").write_text(json.dumps(found))
        dist.barrier()

build_trainer = run.build_trainer
def watched(*args, **kwargs):
    trainer = build_trainer(*args, **kwargs)
    trainer.add_callback(Looking())
    return trainer
run.build_trainer = watched
train(read_settings(file, []), RunRecorder())
"""


@pytest.mark.slow
def test_ranks_share_one_packed_copy_and_the_cores(tmp_path: Path) -> None:
    model, packed = tmp_path / "model", tmp_path / "packed"
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512, **SIZES), model)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, model / file.name)
    pack(model, packed, "bf16")
    keys = recipe(model, tmp_path / "run", max_steps=2, kt_weight_path=str(packed), use_cpu=True, max_samples=32)
    (tmp_path / "keys.yaml").write_text(json.dumps(keys))
    (tmp_path / "rank.py").write_text(RANK)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29431"]
    words = [str(tmp_path / "rank.py"), str(tmp_path / "keys.yaml"), str(packed), str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name not in ("KT_THREADS", "KT_PLACE")}
    paths = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "tests"), env.get("PYTHONPATH", ""))))
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([*launch, *words], capture_output=True, text=True, env=env, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    size = sum(file.stat().st_size for file in packed.glob("packed-*"))
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    mine = os.sched_getaffinity(0)
    for found in ranks:
        assert found["steps"] == 2
        assert 0.7 * size < found["whole"] <= 1.01 * size  # nearly all pages, each of which belongs to both
        assert found["share"] < 0.55 * found["whole"]
        assert found["threads"] <= max(1, len(found["mask"]))
    first, second = (set(found["mask"]) for found in ranks)
    if len({rank_cores.first_sibling(cpu) for cpu in mine}) > 1:
        assert first | second == mine and not first & second
        assert abs(len(first) - len(second)) <= 2
        assert not set(ranks[0]["cpus"]) & set(ranks[1]["cpus"]) - {-1}


@pytest.mark.parametrize(
    ("siblings", "ranks", "expected"),
    [
        ({0: 0, 1: 1, 2: 2, 3: 3}, 2, [{0, 1}, {2, 3}]),
        ({0: 0, 1: 1, 2: 0, 3: 1}, 2, [{0, 2}, {1, 3}]),  # two threads of a core stay together
        ({0: 0, 1: 1, 2: 2}, 2, [{0}, {1, 2}]),
        ({5: 5}, 3, [{5}, {5}, {5}]),
    ],
)
def test_cpu_shares_are_whole_cores(
    siblings: dict[int, int], ranks: int, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_cores, "first_sibling", siblings.__getitem__)
    assert [rank_cores.rank_cpus(siblings, rank, ranks) for rank in range(ranks)] == expected


def test_single_or_bound_process_keeps_its_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[object] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda *words: moved.append(words))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    rank_cores.bind_rank_cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0} if process == os.getpid() else {0, 1})
    rank_cores.bind_rank_cores()
    assert moved == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(rank_cores, "first_sibling", lambda cpu: cpu)
    monkeypatch.setenv("LOCAL_RANK", "1")
    rank_cores.bind_rank_cores()
    assert moved and {words[1] for words in moved} == {frozenset({1})}  # type: ignore[index]
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(rank_cores.InputError, match="LOCAL_RANK"):
        rank_cores.bind_rank_cores()
