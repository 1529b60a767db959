"""Stock LLaMA-Factory, not a line of it changed, with `use_kt: true`: `make test-llamafactory`.

It runs in venvs of its own, because LLaMA-Factory wants older packages than ours. Two releases, each typed as a user
types it: 0.9.5, the last one, and `next`, 0.9.6.dev0 as it is published under another name. What they train is compared
with the same release on the stock model without us, what they say and export with stock PEFT. An adapter of `kt train`,
which runs in the venv that `make build` made, is opened too.
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

from ktransformers.adapters import convert
from ktransformers.modeling.prepare import prepare
from tests.support.tiny_models import build, save
from tests.support.training_files import SEEDS

ROOT = Path(__file__).resolve().parents[2]
VENV = Path(sys.executable).parent.parent
RELEASES = {"0.9.5": VENV, "next": VENV / "next"}
TRANSFORMERS_5_7, PEFT_0_19 = VENV / "transformers-5.7", VENV / "peft-0.19"
TOKENIZER = ROOT / "tests" / "data" / "minimind_6400"
RECIPES = sorted((ROOT / "examples" / "ktransformers" / "train_lora").glob("*.yaml"))
EXPERTS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
DATASETS = ROOT / "src" / "ktransformers" / "train" / "demo_data"
STEPS = 4
LAYERS = 2
TRAINING: dict[str, Any] = {
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 4,
    "lora_target": "all",
    "dataset": "identity",
    "dataset_dir": str(DATASETS),
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
SHORT = (
    "max_steps=2",
    "max_samples=24",
    "use_cpu=true",
    "logging_steps=1",
    "gradient_accumulation_steps=2",
    "cutoff_len=256",
    "preprocessing_num_workers=1",
    "dataloader_num_workers=0",
)
TOKENS = 8  # of an answer

Train = Callable[..., Path]


def environment(release: str, **variables: str) -> dict[str, str]:
    """Without USE_KT: the files say `use_kt: true`."""
    env = {name: value for name, value in os.environ.items() if name not in ("USE_KT", "PYTHONPATH")}
    env |= {"PATH": f"{RELEASES[release] / 'bin'}:{env['PATH']}", "OMP_NUM_THREADS": "1"}
    return env | variables


def run(command: list[str], env: dict[str, str], *, typed: str = "", fails: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=env, input=typed, timeout=900)
    assert (done.returncode != 0) == fails, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def kt(release: str, *words: str) -> str:
    """`kt` of the environment; the second venv has no script of its own."""
    code = "from ktransformers.cli.main import main; main()"
    return run([str(RELEASES[release] / "bin" / "python"), "-c", code, *words], environment(release))


def llamafactory(*words: str, release: str, typed: str = "", fails: bool = False, **variables: str) -> str:
    """Runs `llamafactory-cli` and returns what it printed."""
    command = str(RELEASES[release] / "bin" / "llamafactory-cli")
    return run([command, *words], environment(release, **variables), typed=typed, fails=fails)


def write(folder: Path, keys: dict[str, Any]) -> str:
    file = folder / "file.yaml"
    file.write_text(yaml.safe_dump(keys, sort_keys=False))
    return str(file)


@pytest.fixture(scope="module", autouse=True)
def switched_on() -> Iterator[None]:
    for release in RELEASES:
        kt(release, "llamafactory", "on")
    yield
    for release in RELEASES:
        kt(release, "llamafactory", "off")


@functools.cache
def tiny_model(family: str, folder: Path, **changes: Any) -> Path:
    """A checkpoint with a tokenizer, and room for the special tokens that LLaMA-Factory's templates add."""
    save(build(family, vocab_size=6500, max_position_embeddings=512, **changes), folder)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def model(family: str) -> Path:
        return tiny_model(family, tmp_path_factory.mktemp(family))

    return model


@pytest.fixture(scope="module")
def model(models: Callable[[str], Path]) -> Path:
    return models("qwen3_moe")


