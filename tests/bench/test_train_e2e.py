"""The bench of whole steps runs on the CPU alone with tiny shapes, prints a table and ends with the JSON document.

No speed is judged. What must hold: the variants train the same model (their losses agree), the parts of a step
add up to it, and the recipes have the shapes of the models that they are named after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktransformers.plan.roofs import Roofs

Run = Callable[..., tuple[list[str], dict[str, Any]]]
BENCH = Path(__file__).resolve().parents[2] / "bench"
PARTS = {"experts_forward", "experts_backward", "experts_again", "attention", "optimizer", "rest"}
SHORT = ["--seconds-per-cell", "0.05"]


def check(cell: dict[str, Any]) -> None:
    assert 0 < cell["step_s"] < math.inf and cell["reps"] >= 3
    assert cell["tokens_per_s"] == pytest.approx(cell["tokens"] / cell["step_s"], rel=1e-4)
    assert cell["parts"].keys() == PARTS
    assert sum(cell["parts"].values()) == pytest.approx(cell["profiled_s"], rel=1e-3)
    assert cell["parts"]["rest"] > 0, "parts overlap"
    assert cell["parts"]["experts_forward"] > 0 and cell["parts"]["experts_backward"] > 0
    assert 0.05 < cell["host_peak_gib"] < 8 and cell["gpu_peak_gib"] >= 0


@pytest.mark.slow
def test_variants_train_the_same_model(run_script: Run, tmp_path: Path) -> None:
    options = ["--models", "tiny", "--tokens", "256", "--json", str(tmp_path / "e2e.json")]
    table, document = run_script("train_e2e", *SHORT, *options)
    assert document == json.loads((tmp_path / "e2e.json").read_text())
    assert document["bench"] == "train_e2e" and "notes" not in document
    cells = {cell["variant"]: cell for cell in document["cells"]}
    assert list(cells) == ["kt", "gpu", "fsdp"]
    for cell in cells.values():
        check(cell)
        assert cell["losses"] == pytest.approx(cells["gpu"]["losses"], rel=5e-3)
        assert cell["losses"][1] < cell["losses"][0]
        assert cell["trained_parameters"] == cells["kt"]["trained_parameters"]
    # Rank 8 on q, k, v, o and on gate_up and down of eight experts, in two layers.
    attention = 8 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
    assert cells["kt"]["trained_parameters"] == 2 * (attention + 8 * 8 * ((64 + 64) + (32 + 64)))
    assert [line.split()[1] for line in table if line.startswith("tiny ")] == list(cells)


@pytest.mark.slow
def test_the_headline_recipe_in_small(run_bench: Run) -> None:
    """Latent attention, dropout, a dense first layer, a loss in pieces, accumulation."""
    options = ["--models", "tiny-latent", "--variants", "kt", "--activation", "recompute"]
    table, document = run_bench("train_e2e", *SHORT, *options, "--contexts", "32,96", "--context-memory", "8,16")
    assert [(cell["tokens"], cell["pieces"]) for cell in document["cells"]] == [(64, 2), (64, 1)]
    for cell in document["cells"]:
        check(cell)
        assert cell["parts"]["experts_again"] > 0
        assert 0 < cell["ideal"]["seconds"] < cell["step_s"], "faster than the machine's bare loops"
        assert cell["expert_tflops"]["guide"] == pytest.approx(4 / 3 * cell["expert_tflops"]["products"], rel=1e-4)
    assert document["models"]["tiny-latent"]["activation"] == "recompute"
    assert any("published" in line and "1 token/s" in line for line in table)
    contexts = [cell["context"] for cell in document["contexts"]]
    assert [(one["gib"], one["tokens"], one["out_of_memory_at"]) for one in contexts] == [(8, 96, 0), (16, 96, 0)]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """A trainer whose steps take a hundredth of a GiB a token, and the lengths of the steps that were run."""
    monkeypatch.syspath_prepend(str(BENCH))
    import e2e_trainer
    import torch

    trainer = e2e_trainer.Trainer.__new__(e2e_trainer.Trainer)
    trainer.broken = False
    limit, steps = [0], []
    monkeypatch.setattr(trainer, "allow", lambda gib: limit.__setitem__(0, 100 * gib), raising=False)
    monkeypatch.setattr(trainer, "_free", lambda: None, raising=False)
    monkeypatch.setattr(trainer, "_sequence", lambda length: torch.zeros(1, length), raising=False)

    def step(batches: list[torch.Tensor], loss_rows: int) -> None:
        steps.append(batches[0].numel())
        if steps[-1] > limit[0]:
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(trainer, "step", step, raising=False)
    return trainer, steps


def test_longest_context_ends_where_memory_does(limited: tuple[Any, list[int]]) -> None:
    trainer, steps = limited
    trainer.recovers = True
    contexts = trainer.longest_contexts([1, 2, 9], [50, 150, 250, 400])
    ends = [(one["gib"], one["tokens"], one["out_of_memory_at"]) for one in contexts]
    assert ends == [(1, 50, 150), (2, 150, 250), (9, 400, 0)]
    assert steps == [50, 50, 150, 150, 150, 250, 250, 250, 400, 400], "a length that fits was tried again"


def test_longest_context_does_not_use_what_earlier_steps_left(
    limited: tuple[Any, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's limit holds for new memory alone: a step that finds enough in the allocator's cache would pass."""
    trainer, _ = limited
    trainer.recovers = True
    cached, within_limit = [10_000], trainer.step

    def step(batches: list[Any], loss_rows: int) -> None:
        if batches[0].numel() > cached[0]:
            within_limit(batches, loss_rows)

    monkeypatch.setattr(trainer, "step", step)
    monkeypatch.setattr(trainer, "_free", lambda: cached.__setitem__(0, 0))
    assert [one["tokens"] for one in trainer.longest_contexts([1, 2], [50, 150, 400])] == [50, 150]


