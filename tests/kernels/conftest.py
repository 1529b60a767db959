"""Made-up expert layers and batches, the error measure and its tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.nn import ExpertStore
from ktransformers.nn.reference import Layer

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Relative L2 against float64, by what the variant multiplies and by what the output is rounded to. The two add.
#   f32 activations: only sums are rounded, about 2^-24 * sqrt(K); gelu's erf is good to 1.5e-7.
#   bf16 activations: hidden states (unless they come as bf16) and the inner activations are rounded to 8 bits, an error
#   of at most 2^-9 = 2e-3 each and about 1.1e-3 on average; both together stay below 4e-3.
ARITHMETIC = {"generic": 2e-6, "avx2": 2e-6, "avx512": 2e-6, "avx512_bf16": 4e-3, "amx": 4e-3}
#   Output: half a unit in the last place of bf16 (8 bits) and f16 (11 bits); f32 is not rounded again. Routing weights
#   and hidden states in a 16-bit dtype are exact inputs and cost nothing.
ROUNDING = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 0.0}


def tolerance(isa: str, dtype: torch.dtype = torch.float32) -> float:
    return ARITHMETIC[isa] + ROUNDING[dtype]


def error(got: Tensor, want: Tensor) -> float:
    """Relative L2; infinite where anything is not finite or something is there that should be zero."""
    off, size = (got.double() - want).norm().item(), want.norm().item()
    if size == 0:
        return 0.0 if off == 0 else float("inf")
    return off / size if off == off else float("inf")


@dataclass(frozen=True)
class Batch:
    hidden: Tensor
    ids: Tensor
    weights: Tensor


def make_layer(
    experts: int,
    hidden: int,
    intermediate: int,
    *,
    gated: bool = True,
    biases: bool = False,
    activation: str = "silu",
    limit: float = 0.0,
    alpha: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Layer:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(*shape, generator=random) * scale).to(dtype)

    inner, outer = hidden**-0.5, intermediate**-0.5
    layer = Layer(
        gate=normal(experts, intermediate, hidden, scale=inner) if gated else None,
        up=normal(experts, intermediate, hidden, scale=inner),
        down=normal(experts, hidden, intermediate, scale=outer),
        activation=activation,
        limit=limit,
        alpha=alpha,
    )
    if not biases:
        return layer
    return replace(
        layer,
        gate_bias=normal(experts, intermediate, scale=0.5) if gated else None,
        up_bias=normal(experts, intermediate, scale=0.5),
        down_bias=normal(experts, hidden, scale=0.5),
    )


def make_batch(
    layer: Layer, tokens: int, top_k: int, *, dtype: torch.dtype = torch.float32, here: bool = False, seed: int = 0
) -> Batch:
    """Ids from -1 to E, both ends meaning "not here", or only those that are `here`."""
    random = torch.Generator().manual_seed(seed)
    experts, hidden = layer.down.shape[:2]
    low, high = (0, experts) if here else (-1, experts + 1)
    return Batch(
        torch.randn(tokens, hidden, generator=random).to(dtype),
        torch.randint(low, high, (tokens, top_k), generator=random),
        torch.rand(tokens, top_k, generator=random),
    )


def make_store(layer: Layer, pool: _core.Pool, isa: str | None = None) -> ExpertStore:
    experts, hidden, intermediate = layer.down.shape
    store = ExpertStore(
        experts,
        hidden,
        intermediate,
        gated=layer.gate is not None,
        activation=layer.activation,
        limit=layer.limit,
        alpha=layer.alpha,
        pool=pool,
        isa=isa,
    )
    store.pack(
        gate=layer.gate,
        up=layer.up,
        down=layer.down,
        gate_bias=layer.gate_bias,
        up_bias=layer.up_bias,
        down_bias=layer.down_bias,
    )
    return store


@pytest.fixture(scope="session")
def pool() -> _core.Pool:
    return _core.Pool(2)


@pytest.fixture(scope="session")
def pool_of() -> Callable[[int, int], _core.Pool]:
    """Pools by threads and groups, made once."""
    made: dict[tuple[int, int], _core.Pool] = {}

    def of(threads: int, groups: int) -> _core.Pool:
        key = (threads, groups)
        if key not in made:
            made[key] = _core.Pool(threads, groups)
        return made[key]

    return of


@pytest.fixture(autouse=True)
def few_torch_threads() -> Iterator[None]:
    """Torch's workers spin on the cores of ours; the oracle is small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
