"""Residents: budgets, strategies and statistics; then on slots, what is copied when they change."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from ktransformers.ground.errors import InputError
from ktransformers.place import attach
from ktransformers.place.placement import _warn_once
from ktransformers.place.residents import budget, choose, load_counts, save_counts
from tests.support.placed_experts import tiny_packed_model

COUNTS = np.array([[5, 0, 9, 1], [7, 8, 0, 0], [0, 0, 0, 6]])


def test_budget_by_count_ratio_and_bytes() -> None:
    assert budget(3, 4, 10, count=2) == 6
    assert budget(3, 4, 10, ratio=0.25, count=4) == 3
    assert budget(3, 4, 10, size=75) == 7
    assert budget(3, 4, 10, size=10**6) == 12
    for wrong in ({"ratio": 1.5}, {"count": 5}):
        with pytest.raises(InputError):
            budget(3, 4, 10, **wrong)  # type: ignore[arg-type]


def test_strategies_select_experts() -> None:
    assert choose("uniform", 7, 3, 4) == [(0, 1, 2), (0, 1), (0, 1)]
    assert choose("front-loading", 6, 3, 4) == [(0, 1, 2, 3), (0, 1), ()]
    assert choose("frequency", 4, 3, 4, COUNTS) == [(2,), (0, 1), (3,)]
    random = choose("random", 5, 3, 4)
    assert sum(map(len, random)) == 5 and random == choose("random", 5, 3, 4)
    assert choose("uniform", 100, 3, 4) == [(0, 1, 2, 3)] * 3
    with pytest.raises(InputError, match="frequency"):
        choose("frequency", 4, 3, 4)
    with pytest.raises(InputError, match="one of uniform"):
        choose("hottest", 4, 3, 4)


@pytest.mark.parametrize("name", ["counts.json", "counts.safetensors"])
def test_statistics_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    names = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts", "model.layers.2.mlp.experts"]
    save_counts(tmp_path / name, names, COUNTS)
    assert np.array_equal(load_counts(tmp_path / name, names), COUNTS)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    with pytest.raises(InputError, match="another"):
        load_counts(tmp_path / name, [*names, "another"])


def test_pt_statistics_are_read_without_running_code(tmp_path: Path) -> None:
    """`.pt` files: a table or a dictionary with one, of all decoder layers or of those with experts; and what would run
    code is refused without running it."""
    names = [f"model.layers.{at}.mlp.experts" for at in (1, 2)]
    table = torch.tensor([[[1, 2], [3, 4], [5, 6]], [[0, 0], [10, 0], [0, 10]]])
    for at, (given, want) in enumerate(
        [
            ({"logical_count": table}, [[13, 4], [5, 16]]),
            (table[:, 1:], [[13, 4], [5, 16]]),
            (table[0], [[3, 4], [5, 6]]),
        ]
    ):
        torch.save(given, tmp_path / f"{at}.pt")
        assert np.array_equal(load_counts(tmp_path / f"{at}.pt", names, 2), want)
    torch.save({"logical_count": table[:, :1]}, tmp_path / "few.pt")
    torch.save({"gpu_expert_masks": table}, tmp_path / "masks.pt")
    torch.save({"logical_count": Trap()}, tmp_path / "trap.pt")
    (tmp_path / "none.pt").write_bytes(b"nothing")
    for name, words in (
        ("few", "counts of 1 layers"),
        ("masks", "logical_count"),
        ("trap", "tensors alone"),
        ("none", "tensors alone"),
        ("absent", "exists"),
    ):
        with pytest.raises(InputError, match=words):
            load_counts(tmp_path / f"{name}.pt", names)
    with pytest.raises(InputError, match="3, as the model has"):
        load_counts(tmp_path / "0.pt", names, 3)
    assert not Trap.sprung


class Trap:
    sprung: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[object, ...]:
        return Trap.sprung.append, ("code ran",)


def test_attach_places_and_replaces_residents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_packed_model()
    _warn_once.cache_clear()  # others may have asked before
    assert attach(model) is None, "the CPU computes experts unless another policy is asked for"
    if not torch.cuda.is_available():
        assert attach(model, policy="auto") is None and attach(model, policy="stream") is None
        assert sum("no CUDA device" in record.message for record in caplog.records) == 1
    with pytest.raises(InputError, match="KT_PLACE"):
        attach(model, policy="gpu")
    placement = attach(model, policy="resident", device="cpu")
    assert placement is not None and len(placement.layers) == 3 and len(placement.engines) == 1
    assert placement.names[0] == "model.layers.0.mlp.experts" and not placement.left
    side = placement.engines[0].executor
    placement.place_residents(count=2)
    assert [side.residents[index].present(index) for index in range(3)] == [frozenset({0, 1})] * 3
    with pytest.raises(InputError, match="no counts yet"):
        placement.place_residents(count=2, strategy="frequency")
    for index, layer in enumerate(placement.layers):
        layer.counts[[index, 5]] = 10
    save_counts(tmp_path / "seen.safetensors", *placement.statistics())
    copied = sum(room.copied_bytes for room in side.residents.values())
    found = placement.place_residents(count=2, strategy="frequency", statistics=tmp_path / "seen.safetensors")
    assert found == [(0, 5), (1, 5), (2, 5)]
    again = sum(room.copied_bytes for room in side.residents.values()) - copied
    expert = placement.layers[0].packed.geometry.expert_bytes
    assert again == 4 * expert, "0 and 1 of the first two layers were there"
    placement.place_residents(ratio=0.0)
    assert not side.residents
    store = weakref.ref(placement.layers[0].store)
    del placement, side, layer, model
    gc.collect()
    assert store() is None, "an engine does not keep a model alive"


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["stream", "auto", "resident"])
def test_model_on_a_gpu_with_residents(policy: str) -> None:
    """The engine under a stock model gives the logits that the CPU's path gives."""
    model = tiny_packed_model().to("cuda:0").eval()
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0)).to("cuda:0")
    with torch.inference_mode():
        want = model(tokens).logits.float()
        placement = attach(model, policy=policy)
        assert placement is not None
        if policy == "resident":
            placement.place_residents(ratio=0.5)
        got = model(tokens).logits.float()
    assert sum(row.sum() for row in placement.counts()) == 3 * 2 * 16 * 2
    assert (got - want).norm() < 0.02 * want.norm()
    placement.detach()
