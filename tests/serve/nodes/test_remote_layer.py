"""Experts on several nodes give what one process gives: layers alone, whole answers, mixed adapters, chunks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.partition import ExpertPartition, by_experts, by_layers
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.plan.exchange import forward_row, layer_exchange
from tests.support.expert_nodes import NodeThreads, node_threads, wait_for
from tests.support.serving import EXPERTS, HIDDEN, LAYERS, EngineHarness, random_prompt

FIRST_NONE = ExpertPartition(((1, 1, 1, 2, 2, 2),) * LAYERS, 3)  # rank 0 has no experts
SCATTERED = ExpertPartition(((2, 0, 1, 1, 0, 2), (1, 2, 2, 0, 1, 0)), 3)
PARTITIONS = {
    "experts over 2": by_experts(LAYERS, EXPERTS, 2),
    "experts over 4": by_experts(LAYERS, EXPERTS, 4),
    "layers over 2": by_layers(LAYERS, EXPERTS, 2),
    "none on rank 0": FIRST_NONE,
    "scattered": SCATTERED,
}


@pytest.fixture(scope="module")
def three(model_directory: Path) -> Iterator[NodeThreads]:
    with node_threads(model_directory, SCATTERED) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def layers(three: NodeThreads, model_directory: Path) -> list[tuple[Any, Any]]:
    """(remote layer, store with all experts) of every layer."""
    whole = expert_modules(load_model(model_directory, dtype=torch.float32)).values()
    remote = expert_modules(three.load_model()).values()
    return [(one.kt.backend, two.kt.store) for one, two in zip(remote, whole, strict=True)]


def batch(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(tokens)
    ids = torch.stack([torch.randperm(EXPERTS)[:2] for _ in range(tokens)]) if tokens else torch.empty(0, 2).long()
    return torch.randn(tokens, HIDDEN).to(dtype), ids, torch.rand(tokens, 2)


@pytest.mark.parametrize("tokens", [0, 1, 3, 70])
def test_a_layer_equals_one_store(layers: list[tuple[Any, Any]], tokens: int) -> None:
    for remote, store in layers:
        hidden, ids, weights = batch(tokens)
        out = apply_experts(remote, hidden, ids, weights)
        torch.testing.assert_close(out, store.forward(hidden, ids, weights), rtol=1e-5, atol=1e-5)
        assert out.dtype == hidden.dtype and out.shape == hidden.shape


def test_16_bits_are_rounded_once_for_each_node(layers: list[tuple[Any, Any]]) -> None:
    remote, store = layers[0]
    hidden, ids, weights = batch(40, torch.bfloat16)
    out, expected = apply_experts(remote, hidden, ids, weights), store.forward(hidden, ids, weights)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected.float(), rtol=2**-7, atol=2**-7 * float(expected.abs().max()))


def test_ids_of_no_expert_add_nothing(layers: list[tuple[Any, Any]]) -> None:
    remote, store = layers[0]
    hidden, ids, weights = batch(20)
    ids[::3, 0], ids[5], ids[7] = -1, -1, EXPERTS
    out = apply_experts(remote, hidden, ids, weights)
    torch.testing.assert_close(out, store.forward(hidden, ids, weights), rtol=1e-5, atol=1e-5)
    assert not out[5].any() and not out[7].any()


def test_nodes_without_rows_get_no_message(three: NodeThreads, layers: list[tuple[Any, Any]]) -> None:
    remote, store = layers[0]
    before = {rank: node.node.rows for rank, node in three.nodes.items()}
    hidden, ids, weights = batch(9)
    ids[:] = torch.tensor([2, 3])  # of rank 1
    torch.testing.assert_close(
        apply_experts(remote, hidden, ids, weights), store.forward(hidden, ids, weights), rtol=1e-5, atol=1e-5
    )
    assert {rank: node.node.rows - before[rank] for rank, node in three.nodes.items()} == {1: 9, 2: 0}
    ids[:] = torch.tensor([1, 4])  # of rank 0
    apply_experts(remote, hidden, ids, weights)
    assert {rank: node.node.rows - before[rank] for rank, node in three.nodes.items()} == {1: 9, 2: 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_on_the_wire_are_those_of_the_plan(
    three: NodeThreads, layers: list[tuple[Any, Any]], dtype: torch.dtype
) -> None:
    remote, _ = layers[0]
    hidden, ids, weights = batch(2000, dtype)
    before = three.pool.counters()
    apply_experts(remote, hidden, ids, weights)
    after = three.pool.counters()
    counts = [SCATTERED.owners[0].count(rank) for rank in range(3)]
    planned = layer_exchange(2000, forward_row(HIDDEN, 2, dtype.itemsize), counts, 2, 0)
    assert after["sent"] - before["sent"] == pytest.approx(planned.sent, rel=0.1)
    assert after["received"] - before["received"] == pytest.approx(planned.returned, rel=0.1)


def same(first: Any, second: Any) -> None:
    assert first.tokens == second.tokens
    torch.testing.assert_close(torch.tensor(first.logprobs), torch.tensor(second.logprobs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", PARTITIONS)
def test_answers_equal_those_of_one_process(
    name: str, harness: EngineHarness, model_directory: Path, adapters: dict[str, Path]
) -> None:
    """The base and three adapters in one batch, prompts in chunks."""
    asked = [(random_prompt(7, 40), None), (random_prompt(8, 23), "one"), (random_prompt(9, 31), "two")]
    asked += [(random_prompt(10, 5), "attention"), (random_prompt(11, 1), "one")]
    with node_threads(model_directory, PARTITIONS[name]) as nodes:
        served = nodes.harness(adapters)
        results = []
        for one in (harness, served):
            pairs = [one.sequence(prompt, adapter) for prompt, adapter in asked]
            one.run(one.engine(chunked_prefill_size=16), *(sequence for sequence, _ in pairs))
            results.append([recorded for _, recorded in pairs])
        assert sum(node.node.rows for node in nodes.nodes.values()) > 100
    for alone, over_nodes in zip(*results, strict=True):
        same(alone, over_nodes)


def test_adapters_come_and_go_while_requests_run(
    three: NodeThreads, harness: EngineHarness, model_directory: Path, adapters: dict[str, Path]
) -> None:
    served = three.harness({})
    expected = harness.alone(random_prompt(3, 12), "two", max_tokens=4)
    engine = served.engine()
    engine.start()
    try:
        running = [served.sequence(random_prompt(4, 10), max_tokens=200) for _ in range(2)]
        engine.submit([sequence for sequence, _ in running])
        for version in range(1, 4):
            served.loaded["two"] = served.lora_modules.open(adapters["two"], "two", version, str(model_directory))
            sequence, recorded = served.sequence(random_prompt(3, 12), "two", max_tokens=4)
            engine.submit([sequence])
            wait_for(lambda recorded=recorded: recorded.finish is not None)
            same(expected, recorded)
            assert all(len(node.node.adapters) <= version * LAYERS for node in three.nodes.values())
            del sequence
        for _, recorded in running:
            wait_for(lambda recorded=recorded: recorded.finish is not None)
            assert recorded.finish == "length"
    finally:
        engine.stop()
    served.loaded.clear()
    del engine, running, recorded
    import gc

    gc.collect()
    assert any(node.node.adapters for node in three.nodes.values())
    served.alone(random_prompt(4, 40), max_tokens=2)  # what is not used any more is told with the next rows
    wait_for(lambda: all(not node.node.adapters for node in three.nodes.values()))


def test_factors_of_a_node_keep_a_matrix_that_gate_and_up_share() -> None:
    from ktransformers.adapters import LoraPair
    from ktransformers.serve.nodes.wire import decode_pairs, encode_pairs

    shared = torch.randn(5, 2, HIDDEN)
    pairs = {role: LoraPair(shared, torch.randn(5, 40, 2), 0.5) for role in ("gate", "up")}
    pairs["down"] = LoraPair(torch.randn(5, 2, 40).bfloat16(), torch.randn(5, HIDDEN, 2), 2.0)
    message = encode_pairs(pairs, [3, 1])
    assert len(message) < 1000 + sum(pair.b[:2].nbytes for pair in pairs.values()) + shared[:2].nbytes + 2 * 2 * 40 * 2
    read = decode_pairs(memoryview(message))
    assert read["gate"].a is read["up"].a and read["down"].a.dtype == torch.bfloat16
    for role, pair in pairs.items():
        assert torch.equal(read[role].a, pair.a[[3, 1]]) and torch.equal(read[role].b, pair.b[[3, 1]])
        assert read[role].scaling == pair.scaling


def test_an_adapter_of_other_experts_is_refused(layers: list[tuple[Any, Any]]) -> None:
    from ktransformers.adapters import LoraPair

    pair = LoraPair(torch.zeros(4, 2, HIDDEN), torch.zeros(4, 40, 2), 1.0)
    with pytest.raises(InputError, match="4 experts"):
        layers[0][0].share_lora("adapter", {"up": pair}, dict)
