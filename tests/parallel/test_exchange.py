"""Experts that the ranks of a group divide, over gloo on the CPU: losses and gradients equal those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ktransformers.experts.partition import ExpertShard, by_experts, by_frequency, by_layers
from ktransformers.nn import load_model
from ktransformers.parallel.sharding import reshard, whole_tensor
from tests.support.ranks import run_ranks
from tests.support.tiny_models import build, save

EXPERTS, LAYERS = 8, 2
LORA: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PARTITIONS = {
    "experts": lambda ranks: by_experts(LAYERS, EXPERTS, ranks),
    "layers": lambda ranks: by_layers(LAYERS, EXPERTS, min(ranks, LAYERS)),
    "frequency": lambda ranks: by_frequency([[9, 1, 7, 1, 5, 1, 3, 0], [1, 1, 1, 1, 1, 1, 1, 90]], ranks),
}


def adapted(path: Path, shard: ExpertShard | None, group: Any = None) -> nn.Module:
    """The model with LoRA on attention and experts; B is random, drawn for all experts."""
    from ktransformers.experts.lora_shards import factor_shards
    from ktransformers.parallel.exchange import connect

    model = load_model(path, dtype=torch.float32, precision="f32", shard=shard)
    if group is not None:
        connect(model, group)
    torch.manual_seed(3)
    peft = get_peft_model(model, LoraConfig(**LORA, target_parameters=TARGETS))
    shards = factor_shards(peft)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                shape = shards[name].whole_shape(parameter) if name in shards else tuple(parameter.shape)
                whole = torch.randn(shape, generator=generator) * 0.05
                parameter.copy_(shards[name].cut(whole) if name in shards else whole)
    return peft.train()


def rows_of(rank: int) -> Tensor:
    """Of different length on every rank."""
    generator = torch.Generator().manual_seed(17 + rank)
    return torch.randint(3, 96, (1 + rank % 2, 7 + 3 * rank), generator=generator)


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows).logits
    loss: Tensor = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    return loss


def gradients(model: nn.Module) -> dict[str, Tensor]:
    reshard(model)
    trained = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad and p.grad is not None]
    grads = {name: whole_tensor(grad).clone() for name, grad in trained}
    model.zero_grad()
    return grads


def close(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape, what
    scale, error = float(want.detach().norm()), float((got - want).detach().norm())
    assert error <= 1e-5 * max(scale, 1e-3), f"{what}: {error:.3g} of {scale:.3g}"


def routings(rank: int) -> dict[str, Tensor]:
    """Expert ids [T, 2] of the cases that a batch may have, T different by rank."""
    rows = 3 + 2 * rank
    random = torch.randint(0, EXPERTS, (rows, 2), generator=torch.Generator().manual_seed(rank))
    return {
        "no rows on a rank": random if rank else random[:0],
        "no rows on any rank": random[:0],
        "one expert for all": torch.full((rows, 2), 3),
        "the same expert twice": random[:, :1].expand(rows, 2).contiguous(),
        "no expert": torch.full((rows, 2), -1),
        "some slots without expert": torch.where(torch.arange(rows)[:, None] % 2 == 0, random, -1),
        "ids beyond the experts": torch.where(random > 5, EXPERTS + 2, random),
    }


EQUAL = '''
import copy, sys, torch
from pathlib import Path
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from ktransformers.experts.checkpointing import save_expert_outputs
from ktransformers.parallel.exchange import new_expert_group
from ktransformers.experts.lora_shards import factor_shards
from ktransformers.parallel.whole_state import gather_experts
from ktransformers.experts.operator import apply_experts
from ktransformers.parallel.sharding import ShardOptions, separate_steps, shard_model
from tests.support.rank_memory import parameter_bytes
from ktransformers.parallel.whole_state import clip_gradients, load_optimizer_state
from ktransformers.parallel.whole_state import whole_optimizer_state, whole_trained
from tests.parallel.test_exchange import *
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
path, kinds, size = Path(sys.argv[1]), sys.argv[2].split(","), int(sys.argv[3])
whole = adapted(path, None)
losses = [loss_of(whole, rows_of(other)) for other in range(world)]
(sum(losses) / world).backward()
want = gradients(whole)
with torch.no_grad():
    logits = whole(input_ids=rows_of(rank)).logits

def compare(model, what):
    shards, got = factor_shards(model), gradients(model)
    assert got.keys() == want.keys(), (what, got.keys() ^ want.keys())
    for name in want:
        close(got[name], shards[name].cut(want[name]) if name in shards else want[name], f"{what}: {name}")

def optimizer_of(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    separate_steps(optimizer)
    return optimizer

def check_sharded(shard, group, what):
    """FSDP2 over all ranks beside experts that groups divide: two clipped steps, the state carried over in between."""
    what += ", sharded"
    alone, model = adapted(path, None), adapted(path, shard, group)
    shard_model(model, ShardOptions(), torch.device("cpu"))
    assert parameter_bytes(model) < (0.55 if world == 2 else 0.30) * parameter_bytes(alone)
    loss_of(model, rows_of(rank)).backward()
    compare(model, what)
    with model.no_sync():
        (loss_of(model, rows_of(rank)) / 2).backward()
    (loss_of(model, rows_of(rank)) / 2).backward()
    compare(model, f"{what}, accumulated")
    single, several = optimizer_of(alone), optimizer_of(model)
    for step in range(2):
        (sum(loss_of(alone, rows_of(other)) for other in range(world)) / world).backward()
        loss_of(model, rows_of(rank)).backward()
        norm, expected = clip_gradients(model, 0.1), torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        close(norm, expected, f"{what}: norm")
        for optimizer, stepped in ((single, alone), (several, model)):
            optimizer.step()
            stepped.zero_grad()
        state, wanted = whole_optimizer_state(model, several), single.state_dict()
        assert state["param_groups"] == wanted["param_groups"] and state["state"].keys() == wanted["state"].keys()
        for index, entry in wanted["state"].items() if rank == 0 else ():
            for key, value in entry.items():
                close(state["state"][index][key], value, f"{what}: {key} of {index}")
        several = optimizer_of(model)
        load_optimizer_state(model, several, copy.deepcopy(wanted))
    trained = whole_trained(model)
    for name, parameter in alone.named_parameters():
        if parameter.requires_grad and (rank == 0 or name not in factor_shards(model)):
            close(trained[name], parameter, f"{what}: {name}")

for kind in kinds:
    partition = PARTITIONS[kind](size)
    group = new_expert_group(partition.ranks)
    model = adapted(path, ExpertShard(partition, group.rank), group)
    shards = factor_shards(model)
    for name, parameter in model.named_parameters():  # drawn as in one process
        if parameter.requires_grad:
            expected = whole.get_parameter(name).detach()
            assert torch.equal(parameter, shards[name].cut(expected) if name in shards else expected), name
    assert len(shards) == 8, len(shards)
    with torch.no_grad():
        close(model(input_ids=rows_of(rank)).logits, logits, f"{kind}: logits")
    ddp = DistributedDataParallel(model)
    loss = loss_of(ddp, rows_of(rank))
    close(loss, losses[rank], f"{kind}: loss")
    loss.backward()
    compare(model, kind)
    with ddp.no_sync():
        (loss_of(ddp, rows_of(rank)) / 2).backward()
    (loss_of(ddp, rows_of(rank)) / 2).backward()
    compare(model, f"{kind}, accumulated")
    for context in (None, save_expert_outputs):  # computed twice, replayed
        options = {"use_reentrant": False} | ({} if context is None else {"context_fn": context})
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        model.enable_input_require_grads()
        loss_of(ddp, rows_of(rank)).backward()
        compare(model, f"{kind}, checkpointed")
    model.gradient_checkpointing_disable()
    for name, divided in shards.items():
        gathered = gather_experts(model.get_parameter(name), divided, group.members)
        assert (gathered is None) == (group.rank != 0)
        assert gathered is None or torch.equal(gathered, whole.get_parameter(name)), name
    state = {name: parameter for name, parameter in whole.state_dict().items() if "lora" in name}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(torch.nan)
    model.load_state_dict(state, strict=False)  # whole tensors are cut
    with torch.no_grad():
        close(model(input_ids=rows_of(rank)).logits, logits, f"{kind}: loaded")
    del ddp
    check_sharded(ExpertShard(partition, group.rank), group, kind)

layer = next(module for module in whole.modules() if hasattr(module, "kt"))
divided = next(module for module in model.modules() if hasattr(module, "kt"))
for what, ids in routings(rank).items():
    generator = torch.Generator().manual_seed(rank)
    results = []
    for module in (layer, divided):
        generator.manual_seed(rank)
        hidden = torch.randn(len(ids), 64, generator=generator).requires_grad_()
        weights = torch.rand(len(ids), 2, generator=generator).requires_grad_()
        out = apply_experts(module.kt.backend, hidden, ids, weights)
        out.square().sum().backward()
        results.append((out, hidden.grad, weights.grad))
    for got, expected in zip(results[1], results[0], strict=True):
        close(got, expected, f"{what} of rank {rank}")
print("fine")
dist.destroy_process_group()
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exchange")
    save(build("qwen3_moe", num_experts=EXPERTS), path)
    return path


def test_two_ranks_equal_one_process(tiny: Path) -> None:
    assert run_ranks(EQUAL, 2, tiny, "experts,layers,frequency", 2) == ["fine\n"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_four_ranks_equal_one_process(size: int, tiny: Path) -> None:
    """Four ranks divide the experts, or two groups of two each hold all of them."""
    assert run_ranks(EQUAL, 4, tiny, "experts,frequency", size) == ["fine\n"] * 4
