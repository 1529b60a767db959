"""The default thread pool and its replacement."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ktransformers.ground import pool


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = list(pool._default)
    yield
    pool._default[:] = before


def test_set_default_pool_replaces_the_default() -> None:
    chosen = pool.set_default_pool(threads=1)
    assert chosen.threads == 1
    assert pool.default_pool() is chosen
    assert pool.set_default_pool() is pool.default_pool() is not chosen


def test_spare_leaves_one_cpu_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_THREADS", raising=False)
    monkeypatch.delenv("KT_PLACE", raising=False)
    every = pool.set_default_pool().threads
    spared = pool.set_default_pool(spare=True).threads
    assert spared == (every - 1 if every > 2 else every)
    pool._default.clear()
    monkeypatch.setenv("KT_PLACE", "auto")
    assert pool.default_pool().threads == spared
    assert pool.set_default_pool(threads=2, spare=True).threads == 2, "a number that was given is kept"


@pytest.mark.parametrize(("quota", "asked", "threads"), [(0.0, "", 6), (2.5, "", 3), (0.4, "", 1), (2.5, "6", 6)])
def test_torch_has_no_more_threads_than_the_container_grants(
    quota: float, asked: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [6]
    monkeypatch.setattr(pool.torch, "get_num_threads", lambda: found[-1])
    monkeypatch.setattr(pool.torch, "set_num_threads", found.append)
    monkeypatch.setattr(pool._core, "machine", lambda: {"quota": quota})
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    pool.limit_torch_threads()
    assert found[-1] == threads
