"""Made-up expert layers and batches, the error measure and its tolerances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ktransformers import _core
from ktransformers.nn import ExpertStore
from tests.support.reference import ReferenceLayer
from tests.support.variants import ROUNDING

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# Relative L2 against float64, in three parts that add up. A number rounded to p bits is off by at most 2^-p of itself,
# and by about a third of that on average.
#   Arithmetic. f32 activations: only sums are rounded, about 2^-24 * sqrt(K), and gelu's erf is good to 1.5e-7. bf16
#   activations (p = 8): what lies between the two products is rounded, 1.3e-3 on average; single rows, where little
#   averages out and down's sum may cancel, reach 2^-8 and a half.
ROUNDED = 1.5 * 2**-8
ARITHMETIC = dict.fromkeys(("generic", "avx2", "avx_vnni", "avx512", "avx512_vnni", "neon"), 2e-6)
ARITHMETIC |= dict.fromkeys(ROUNDING, ROUNDED)
#   Hidden states finer than bf16 are rounded to it by the variants that multiply bf16; gate and up share that error.
FINE_INPUT = {isa: 2**-8 if isa in ROUNDING else 0.0 for isa in ARITHMETIC}
#   Output, over many values: half of 2^-8 for bf16, of 2^-11 for f16; f32 and f64 are not rounded again.
OUTPUT = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 0.0, torch.float64: 0.0}


def tolerance(isa: str, out: torch.dtype = torch.float32, *, fine: bool = False) -> float:
    return ARITHMETIC[isa] + OUTPUT[out] + (FINE_INPUT[isa] if fine else 0.0)


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
) -> ReferenceLayer:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float) -> Tensor:
        fine = torch.float64 if dtype == torch.float64 else torch.float32
        return (torch.randn(*shape, generator=random, dtype=fine) * scale).to(dtype)

    inner, outer = hidden**-0.5, intermediate**-0.5
    layer = ReferenceLayer(
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
    layer: ReferenceLayer, tokens: int, top_k: int, *, fine: bool = False, here: bool = False, seed: int = 0
) -> Batch:
    """Hidden states in float32, with values that bf16 has too unless `fine`. Ids from -1 to E, both ends meaning "not
    here", or only those that are `here`."""
    random = torch.Generator().manual_seed(seed)
    experts, hidden = layer.down.shape[:2]
    low, high = (0, experts) if here else (-1, experts + 1)
    states = torch.randn(tokens, hidden, generator=random)
    return Batch(
        states if fine else states.bfloat16().float(),
        torch.randint(low, high, (tokens, top_k), generator=random),
        torch.rand(tokens, top_k, generator=random),
    )


def make_store(layer: ReferenceLayer, pool: _core.Pool, isa: str | None = None, precision: str = "bf16") -> ExpertStore:
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
        precision=precision,
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
