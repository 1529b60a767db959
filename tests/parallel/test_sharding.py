"""FSDP2 over gloo on the CPU, with the experts left out: gradients, norms, steps and states equal one process."""

from __future__ import annotations

import socket

import pytest
import torch
from torch import nn

from ktransformers.ground.errors import InputError
from ktransformers.parallel import sharding
from ktransformers.quantized.widened import WidenedWeight
from tests.support.forked import Forked
from tests.support.tiny_models import build

RANK = """
import copy, os, sys, torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch.distributed.tensor import DTensor
from tests.support.tiny_models import build, tokens
from tests.parallel.test_distributed import ATTENTION, EXPERTS, loss
from tests.parallel.test_sharding import widen
from ktransformers.nn import attach
from ktransformers.parallel import sharding, whole_state
from tests.support.rank_memory import parameter_bytes
from ktransformers.experts.checkpointing import save_expert_outputs
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size, batch = dist.get_rank(), dist.get_world_size(), tokens(4)
own = batch[4 // size * rank : 4 // size * (rank + 1)]

def adapted(case, seed=0):
    model = build(case["family"], **case["changes"])
    attach(model, free=True, precision="f32", isa="generic")
    if case["widened"]:
        widen(model)
    torch.manual_seed(seed)
    peft = get_peft_model(model, LoraConfig(r=3, target_modules=case["targets"]))  # 3 rows: uneven shards
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    if case["checkpointed"]:
        options = {"use_reentrant": False} | ({"context_fn": save_expert_outputs} if case["checkpointed"] == 2 else {})
        peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        peft.enable_input_require_grads()
    return peft.train()

def close(got, want, what, bound=1e-5):
    assert got.keys() == want.keys(), (what, got.keys() ^ want.keys())
    for name in want:
        error = (got[name].float() - want[name].float()).abs().max() / want[name].float().abs().max().clamp(min=1e-12)
        assert error <= bound, (what, name, float(error))

def gradients(model):
    sharding.reshard(model)
    found = {n: sharding.whole_tensor(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found

def optimizer_of(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW([{"params": trained[0::2], "lr": 1e-2}, {"params": trained[1::2], "lr": 2e-2}])

def check(case):
    what = str(case)
    alone, model = adapted(case), adapted(case, seed=rank)  # other initial values: rank 0's are sent to all
    model.load_state_dict({n: p for n, p in alone.state_dict().items() if "lora_B" in n}, strict=False)
    options = sharding.ShardOptions(case.get("offload", False), case.get("again", True))
    whole_bytes = parameter_bytes(alone)
    done = sharding.shard_model(model, options, torch.device("cpu"))
    assert done.compute_dtype == torch.float32 and sharding.sharding_of(model) is done
    share = parameter_bytes(model) / whole_bytes
    assert share <= (0.55 if size == 2 else 0.30), (what, share)
    sharded = [n for n, p in model.named_parameters() if isinstance(p, DTensor)]
    left = {n for n, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert sharded and all("experts" in name for name in left), left
    loss(alone, batch).backward()
    want = {n: p.grad.clone() for n, p in alone.named_parameters() if p.grad is not None}
    loss(model, own).backward()
    close(gradients(model), want, what + " gradients")
    with model.no_sync():
        loss(model, own).backward()
    loss(model, own).backward()
    close(gradients(model), {n: 2 * g for n, g in want.items()}, what + " accumulated")
    with torch.no_grad():
        model(input_ids=own)  # leaves the root gathered
    loss(model, own).backward()
    norm = whole_state.clip_gradients(model, 0.1)
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert abs(float(norm) / float(expected) - 1) < 1e-5, (what, norm, expected)
    close(gradients(model), {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}, what + " clipped")
    alone.zero_grad()
    # three steps; after the first, the state is moved to an optimiser of one process and back
    single, several = optimizer_of(alone), optimizer_of(model)
    sharding.separate_steps(several)
    for step in range(3):
        loss(alone, batch).backward(); single.step(); alone.zero_grad()
        loss(model, own).backward(); several.step(); model.zero_grad()
        if step == 0:
            state = whole_state.whole_optimizer_state(model, several)
            assert all(type(v) is torch.Tensor for entry in state["state"].values() for v in entry.values())
            fresh = optimizer_of(alone); fresh.load_state_dict(copy.deepcopy(state)); single = fresh
            several = optimizer_of(model); sharding.separate_steps(several)
            whole_state.load_optimizer_state(model, several, copy.deepcopy(state))
    trained = whole_state.whole_trained(model)
    assert all(type(tensor) is not DTensor for tensor in trained.values())
    close(trained, {n: p for n, p in alone.named_parameters() if p.requires_grad}, what + " trained", 2e-4)
    # the adapter's file: written from whole tensors, read back by PEFT into shards
    saved = {n: t.clone() for n, t in get_peft_model_state_dict(model, state_dict=trained).items()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            sharding.local_tensor(parameter).fill_(float("nan"))
    result = set_peft_model_state_dict(model, saved)
    assert not result.unexpected_keys
    close(whole_state.whole_trained(model), trained, what + " read back", 0)
    set_peft_model_state_dict(alone, saved)
    with torch.no_grad():
        ours, stock = loss(model, batch), loss(alone, batch)
    assert abs(float(ours) - float(stock)) <= 1e-5 * float(stock), (what, ours, stock)
    assert sharding.on_any_rank([rank == 0, rank == size - 1, False]) == [True, True, False]

sizes = {"vocab_size": 515, "hidden_size": 64}
plain = {"family": "qwen3_moe", "changes": sizes, "widened": False, "checkpointed": 0, "targets": ATTENTION + EXPERTS}
cases = [
    plain | {"checkpointed": 2, "offload": True},
    plain | {"widened": True, "checkpointed": 1},
    plain | {"changes": sizes | {"tie_word_embeddings": True}, "widened": True, "again": False},
    plain | {"family": "deepseek_v3", "changes": {}, "targets": ["o_proj", *EXPERTS], "checkpointed": 1},
    plain | {"targets": ["embed_tokens", "q_proj", "lm_head"], "checkpointed": 1},
]
for case in cases[int(sys.argv[1]) : int(sys.argv[2])]:
    check(case)
print("fine")
dist.destroy_process_group()
"""


def widen(model: nn.Module) -> None:
    """As on a CPU without bf16 products; the numbers of tiny models are bf16."""
    widened: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = module.weight
            if id(weight) not in widened:
                numbers = weight.detach().to(torch.bfloat16)
                assert torch.equal(numbers.float(), weight)
                widened[id(weight)] = nn.Parameter(WidenedWeight(numbers, torch.float32), requires_grad=False)
            module.weight = widened[id(weight)]


def run_ranks(size: int, first: int, last: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    started = [Forked(RANK, first, last, **where, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(size)]
    for rank in [rank.wait(500) for rank in started]:
        assert rank.returncode == 0 and rank.stdout.strip() == "fine", rank.stderr[-4000:]


def test_two_ranks_equal_one_process() -> None:
    run_ranks(2, 0, 3)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_families_embeddings_and_more_ranks_equal_one_process(size: int) -> None:
    run_ranks(size, 0 if size == 4 else 3, 5)


def test_one_process_is_not_sharded() -> None:
    with pytest.raises(InputError, match="fsdp: given one process, expected several"):
        sharding.shard_model(build("qwen3_moe"), sharding.ShardOptions(), torch.device("cpu"))
