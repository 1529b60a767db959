"""Expert nodes as Ray actors: one on each of N - 1 machines of the cluster, beside rank 0 on this one.

A placement group keeps a machine for each node (`STRICT_SPREAD`), with the host memory that its part needs as planned.
Ray starts a lost actor again, on its machine or on another one, and `run` once more in it; rows do not go through Ray.
Without RAY_ADDRESS, Ray is started on this machine for as long as the server runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.ray_cluster import RayCluster
from ktransformers.serve.flags import Launch
from ktransformers.serve.nodes.options import NodeOptions
from ktransformers.serve.nodes.wire import ConnectionLost

PLACE_SECONDS = 60.0  # that machines may take to have room

ServeExperts = Callable[[Launch, NodeOptions, Callable[[str], None]], None]


class ExpertNodeActor:
    """The process of an expert node under Ray."""

    def run(self, serve: ServeExperts, launch: Launch, options: NodeOptions, directory: str) -> None:
        """Returns when rank 0 has ended. Without its connection the process ends, so that Ray starts another."""
        if os.path.isdir(directory):
            os.chdir(directory)
        try:
            serve(launch, options, _log)
        except ConnectionLost as error:
            _log(f"rank 0 at {options.address}:{options.port} is gone: {error}")
            os._exit(1)


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # a file of Ray's logs


def start_nodes(
    cluster: RayCluster,
    serve: ServeExperts,
    launch: Launch,
    options: NodeOptions,
    planned: Sequence[int],
    report: Callable[[int, str], None],
) -> None:
    """`serve`: what a node does; `planned`: bytes of host memory of each node, or none; `report`: called with the rank
    and the reason if a node ends with an error that starting it again would not mend."""
    ray = cluster.ray
    here = ray.get_runtime_context().get_node_id()
    # Every bundle says where it may lie: Ray places them one by one and would give another one this machine.
    places = [{"ray.io/node-id": here}] + [{"ray.io/node-id": f"!{here}"}] * (options.ranks - 1)
    needs = [{"memory": float(size)} for size in planned] or [{}] * options.ranks
    group = ray.util.placement_group(
        [{"CPU": 1}, *({"CPU": 1, **need} for need in needs[1:])],
        strategy=cluster.strategy,
        bundle_label_selector=[{}] * options.ranks if cluster.is_local else places,
    )
    if not group.wait(PLACE_SECONDS):
        alive = sum(node["Alive"] for node in ray.nodes())
        most = max(planned[1:], default=0) / 1e9
        given = f"{options.ranks} nodes, a Ray cluster of {alive} machines with {ray.available_resources()}"
        expected = f"{options.ranks} machines, each with a free CPU and {most:.1f} GB in Ray's resource `memory`"
        raise InputError("nodes", given, expected, "start Ray on more machines, or ask for fewer nodes")
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    for rank in range(1, options.ranks):
        actor = ray.remote(ExpertNodeActor).options(
            num_cpus=1,
            memory=needs[rank].get("memory"),
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=strategy(group, placement_group_bundle_index=rank),
        )
        cluster.actors.append(actor.remote())
        ended = cluster.actors[-1].run.remote(serve, launch, replace(options, rank=rank), os.getcwd()).future()
        ended.add_done_callback(partial(_report, report, rank))


def _report(report: Callable[[int, str], None], rank: int, ended: Any) -> None:
    if (error := ended.exception()) is not None:
        report(rank, str(getattr(error, "cause", None) or error).strip().splitlines()[-1])
