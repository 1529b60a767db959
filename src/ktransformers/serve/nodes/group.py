"""A launch line of `kt serve` that belongs to a group of nodes: everything is checked before anything is loaded, then
rank 0 becomes the server and the other ranks, which Ray or torchrun starts, nodes of experts.

Refused at once: placement on GPUs, which needs all experts in one process; a partition that leaves a node without
experts; less memory than the node's part needs; on rank 0 a port in use; nodes that differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ktransformers.experts.partition import ExpertPartition, ExpertShard
from ktransformers.ground.errors import InputError
from ktransformers.ground.options.placement import PlacementOptions, read_options
from ktransformers.ground.pool import pool_for
from ktransformers.ground.ray_cluster import RayCluster, join_cluster
from ktransformers.modeling.shard_stores import ShardLayer, load_shard
from ktransformers.modeling.spec import ModelSpec
from ktransformers.plan import open_shape, with_gpus
from ktransformers.plan.formats import counted_as
from ktransformers.plan.hosts import BY_EXPERTS, BY_LAYERS, evaluate_hosts, hosts_of, parse_network
from ktransformers.plan.workload import Choice, Serving
from ktransformers.serve.flags import Launch
from ktransformers.serve.forecast import workload_of
from ktransformers.serve.identity import node_facts
from ktransformers.serve.nodes.expert_node import run_expert_node
from ktransformers.serve.nodes.node_pool import NodePool
from ktransformers.serve.nodes.options import NodeOptions, make_partition
from ktransformers.serve.nodes.ray_nodes import start_nodes
from ktransformers.serve.target import Target, resolve_target

ALLOWED_PLACEMENT = {"init_expert_location", "kt_record_experts"}  # that do not place experts
DEFAULT_NETWORK = "25Gb"  # memory does not depend on it
LogLine = Callable[[str], None]


@dataclass(frozen=True)
class NodeGroup:
    """Rank 0's nodes, and its own part of the experts."""

    pool: NodePool
    shard: ExpertShard
    cluster: RayCluster | None = None  # None: torchrun has started the nodes

    def close(self) -> None:
        self.pool.close()
        if self.cluster is not None:
            self.cluster.close()


def check_launch(launch: Launch, target: Target) -> None:
    """Flags, and keys of a YAML file, that several nodes have no answer to."""
    options, defaults = read_options(launch.place, target.keys), PlacementOptions()
    for name in {field.name for field in fields(options)} - ALLOWED_PLACEMENT:
        value = getattr(options, name)
        if value != getattr(defaults, name) and (name, value) != ("kt_place", "cpu"):
            raise InputError(name, value, "none with several nodes: experts stay on their CPUs")
    if launch.pages != "lazy":
        raise InputError(f"--{launch.pages}", "several nodes", "packed experts whose pages are read when they are used")
    if (launch.gpus or 1) > 1:
        raise InputError("tensor-parallel-size", launch.gpus, "one GPU on rank 0 with several nodes")


def paths_of(launch: Launch, target: Target) -> list[Path]:
    experts = target.choose_experts(launch.experts)
    return [target.model] if experts is None else [target.model, experts]


def shares_of(partition: ExpertPartition) -> tuple[str, tuple[int, ...]]:
    """The partition in the planner's words: its form, and experts of a layer, or layers, by node."""
    first = partition.owners[0]
    if all(len(set(row)) == 1 for row in partition.owners):
        owners = [row[0] for row in partition.owners]
        return BY_LAYERS, tuple(owners.count(rank) for rank in range(partition.ranks))
    return BY_EXPERTS, tuple(first.count(rank) for rank in range(partition.ranks))


def require_memory(
    launch: Launch, target: Target, work: Serving, shard: ExpertShard, gpus: int, log: LogLine
) -> list[int]:
    """Bytes of host memory that each node needs as planned, none if there is no plan. A part that does not fit into
    this node's memory is refused, unless --force is given."""
    from ktransformers.plan.calibrate import this_machine

    try:
        shape, machine = open_shape(str(target.model)), this_machine()
    except InputError as error:
        log(f"no plan of memory and time: {error}")
        return []
    machine = machine if gpus else with_gpus(machine, "none")
    (form, shares), name = shares_of(shard.partition), f"node {shard.rank}"
    choice = Choice(counted_as(shape.stored), gpus)
    candidate = evaluate_hosts(shape, work, choice, machine, parse_network(DEFAULT_NETWORK), form, shares)
    planned = [memory.host_bytes for memory in hosts_of(candidate).memory]
    log(f"memory   {planned[shard.rank] / 1e9:.2f} GB of {machine.memory / 1e9:.1f} GB free memory; experts by {form}")
    missing = {place: size for place, size in candidate.lacking.items() if place.partition(":")[0] == name}
    if missing and not launch.force:
        given = f"{sum(missing.values()) / 1e9:.1f} GB too little memory"
        remedy = "more nodes, --first-node-experts, or --force; `kt plan --hosts` compares"
        raise InputError(name, given, "its part of the experts to fit", remedy)
    return planned


def start_group(
    launch: Launch, target: Target, nodes: NodeOptions, work: Serving, gpus: int, log: LogLine
) -> NodeGroup | None:
    """Rank 0: all nodes have connected and agree. Other ranks: None, after they have served until rank 0 ended. `gpus`
    of rank 0."""
    check_launch(launch, target)
    shard = ExpertShard(make_partition(launch, target, nodes.ranks), nodes.rank)
    encoded = target.choose_expert_format(launch.expert_format, launch.experts)
    facts = node_facts(paths_of(launch, target), shard.partition, nodes.rank, encoded)
    planned = require_memory(launch, target, work, shard, gpus, log)
    if nodes.rank:
        run_expert_node(nodes, facts, lambda: _load_experts(launch, target, shard, log), log)
        return None
    cluster = None if launch.nodes is None else join_cluster(nodes.ranks)
    if cluster is not None and not nodes.address:
        nodes = replace(nodes, address=cluster.address)
    group = NodeGroup(NodePool(nodes, facts, log), shard, cluster)
    try:
        if cluster is not None:
            start_nodes(cluster, _serve_node, launch, replace(nodes, port=group.pool.port), planned, group.pool.report)
        log(f"waiting for {nodes.ranks - 1} expert nodes at {nodes.address}:{group.pool.port}")
        group.pool.wait_for_nodes()
    except BaseException:
        group.close()
        raise
    return group


def _serve_node(launch: Launch, options: NodeOptions, log: LogLine) -> None:
    """An expert node, which resolves the model by its own folders."""
    target = resolve_target(launch.target)
    start_group(launch, target, options, workload_of(launch, target, "cpu"), 0, log)


def _load_experts(launch: Launch, target: Target, shard: ExpertShard, log: LogLine) -> list[ShardLayer]:
    log(f"loading experts of {target.model}")
    spec = ModelSpec(
        target.model,
        experts=target.choose_experts(launch.experts),
        formats=target.choose_expert_format(launch.expert_format, launch.experts),
        isa=launch.isa,
        pool=pool_for(launch.threads, launch.groups, log),
        verify=launch.verify,
        shard=shard,
    )
    return load_shard(spec)
