"""Nodes that leave, do not answer, come back, or do not belong here: clean errors, no wrong answer, nothing that
hangs."""

from __future__ import annotations

import gc
import json
import shutil
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.experts.partition import by_experts
from ktransformers.ground.errors import InputError
from ktransformers.serve.flags import parse
from ktransformers.serve.identity import node_facts
from ktransformers.serve.nodes.expert_node import Refused, connect
from ktransformers.serve.nodes.node_pool import NodePool
from ktransformers.serve.nodes.options import NodeOptions, make_partition, read_nodes
from ktransformers.serve.nodes.wire import HEADER, Connection, ConnectionLost
from ktransformers.serve.scheduler.engine import Unavailable
from ktransformers.serve.target import resolve_target
from tests.support.expert_nodes import TOKEN, NodeThreads, node_threads, wait_for
from tests.support.serving import EXPERTS, LAYERS, EngineHarness, make_service, random_prompt, run_app

TWO = by_experts(LAYERS, EXPERTS, 2)


@pytest.fixture(scope="module")
def nodes(model_directory: Path) -> Iterator[NodeThreads]:
    with node_threads(model_directory, TWO, seconds=2.0) as threads:
        yield threads


@pytest.fixture(scope="module")
def served_over_nodes(nodes: NodeThreads, adapters: dict[str, Path]) -> EngineHarness:
    return nodes.harness({name: adapters[name] for name in ("one", "two")})


def restart(nodes: NodeThreads) -> None:
    nodes.nodes[1].start()
    wait_for(lambda: not nodes.pool.unavailable())


def test_a_lost_node_ends_requests_and_comes_back(nodes: NodeThreads, served_over_nodes: EngineHarness) -> None:
    served, prompt = served_over_nodes, random_prompt(5, 20)
    before = [served.alone(prompt, adapter).tokens for adapter in (None, "one")]
    engine = served.engine()
    engine.unavailable = nodes.pool.unavailable
    engine.start()
    try:
        running = [served.sequence(prompt, adapter, max_tokens=400) for adapter in (None, "one")]
        engine.submit([sequence for sequence, _ in running])
        wait_for(lambda: all(len(recorded.events) > 3 for _, recorded in running))
        nodes.nodes[1].stop()
        for _, recorded in running:
            wait_for(lambda recorded=recorded: recorded.finish is not None)
            assert recorded.finish == "unavailable"
            assert "expert node 1 (127.0.0.1) is gone" in recorded.events[-1].error
        with pytest.raises(Unavailable, match=r"expert node 1 .127.0.0.1. is gone.*refused until it is back"):
            engine.submit([served.sequence(prompt)[0]])
        assert not engine.busy
        restart(nodes)
        for adapter, tokens in zip((None, "one"), before, strict=True):
            sequence, recorded = served.sequence(prompt, adapter)
            engine.submit([sequence])
            wait_for(lambda recorded=recorded: recorded.finish is not None)
            assert recorded.tokens == tokens
    finally:
        engine.stop()
    assert any("is connected again, with" in line for line in nodes.lines)


def test_a_node_that_does_not_answer_is_gone(nodes: NodeThreads, served_over_nodes: EngineHarness) -> None:
    nodes.nodes[1].delay = 30.0  # after the next answer it is silent
    started = time.monotonic()
    try:
        with pytest.raises(Unavailable, match="no answer within 2 s"):
            served_over_nodes.alone(random_prompt(6, 30), max_tokens=4)
        assert time.monotonic() - started < 20
    finally:
        node = nodes.nodes[1]
        node.delay, node.stopping = 0.0, True
    replaced = type(node)(nodes.directory, _shard(1), nodes.options)
    nodes.nodes[1] = replaced
    wait_for(lambda: not nodes.pool.unavailable())
    assert served_over_nodes.alone(random_prompt(6, 30), max_tokens=4).finish == "length"


def _shard(rank: int) -> Any:
    from ktransformers.experts.partition import ExpertShard

    return ExpertShard(TWO, rank)