@pytest.fixture(scope="module")
def train(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Train:
    """The output directory of a run; each is made once."""

    @functools.cache
    def run_once(release: str, *, use_kt: bool, processes: int = 1, gpu: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("run")
        keys = {**TRAINING, "model_name_or_path": str(model), "output_dir": str(folder / "out")}
        keys |= {"use_cpu": False, "bf16": True} if gpu else {}
        keys |= {"use_kt": True} if use_kt else {"lora_target": EXPERTS}
        keys |= {"ddp_backend": "gloo"} if processes > 1 else {}
        variables = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(processes)} if processes > 1 else {}
        printed = llamafactory("train", write(folder, keys), release=release, **variables)
        assert printed.count("bytes packed") == (processes * LAYERS if use_kt else 0)
        return folder / "out"

    return run_once


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def adapter(output: Path) -> dict[str, torch.Tensor]:
    return load_file(output / "adapter_model.safetensors")


def require_equal_runs(ours: Path, stock: Path, *, rel: float = 2e-3) -> None:
    assert len(losses(ours)) == STEPS and losses(ours)[-1] < losses(ours)[0]
    assert losses(ours) == pytest.approx(losses(stock), rel=rel)
    found, expected = adapter(ours), adapter(stock)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}
    # q, k, v, o, gate_up and down in each layer, A and B of each.
    assert len(found) == LAYERS * 12 and sum("experts" in name for name in found) == LAYERS * 4
    assert all(tensor.any() for tensor in found.values()), "B begins as zero and has moved"


@pytest.mark.parametrize("release", RELEASES)
def test_training_with_use_kt_equals_expert_lora_of_the_stock_model(release: str, train: Train) -> None:
    """`lora_target: all` here, the names of the experts there."""
    require_equal_runs(train(release, use_kt=True), train(release, use_kt=False))


@pytest.mark.gpu
def test_training_on_a_gpu_equals_that_of_the_stock_model(train: Train) -> None:
    """Everything but the experts is on the GPU, and the experts are streamed to it, in bf16."""
    require_equal_runs(*(train("0.9.5", use_kt=use_kt, gpu=True) for use_kt in (True, False)), rel=2e-2)


def test_training_in_two_processes_equals_that_of_the_stock_model(train: Train) -> None:
    """DDP; the processes that torchrun starts have the hooks too."""
    require_equal_runs(*(train("0.9.5", use_kt=use_kt, processes=2) for use_kt in (True, False)))


FSDP2 = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "no",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "machine_rank": 0,
    "rdzv_backend": "static",
    "same_network": True,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_state_dict_type": "FULL_STATE_DICT",
    },
}


@pytest.mark.parametrize("release", RELEASES)
def test_fsdp2_of_accelerate_launch_trains_what_ddp_trains(
    release: str, model: Path, train: Train, tmp_path: Path
) -> None:
    """`accelerate launch --config_file fsdp2_kt_bf16.yaml src/train.py X.yaml`, the form of the examples."""
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(FSDP2))
    (tmp_path / "train.py").write_text("from llamafactory.train.tuner import run_exp\n\nrun_exp()\n")
    keys = {**TRAINING, "model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), "use_kt": True}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [str(RELEASES[release] / "bin" / "python"), "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(tmp_path / "fsdp2.yaml"), "--main_process_port", port, str(tmp_path / "train.py")]
    printed = run([*command, write(tmp_path, {**keys, "ddp_backend": "gloo"})], environment(release))
    assert "FSDP2: everything but the experts is sharded" in printed
    require_equal_runs(tmp_path / "out", train("0.9.5", use_kt=True, processes=2))


