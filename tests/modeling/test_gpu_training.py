"""A Qwen3-MoE of real layer shapes trained with LoRA on attention and experts, by the stock model with all of it on a
GPU and by ours with the experts on the CPU: the losses are the same within bf16 noise.

What that noise is, is measured: the stock model is also trained in float32, from the same bf16 numbers on the same
data. Its losses are the truth; the stock bf16 model's mean distance from them is the noise of one bf16 run. Ours must
not be further from the truth than twice that, nor from the stock model than three times: two noisy runs are up to twice
as far from each other as each is from the truth, and the noise of one run is itself a matter of luck (a token near the
border between two experts takes the one or the other). The same script runs in a small size with everything on the CPU,
so that it is known to work where there is no GPU.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ktransformers.experts.contract import expert_modules
from ktransformers.experts.placeholder import Placeholder
from ktransformers.nn import attach, lora_parameters

pytestmark = pytest.mark.filterwarnings("ignore")

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Size:
    device: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    layers: int
    head: int
    rows: int  # sequences a step
    length: int
    steps: int
    vocabulary: int
    rate: float  # of learning


SMALL = Size("cpu", 64, 32, 8, 2, layers=2, head=16, rows=2, length=32, steps=15, vocabulary=32, rate=5e-3)
REAL = Size("cuda:0", 2048, 768, 128, 8, layers=8, head=128, rows=4, length=128, steps=50, vocabulary=256, rate=5e-4)
BATCHES = 5  # repeated, so that the model memorises them soon


@dataclass(frozen=True)
class Run:
    losses: list[float]
    step_s: float  # the median


def build(size: Size, implementation: str) -> PreTrainedModel:
    """The stock model in bf16 on its device, the same numbers every time, large enough that the experts matter."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        moe_intermediate_size=size.intermediate,
        num_experts=size.experts,
        num_experts_per_tok=size.top_k,
        norm_topk_prob=True,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.head,
        max_position_embeddings=size.length,
        tie_word_embeddings=False,
        pad_token_id=None,
        use_cache=False,
    )
    with torch.device(size.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation=implementation)
    generator = torch.Generator(size.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                scale = 1.5 if "experts" in name else 1.0
                parameter.normal_(0, scale / parameter.shape[-1] ** 0.5, generator=generator)
    built: PreTrainedModel = model
    return built


def batches(size: Size) -> list[Tensor]:
    """A token is followed by the one that a fixed permutation says, nine times out of ten: something to learn."""
    generator = torch.Generator().manual_seed(1)
    follower = torch.randperm(size.vocabulary, generator=generator)
    different = []
    for _ in range(BATCHES):
        rows = torch.randint(size.vocabulary, (size.rows, size.length), generator=generator)
        kept = torch.rand(size.rows, size.length, generator=generator) < 0.9
        for place in range(1, size.length):
            rows[:, place] = torch.where(kept[:, place], follower[rows[:, place - 1]], rows[:, place])
        different.append(rows.to(size.device))
    return [different[step % BATCHES] for step in range(size.steps)]


def adapt(model: PreTrainedModel, start: dict[str, Tensor]) -> PeftModel:
    """PEFT's LoRA, rank 8, from the same numbers in every model; `start` takes those of the first."""
    torch.manual_seed(2)
    peft = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    trained = {name: parameter for name, parameter in peft.named_parameters() if parameter.requires_grad}
    if not start:
        start |= {name: parameter.detach().cpu().clone() for name, parameter in trained.items()}
    assert trained.keys() == start.keys() and any("experts" in name for name in start)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(start[name])
    return peft.train()


def train(peft: PeftModel, data: list[Tensor], rate: float) -> Run:
    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01, fused=True)
    losses, times = [], []
    for batch in data:
        began = time.perf_counter()
        loss = peft(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - began)
    return Run(losses, sorted(times)[len(times) // 2])


def check_ours(peft: PeftModel, size: Size) -> None:
    """The experts are where they should be, and so is everything else."""
    assert all(isinstance(module.gate_up_proj, Placeholder) for module in expert_modules(peft).values())
    lora = lora_parameters(peft)
    assert len(lora) == 4 * size.layers
    on_gpu = size.device != "cpu"
    assert all(p.device.type == "cpu" and p.is_pinned() == on_gpu for p in lora.values())
    others = [p for name, p in peft.named_parameters() if name not in lora and not isinstance(p, Placeholder)]
    assert {str(parameter.device) for parameter in others} == {size.device}


def runs(size: Size) -> dict[str, Run]:
    """Stock in bf16, stock in float32, ours; one model in memory at a time."""
    data, start, results = batches(size), dict[str, Tensor](), {}
    results["stock"] = train(adapt(build(size, "grouped_mm"), start), data, size.rate)
    gc.collect()  # modules refer to each other in circles
    results["float32"] = train(adapt(build(size, "grouped_mm").float(), start), data, size.rate)
    gc.collect()
    model = build(size, "eager")
    attach(model, free=True)
    peft = adapt(model, start)
    results["ours"] = train(peft, data, size.rate)
    check_ours(peft, size)
    return results


def mean_loss_difference(first: Run, second: Run) -> float:
    return sum(abs(a - b) for a, b in zip(first.losses, second.losses, strict=True)) / len(first.losses)


def judge(results: dict[str, Run], write: Any) -> None:
    stock, truth, ours = results["stock"], results["float32"], results["ours"]
    noise = mean_loss_difference(stock, truth)
    summary = {
        "losses": {name: [round(loss, 5) for loss in run.losses] for name, run in results.items()},
        "step_s": {name: round(run.step_s, 4) for name, run in results.items()},
        "noise": noise,
        "ours_from_float32": mean_loss_difference(ours, truth),
        "ours_from_stock": mean_loss_difference(ours, stock),
        "worst": max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)),
        "worst_of_stock": max(abs(a - b) for a, b in zip(stock.losses, truth.losses, strict=True)),
    }
    write(json.dumps(summary) + "\n")
    fell = sum(truth.losses[:5]) / 5 - sum(truth.losses[-5:]) / 5
    assert fell > 0.5, "the stock model does not learn either"
    assert 0 < noise < fell / 5, "bf16 noise hides what is learnt: nothing would be shown"
    assert mean_loss_difference(ours, truth) <= 2 * noise
    assert mean_loss_difference(ours, stock) <= 3 * noise


def test_small_layers_on_the_cpu_match_stock_training() -> None:
    judge(runs(SMALL), sys.stdout.write)


@pytest.mark.gpu
def test_real_layers_match_stock_training_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """About two minutes, up to 60 GB on the GPU (the float32 model) and 15 GB of host memory."""
    assert torch.get_float32_matmul_precision() == "highest", "float32 is to be the truth"
    results = runs(REAL)
    with capsys.disabled():
        judge(results, sys.stdout.write)
