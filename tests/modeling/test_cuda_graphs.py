"""The life cycle of CUDA graphs with a fake capture: when a key is captured, what a failure refuses, what is forgotten;
and the switch KT_GRAPHS."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ktransformers.ground import env
from ktransformers.ground.errors import InputError
from ktransformers.modeling import cuda_graphs
from ktransformers.modeling.cuda_graphs import CAPTURE_AT, GraphCache, GraphPool, Refusal, padded_tokens

Cache = GraphCache[str, str]


@pytest.fixture
def pool() -> GraphPool:
    return GraphPool(torch.device("cpu"))


@pytest.fixture
def cache(pool: GraphPool) -> Cache:
    return GraphCache("fakes", pool)


def request(cache: Cache, key: str, make: Callable[[], str] | None = None, caller: object = None) -> str | None:
    """As callers do: replay, or capture when it is time."""
    graph = cache.get(key)
    if graph is None and cache.due(key, caller):
        graph = cache.capture(key, make or (lambda: f"graph of {key}"), f"fakes of {key}")
    return graph


def failing(error: Exception) -> Callable[[], str]:
    def make() -> str:
        raise error

    return make


def captured_keys(cache: Cache, keys: str, rounds: int = CAPTURE_AT) -> list[str]:
    for _ in range(rounds):
        for key in keys:
            request(cache, key)
    return list(cache.captured)


def test_key_is_captured_at_its_third_occurrence_and_then_replayed(cache: Cache) -> None:
    made: list[str] = []

    def make() -> str:
        made.append("graph")
        return "graph"

    assert [request(cache, "a", make) for _ in range(5)] == [None, None, "graph", "graph", "graph"]
    assert made == ["graph"]


def test_only_occurrences_of_the_first_caller_count(cache: Cache) -> None:
    for turn in range(CAPTURE_AT):
        assert {cache.due("a", layer) for layer in (4, 5, 6)} == {turn == CAPTURE_AT - 1}


def test_number_of_graphs_is_bounded(pool: GraphPool) -> None:
    cache: Cache = GraphCache("fakes", pool, max_graphs=2)
    assert captured_keys(cache, "abc") == ["a", "b"]
    assert not cache.may_capture("c") and cache.may_capture("a"), "a captured key may get a new graph"
    cache.evict(lambda key: key == "a")
    assert captured_keys(cache, "c") == ["b", "c"]


def test_number_of_counted_keys_is_bounded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_COUNTED", 4)
    for key in "abcdefghij":
        request(cache, key)
        assert len(cache._counts) <= 5
    assert captured_keys(cache, "a") == ["a"]


def test_evicted_key_is_captured_again_at_once(cache: Cache) -> None:
    captured_keys(cache, "ab")
    cache.evict(lambda key: key == "a")
    assert list(cache.captured) == ["b"] and request(cache, "a") == "graph of a"


def test_reset_forgets_occurrences_and_refusals(cache: Cache) -> None:
    captured_keys(cache, "a")
    cache.refused = {"a", "b"}
    cache.evict()
    cache.reset(lambda key: key == "a")
    assert cache.refused == {"b"} and not cache.may_capture("b")
    assert [request(cache, "a") for _ in range(CAPTURE_AT)] == [None] * (CAPTURE_AT - 1) + ["graph of a"]


def test_failed_capture_closes_the_cache_with_a_line(
    cache: Cache, pool: GraphPool, caplog: pytest.LogCaptureFixture
) -> None:
    captured_keys(cache, "a")
    other: Cache = GraphCache("others", pool)
    for _ in range(CAPTURE_AT + 2):
        assert request(cache, "b", failing(RuntimeError("not while capturing"))) is None
    assert caplog.messages == [
        "no further CUDA graphs of fakes, run eagerly instead: RuntimeError: not while capturing"
    ]
    assert cache.closed and not cache.may_capture("c") and not cache.due("c")
    assert request(cache, "a") == "graph of a", "graphs that exist are replayed"
    assert not other.closed and captured_keys(other, "b") == ["b"]


def test_equal_failures_of_caches_in_a_pool_are_logged_once(pool: GraphPool, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        layer: Cache = GraphCache("Attention", pool)
        assert layer.capture("a", failing(TypeError("three results"))) is None and layer.closed
    assert len(caplog.messages) == 1


def test_out_of_memory_closes_all_caches_of_the_pool(
    cache: Cache, pool: GraphPool, caplog: pytest.LogCaptureFixture
) -> None:
    other: Cache = GraphCache("others", pool)
    captured_keys(other, "a")
    assert cache.capture("a", failing(torch.OutOfMemoryError("tried to allocate"))) is None
    assert cache.closed and other.closed and request(other, "a") == "graph of a"
    assert caplog.messages == ["no further CUDA graphs of fakes, run eagerly instead: no GPU memory is left"]


def test_caller_may_refuse_the_key_alone(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    def policy(key: str, error: Exception) -> Refusal:
        return Refusal.KEY

    assert cache.capture("a", failing(ValueError("too large")), "fakes of a", policy) is None
    assert cache.refused == {"a"} and not cache.due("a") and captured_keys(cache, "b") == ["b"]
    assert "of fakes of a, run eagerly instead: ValueError: too large" in caplog.text


def test_caller_may_make_room_and_retry(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    captured_keys(cache, "ab")

    def make() -> str:
        if cache.captured:
            raise torch.OutOfMemoryError
        return "graph of c"

    def policy(key: str, error: Exception) -> Refusal:
        oldest = next(iter(cache.captured))
        cache.evict(lambda key: key == oldest)
        return Refusal.RETRY

    assert cache.capture("c", make, "", policy) == "graph of c"
    assert list(cache.captured) == ["c"] and not caplog.messages


def test_closed_and_disabled_caches_never_capture(cache: Cache, pool: GraphPool) -> None:
    captured_keys(cache, "a")
    cache.close()
    assert cache.closed and not cache.captured and not captured_keys(cache, "a")
    disabled: Cache = GraphCache("fakes", pool, enabled=False)
    assert disabled.closed and not captured_keys(disabled, "a")


def test_pool_on_a_cpu_warms_up_and_calls_again(pool: GraphPool) -> None:
    calls: list[str] = []

    def run() -> int:
        calls.append("run")
        return len(calls)

    replay = pool.record(run)
    assert calls == ["run"] and replay() == 2
    replay = pool.record(run, lambda: calls.append("rehearsal"))
    assert calls == ["run", "run", "rehearsal"] and replay() == 4


def test_padded_sizes_are_few_and_close() -> None:
    sizes = (1, 64, 65, 1000, 1025, 2049, 4000)
    assert [padded_tokens(tokens) for tokens in sizes] == [64, 64, 128, 1024, 1152, 2304, 4096]
    for tokens in range(1, 5000, 7):
        assert 0 <= padded_tokens(tokens) - tokens < max(64, tokens / 8 + 1)


@pytest.mark.parametrize(
    ("value", "enabled"),
    [
        ("", ["experts", "attention", "decode"]),
        ("0", []),
        ("none", []),
        ("experts", ["experts"]),
        ("decode, attention", ["attention", "decode"]),
    ],
)
def test_switch_lists_what_is_on(value: str, enabled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_GRAPHS", value)
    assert [name for name in env.GRAPHS if env.graphs_enabled(name)] == enabled


@pytest.mark.parametrize("value", ["1", "all", "experts,prefill", "0,decode", ","])
def test_switch_with_an_unknown_word_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_GRAPHS", value)
    with pytest.raises(InputError, match=r"KT_GRAPHS: given .*, expected a list of experts, attention, decode"):
        env.graphs_enabled("decode")


@pytest.mark.gpu
def test_graphs_share_a_pool_and_a_new_one_follows_the_last_graph() -> None:
    device = torch.device("cuda:0")
    pool = GraphPool(device)
    source, target = torch.ones(8, device=device), torch.zeros(8, device=device)

    def run() -> torch.Tensor:
        return target.copy_((source * 2 + 1).sum().expand(8))

    first, second = pool.record(run), pool.record(run)
    assert len({graph.pool() for graph in pool._graphs}) == 1
    source.fill_(2)
    target.zero_()
    assert first() is not None and float(second()[0]) == 40
    del first, second
    assert not len(pool._graphs)
    third = pool.record(run)
    source.fill_(3)
    assert float(third()[0]) == 56


@pytest.mark.gpu
def test_random_numbers_go_on_after_a_failed_capture() -> None:
    device = torch.device("cuda:0")
    pool = GraphPool(device)
    weights, target = torch.ones(64, device=device), torch.empty(64, device=device)

    def synchronising() -> None:
        target.copy_(torch.nn.functional.dropout(weights, 0.5))
        float(target.sum())

    with pytest.raises(RuntimeError):
        pool.record(synchronising)
    assert torch.nn.functional.dropout(weights, 0.5).sum() != 64
    replay = pool.record(lambda: target.copy_(torch.nn.functional.dropout(weights, 0.5)))
    assert not torch.equal(replay().clone(), replay()), "another mask at every replay"