def test_a_node_that_comes_back_takes_the_place_of_its_silent_connection(
    nodes: NodeThreads, served_over_nodes: EngineHarness
) -> None:
    """As after a loss of power: the connection before has not ended."""
    before, old = nodes.pool.counters()["losses"], nodes.nodes[1]
    nodes.nodes[1] = type(old)(nodes.directory, _shard(1), nodes.options)
    wait_for(lambda: nodes.pool.counters()["losses"] == before + 1 and not nodes.pool.unavailable())
    old.thread.join(10)
    assert not old.thread.is_alive()
    assert served_over_nodes.alone(random_prompt(6, 30), max_tokens=4).finish == "length"


def test_idle_losses_are_noticed(nodes: NodeThreads) -> None:
    nodes.nodes[1].stop()
    wait_for(lambda: "expert node 1" in nodes.pool.unavailable())
    restart(nodes)


def test_adapters_that_changed_on_disk_are_not_sent_again(
    nodes: NodeThreads, model_directory: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    from ktransformers.serve.scheduler.lora import LoraModules

    copy = tmp_path / "adapter"
    shutil.copytree(adapters["one"], copy)
    modules = LoraModules(nodes.load_model())
    loaded = modules.open(copy, "copy", 1, str(model_directory))
    nodes.nodes[1].stop()
    wait_for(lambda: bool(nodes.pool.unavailable()))
    with next(copy.glob("*.safetensors")).open("r+b") as file:  # in place: a replaced file stays open as it was
        data = bytearray(file.read())
        first = 8 + int.from_bytes(data[:8], "little")
        data[first::4] = bytes(byte ^ 1 for byte in data[first::4])
        file.seek(0)
        file.write(data)
    nodes.nodes[1].start()
    wait_for(lambda: "files that have changed" in nodes.pool.unavailable())
    with pytest.raises(Unavailable, match="expert node 1"):
        modules.open(adapters["two"], "two", 2, str(model_directory))
    del loaded
    gc.collect()
    nodes.nodes[1].stop()
    restart(nodes)


def test_http_answers_503_and_names_the_node(
    nodes: NodeThreads, served_over_nodes: EngineHarness, adapters: dict[str, Path]
) -> None:
    pytest.importorskip("fastapi")
    from ktransformers.serve.http.api import create_app

    service = make_service(served_over_nodes, adapters)
    service.nodes, service.engine.unavailable = nodes.pool, nodes.pool.unavailable

    def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    asked = {"model": "tiny:one", "prompt": "The sea", "max_tokens": 8, "temperature": 0}
    with run_app(create_app(service)) as url:
        status, first = post("/v1/completions", asked)
        assert status == 200
        nodes.nodes[1].stop()
        wait_for(lambda: bool(nodes.pool.unavailable()))
        status, answer = post("/v1/completions", asked)
        assert status == 503 and answer["error"]["code"] == "node_unavailable"
        assert "expert node 1 (127.0.0.1)" in answer["error"]["message"] and "\n" not in answer["error"]["message"]
        loading = {"lora_name": "late", "lora_path": str(adapters["two"])}
        status, answer = post("/v1/load_lora_adapter", loading)
        assert status == 503 and "expert node 1" in answer["error"]["message"]
        with pytest.raises(urllib.error.HTTPError) as health:
            urllib.request.urlopen(url + "/health")
        assert health.value.code == 503 and json.loads(health.value.read())["status"] == "unavailable"
        restart(nodes)
        assert post("/v1/load_lora_adapter", loading)[0] == 200
        status, again = post("/v1/completions", asked)
        assert status == 200 and again["choices"][0]["text"] == first["choices"][0]["text"]
        with urllib.request.urlopen(url + "/metrics") as reply:
            metrics = reply.read().decode()
        assert "kt_nodes_connected 1\n" in metrics and "kt_nodes_sent_bytes_total " in metrics


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ktransformers": "0.0.1"}, "ktransformers .*, as on rank 0, not 0.0.1"),
        ({"model files": "other"}, "model files .* not other"),
        ({"partition of the experts": "other"}, "partition of the experts"),
        ({"format of the experts": "int8"}, "format of the experts that of the files, as on rank 0, not int8"),
        ({"nodes": "3"}, "nodes 2, as on rank 0, not 3"),
        ({"rank": "7"}, "a rank from 1 to 1, not 7"),
    ],
)
def test_nodes_that_differ_are_refused(nodes: NodeThreads, change: dict[str, str], words: str) -> None:
    facts = node_facts([nodes.directory], TWO, 1) | change
    with pytest.raises(Refused, match=words):
        connect(nodes.options, facts, 5)
    assert not nodes.pool.unavailable()


