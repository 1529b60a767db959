"""Expert LoRA of kt-kernel's form on two processes over gloo: gradients equal those of one with twice the batch."""

from __future__ import annotations

import socket

from tests.support.forked import Forked

RANK = """
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.nn.parallel import DistributedDataParallel
from kt_kernel import sft
from tests.support.tiny_models import build, tokens
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, batch = dist.get_rank(), tokens(4)
own = batch[2 * rank : 2 * rank + 2]

def adapted(seed):
    model = build("qwen3_moe")
    sft.wrap_moe_layers_with_kt_wrapper(model, {})
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]))
    torch.manual_seed(seed)
    sft.kt_adapt_peft_lora(model)
    with torch.no_grad():
        for parameter in sft.get_kt_lora_params(model)[1::2]:  # B, equal on both ranks
            parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view(parameter.shape))
    return model

def gradients(model):
    grads = [parameter.grad.float() for parameter in sft.get_kt_lora_params(model)]
    for parameter in sft.get_kt_lora_params(model):
        parameter.grad = None
    return grads

def close(got, want, what):
    for one, other in zip(got, want, strict=True):
        assert float((one - other).norm()) < 0.02 * float(other.norm()), what

def loss(model, rows):
    return model(input_ids=rows, labels=rows).loss

model = adapted(rank)  # another seed on rank 1: the values of rank 0 count
alone = adapted(0)
loss(alone, batch).backward()
want = gradients(alone)
loss(model, own).backward()
sft.sync_kt_lora_gradients(model)
close(gradients(model), want, "without DDP")
ddp = DistributedDataParallel(model)
loss(ddp, own).backward()
first = [parameter.grad.clone() for parameter in sft.get_kt_lora_params(model)]
sft.sync_kt_lora_gradients(model)
for one, parameter in zip(first, sft.get_kt_lora_params(model), strict=True):
    assert torch.equal(one, parameter.grad), "averaged before"
close(gradients(model), want, "DDP")
print("fine" if rank == 0 else "")
dist.destroy_process_group()
"""


def test_gradients_of_two_processes_equal_one_with_twice_the_batch() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [Forked(RANK, **where, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]
    first, second = (rank.wait() for rank in ranks)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr[-4000:] + second.stderr[-4000:]
    assert first.stdout.strip() == "fine"
