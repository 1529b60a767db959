"""Stores of random experts, layers placed on a device, batches with and without LoRA, and the CPU's results to compare
with: what the tests of `ktransformers.place` share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from ktransformers import _core
from ktransformers.checkpoint.encoder import encode
from ktransformers.experts.backend import ExpertBatch, LocalExperts
from ktransformers.experts.gate import Gate
from ktransformers.experts.lora import ExpertLora, LoraPair, MixedLora, packed_adapter
from ktransformers.experts.operator import apply_experts
from ktransformers.experts.store import NO_DROPOUT, Dropout
from ktransformers.nn import ExpertStore
from ktransformers.nn import attach as pack
from ktransformers.place.engine import ExpertEngine
from ktransformers.place.gpu.expert_cache import ExpertCache
from ktransformers.place.gpu.pinned import RegisteredMemory
from ktransformers.place.placed_experts import PlacedExperts
from ktransformers.place.placement import geometry_of, new_layer
from ktransformers.plan.split import Costs

TOLERANCE = 0.01


# Everything costs the same: the split is somewhere in the middle.
EVEN_COSTS = Costs(1e-4, 0, 1e-4, 1e-6, 1e-4, 1e-6, 1e-5, 0, 0)


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])


@dataclass(frozen=True)
class Size:
    experts: int
    hidden: int
    intermediate: int
    top_k: int
    tokens: int
    rank: int


SMALL = Size(8, 128, 64, 2, 41, 4)


QWEN = Size(128, 2048, 768, 8, 512, 8)


def make_store(
    size: Size, spec: str = "bf16", seed: int = 0, biased: bool = False, pool: _core.Pool | None = None
) -> ExpertStore:
    generator = torch.Generator().manual_seed(seed)
    e, h, i = size.experts, size.hidden, size.intermediate

    def random(count: int, *shape: int) -> Tensor:
        """Windows of one stretch of numbers: a real layer would take seconds to draw."""
        each = math.prod(shape)
        pool = (torch.randn(each + 997 * count, generator=generator) / shape[-1] ** 0.5).bfloat16()
        return torch.stack([pool[997 * at : 997 * at + each].view(shape) for at in range(count)])

    matrices: dict[str, Any] = {"gate": random(e, i, h), "up": random(e, i, h), "down": random(e, h, i)}
    if spec != "bf16":
        matrices = {name: encode(matrix, spec) for name, matrix in matrices.items()}
    if biased:
        matrices |= {"gate_bias": random(e, i), "up_bias": random(e, i), "down_bias": random(e, h)}
    store = ExpertStore(e, h, i, formats=spec, pool=pool)
    store.pack(**matrices)
    return store


def place_store_on(
    store: ExpertStore, device: str, policy: str, slots: int, residents: tuple[int, ...] = (), pinned: int = 1 << 40
) -> PlacedExperts:
    """`pinned`: bytes that may be registered with the driver."""
    where, sizes = torch.device(device), geometry_of(store)
    registered = RegisteredMemory(pinned) if where.type == "cuda" and pinned else None
    engine = ExpertEngine(where, policy, ExpertCache(sizes, slots, where, registered))
    layer = new_layer(engine, 0, store, Gate("silu"), sizes)
    layer.costs = engine.dispatcher.costs = {"forward": EVEN_COSTS, "backward": EVEN_COSTS}
    engine.layers[0] = layer
    if residents:
        engine.executor.residents[0] = ExpertCache(sizes, len(residents), where, registered)
        engine.executor.residents[0].fetch(0, layer.packed.source, residents)
    return PlacedExperts(engine, layer)


@dataclass
class Inputs:
    hidden: Tensor
    ids: Tensor
    weights: Tensor
    lora: ExpertLora
    grad: Tensor

    def leaves(self) -> list[Tensor]:
        found = [self.hidden, self.weights]
        for factor in (self.lora.gate_up, self.lora.down):
            assert factor is not None
            found += [factor.a, factor.b]
        return found


def make_inputs(size: Size, device: str, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    e, h, i, r = size.experts, size.hidden, size.intermediate, size.rank

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    # B as PEFT has it: the expert is the innermost dimension.
    wide = LoraPair((random(e, r, h) / h**0.5), (random(2 * i, r, e) / r**0.5).permute(2, 0, 1), 0.5)
    down = LoraPair((random(e, r, i) / i**0.5), (random(h, r, e) / r**0.5).permute(2, 0, 1), 2.0)
    ids = torch.rand(size.tokens, e, generator=generator).topk(size.top_k).indices
    ids[0, 0] = -1
    made = Inputs(
        random(size.tokens, h).to(dtype).to(device),
        ids.to(device),
        torch.rand(size.tokens, size.top_k, generator=generator).to(device),
        ExpertLora(gate_up=wide, down=down),
        random(size.tokens, h).to(dtype).to(device),
    )
    for leaf in made.leaves():
        leaf.requires_grad_()
    return made


def relative_error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().cpu().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def gradients(out: Tensor, given: Inputs) -> list[Tensor]:
    return list(torch.autograd.grad(out, given.leaves(), given.grad))


def cpu_results(store: ExpertStore, given: Inputs, retain: bool = True) -> list[Tensor]:
    host = replace_device(given, "cpu")
    out = apply_experts(LocalExperts(store), host.hidden, host.ids, host.weights, lora=host.lora, retain=retain)
    return [out, *gradients(out, host)]


def replace_device(given: Inputs, device: str) -> Inputs:
    moved = {name: getattr(given, name).detach().to(device) for name in ("hidden", "ids", "weights", "grad")}
    for name in ("hidden", "weights"):
        moved[name].requires_grad_()
    return replace(given, **moved)


def assert_close(got: list[Tensor], want: list[Tensor], times: float = 1) -> None:
    names = ("out", "hidden", "weights", "gate_up_a", "gate_up_b", "down_a", "down_b")
    found = {name: relative_error(a, b) for name, a, b in zip(names, got, want, strict=False)}
    assert all(value < times * TOLERANCE for value in found.values()), found


def run(
    place: PlacedExperts,
    given: Inputs,
    lora: ExpertLora | None = None,
    dropout: Dropout = NO_DROPOUT,
    retain: bool = True,
) -> Tensor:
    torch.manual_seed(dropout.seed)
    lora = lora and replace(lora, dropout=dropout.rate)
    return apply_experts(place, given.hidden, given.ids, given.weights, lora=lora, retain=retain)


def run_with_gradients(
    place: PlacedExperts, given: Inputs, retain: bool, dropout: Dropout = NO_DROPOUT
) -> list[Tensor]:
    out = run(place, given, given.lora, dropout, retain)
    return [out, *gradients(out, given)]


def placed_for_inference(
    store: ExpertStore, device: str, policy: str, slots: int = 8, residents: tuple[int, ...] = (), threshold: int = 0
) -> PlacedExperts:
    where, sizes = torch.device(device), geometry_of(store)
    engine = ExpertEngine(where, policy, ExpertCache(sizes, slots, where, None))
    engine.dispatcher.threshold = threshold
    layer = new_layer(engine, 0, store, Gate("silu"), sizes)
    layer.costs = {"forward": EVEN_COSTS, "backward": EVEN_COSTS}
    engine.layers[0] = layer
    if residents:
        engine.executor.residents[0] = ExpertCache(sizes, len(residents), where, None)
        engine.executor.residents[0].fetch(0, layer.packed.source, residents)
    return PlacedExperts(engine, layer)


def random_factors(rank: int, seed: int, roles: str) -> ExpertLora:
    generator = torch.Generator().manual_seed(seed)
    e, h, i = SMALL.experts, SMALL.hidden, SMALL.intermediate
    shapes = {"gate_a": (rank, h), "gate_b": (i, rank), "up_a": (rank, h), "up_b": (i, rank)}
    shapes |= {"down_a": (rank, i), "down_b": (h, rank)}
    made = {role: torch.randn(e, *shapes[role], generator=generator) / 4 for role in roles.split()}
    return ExpertLora.of_tensors(tuple(made), tuple(made.values()), (0.5, 0.25, 2.0))


ALL_ROLES = "gate_a gate_b up_a up_b down_a down_b"


ADAPTERS = [
    random_factors(4, 1, ALL_ROLES),
    random_factors(9, 2, "gate_a gate_b up_b"),
    random_factors(2, 3, "down_a down_b"),
]


def mixed_lora(store: ExpertStore, which: list[ExpertLora], tokens: int) -> MixedLora:
    rows = torch.randint(-1, len(which), (tokens,), generator=torch.Generator().manual_seed(5), dtype=torch.int32)
    return MixedLora(rows, [packed_adapter(store, one) for one in which], which)


CLOSE = 6e-3  # of a result's norm


def small_batch(size: Size, tokens: int, device: str, seed: int = 0) -> ExpertBatch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, size.experts, generator=generator).topk(size.top_k).indices
    ids[0, 0] = -1
    if tokens > 1:
        ids[1, 1] = size.experts
    hidden = torch.randn(tokens, size.hidden, generator=generator).bfloat16()
    weights = torch.rand(tokens, size.top_k, generator=generator)
    return ExpertBatch(hidden.to(device), ids.to(device), weights.to(device), None, NO_DROPOUT)


def cpu_output(store: ExpertStore, given: ExpertBatch) -> Tensor:
    return store.forward(given.hidden.cpu(), given.ids.cpu(), given.weights.cpu())


def with_adapters(
    store: ExpertStore, given: ExpertBatch, rows: list[int], which: list[ExpertLora] | None = None
) -> ExpertBatch:
    which = ADAPTERS if which is None else which
    where = given.hidden.device
    numbers = torch.tensor(rows, dtype=torch.int32, device=where)
    return replace(given, mixed=MixedLora(numbers, [packed_adapter(store, one) for one in which], which))


def cpu_output_with_adapters(store: ExpertStore, given: ExpertBatch) -> Tensor:
    assert given.mixed is not None
    lora = given.mixed
    make_inputs = (given.hidden.cpu(), given.ids.cpu(), given.weights.cpu())
    return store.forward(*make_inputs, adapter=lora.rows.cpu(), adapters=lora.adapters)


def tiny_packed_model() -> torch.nn.Module:
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    pack(model, free=True)
    return model