def test_a_wrong_token_is_refused(nodes: NodeThreads) -> None:
    with pytest.raises(Refused, match="the same KT_NODES_TOKEN"):
        connect(replace(nodes.options, token="another"), node_facts([nodes.directory], TWO, 1), 5)
    assert not nodes.pool.unavailable()


def test_strangers_do_not_disturb(nodes: NodeThreads) -> None:
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, HEADER.pack(9, 9, 9, 9, 9, 9, 9)):
        with socket.create_connection((nodes.options.address, nodes.options.port)) as stranger:
            stranger.sendall(data)
    assert not nodes.pool.unavailable()


def test_two_models_that_differ_in_numbers_differ(model_directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "tiny"
    shutil.copytree(model_directory, copy)
    first, second = (node_facts([path], TWO, 1) for path in (model_directory, copy))
    assert first == second
    file = next(copy.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert node_facts([copy], TWO, 1)["model files"] != first["model files"]


def test_rank_0_does_not_wait_for_ever_and_reports_refusals(model_directory: Path) -> None:
    facts = node_facts([model_directory], TWO, 0)
    options = NodeOptions(0, 2, "127.0.0.1", 0, TOKEN, 2.0)
    pool = NodePool(options, facts, lambda _: None)
    try:
        with pytest.raises(InputError, match=r"no connection of node 1 to 127.0.0.1:"):
            pool.wait_for_nodes(0.3)
        with pytest.raises(InputError, match="a free port of rank 0"):
            NodePool(replace(options, port=pool.port), facts, lambda _: None)
        port = replace(options, port=pool.port)
        with pytest.raises(Refused):
            connect(port, facts | {"rank": "1", "ktransformers": "0.0.1"}, 5)
        with pytest.raises(InputError, match=r"node 1 .* with other settings, where ktransformers"):
            pool.wait_for_nodes(5)
    finally:
        pool.close()


def test_a_node_gives_up_when_there_is_no_rank_0(model_directory: Path) -> None:
    options = NodeOptions(1, 2, "127.0.0.1", 1, TOKEN, 2.0)
    with pytest.raises(InputError, match=r"no rank 0 at 127.0.0.1:1"):
        connect(options, node_facts([model_directory], TWO, 1), 0.1)


def connected() -> tuple[Connection, Connection]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    return Connection(left, 0.5), Connection(right, 0.5)


def test_another_protocol_and_silence_end_a_connection() -> None:
    one, two = connected()
    one.send_bytes(HEADER.pack(99, 0, 0, 0, 0, 0, 0))
    with pytest.raises(ConnectionLost, match="not a message of this protocol"):
        two.receive(5)
    with pytest.raises(ConnectionLost, match="was closed"):
        one.receive(5)
    one, two = connected()
    with pytest.raises(ConnectionLost, match=r"no answer within 0.1 s"):
        two.receive(0.1)
    assert one.has_ended() and two.has_ended()


def test_a_message_that_stops_half_way_ends_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as left:
        right, _ = listener.accept()
        two = Connection(right, 0.2)
        left.sendall((1000).to_bytes(4, "big") + b"x" * 10)
        with pytest.raises(ConnectionLost, match="does not read or write"):
            two.receive(5)


ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def test_the_group_is_read_from_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_NODES_TOKEN", raising=False)
    launch = parse(["m"])
    assert read_nodes(launch, {}) is None
    options = read_nodes(launch, ENVIRONMENT)
    assert options is not None
    assert (options.rank, options.ranks, options.address, options.port) == (1, 2, "127.0.0.1", 29512)
    given = read_nodes(parse(["m", "--nodes-address", "localhost:99", "--nodes-timeout", "5"]), ENVIRONMENT)
    assert given is not None and (given.address, given.port, given.seconds) == ("localhost", 99, 5.0)
    with pytest.raises(InputError, match="KT_NODES_TOKEN: given nothing"):
        read_nodes(launch, ENVIRONMENT | {"MASTER_ADDR": "192.0.2.7"})
    monkeypatch.setenv("KT_NODES_TOKEN", "secret")
    options = read_nodes(launch, ENVIRONMENT | {"MASTER_ADDR": "192.0.2.7"})
    assert options is not None and options.token == "secret"
    for wrong in ({"RANK": "2"}, {"RANK": ""}, {"WORLD_SIZE": "x"}):
        with pytest.raises(InputError, match="torchrun sets it"):
            read_nodes(launch, ENVIRONMENT | wrong)
    with pytest.raises(InputError, match="several nodes"):
        read_nodes(parse(["m", "--nodes-address", "localhost:99"]), {})
    three = read_nodes(parse(["m", "--nodes", "3"]), {})
    assert three is not None and (three.rank, three.ranks, three.address, len(three.token)) == (0, 3, "", 64)
    assert read_nodes(parse(["m", "--nodes", "1"]), {}) is None
    with pytest.raises(InputError, match="under torchrun"):
        read_nodes(parse(["m", "--nodes", "3"]), ENVIRONMENT)


@pytest.mark.parametrize("line", ["--kt-expert-partition bananas", "--nodes-timeout 0", "--nodes-timeout inf"])
def test_wrong_flags_are_refused(line: str) -> None:
    with pytest.raises(InputError):
        parse(["m", *line.split()])


def test_partitions_of_the_launch_line(model_directory: Path, tmp_path: Path) -> None:
    from ktransformers.serve.nodes.group import check_launch, shares_of

    target = resolve_target(str(model_directory))

    def made(ranks: int, *words: str) -> Any:
        return shares_of(make_partition(parse([str(model_directory), *words]), target, ranks))

    assert made(2) == ("experts", (3, 3))
    assert made(2, "--kt-expert-partition", "layers") == ("layers", (1, 1))
    assert made(3, "--first-node-experts", "0") == ("experts", (0, 3, 3))
    assert made(2, "--first-node-experts", "5") == ("experts", (5, 1))
    counts = tmp_path / "counts.json"
    names = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]
    counts.write_text(json.dumps({name: [3, 3, 1, 1, 1, 1] for name in names}))
    frequency = ("--kt-expert-partition", "frequency", "--init-expert-location", str(counts))
    partition = make_partition(parse([str(model_directory), *frequency]), target, 2)
    assert all(row[0] != row[1] for row in partition.owners), "the two busiest experts are on two nodes"
    with pytest.raises(InputError, match="init-expert-location"):
        made(2, "--kt-expert-partition", "frequency")
    for words in (("--first-node-experts", "6"), ("--first-node-experts", "-1")):
        with pytest.raises(InputError, match="first-node-experts"):
            made(2, *words)
    with pytest.raises(InputError, match="at most 6"):
        made(7)
    with pytest.raises(InputError, match="experts stay on their CPUs"):
        check_launch(parse(["m", "--kt-num-gpu-experts", "2"]), target)
    with pytest.raises(InputError, match=r"kt_optimize_rule.*experts stay on their CPUs"):
        check_launch(parse(["m"]), replace(target, keys={"kt_optimize_rule": "rules.yaml"}))
    with pytest.raises(InputError, match="one GPU on rank 0"):
        check_launch(parse(["m", "--tp", "2"]), target)
    check_launch(parse(["m", "--kt-place", "cpu", "--kt-record-experts", "counts.json"]), target)
