"""`kt train FILE --nodes N`: Ray Train starts one rank on each of N machines, and all of them again when one is lost.

A rank is `kt train` itself, as torchrun would start it. Ray's process group serves to agree on a port; the run opens
one of its own, after the ranks have been compared. A run that is started again goes on from its last checkpoint."""

from __future__ import annotations

import importlib
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktransformers.cli.progress import log
from ktransformers.ground.errors import KTError
from ktransformers.ground.ray_cluster import join_cluster

# A run is given up after so many restarts.
RESTARTS = 10


def train_rank(line: dict[str, Any]) -> None:
    """One rank, in a worker of Ray Train."""
    import torch.distributed as dist

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.pop("ACCELERATE_TORCH_DEVICE", None)
    # Only a run that has been started before has left its id in the output directory.
    restart = {"TORCHELASTIC_RUN_ID": line["run"], "TORCHELASTIC_RESTART_COUNT": "1"}
    os.environ.update({"MASTER_PORT": str(port[0]), **restart})
    os.chdir(line["directory"])
    line["train"](*line["arguments"])


def train_on_nodes(train: Callable[..., None], *arguments: Any, output: Path, nodes: int, gpu: bool) -> None:
    """`train` with `arguments` is the command of one process. Returns when the run has ended; raises what ended it for
    good."""
    cluster = join_cluster(nodes + 1)
    ray_train, ray_torch = (importlib.import_module(f"ray.train{part}") for part in ("", ".torch"))
    run = secrets.token_hex(8)
    trainer = ray_torch.TorchTrainer(
        train_rank,
        train_loop_config={"train": train, "arguments": arguments, "run": run, "directory": os.getcwd()},
        scaling_config=ray_train.ScalingConfig(
            num_workers=nodes, use_gpu=gpu, resources_per_worker={"CPU": 1}, placement_strategy=cluster.strategy
        ),
        run_config=ray_train.RunConfig(
            name=run,
            storage_path=str(output.absolute() / "ray"),
            failure_config=ray_train.FailureConfig(max_failures=RESTARTS),
        ),
    )
    log(f"{nodes} ranks under Ray; their log is {output / 'running_log.txt'}")
    try:
        trainer.fit()
    except Exception as error:
        raise KTError(f"nodes: the run has failed {RESTARTS + 1} times, at last with: {error}") from error
    finally:
        cluster.close()
    log(f"the adapter is in {output}")
