"""What a plan counts for the linear layers outside of the experts is what a run chooses for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ktransformers.cli.main import app
from ktransformers.ground import system
from ktransformers.modeling.spec import parse_dtype
from ktransformers.nn import load_model
from ktransformers.plan import Serving, Training, make_plan, open_shape, profile, with_gpus
from ktransformers.plan import calibrate as calibrate_module
from ktransformers.plan.calibrate import Rates, this_machine
from ktransformers.plan.machine import Machine
from ktransformers.quantized.widened import WidenedWeight
from ktransformers.train.arguments import dtype_of
from ktransformers.train.resolve import read_settings
from tests.support.tiny_models import build, save

# Two Neoverse-N1 cores: bytes and operations per second.
RATES = Rates(2, "cpu", "generic", 2, 1, 45e9, 38e9, 0.15e9, 60e9, 1.0, 1.0, 0.08)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(calibrate_module, "calibrate", lambda remeasure=False: RATES)
    return with_gpus(this_machine(), "none")


def with_products(machine: Machine, products: str) -> Machine:
    return replace(machine, cpu=replace(machine.cpu, dense_products=products))


@pytest.mark.parametrize("word", system.DENSE_PRODUCTS)
def test_plan_of_this_machine_has_the_arithmetic_of_a_run(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate_module, "calibrate", lambda remeasure=False: RATES)
    monkeypatch.setattr(system, "forced_dense_products", word)
    assert this_machine().cpu.products == word
    words = ["plan", "qwen3-30b-a3b", "--serve", "--gpu", "none", "--json"]
    planned = json.loads(CliRunner().invoke(app, words).stdout)
    shape, host = open_shape("qwen3-30b-a3b"), planned["serve"]["plan"]["host"]
    size = parse_dtype("auto", "cpu").itemsize
    settings = read_settings({"model_name_or_path": "a/b", "output_dir": "out", "dataset": "identity", "use_cpu": True})
    assert dtype_of(settings, {"dtype": "bfloat16"}).itemsize == size
    assert host["KV cache"] == 8192 * shape.cache_width * size
    assert host.get("weights", 0) == (shape.rest * 4 if word == "float32" else 0)


def test_slow_bf16_does_not_slow_the_predicted_run(machine: Machine) -> None:
    """On this machine two layers with the head decoded 16.6 tokens/s in float32, about 1.5 for all 48."""
    shape = open_shape("qwen3-30b-a3b")
    rates = {}
    for products, size in (("widened", 4), ("float32", 4), ("bfloat16", 2)):
        plan = make_plan(shape, Serving(rest_bytes=size), with_products(machine, products))
        rates[products] = plan.nearest.time.tokens_per_second
    assert rates["widened"] > 1.05 * rates["float32"] and 1 < rates["float32"] < 4 and rates["bfloat16"] < 0.1
    training = {
        size: make_plan(shape, Training(rest_bytes=size), with_products(machine, "widened")).nearest.time.seconds
        for size in (2, 4)
    }
    assert training[2] == pytest.approx(training[4], rel=0.1)  # bf16, if asked for, is widened as well


def test_profiles_choose_by_their_rates() -> None:
    assert profile("arm2").cpu.products == "widened"
    assert profile("amx16-h200").cpu.products == "bfloat16"


def test_planned_bytes_of_weights_are_those_of_the_loaded_model(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("qwen3_moe", hidden_size=512, vocab_size=4096).bfloat16()
    model.config.dtype = torch.bfloat16
    save(model, tmp_path)
    shape, held = open_shape(str(tmp_path)), {}
    for word in ("widened", "float32"):
        monkeypatch.setattr(system, "forced_dense_products", word)
        loaded: Any = load_model(tmp_path, dtype=torch.float32)
        rest = [parameter for name, parameter in loaded.named_parameters() if ".experts." not in name]
        held[word] = sum(p.stored.nbytes if isinstance(p, WidenedWeight) else p.nbytes for p in rest)
        memory = make_plan(shape, Serving(rest_bytes=4), with_products(machine, word)).nearest.memory
        planned = memory.mapped if word == "widened" else memory.host["weights"]
        assert held[word] == pytest.approx(planned, rel=0.03)
        assert ("weights" in memory.host) is (word == "float32")
    assert held["widened"] < 0.52 * held["float32"]


def test_latents_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `kt serve` keeps them: latent 512 and rotary key 64 in 27 layers. On a CPU absorbed keys are a copy."""
    monkeypatch.setattr(calibrate_module, "calibrate", lambda remeasure=False: RATES)
    monkeypatch.setattr(system, "forced_dense_products", "bfloat16")
    planned = {}
    for gpu in ("none", "h200"):
        words = ["plan", "deepseek-v2-lite", "--serve", "--gpu", gpu, "--json"]
        planned[gpu] = json.loads(CliRunner().invoke(app, words).stdout)["serve"]["plan"]
    size = parse_dtype("auto", "cpu").itemsize
    assert planned["none"]["host"]["KV cache"] == 8192 * 27 * (512 + 64) * size
    assert planned["none"]["host"]["absorbed keys"] == 27 * 16 * 128 * 512 * 2
    assert planned["h200"]["gpus"][0]["KV cache"] == 8192 * 27 * (512 + 64) * 2
    assert "absorbed keys" not in planned["h200"]["host"]
