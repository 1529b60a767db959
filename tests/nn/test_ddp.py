"""Expert LoRA on two processes: stock DDP over gloo on the CPU, gradients those of one process with twice the batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ktransformers.nn import attach
from ktransformers.nn.adapter import lora_parameters
from ktransformers.nn.distributed import PREFIXES
from ktransformers.nn.ghost import Ghost

from .families import build

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]
HERE = Path(__file__).resolve().parents[2]


def adapted(seed: int, targets: list[str]) -> nn.Module:
    model = build("qwen3_moe")
    attach(model, free=True)
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(r=4, target_modules=targets))
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    return peft.train()


def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch).logits
    found: torch.Tensor = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_names_for_ddp() -> None:
    peft = adapted(0, ATTENTION + EXPERTS)
    ignored = set(peft._ddp_params_and_buffers_to_ignore)  # found on the model inside
    left = {name for name, _ in peft.named_parameters() if name not in ignored}
    assert not [name for name in left if "experts" in name]
    assert {name for name in left if "lora" in name} == {
        name for name, parameter in peft.named_parameters() if "self_attn" in name and parameter.requires_grad
    }
    inside = peft.get_base_model()
    ghosts = [name for name, parameter in inside.named_parameters() if isinstance(parameter, Ghost)]
    assert len(ghosts) == 4 and len(lora_parameters(inside)) == 8
    assert ignored == {prefix + name for name in [*ghosts, *lora_parameters(inside)] for prefix in PREFIXES}


RANK = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.nn.families import tokens
from tests.nn.test_ddp import *
from ktransformers.nn.distributed import average_expert_gradients
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, batch = dist.get_rank(), tokens(4)
mine, rest = batch[2 * rank : 2 * rank + 2], batch[2 - 2 * rank : 4 - 2 * rank]

def close(got, want, what):
    assert got.keys() == want.keys(), (what, got.keys() ^ want.keys())
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6, msg=lambda m: f"{what}: {name}: {m}")

for targets in (ATTENTION + EXPERTS, EXPERTS):
    alone = adapted(0, targets)
    loss(alone, batch).backward()
    want = gradients(alone)
    model = adapted(rank, targets)  # another seed on the second rank: the first one's numbers count
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    loss(ddp, mine).backward()
    close(gradients(model), want, "one step")
    with ddp.no_sync():
        loss(ddp, rest).backward()
    local = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    others = [torch.empty_like(tensor) for tensor in [next(iter(local.values()))] * 2]
    dist.all_gather(others, next(iter(local.values())))
    assert not torch.equal(*others), "under no_sync nothing is averaged"
    loss(ddp, mine).backward()
    close(gradients(model), {name: 2 * tensor for name, tensor in want.items()}, "accumulated")
    for _ in range(2):  # accumulated, and averaged each time
        loss(ddp, mine).backward()
    close(gradients(model), {name: 2 * tensor for name, tensor in want.items()}, "averaged twice")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    loss(ddp, mine).backward()
    close(gradients(model), want, "checkpointed")
    del ddp
model = adapted(0, EXPERTS)
loss(model, mine).backward()
average_expert_gradients(model)
close(gradients(model), want, "without DDP")
if rank == 0:
    print("fine")
dist.destroy_process_group()
"""


def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{RANK}")
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("fine")


MIXED = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.nn.families import tokens
from tests.nn.test_ddp import *
dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
batch = tokens(4).cuda()
alone = adapted(0, ATTENTION + EXPERTS).cuda()
loss(alone, batch).backward()
want = gradients(alone)
model = adapted(0, ATTENTION + EXPERTS).cuda()
ddp = DistributedDataParallel(model, device_ids=[0], find_unused_parameters=True)
loss(ddp, batch).backward()
got = gradients(model)
assert {t.device.type for n, t in got.items() if "experts" in n} == {"cpu"}
assert {t.device.type for n, t in got.items() if "experts" not in n} == {"cuda"}
for name in want:
    torch.testing.assert_close(got[name], want[name], rtol=1e-2, atol=1e-5)
print("fine")
dist.destroy_process_group()
"""


@pytest.mark.gpu
def test_mixed_devices(tmp_path: Path) -> None:
    """One GPU, so one rank: DDP takes a module with parameters on both devices, and nccl gets no host tensors."""
    script = tmp_path / "rank.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{MIXED}")
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", str(script)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("fine")