@pytest.mark.parametrize("folder", [TRANSFORMERS_5_7, PEFT_0_19], ids=lambda folder: folder.name)
def test_training_with_the_oldest_packages(folder: Path, model: Path, train: Train, tmp_path: Path) -> None:
    keys = {**TRAINING, "model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), "use_kt": True}
    llamafactory("train", write(tmp_path, keys), release="next", PYTHONPATH=str(folder))
    require_equal_runs(tmp_path / "out", train("next", use_kt=False))


@pytest.mark.parametrize("release", RELEASES)
def test_mapping_activations_and_form_of_the_adapter(release: str, model: Path, train: Train, tmp_path: Path) -> None:
    """The same losses with kept activations; the adapter in kt-kernel's form answers as in PEFT's."""
    keys = {**TRAINING, "model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), "use_kt": True}
    keys |= {"kt_config": {"kt_num_threads": 2, "kt_backend": "auto", "kt_expert_weight_format": "bf16"}}
    keys |= {"kt_cpu_activation": "retain", "kt_adapter_format": "kt"}
    llamafactory("train", write(tmp_path, keys), release=release)
    assert losses(tmp_path / "out") == pytest.approx(losses(train(release, use_kt=True)), rel=1e-3)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"fused_expert_lora.safetensors", "kt_adapter_manifest.json", "adapter_model.safetensors"} <= names
    assert not any("experts" in name for name in adapter(tmp_path / "out"))
    answers = [
        chat(release, asking(model, folder, tmp_path)) for folder in (tmp_path / "out", train(release, use_kt=True))
    ]
    assert answers[0] == answers[1] != chat(release, asking(model, None, tmp_path))


def said(model: Path, folder: Path) -> tuple[str, str]:
    """What stock transformers says to "hello", and stock PEFT with the adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([tokenizer.encode("hello", add_special_tokens=False)])

    def answer(speaker: Any) -> str:
        generated = speaker.generate(input_ids=prompt, max_new_tokens=TOKENS, do_sample=False)
        return str(tokenizer.decode(generated[0, prompt.shape[1] :], skip_special_tokens=True))

    return answer(stock), answer(PeftModel.from_pretrained(stock, folder))


def asking(model: Path, trained: Path | None, folder: Path, **keys: Any) -> str:
    """A file for `chat` and `api`, as the guides have it."""
    keys = {"model_name_or_path": str(model), "template": "empty", "use_kt": True, **keys}
    keys |= {"infer_backend": "ktransformers", "cpu_infer": 2, "chunk_size": 8192, "trust_remote_code": True}
    keys |= {"kt_optimize_rule": "examples/kt_optimize_rules/Qwen3Moe-sft-amx.yaml"}
    keys |= {"infer_dtype": "float32", "max_new_tokens": TOKENS, "do_sample": False}
    return write(folder, keys | ({} if trained is None else {"adapter_name_or_path": str(trained)}))


def chat(release: str, file: str) -> str:
    printed = llamafactory("chat", file, release=release, typed="hello\nexit\n")
    assert printed.count("bytes packed") == LAYERS
    return printed.partition("Assistant: ")[2].partition("\n")[0].strip()


@contextmanager
def api(file: str, log: Path, release: str) -> Iterator[str]:
    """`llamafactory-cli api`, until it answers; the address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(RELEASES[release] / "bin" / "llamafactory-cli"), "api", file]
    env = environment(release, API_HOST="127.0.0.1", API_PORT=str(port))
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


def ask(url: str) -> str:
    body = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "do_sample": False}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


@pytest.mark.parametrize("release", RELEASES)
def test_chat_and_api_answer_as_stock_peft(release: str, model: Path, train: Train, tmp_path: Path) -> None:
    """With the keys of the guides: `infer_backend: ktransformers`, `cpu_infer`, `chunk_size`, `kt_optimize_rule`."""
    trained = train(release, use_kt=True)
    base, adapted = said(model, trained)
    file = asking(model, trained, tmp_path)
    assert adapted != base and chat(release, file) == adapted.strip()
    with api(file, tmp_path / "log", release) as url:
        assert ask(url) == adapted
    assert (tmp_path / "log").read_text().count("bytes packed") == LAYERS
    convert(trained, tmp_path / "gguf", "gguf", base_model_name_or_path=str(model))
    (gguf,) = (tmp_path / "gguf").glob("*.gguf")
    assert chat(release, asking(model, gguf, tmp_path)) == adapted.strip()