def test_variant_that_does_not_recover_is_not_run_out_of_memory(
    limited: tuple[Any, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose tensors alone are too large is not run; one that runs out of memory all the same is the last."""
    trainer, steps = limited
    trainer.recovers = False
    needs = {50: 0.5, 150: 1.5, 250: 1.9, 400: 4.0}
    monkeypatch.setattr(trainer, "_needed", needs.__getitem__, raising=False)
    contexts = list(trainer.longest_contexts([1, 2, 9], [50, 150, 400]))
    ends = [(one["gib"], one["tokens"], one["out_of_memory_at"]) for one in contexts]
    assert ends == [(1, 50, 150), (2, 150, 400), (9, 400, 0)]
    assert steps == [50, 50, 150, 150, 400, 400], "a step whose tensors are too large was run"
    assert contexts[0]["needed_gib"] == {50: 0.5, 150: 1.5}
    contexts = list(trainer.longest_contexts([1, 2, 9], [50, 150, 250, 400]))
    ends = [(one["gib"], one["tokens"], one["out_of_memory_at"]) for one in contexts]
    assert ends == [(1, 50, 150), (2, 150, 250)], "a step after one that stopped half-way"
    assert trainer.broken


@pytest.mark.parametrize(("breaks", "steps"), [(True, [1]), (False, [1, 2])])
def test_nothing_is_measured_after_a_step_that_stopped_half_way(
    breaks: bool, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import e2e_models
    import train_e2e

    calls: dict[str, list[int]] = {"measure": [], "serve": []}

    class Fake:
        def __init__(self) -> None:
            self.built: dict[str, Any] = {}
            self.broken, self.gib = False, 0
            self.model = self.device = None

        def allow(self, gib: int) -> None:
            self.gib = gib

        def measure(self, *sizes: Any) -> dict[str, Any]:
            calls["measure"].append(self.gib)
            return {}

        def longest_contexts(self, *limits: Any) -> list[dict[str, Any]]:
            self.broken = breaks
            return [{"tokens": 0}]

    fake = Fake()
    monkeypatch.setattr(train_e2e, "Trainer", lambda *given: fake)
    monkeypatch.setattr(train_e2e, "answer", lambda *given: calls["serve"].append(fake.gib))
    options = ["--models", "tiny", "--variants", "fsdp", "--tokens", "64", "--accumulate", "1"]
    options += ["--gpu-memory", "1,2", "--contexts", "64", "--serve", "8"]
    assert train_e2e.child(train_e2e.parse(options), e2e_models.recipes()["tiny"]) == 0
    assert calls == {"measure": steps, "serve": [] if breaks else steps}


@pytest.mark.slow
def test_latent_variants_train_the_same_model(run_script: Run) -> None:
    """Also under FSDP2, whose loss in pieces calls the decoder and the head apart."""
    _, document = run_script("train_e2e", *SHORT, "--models", "tiny-latent", "--accumulate", "1")
    losses = {cell["variant"]: cell["losses"][0] for cell in document["cells"]}
    assert list(losses) == ["kt", "gpu", "fsdp"] and "notes" not in document
    assert losses["fsdp"] == pytest.approx(losses["gpu"], rel=5e-2), "dropout differs"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tiny-latent"])
def test_zero_trains_the_same_model(model: str, run_script: Run) -> None:
    """With LoRA in bf16, a loss in pieces, and pieces of a step; dropout draws the same numbers."""
    pytest.importorskip("deepspeed")
    options = ["--models", model, "--variants", "gpu,zero", "--tokens", "64", "--accumulate", "2,1"]
    _, document = run_script("train_e2e", *SHORT, *options, "--contexts", "32,96", "--context-memory", "8,16")
    assert "notes" not in document
    cells = {(cell["variant"], cell["pieces"]): cell for cell in document["cells"]}
    assert list(cells) == [("gpu", 2), ("gpu", 1), ("zero", 2), ("zero", 1)]
    for pieces in (1, 2):
        stock, zero = cells["gpu", pieces], cells["zero", pieces]
        check(zero)
        assert zero["losses"] == pytest.approx(stock["losses"], rel=5e-3)
        assert zero["trained_parameters"] == stock["trained_parameters"]
        assert zero["optimizer"] == "DeepSpeedCPUAdam" or zero["no_cpu_adam"]
    assert [cell["context"]["tokens"] for cell in document["contexts"]] == [96] * 4


def test_recipes_have_the_real_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    import e2e_models
    import torch

    for name, (layers, experts, gate_up) in {
        "qwen3-30b": (8, 128, (128, 1536, 2048)),
        "dsv3": (2, 256, (256, 4096, 7168)),
        "dsv2-lite": (27, 64, (64, 2816, 2048)),
    }.items():
        recipe = e2e_models.recipes()[name]
        model = e2e_models._blank(recipe, torch.device("meta"), "eager")
        found = [p for parameter, p in model.named_parameters() if parameter.endswith("experts.gate_up_proj")]
        assert len(model.model.layers) == layers
        assert {tuple(p.shape) for p in found} == {gate_up} and found[0].shape[0] == experts
        assert recipe.rank == 8 and recipe.length == 512
    lite = sum(p.numel() for p in model.parameters())
    assert 15.6e9 < lite < 15.8e9  # as published


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--models", "huge"], ["huge", "qwen3-30b"]),
        (["--variants", "zero3"], ["zero3", "fsdp"]),
        (["--tokens", "500"], ["multiples of 512"]),
        (["--variants", "kt", "--fill-like", "fsdp"], ["fsdp", "not measured", "only kt"]),
        (["--fill-like", "zero"], ["zero", "not measured for qwen3-30b", "only kt, gpu, fsdp"]),
        (["--models", "qwen3-30b,dsv3", "--fill-like", "fsdp"], ["not measured for dsv3, only kt"]),
        (["--variants", "gpu,zero", "--serve", "64"], ["--serve", "zero"]),
    ],
)
def test_wrong_options_are_explained(
    options: list[str], words: list[str], refused: Callable[[str, list[str]], str]
) -> None:
    said = refused("train_e2e", options)
    assert all(word in said for word in words)


@pytest.mark.parametrize("policy", ["auto", "stream"])
def test_a_few_layers_are_multiplied_up_by_what_a_deep_model_would_take(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts that backward finds in the cache, because there are only two layers, are not free in 58; nor under
    `auto`, whose best schedule gives a share to the CPU that the streamed step did not give it."""
    monkeypatch.syspath_prepend(str(BENCH))
    import e2e_models
    import train_e2e

    recipe, rates = e2e_models.recipes()["dsv3"], Roofs(dram=200e9, tiles=14e12, link=50e9, gpu=750e12)
    cell = {"layers": 2, "tokens": 8192, "pieces": 1, "touched": 256, "format": "fp8:128x128", "policy": policy}
    copies = 2 * 2 * 256 * 3 * 7168 * 2048 * (1 + 4 / 128**2) / 50e9  # forward and back, a scale for each block
    for step_s in (0.586, 1.5):
        for mode, least in (("stream", copies), ("stream_all", copies), ("cpu", 0.0)):
            ran = cell | {"step_s": step_s, "modes": {"mode": mode} if policy == "auto" else {}, "policy": policy}
            if policy != "auto":
                ran["policy"] = mode
            whole = train_e2e.whole_model(recipe, ran, rates)
            assert whole["step_s"] == pytest.approx(29 * max(step_s, least), rel=0.01)
            assert whole["layers"] == 58 and whole["tokens_per_s"] == pytest.approx(8192 / whole["step_s"])


def test_the_ideal_counts_the_bytes_of_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters too: bf16:12 is not bf16."""
    monkeypatch.syspath_prepend(str(BENCH))
    import e2e_models
    import ideal

    recipe, rates = e2e_models.recipes()["qwen3-30b"], Roofs(dram=200e9, tiles=14e12, link=50e9, gpu=750e12)
    cell = {"layers": 8, "tokens": 512, "pieces": 1, "touched": 128, "policy": "stream"}
    bits = {"bf16": 16, "bf16:12": 12.06, "int8": 8, "int4:32": 4.5, "int4:128": 4.125, "mxfp4": 4.25}
    seconds = {spec: ideal.ideal(recipe, cell | {"format": spec}, rates)["seconds"] for spec in bits}
    assert {spec: 16 * one / seconds["bf16"] for spec, one in seconds.items()} == pytest.approx(bits, rel=0.01)
