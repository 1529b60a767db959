"""Real runs of `kt train` on the CPU, each in a process of its own, and what the planner predicted for them.

`python -m tests.support.measured_training NAME` builds a random model, trains it for a few steps and prints predicted
and measured memory as one JSON line; without a name it runs all of them and prints the table of docs/plan.md. Models
are large enough that what is planned outweighs Python itself, and float32 except for the experts, because CPUs without
bf16 instructions would need minutes. Memory that allocators keep after it is freed is not part of the prediction and
varies (5 % on two busy cores; with glibc 13 to 24 % of what a run with pairs needs), so allocators are told to return
it at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests" / "data" / "minimind_6400"
# What is freed is given back at once: by torch's allocator on ARM, and by glibc, whose thresholds grow by themselves
# unless they are set.
PROMPT = {"MIMALLOC_PURGE_DELAY": "0"}
PROMPT |= {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}

GROUPED: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "moe_intermediate_size": 320,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 128,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 96,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}


@dataclass(frozen=True)
class Case:
    model: dict[str, Any]
    keys: dict[str, Any] = field(default_factory=dict)


CASES = {
    "grouped": Case(GROUPED, {"lora_rank": 8}),
    "latent-retain": Case(LATENT, {"lora_rank": 16, "kt_cpu_activation": "retain", "cutoff_len": 768}),
    "no-checkpointing": Case(GROUPED, {"disable_gradient_checkpointing": True, "cutoff_len": 768}),
    "rank-64-accumulated": Case(GROUPED, {"lora_rank": 64, "gradient_accumulation_steps": 2}),
    "attention-alone": Case(LATENT, {"lora_target": "q_b_proj,o_proj"}),
    "train-on-prompt": Case(GROUPED, {"train_on_prompt": True}),
    "preference": Case(
        GROUPED, {"stage": "dpo", "dataset": "dpo_en_demo", "max_samples": 40, "packing": False, "cutoff_len": 384}
    ),
    "wide-vocabulary": Case(GROUPED | {"vocab_size": 32000, "num_hidden_layers": 4}, {"cutoff_len": 384}),
    "few-large-experts": Case(
        GROUPED
        | {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 1536,
            "hidden_size": 640,
            "head_dim": 80,
        },
        {"packing": False, "kt_tokens_per_batch": 512, "per_device_train_batch_size": 8, "cutoff_len": 256},
    ),
}


def build_case(name: str, folder: Path) -> dict[str, Any]:
    """A random model in `folder`, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    case = CASES[name]
    torch.set_num_threads(2)
    words = {"vocab_size": 6400, "max_position_embeddings": 2048, "dtype": "float32"} | case.model
    config = AutoConfig.for_model(**words, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / "model" / file.name)
    return {"parameters": sum(tensor.numel() for tensor in model.parameters())}


def train_case(name: str, folder: Path) -> dict[str, Any]:
    import torch

    from ktransformers.train.resolve import read_settings
    from ktransformers.train.run import train
    from tests.support.training import RunRecorder

    torch.set_num_threads(2)
    keys = {
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(folder / "output"),
        "dataset": "identity",
        "max_samples": 400,
        "packing": True,
        "cutoff_len": 512,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    result = train(read_settings(keys | CASES[name].keys), RunRecorder())
    return {line.what: {"predicted": line.predicted, "measured": line.measured} for line in result.comparison}


def measure(name: str) -> dict[str, Any]:
    """Built in one process and trained in another, so that nothing of building is left in memory."""
    return run_parts("tests.support.measured_training", name, ("build", "train"))


def run_parts(module: str, name: str, parts: Sequence[str]) -> dict[str, Any]:
    """The results of `python -m MODULE NAME PART FOLDER`, one process after another in the same folder."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, Any] = {}
        for part in parts:
            command = [sys.executable, "-m", module, name, part, folder]
            done = subprocess.run(
                command, cwd=ROOT, env=os.environ | PROMPT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{name}: {part}: {done.stderr[-2000:]}")
            found |= json.loads(done.stdout.splitlines()[-1])
        return found


HEAD = ("run", "parameters", "predicted", "measured", "off", "tokens/s predicted", "measured")


def say(*cells: str) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[2] in ("build", "train"):
        name, part, folder = sys.argv[1:]
        found = (build_case if part == "build" else train_case)(name, Path(folder))
        sys.stdout.write(json.dumps(found) + "\n")
        return
    say(*HEAD)
    say(*("---" for _ in HEAD))
    for name in sys.argv[1:] or CASES:
        found = measure(name)
        host, speed = found["host memory"], found["speed"]
        off = host["measured"] / host["predicted"] - 1
        sizes = f"{host['predicted']:.3f} GB", f"{host['measured']:.3f} GB", f"{off:+.1%}"
        rates = f"{speed['predicted']:.0f}", f"{speed['measured']:.0f}"
        say(name, f"{found['parameters'] / 1e6:.0f} million", *sizes, *rates)


if __name__ == "__main__":
    main()
