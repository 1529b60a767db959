"""Stock LLaMA-Factory, not a line of it changed, trains LoRA on packed experts: `make test-llamafactory`.

It runs in a venv of its own, because LLaMA-Factory wants older packages than ours. Two releases: 0.9.5, the last one,
and `next`, 0.9.6.dev0 as it is published under another name. What they train is held against the same release on the
stock model without us. An adapter of `kt train`, which runs in the venv that `make build` made, is opened by their
`export`, `chat` and `api`, and has to say there what stock PEFT says with it.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.support.tiny_models import build, save

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NEXT = BIN.parent / "next"
TOKENIZER = ROOT / "tests" / "data" / "minimind_6400"
EXPERTS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
DATASETS = ROOT / "src" / "ktransformers" / "train" / "demo_data"
STEPS = 4
LAYERS = 2
TRAINING: dict[str, Any] = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "dataset": "identity",
    "template": "empty",
    "cutoff_len": 96,
    "max_samples": 16,
    "logging_steps": 1,
    "save_strategy": "no",
    "per_device_train_batch_size": 2,
    "learning_rate": 0.01,
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "report_to": "none",
    "use_cpu": True,
}
TOKENS = 8  # of an answer

Train = Callable[..., Path]


def line(*words: str, ours: bool, release: str) -> tuple[list[str], dict[str, str]]:
    """The command and its environment; `ours`: behind `kt with`."""
    env = {**os.environ, "KT_LOG": "info", "PATH": f"{BIN}:{os.environ['PATH']}"}
    if release == "next":
        env["PYTHONPATH"] = str(NEXT)
        program = [sys.executable, "-m", "llamafactory.cli"]
    else:
        env["DISABLE_VERSION_CHECK"] = "1"  # its limit is transformers 5.6, the other's 5.8 without that very 5.6
        program = ["llamafactory-cli"]
    return [*(["kt", "with", "--"] if ours else []), *program, *words], env


def llamafactory(*words: str, ours: bool, release: str = "0.9.5", typed: str = "", fails: bool = False) -> str:
    """Runs `llamafactory-cli` and returns what it printed."""
    command, env = line(*words, ours=ours, release=release)
    done = subprocess.run(command, capture_output=True, text=True, env=env, input=typed, timeout=900)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-4000:]
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
        keys = {**TRAINING, "model_name_or_path": str(prepared if ours else model), "lora_target": target}
        keys |= {"dataset_dir": str(DATASETS), "output_dir": str(folder / "out")}
        (folder / "train.yaml").write_text(yaml.safe_dump(keys))
        said = llamafactory("train", str(folder / "train.yaml"), ours=ours, release=release)
        assert said.count("bytes packed") == (LAYERS if ours else 0)
        return folder / "out"

    return run


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of `kt train`: attention and experts, written by newer packages than these."""
    folder = tmp_path_factory.mktemp("ours")
    keys = {**TRAINING, "model_name_or_path": str(model), "lora_target": "all", "output_dir": str(folder / "out")}
    (folder / "train.yaml").write_text(yaml.safe_dump(keys))
    command = [str(ROOT / ".venv" / "bin" / "kt"), "train", str(folder / "train.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert sum("experts" in name for name in adapter(folder / "out")) == LAYERS * 4
    return folder / "out"


@pytest.fixture(scope="module")
def said(model: Path, trained: Path) -> tuple[str, str]:
    """What stock transformers says to "hello", and stock PEFT with the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([tokenizer.encode("hello", add_special_tokens=False)])

    def answer(speaker: Any) -> str:
        found = speaker.generate(input_ids=prompt, max_new_tokens=TOKENS, do_sample=False)
        return str(tokenizer.decode(found[0, prompt.shape[1] :], skip_special_tokens=True))

    return answer(stock), answer(PeftModel.from_pretrained(stock, trained))


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter_model.safetensors")


@pytest.mark.parametrize("release", ["0.9.5", "next"])
def test_expert_lora_training_equals_stock_model(release: str, train: Train) -> None:
    ours, stock = train(ours=True, release=release), train(ours=False)
    assert len(losses(ours)) == STEPS and losses(ours)[-1] < losses(ours)[0]
    assert losses(ours) == pytest.approx(losses(stock), rel=2e-3)
    found, expected = adapter(ours), adapter(stock)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}
    # q, k, v, o, gate_up and down in each layer, A and B of each.
    assert len(found) == LAYERS * 12 and sum("experts" in name for name in found) == LAYERS * 4
    assert all(tensor.any() for tensor in found.values()), "B begins as zero and has moved"


def test_target_all_in_llamafactory_means_attention(train: Train) -> None:
    found = adapter(train(ours=True, target="all"))
    assert {name.split(".")[-3] for name in found} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(tensor.any() for tensor in found.values())


def test_export_merges_the_adapter(trained: Path, model: Path, tmp_path: Path) -> None:
    """On the checkpoint itself: nobody merges into packed experts."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    keys = {"model_name_or_path": str(model), "adapter_name_or_path": str(trained), "template": "empty"}
    keys |= {"export_dir": str(tmp_path / "merged"), "infer_dtype": "float32", "export_device": "cpu"}
    (tmp_path / "export.yaml").write_text(yaml.safe_dump(keys))
    llamafactory("export", str(tmp_path / "export.yaml"), ours=False)
    batch = torch.arange(1, 33).view(1, -1)
    with torch.no_grad():
        stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        plain = stock(batch).logits
        adapted = PeftModel.from_pretrained(stock, trained)(batch).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(batch).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - plain).abs().max() > 0.05, "the adapter does something"


def asking(prepared: Path, trained: Path, folder: Path) -> str:
    """A file for `chat` and `api`."""
    keys: dict[str, Any] = {"model_name_or_path": str(prepared), "adapter_name_or_path": str(trained)}
    keys |= {"template": "empty", "infer_backend": "huggingface", "infer_dtype": "float32"}
    keys |= {"max_new_tokens": TOKENS, "do_sample": False}
    (folder / "ask.yaml").write_text(yaml.safe_dump(keys))
    return str(folder / "ask.yaml")


def test_llamafactory_chat_uses_the_adapter(
    trained: Path, prepared: Path, said: tuple[str, str], tmp_path: Path
) -> None:
    printed = llamafactory("chat", asking(prepared, trained, tmp_path), ours=True, typed="hello\nexit\n")
    assert printed.count("bytes packed") == LAYERS and "Loaded adapter(s)" in printed
    base, adapted = said
    assert adapted != base and adapted.strip() in printed.partition("Assistant: ")[2]


@contextmanager
def api(file: str, log: Path, release: str) -> Iterator[str]:
    """`llamafactory-cli api` behind `kt with`, until it answers; the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, env = line("api", file, ours=True, release=release)
    env |= {"API_HOST": "127.0.0.1", "API_PORT": str(port)}
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        end = time.monotonic() + 300
        while server.poll() is None and time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("release", ["0.9.5", "next"])
def test_llamafactory_api_uses_the_adapter(
    release: str, trained: Path, prepared: Path, said: tuple[str, str], tmp_path: Path
) -> None:
    body = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "do_sample": False}
    with api(asking(prepared, trained, tmp_path), tmp_path / "log", release) as url:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer = json.load(reply)["choices"][0]["message"]["content"]
    assert (tmp_path / "log").read_text().count("bytes packed") == LAYERS
    base, adapted = said
    assert answer == adapted != base


@pytest.mark.parametrize(
    ("release", "why"),
    [("0.9.5", "'kt-kernel' distribution was not found"), ("next", "without the upstream `transformers` distribution")],
)
def test_use_kt_is_refused_by_llamafactory_itself(release: str, why: str, prepared: Path, tmp_path: Path) -> None:
    """As docs/llamafactory.md says it."""
    keys = {**TRAINING, "model_name_or_path": str(prepared), "lora_target": EXPERTS, "dataset_dir": str(DATASETS)}
    keys |= {"output_dir": str(tmp_path / "out"), "use_kt": True}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(keys))
    assert why in llamafactory("train", str(tmp_path / "train.yaml"), ours=True, release=release, fails=True)
