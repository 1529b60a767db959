"""Stock LLaMA-Factory, not a line of it changed, trains LoRA on packed experts: `make test-llamafactory`.

It runs in a venv of its own, because LLaMA-Factory wants older packages than ours. Two releases: 0.9.5, the last one,
and `next`, 0.9.6.dev0 as it is published under another name. What they train is held against the same release on the
stock model without us; what they saved is opened by their own `export` and `chat`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

try:  # this folder has its name, so an import would prove nothing
    importlib.metadata.version("llamafactory")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("LLaMA-Factory is not installed: make test-llamafactory", allow_module_level=True)

from ktransformers.nn.prepare import prepare
from tests.nn.families import build, save

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NEXT = BIN.parent / "next"
TOKENIZER = ROOT / "tests" / "data" / "minimind_6400"
EXPERTS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
STEPS = 4
LAYERS = 2

Train = Callable[..., Path]


def llamafactory(*words: str, ours: bool, release: str = "0.9.5", typed: str = "") -> str:
    """Runs `llamafactory-cli` and returns what it printed; `ours`: behind `kt with`."""
    env = {**os.environ, "KT_LOG": "info", "PATH": f"{BIN}:{os.environ['PATH']}"}
    if release == "next":
        env["PYTHONPATH"] = str(NEXT)
        program = [sys.executable, "-m", "llamafactory.cli"]
    else:
        env["DISABLE_VERSION_CHECK"] = "1"  # its limit is transformers 5.6, the other's 5.8 without that very 5.6
        program = ["llamafactory-cli"]
    command = [*(["kt", "with", "--"] if ours else []), *program, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, input=typed, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(build("qwen3_moe", vocab_size=6400, max_position_embeddings=512), folder)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def prepared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kt") / "prepared"
    prepare(model, folder)
    return folder


@pytest.fixture(scope="module")
def train(model: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The output directory of a run; each is made once."""

    @functools.cache
    def run(*, ours: bool, release: str = "0.9.5", target: str = EXPERTS) -> Path:
        folder = tmp_path_factory.mktemp("run")
        keys: dict[str, Any] = {
            "model_name_or_path": str(prepared if ours else model),
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "lora",
            "lora_rank": 4,
            "lora_target": target,
            "dataset": "identity",
            "dataset_dir": str(ROOT / "src" / "ktransformers" / "train" / "demo_data"),
            "template": "empty",
            "cutoff_len": 96,
            "max_samples": 16,
            "output_dir": str(folder / "out"),
            "logging_steps": 1,
            "save_strategy": "no",
            "per_device_train_batch_size": 2,
            "learning_rate": 0.01,
            "max_steps": STEPS,
            "lr_scheduler_type": "constant",
            "report_to": "none",
            "use_cpu": True,
        }
        (folder / "train.yaml").write_text(yaml.safe_dump(keys))
        said = llamafactory("train", str(folder / "train.yaml"), ours=ours, release=release)
        assert said.count("bytes packed") == (LAYERS if ours else 0)
        return folder / "out"

    return run


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter_model.safetensors")


@pytest.mark.parametrize("release", ["0.9.5", "next"])
def test_expert_lora_learns_as_on_the_stock_model(release: str, train: Train) -> None:
    ours, stock = train(ours=True, release=release), train(ours=False)
    assert len(losses(ours)) == STEPS and losses(ours)[-1] < losses(ours)[0]
    assert losses(ours) == pytest.approx(losses(stock), rel=2e-3)
    found, expected = adapter(ours), adapter(stock)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}
    # q, k, v, o, gate_up and down in each layer, A and B of each.
    assert len(found) == LAYERS * 12 and sum("experts" in name for name in found) == LAYERS * 4
    assert all(tensor.any() for tensor in found.values()), "B begins as zero and has moved"


def test_all_means_attention_to_llamafactory(train: Train) -> None:
    found = adapter(train(ours=True, target="all"))
    assert {name.split(".")[-3] for name in found} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(tensor.any() for tensor in found.values())


def test_export_merges_the_adapter(train: Train, model: Path, tmp_path: Path) -> None:
    """On the checkpoint itself: nobody merges into packed experts."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    keys = {"model_name_or_path": str(model), "adapter_name_or_path": str(train(ours=True)), "template": "empty"}
    keys |= {"export_dir": str(tmp_path / "merged"), "infer_dtype": "float32", "export_device": "cpu"}
    (tmp_path / "export.yaml").write_text(yaml.safe_dump(keys))
    llamafactory("export", str(tmp_path / "export.yaml"), ours=False)
    batch = torch.arange(1, 33).view(1, -1)
    with torch.no_grad():
        stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        plain = stock(batch).logits
        adapted = PeftModel.from_pretrained(stock, train(ours=True))(batch).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(batch).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - plain).abs().max() > 0.05, "the adapter does something"


def test_chat_answers_with_the_adapter(train: Train, prepared: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"model_name_or_path": str(prepared), "adapter_name_or_path": str(train(ours=True))}
    keys |= {"template": "empty", "infer_backend": "huggingface", "infer_dtype": "float32"}
    keys |= {"max_new_tokens": 4, "do_sample": False}
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(keys))
    said = llamafactory("chat", str(tmp_path / "chat.yaml"), ours=True, typed="hello\nexit\n")
    assert said.count("bytes packed") == LAYERS and "Loaded adapter(s)" in said
    assert said.partition("Assistant: ")[2].strip()
