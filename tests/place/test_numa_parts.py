"""One copy of the experts on any number of NUMA nodes, simulated by groups of threads: the same bits forward, backward
and with LoRA, from tensors and from a mapped file, on the CPU and through the expert cache; and the memory it takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.checkpoint.mapped import load_pages, map_file
from ktransformers.experts.gate import Gate
from ktransformers.ground.errors import DamagedFileError
from ktransformers.nn import ExpertStore
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.placement import geometry_of, new_layer
from tests.support.placed_experts import Size, cpu_results, make_inputs, make_store, place_store_on, run_with_gradients

SIZE = Size(6, 160, 160, 2, 41, 4)  # blocks: 10 of gate and up in pairs, 5 of down
LARGE = Size(48, 1024, 672, 2, 4, 2)  # 198 MB in bf16: of parts that end within a huge page little is left over
GROUPS = (1, 2, 4)


def pool_of(groups: int) -> _core.Pool:
    return _core.Pool(threads=max(2, groups), groups=groups, spin_us=0, pin=False)


def write_packed(store: ExpertStore, path: Path) -> dict[str, int]:
    """The bytes of a store in a file, the matrices at page boundaries; bytes by matrix."""
    sizes = {}
    with path.open("wb") as file:
        for name in ("gate_up", "down"):
            data = store.memory()[name]
            sizes[name] = data.numel()
            file.write(data.numpy().data)
            file.write(bytes(-data.numel() % 4096))
    return sizes


def mapped_store(
    source: ExpertStore, path: Path, sizes: dict[str, int], pool: _core.Pool, verify: bool = True
) -> ExpertStore:
    data = map_file(path)
    down = sizes["gate_up"] + -sizes["gate_up"] % 4096
    store = ExpertStore(
        source.num_experts, source.hidden_size, source.intermediate_size, formats=source.formats, pool=pool
    )
    store.adopt(
        gate_up=data[: sizes["gate_up"]],
        down=data[down : down + sizes["down"]],
        gate_up_bias=source.biases().get("gate_up_bias"),
        down_bias=source.biases().get("down_bias"),
        checksums=torch.tensor(source.checksums()) if verify else None,
        source=str(path),
    )
    return store


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) == 7
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("spec", "verify"), [("bf16", True), ("int4:32", False)])
def test_numbers_do_not_depend_on_the_number_of_nodes(spec: str, verify: bool, tmp_path: Path) -> None:
    one = make_store(SIZE, spec, biased=True, pool=pool_of(1))
    sizes = write_packed(one, tmp_path / "layer")
    given = make_inputs(SIZE, "cpu")
    want, forward = cpu_results(one, given), one.forward(given.hidden, given.ids, given.weights)
    placed = run_with_gradients(place_store_on(one, "cpu", "stream", 3), given, True)
    for groups in GROUPS[1:]:
        packed = make_store(SIZE, spec, biased=True, pool=pool_of(groups))
        mapped = mapped_store(one, tmp_path / "layer", sizes, pool_of(groups), verify)
        for store in (packed, mapped):
            assert torch.equal(store.forward(given.hidden, given.ids, given.weights), forward)
            assert_same(cpu_results(store, given), want)
            assert_same(run_with_gradients(place_store_on(store, "cpu", "stream", 3), given, True), placed)
            assert store.checksums() == one.checksums()
            assert all(torch.equal(store.memory()[name], one.memory()[name]) for name in sizes)


@pytest.mark.parametrize("groups", GROUPS)
def test_parts_are_views_that_cover_an_expert(groups: int, tmp_path: Path) -> None:
    packed = make_store(SIZE, pool=pool_of(groups))
    mapped = mapped_store(packed, tmp_path / "layer", write_packed(packed, tmp_path / "layer"), pool_of(groups))
    for store, count in ((packed, groups), (mapped, 1)):
        for name, parts in store.parts().items():
            assert len(parts) == count
            whole = store.memory()[name].view(SIZE.experts, -1)
            at = 0
            for offset, data in parts:
                assert offset == at and torch.equal(data, whole[:, at : at + data.shape[1]])
                at += data.shape[1]
            assert at == whole.shape[1]
            again = store.parts()[name]
            assert [data.data_ptr() for _, data in again] == [data.data_ptr() for _, data in parts]


def test_parts_outlive_the_store() -> None:
    store = make_store(SIZE, pool=pool_of(2))
    want, parts = store.memory()["down"].view(SIZE.experts, -1).clone(), store.parts()["down"]
    del store
    assert torch.equal(torch.cat([data for _, data in parts], 1), want)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("pages", ["lazy", "prefault"])
def test_damage_of_a_mapped_file_is_found_on_any_number_of_nodes(groups: int, pages: str, tmp_path: Path) -> None:
    packed = make_store(SIZE, pool=pool_of(1))
    sizes = write_packed(packed, tmp_path / "layer")
    with (tmp_path / "layer").open("r+b") as file:
        file.seek(sizes["gate_up"] // SIZE.experts * 3 - 5)  # the last bytes of expert 2: those of the last node
        file.write(b"\xff\x00\xff\x00\xff")
    store = mapped_store(packed, tmp_path / "layer", sizes, pool_of(groups))
    if pages == "prefault":
        store.place_pages()
        load_pages(tmp_path / "layer", map_file(tmp_path / "layer"), pages)
    with pytest.raises(DamagedFileError, match=r"expert 2\b"):
        store.verify([2])
    store.verify([0, 1, 3, 4, 5])


def resident() -> tuple[int, int]:
    """(all, anonymous) bytes of this process."""
    text = Path("/proc/self/smaps_rollup").read_text()
    rss, anonymous = (int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.M)[0]) * 1024 for name in ("Rss", "Anonymous"))
    return rss, anonymous


def stream_all(store: ExpertStore) -> ExpertCache:
    """The engine attached to a store, and every expert streamed through two slots."""
    device, sizes = torch.device("cpu"), geometry_of(store)
    cache = ExpertCache(sizes, 2, device, None)
    layer = new_layer(ExpertEngine(device, "stream", cache), 0, store, Gate("silu"), sizes)
    for expert in range(0, sizes.experts, 2):
        cache.fetch(0, layer.packed.source, [expert, expert + 1])
    return cache


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ExpertStore, Path, dict[str, int]]]:
    store = make_store(LARGE, pool=pool_of(1))
    path = tmp_path_factory.mktemp("packed") / "layer"
    yield store, path, write_packed(store, path)
    path.unlink()


@pytest.mark.parametrize("groups", GROUPS)
def test_streamed_experts_packed_from_tensors_are_in_memory_once(groups: int) -> None:
    before = resident()[0]
    store = make_store(LARGE, pool=pool_of(groups))
    cache = stream_all(store)
    taken = resident()[0] - before - cache.bytes
    assert 0.9 < taken / store.packed_bytes < 1.1


@pytest.mark.parametrize("groups", GROUPS)
def test_mapped_experts_are_streamed_without_a_copy(
    groups: int, large: tuple[ExpertStore, Path, dict[str, int]]
) -> None:
    before = resident()
    store = mapped_store(*large, pool_of(groups))
    hidden = torch.randn(LARGE.tokens, LARGE.hidden).bfloat16()
    ids = torch.arange(LARGE.tokens * LARGE.top_k).view(LARGE.tokens, LARGE.top_k)
    store.forward(hidden, ids, torch.ones(ids.shape))
    cache = stream_all(store)
    taken, anonymous = (after - start - cache.bytes for after, start in zip(resident(), before, strict=True))
    assert taken < 1.1 * store.packed_bytes
    assert anonymous < 0.1 * store.packed_bytes
