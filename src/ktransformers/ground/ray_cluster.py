"""Joins a Ray cluster, or starts Ray on this machine alone. Ray is imported here, and nowhere before it is needed."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass, field
from typing import Any

from ktransformers.ground.errors import InputError

OBJECT_STORE_BYTES = 100 << 20  # of a Ray on this machine alone: nothing large is put into it
# A Ray for one command listens on 127.0.0.1, as on other systems than Linux; its processes have the command's priority.
ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass
class RayCluster:
    ray: Any  # the module
    address: str  # of this machine
    is_local: bool  # Ray was started for this command
    actors: list[Any] = field(default_factory=list)  # Ray ends an actor that nothing refers to

    @property
    def strategy(self) -> str:
        """Of placement groups: a machine for each process, where there are several."""
        return "PACK" if self.is_local else "STRICT_SPREAD"

    def close(self) -> None:
        self.ray.shutdown()


def join_cluster(processes: int) -> RayCluster:
    """The cluster that RAY_ADDRESS names, else one of this machine alone with room for so many processes. What
    processes print is in Ray's logs."""
    if importlib.util.find_spec("ray") is None:
        raise InputError("ray", "no such package", "it installed", "pip install 'ktransformers[ray]'")
    address = os.environ.get("RAY_ADDRESS")
    for name, value in ({} if address else ALONE).items():
        os.environ.setdefault(name, value)  # before Ray is imported
    ray: Any = importlib.import_module("ray")
    logs = {"log_to_driver": False, "logging_level": logging.ERROR}
    if not address:
        alone = {"num_cpus": processes, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        ray.init(address="local", **alone, **logs)
        return RayCluster(ray, "127.0.0.1", True)
    try:
        ray.init(address=address, **logs)
    except ConnectionError as error:
        raise InputError("RAY_ADDRESS", f"{address} ({error})", "a Ray cluster that runs", "`ray start`") from error
    return RayCluster(ray, ray.util.get_node_ip_address(), False)
