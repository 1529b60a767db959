"""The clock around the experts: what it counts as work, with and without checkpointing, and what the roof is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktransformers.experts.checkpointing import save_expert_outputs
from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.nn import ExpertStore, attach
from ktransformers.train import callbacks
from ktransformers.train.arguments import precision_notes
from ktransformers.train.callbacks import ExpertClock, PeakRates, TrainLog
from ktransformers.train.resolve import read_settings
from tests.support.tiny_models import build, tokens

LAYERS = 2


def test_peak_time_is_compute_or_memory_bound() -> None:
    store = ExpertStore(8, 64, 32)
    store.pack(gate_up=torch.zeros(8, 64, 64), down=torch.zeros(8, 64, 32))
    operations = 2 * 100 * 2 * 3 * 64 * 32
    assert PeakRates(flops=1e6, read=1e30).seconds(store, 100, 2) == pytest.approx(operations / 1e6)
    touched = 1 - (6 / 8) ** 3
    assert PeakRates(flops=1e30, read=1e6).seconds(store, 3, 2) == pytest.approx(touched * store.packed_bytes / 1e6)


@pytest.mark.parametrize(("checkpointing", "passes"), [("none", 2), ("recompute", 3), ("retain", 2)])
def test_expert_clock_counts_recomputed_passes(checkpointing: str, passes: int) -> None:
    model = build("qwen3_moe")
    attach(model, free=True)
    model.train()
    options: dict[str, Any] = {"use_reentrant": False}
    if checkpointing == "retain":
        options["context_fn"] = save_expert_outputs
    if checkpointing != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    model.enable_input_require_grads()
    clock, batch = ExpertClock(model), tokens()
    clock.peak_rates = PeakRates(flops=1e12, read=1e12)
    model(input_ids=batch, labels=batch).loss.backward()
    store, top_k = next(iter(expert_modules(model).values())).kt.store, model.config.num_experts_per_tok
    assert isinstance(store, ExpertStore)
    one = clock.peak_rates.seconds(store, batch.numel(), top_k)
    assert clock.peak_seconds == pytest.approx(LAYERS * passes * one)
    assert clock.seconds > clock.peak_seconds
    before = clock.seconds
    clock.close()
    model(input_ids=batch)
    assert clock.seconds == before


def test_exceeded_peak_rate_is_remeasured_then_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []

    def remeasure_rates() -> Any:
        measured.append(4e9)
        return SimpleNamespace(tile_flops=4e9, read_bytes=1e9)

    monkeypatch.setattr(callbacks, "remeasure_rates", remeasure_rates)
    clock, shown = ExpertClock(torch.nn.Module()), []
    clock.peak_rates = PeakRates(flops=2e9, read=2e9)
    journal = TrainLog(tmp_path, clock, shown.append)
    state = SimpleNamespace(is_world_process_zero=True, global_step=1, max_steps=9, epoch=0.0)
    journal.on_train_begin(None, state, None)
    expected = {0.5: (2e9, 2e9), 1.6: (4e9, 2e9), 0.9: (4e9, 2e9), 1.25: (5e9, 2.5e9)}
    for share, roof in expected.items():
        clock.seconds, clock.peak_seconds = clock.seconds + 1.0, clock.peak_seconds + share
        journal.on_log(None, state, None, {"loss": 1.0})
        assert shown[-1].roof_share == pytest.approx(min(share, 1.0))
        assert (clock.peak_rates.flops, clock.peak_rates.read) == roof
    assert measured == [4e9]
    clock.seconds += 1.0  # what a GPU computed has no roof here
    journal.on_log(None, state, None, {"loss": 1.0})
    assert shown[-1].roof_share is None


def test_f32_experts_are_refused_without_f32_kernels() -> None:
    keys = {"model_name_or_path": "x/y", "output_dir": "out", "dataset": "identity", "precision": "f32"}
    (note,) = precision_notes(read_settings(keys), {"dtype": "float32"})
    assert "twice the memory" in note and "though" not in note
    with pytest.raises(InputError, match="f32 with kt_backend AVX512BF16, expected auto, generic or avx2"):
        precision_notes(read_settings(keys | {"kt_config": {"kt_backend": "AVX512BF16"}}), {})
    assert precision_notes(read_settings(keys | {"precision": "bf16"}), {}) == []