@pytest.fixture(scope="module")
def trained_by_kt(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of `kt train`: attention and experts, written by newer packages than these."""
    folder = tmp_path_factory.mktemp("ours")
    keys = {**TRAINING, "model_name_or_path": str(model), "output_dir": str(folder / "out")}
    done = [str(ROOT / ".venv" / "bin" / "kt"), "train", write(folder, keys)]
    run(done, dict(os.environ))
    assert sum("experts" in name for name in adapter(folder / "out")) == LAYERS * 4
    return folder / "out"


@pytest.mark.parametrize("release", RELEASES)
def test_adapter_of_kt_train_answers_as_stock_peft(
    release: str, model: Path, trained_by_kt: Path, tmp_path: Path
) -> None:
    base, adapted = said(model, trained_by_kt)
    assert adapted != base and chat(release, asking(model, trained_by_kt, tmp_path)) == adapted.strip()


@pytest.mark.parametrize("release", RELEASES)
def test_export_merges_the_adapter(release: str, model: Path, train: Train, tmp_path: Path) -> None:
    """With `use_kt: true` as in the other files of a recipe: the checkpoint is merged, its experts included."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    trained = train(release, use_kt=True)
    keys = {"model_name_or_path": str(model), "adapter_name_or_path": str(trained), "template": "empty"}
    keys |= {"export_dir": str(tmp_path / "merged"), "infer_dtype": "float32", "export_device": "cpu"}
    llamafactory("export", write(tmp_path, {**keys, "use_kt": True}), release=release)
    batch = torch.arange(1, 33).view(1, -1)
    with torch.no_grad():
        stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        plain = stock(batch).logits
        adapted = PeftModel.from_pretrained(stock, trained)(batch).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(batch).logits
    torch.testing.assert_close(merged, adapted, rtol=1e-3, atol=1e-3)
    assert (adapted - plain).abs().max() > 0.05, "the adapter does something"


@pytest.mark.parametrize("release", RELEASES)
def test_run_without_gradients_of_expert_lora_fails(release: str, models: Any, tmp_path: Path) -> None:
    """Experts of zeros pass no gradient to their LoRA."""
    folder = tmp_path / "model"
    shutil.copytree(models("qwen3_moe"), folder)
    (file,) = folder.glob("*.safetensors")
    from safetensors.torch import save_file

    tensors = load_file(file)
    save_file({n: t.zero_() if ".experts." in n else t for n, t in tensors.items()}, file, metadata={"format": "pt"})
    keys = {**TRAINING, "model_name_or_path": str(folder), "output_dir": str(tmp_path / "out"), "use_kt": True}
    printed = llamafactory("train", write(tmp_path, keys), release=release, fails=True)
    assert "4 of 4 LoRA pairs on experts never received a gradient" in printed
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


def dense_model(folder: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config.vocab_size = 6500
    save(LlamaForCausalLM(config), folder)
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    return folder


def test_refusals(model: Path, tmp_path: Path) -> None:
    keys = {**TRAINING, "model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), "use_kt": True}
    file = write(tmp_path, keys)
    train_it = functools.partial(llamafactory, "train", file, fails=True)
    assert "gate_proj,up_proj,down_proj among the names" in train_it("lora_target=q_proj", release="0.9.5")
    assert "finetuning_type: given freeze" in train_it("finetuning_type=freeze", release="0.9.5")
    dense = dense_model(tmp_path / "dense")
    assert "no expert layers" in train_it(f"model_name_or_path={dense}", release="next")
    versions = {"PYTHONPATH": str(TRANSFORMERS_5_7), "DISABLE_VERSION_CHECK": "1"}
    assert "use_kt: given transformers 5.7.0, expected LLaMA-Factory ==0.9.5 with" in train_it(
        release="0.9.5", **versions
    )
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.parametrize(
    ("release", "why"),
    [("0.9.5", "'kt-kernel' distribution was not found"), ("next", "without the upstream `transformers` distribution")],
)
def test_off_leaves_llamafactory_as_it_is(release: str, why: str, model: Path, tmp_path: Path) -> None:
    keys = {**TRAINING, "model_name_or_path": str(model), "output_dir": str(tmp_path / "out"), "use_kt": True}
    assert kt(release, "llamafactory", "status").startswith("on: ")
    assert "these versions work with use_kt" in kt(release, "llamafactory", "status")
    switched = list(RELEASES) if release == "next" else [release]  # the second venv sees files of the first
    for name in switched:
        kt(name, "llamafactory", "off")
    try:
        assert kt(release, "llamafactory", "status").startswith("off: ")
        assert why in llamafactory("train", write(tmp_path, keys), release=release, fails=True)
    finally:
        for name in switched:
            kt(name, "llamafactory", "on")


def test_prepared_directory_trains_under_kt_with(model: Path, train: Train, tmp_path: Path) -> None:
    """`kt with` and `kt model prepare`, for programs that have no `use_kt`; the file has neither."""
    prepare(model, tmp_path / "prepared")
    keys = {**TRAINING, "model_name_or_path": str(tmp_path / "prepared"), "output_dir": str(tmp_path / "out")}
    file = write(tmp_path, {**keys, "lora_target": EXPERTS})
    program = [str(VENV / "bin" / "kt"), "with", "--", "llamafactory-cli", "train", file]
    printed = run(program, environment("0.9.5", KT_LOG="info"))
    assert printed.count("bytes packed") == LAYERS
    require_equal_runs(tmp_path / "out", train("0.9.5", use_kt=False))


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped data, and rows under the name of a dataset that the recipes want and that is not shipped."""
    folder = tmp_path_factory.mktemp("data")
    shutil.copytree(DATASETS, folder, dirs_exist_ok=True)
    rows = [{"instruction": f"Say {number}.", "input": "", "output": f"{number}, gladly."} for number in range(24)]
    (folder / "alpaca_en_demo.json").write_text(json.dumps(rows))
    info = json.loads((folder / "dataset_info.json").read_text()) | {
        "alpaca_en_demo": {"file_name": "alpaca_en_demo.json"}
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


FAMILY_OF = {
    "deepseek3": "deepseek_v3",
    "deepseek2": "deepseek_v2",
    "qwen3moe": "qwen3_moe",
    "qwen3_5moe": "qwen3_5_moe_text",
}


def run_recipe(file: str, name: str, release: str, models: Any, datasets: Path, tmp_path: Path, *words: str) -> None:
    """The file as it is, with model, data and output named on the command line."""
    model = models(FAMILY_OF[name.split("_lora_")[0].removesuffix("_int8")])
    paths = [f"model_name_or_path={model}", f"dataset_dir={datasets}", f"output_dir={tmp_path / 'out'}"]
    if name.startswith("qwen3_5moe"):  # its template needs the image processor of the release, which needs torchvision
        paths.append("template=qwen3")
    printed = llamafactory("train", file, *paths, *SHORT, *words, release=release)
    assert "bytes packed" in printed and "received gradients in 2 steps" in printed
    assert any("experts" in key for key in adapter(tmp_path / "out"))
    assert len(losses(tmp_path / "out")) == 2


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", SEEDS)
def test_recipes_of_the_guides_run(name: str, release: str, models: Any, datasets: Path, tmp_path: Path) -> None:
    run_recipe(write(tmp_path, SEEDS[name]), name, release, models, datasets, tmp_path)


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_recipes_in_examples_run(file: Path, models: Any, datasets: Path, tmp_path: Path) -> None:
    words = []
    if "int8" in file.stem:
        folder = tmp_path / "int8"
        run(
            [str(ROOT / ".venv" / "bin" / "kt"), "quant", str(models("deepseek_v3")), "-o", str(folder), "-m", "int8"],
            dict(os.environ),
        )
        words.append(f"kt_weight_path={folder}")
    run_recipe(str(file), file.stem, "next", models, datasets, tmp_path, *words)
