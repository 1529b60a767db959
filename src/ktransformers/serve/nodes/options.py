"""The nodes that a launch line belongs to: rank and size from `--nodes` or torchrun's variables, address and token, and
the partition of the experts.

With `--nodes N` this process is rank 0, and Ray starts the others with a random token. Under torchrun rank 0 listens on
`--nodes-address`, by default MASTER_ADDR and the port after MASTER_PORT, which torchrun uses itself; the token of the
launch is KT_NODES_TOKEN, on a loopback address torchrun's run id.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktransformers.experts.partition import ExpertPartition, by_experts, by_frequency, by_layers
from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import Target

DEFAULT_ADDRESS, DEFAULT_PORT = "127.0.0.1", 29500  # of MASTER_ADDR and MASTER_PORT, as in torch


@dataclass(frozen=True)
class NodeOptions:
    rank: int
    ranks: int
    address: str  # of rank 0; empty: that which Ray knows this machine by
    port: int
    token: str
    seconds: float  # that an answer of a node may take


def read_nodes(launch: Launch, environment: Mapping[str, str] | None = None) -> NodeOptions | None:
    """None: a server of one process."""
    variables = os.environ if environment is None else environment
    ranks = _number(variables, "WORLD_SIZE", 1)
    if launch.nodes is not None and ranks > 1:
        raise InputError("nodes", f"{launch.nodes} under torchrun", "one of both", "leave --nodes out, or torchrun")
    if launch.nodes is None and ranks < 2 and launch.nodes_address is not None:
        remedy = "pass --nodes N, or start every node with torchrun"
        raise InputError("nodes-address", launch.nodes_address, "several nodes", remedy)
    if max(ranks, launch.nodes or 1) < 2:
        return None
    if launch.nodes is not None:
        address, port = ("", 0) if launch.nodes_address is None else _address(launch, variables)
        return NodeOptions(0, launch.nodes, address, port, secrets.token_hex(), launch.nodes_timeout)
    rank = _number(variables, "RANK", -1)
    if not 0 <= rank < ranks:
        raise InputError("RANK", variables.get("RANK", "nothing"), f"0 to {ranks - 1}", "torchrun sets it")
    address, port = _address(launch, variables)
    token = env.text("KT_NODES_TOKEN")
    if not token and _is_loopback(address):
        token = f"loopback {variables.get('TORCHELASTIC_RUN_ID', '')}"
    if not token:
        remedy = "export the same KT_NODES_TOKEN on every node: python -c 'import secrets; print(secrets.token_hex())'"
        raise InputError("KT_NODES_TOKEN", "nothing", f"a secret, because {address} is no loopback address", remedy)
    return NodeOptions(rank, ranks, address, port, token, launch.nodes_timeout)


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name, "").strip()
    if text and not text.isdigit():
        raise InputError(name, text, "a number", "torchrun sets it")
    return int(text) if text else default


def _address(launch: Launch, variables: Mapping[str, str]) -> tuple[str, int]:
    if launch.nodes_address is not None:
        host, _, port = launch.nodes_address.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise InputError("nodes-address", launch.nodes_address, "ADDRESS:PORT of rank 0")
        return host.strip("[]"), int(port)
    master = variables.get("MASTER_ADDR", "").strip() or DEFAULT_ADDRESS
    return master, _number(variables, "MASTER_PORT", DEFAULT_PORT) + 1


def _is_loopback(address: str) -> bool:
    try:
        names = {str(entry[4][0]) for entry in socket.getaddrinfo(address, None)}
    except OSError as error:
        raise InputError("nodes-address", f"{address} ({error})", "an address or a name that resolves") from error
    return all(ipaddress.ip_address(name.partition("%")[0]).is_loopback for name in names)


def make_partition(launch: Launch, target: Target, ranks: int) -> ExpertPartition:
    """The experts of the model over all nodes, from its configuration and the launch line."""
    from ktransformers.experts.contract import expert_modules, read_contract
    from ktransformers.modeling.load import meta_model

    modules = expert_modules(meta_model(target.model))
    if not modules:
        raise InputError("model", f"{target.model}, which has no experts", "experts to divide over several nodes")
    counts = [read_contract(name, module).shape.num_experts for name, module in modules.items()]
    if len(set(counts)) > 1:
        raise InputError("model", f"layers of {min(counts)} to {max(counts)} experts", "as many in every layer")
    layers, experts = len(counts), counts[0]
    if launch.first_node_experts is not None:
        return _with_first_share(layers, experts, ranks, launch.first_node_experts)
    if launch.expert_partition == "layers":
        return by_layers(layers, experts, ranks)
    if launch.expert_partition == "frequency":
        return by_frequency(_counts(launch, list(modules), experts), ranks)
    return by_experts(layers, experts, ranks)


def _with_first_share(layers: int, experts: int, ranks: int, first: int) -> ExpertPartition:
    """So many experts of every layer on rank 0, the rest in even ranges on the others."""
    if not 0 <= first <= experts - (ranks - 1):
        expected = f"0 to {experts - ranks + 1}, so that {ranks - 1} other nodes have experts of {experts}"
        raise InputError("first-node-experts", first, expected)
    others = by_experts(layers, experts - first, ranks - 1).owners
    return ExpertPartition(tuple((0,) * first + tuple(owner + 1 for owner in row) for row in others), ranks)


def _counts(launch: Launch, names: list[str], experts: int) -> list[list[int]]:
    from ktransformers.place.residents import load_counts

    path = launch.place.get("init_expert_location")
    if path is None:
        raise InputError("kt-expert-partition", "frequency", "--init-expert-location with counts of routed tokens")
    rows = load_counts(Path(path), names, experts)
    return [[int(count) for count in row] for row in rows]
