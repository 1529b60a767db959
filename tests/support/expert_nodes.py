"""Expert nodes as threads of the test's process: real sockets, real stores, one model directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ktransformers.experts.partition import ExpertPartition, ExpertShard
from ktransformers.modeling.shard_stores import load_shard
from ktransformers.modeling.spec import ModelSpec
from ktransformers.nn import load_model
from ktransformers.serve.identity import node_facts
from ktransformers.serve.nodes.expert_node import ExpertNode, connect
from ktransformers.serve.nodes.node_pool import NodePool
from ktransformers.serve.nodes.options import NodeOptions
from ktransformers.serve.nodes.remote_layer import attach_nodes
from ktransformers.serve.nodes.wire import Connection, ConnectionLost, Header, Kind
from tests.support.serving import EngineHarness

TOKEN = "of this test"


def wait_for(condition: Any, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


class ThreadNode:
    """One node; `stop` ends it as a killed process ends: the socket closes."""

    def __init__(self, directory: Path, shard: ExpertShard, options: NodeOptions) -> None:
        self.options = replace(options, rank=shard.rank)
        self.facts = node_facts([directory], shard.partition, shard.rank)
        self.node = ExpertNode(load_shard(ModelSpec(directory, shard=shard)))
        self.stopping = False
        self.connection: Connection | None = None
        self.delay = 0.0  # before every answer
        self.start()

    def start(self) -> None:
        self.stopping = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.connection = connect(self.options, self.facts, 20)
            self.node.adapters.clear()
            self.connection.send(Header(Kind.READY))
            with torch.inference_mode():
                while self.node.answer(self.connection) and not self.stopping:
                    time.sleep(self.delay)
        except ConnectionLost:
            return

    def stop(self) -> None:
        self.stopping = True
        if self.connection is not None:
            self.connection.close()
        self.thread.join(10)


class NodeThreads:
    def __init__(self, directory: Path, partition: ExpertPartition, seconds: float = 20.0) -> None:
        self.directory, self.partition, self.lines = directory, partition, list[str]()
        options = NodeOptions(0, partition.ranks, "127.0.0.1", 0, TOKEN, seconds)
        self.pool = NodePool(options, node_facts([directory], partition, 0), self.lines.append)
        self.options = replace(options, port=self.pool.port)
        self.nodes = {
            rank: ThreadNode(directory, ExpertShard(partition, rank), self.options)
            for rank in range(1, partition.ranks)
        }
        self.pool.wait_until_ready()

    def load_model(self, dtype: torch.dtype = torch.float32) -> Any:
        model = load_model(self.directory, dtype=dtype, shard=ExpertShard(self.partition, 0))
        attach_nodes(model, self.pool)
        return model

    def harness(self, adapters: dict[str, Path]) -> EngineHarness:
        return EngineHarness(self.directory, adapters, model=self.load_model())

    def close(self) -> None:
        self.pool.close()
        for node in self.nodes.values():
            node.stop()


@contextmanager
def node_threads(directory: Path, partition: ExpertPartition, seconds: float = 20.0) -> Iterator[NodeThreads]:
    threads = NodeThreads(directory, partition, seconds)
    try:
        yield threads
    finally:
        threads.close()
