"""Expert LoRA on two ranks with stock DDP over gloo on the CPU: gradients equal those of one process with twice the
batch."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ktransformers.experts.peft_lora import lora_parameters
from ktransformers.experts.placeholder import Placeholder
from ktransformers.nn import attach
from ktransformers.parallel.distributed import DDP_NAME_PREFIXES
from tests.support.forked import Forked
from tests.support.tiny_models import build

ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["gate_proj", "up_proj", "down_proj"]
ROOT = Path(__file__).resolve().parents[2]


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
    grads: torch.Tensor = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    return grads


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return grads


def test_ddp_ignores_placeholders_and_expert_lora() -> None:
    peft = adapted(0, ATTENTION + EXPERTS)
    ignored = set(peft._ddp_params_and_buffers_to_ignore)  # grads on the model inside
    left = {name for name, _ in peft.named_parameters() if name not in ignored}
    assert not [name for name in left if "experts" in name]
    assert {name for name in left if "lora" in name} == {
        name for name, parameter in peft.named_parameters() if "self_attn" in name and parameter.requires_grad
    }
    inside = peft.get_base_model()
    placeholders = [name for name, parameter in inside.named_parameters() if isinstance(parameter, Placeholder)]
    assert len(placeholders) == 4 and len(lora_parameters(inside)) == 8
    assert ignored == {
        prefix + name for name in [*placeholders, *lora_parameters(inside)] for prefix in DDP_NAME_PREFIXES
    }


RANK = """
import sys, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from tests.support.tiny_models import tokens
from tests.parallel.test_distributed import *
from ktransformers.nn import average_expert_gradients
torch.set_num_threads(1)
backend, device = sys.argv[1:]
dist.init_process_group(backend)
rank, size, batch = dist.get_rank(), dist.get_world_size(), tokens(4).to(device)
half = 4 // size
own, rest = batch[half * rank : half * (rank + 1)], batch[half * (size - 1 - rank) : half * (size - rank)]
together, alone_too = ATTENTION + EXPERTS, [EXPERTS] if device == "cpu" else []

def close(got, want, what):
    assert got.keys() == want.keys(), (what, got.keys() ^ want.keys())
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-5, msg=lambda m: f"{what}: {name}: {m}")

for targets in [together, *alone_too]:
    alone = adapted(0, targets).to(device)
    loss(alone, batch).backward()
    want = gradients(alone)
    twice = {name: 2 * tensor for name, tensor in want.items()}
    model = adapted(rank, targets).to(device)  # another seed on rank 1: DDP broadcasts the values of rank 0
    ddp = DistributedDataParallel(model, device_ids=None if device == "cpu" else [0], find_unused_parameters=True)
    loss(ddp, own).backward()
    close(gradients(model), want, "one step")
    with ddp.no_sync():
        loss(ddp, rest).backward()
    if size > 1:
        local = next(p.grad for name, p in model.named_parameters() if "experts" in name and p.grad is not None)
        gathered = [torch.empty_like(local) for _ in range(size)]
        dist.all_gather(gathered, local)
        assert not torch.equal(*gathered), "under no_sync nothing is averaged"
    loss(ddp, own).backward()
    close(gradients(model), twice, "accumulated")
    for _ in range(2):  # accumulated, and averaged each time
        loss(ddp, own).backward()
    close(gradients(model), twice, "averaged twice")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    loss(ddp, own).backward()
    grads = gradients(model)
    close(grads, want, "checkpointed")
    assert {tensor.device.type for name, tensor in grads.items() if "experts" in name} == {"cpu"}
    assert {tensor.device.type for name, tensor in grads.items() if "experts" not in name} <= {device}
    del ddp
model = adapted(0, targets).to(device)
loss(model, own).backward()
average_expert_gradients(model)
want = {name: tensor for name, tensor in want.items() if "experts" in name}
close({name: tensor for name, tensor in gradients(model).items() if "experts" in name}, want, "without DDP")
if rank == 0:
    print("fine")
dist.destroy_process_group()
"""


def run(tmp_path: Path, processes: int, backend: str, device: str) -> None:
    script = tmp_path / "rank.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{RANK}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run([*launcher, str(script), backend, device], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().endswith("fine")


def test_gradients_of_two_ranks_equal_one_process_with_twice_the_batch() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [Forked(RANK, "gloo", "cpu", **where, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    first, second = (rank.wait() for rank in ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-4000:] + second.stderr[-4000:]
    assert first.stdout.strip() == "fine"


@pytest.mark.gpu
@pytest.mark.parametrize(("processes", "backend"), [(2, "gloo"), (1, "nccl")])
def test_expert_lora_on_the_host_and_attention_on_a_gpu(processes: int, backend: str, tmp_path: Path) -> None:
    """Two processes share a GPU over gloo; nccl gets no host tensors."""
    run(tmp_path, processes, backend, "cuda")
