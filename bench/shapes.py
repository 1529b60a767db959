"""The layers that the benches measure, and the work put through them.

Everything is made from seeds, so that two interpreters, ours and a peer's, hold the same weights and route the same
tokens without passing gigabytes between them. Weights are windows of one pool of random numbers: a gigabyte in a
fraction of a second, no two experts alike.

Caches must not help more than in a model. A step of the work names a layer and its routes: steps rotate over several
layers, and a single token takes its experts from a random permutation of them, so an expert comes back only after all
the others of all the layers.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FEW = 16  # tokens; up to here steps have the routes of many batches


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int  # H
    intermediate: int  # I
    experts: int  # E
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """gate, up and down of one expert in bf16."""
        return 3 * self.hidden * self.intermediate * 2

    @property
    def layer_bytes(self) -> int:
        return self.experts * self.expert_bytes

    def operations(self, tokens: int) -> float:
        """Multiplications and additions of one forward."""
        return 2.0 * tokens * self.top_k * 3 * self.hidden * self.intermediate

    def activation_bytes(self, tokens: int) -> int:
        """The least that moves besides weights: bf16 input and output, the intermediate written once and read once."""
        return 2 * tokens * (2 * self.hidden + 2 * self.top_k * self.intermediate)

    def layers(self, cache: int = 0, layer_bytes: float = 0) -> int:
        """How many layers, of so many bytes where they are not bf16, are many times larger than a last-level cache."""
        wanted = max(2_200_000_000, 8 * cache)
        return min(16, max(2, math.ceil(wanted / (layer_bytes or self.layer_bytes))))


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("dsv2-lite", 2048, 1408, 64, 6),
        Shape("dsv3-slice", 7168, 2048, 16, 8),
        Shape("qwen3-235b-slice", 4096, 1536, 32, 8),
        Shape("gpt-oss", 2880, 2880, 32, 4),
        Shape("tiny", 512, 256, 8, 2),
    )
}
DEFAULT_SHAPES = tuple(name for name in SHAPES if name not in ("gpt-oss", "tiny"))  # the former by name, tiny in tests
DEFAULT_TOKENS = (1, 4, 16, 128, 512, 2048, 8192)


@dataclass(frozen=True)
class Weights:
    """One layer in bf16."""

    gate: torch.Tensor  # [E, I, H]
    up: torch.Tensor  # [E, I, H]
    down: torch.Tensor  # [E, H, I]


def make_weights(shape: Shape, seed: int = 0) -> Weights:
    import torch

    generator = torch.Generator().manual_seed(seed)
    size, slack = shape.hidden * shape.intermediate, 1 << 20
    pool = torch.randn(size + slack, generator=generator)
    starts = torch.randint(0, slack, (3, shape.experts), generator=generator).tolist()

    def matrices(rows: int, columns: int, windows: list[int]) -> torch.Tensor:
        source = (pool * columns**-0.5).to(torch.bfloat16)
        filled = torch.empty(shape.experts, rows, columns, dtype=torch.bfloat16)
        for expert, start in enumerate(windows):
            filled[expert].view(-1).copy_(source[start : start + size])
        return filled

    return Weights(
        gate=matrices(shape.intermediate, shape.hidden, starts[0]),
        up=matrices(shape.intermediate, shape.hidden, starts[1]),
        down=matrices(shape.hidden, shape.intermediate, starts[2]),
    )


@dataclass(frozen=True)
class Work:
    """What one cell computes: step i is layer and routes `steps[i % len(steps)]` on the same hidden states."""

    hidden: torch.Tensor  # [T, H] bf16
    weights: torch.Tensor  # [T, k] f32
    steps: list[tuple[int, torch.Tensor]]  # (layer, ids [T, k] int64)

    def step(self, index: int) -> tuple[int, torch.Tensor]:
        return self.steps[index % len(self.steps)]

    @property
    def unique_experts(self) -> float:
        """Experts that a step touches, on average."""
        return sum(len(set(ids.flatten().tolist())) for _, ids in self.steps) / len(self.steps)

    @property
    def routes(self) -> int:
        """A checksum: two interpreters that disagree on it have not measured the same work."""
        checksum = 0
        for layer, ids in self.steps:
            checksum = zlib.crc32(ids.numpy().tobytes(), checksum + layer)
        return checksum


def make_work(shape: Shape, tokens: int, layers: int, seed: int = 1, experts: int = 0) -> Work:
    """Routes go to all experts, or to the first so many of them (with more than one token)."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    # A prime length, so that no two rows of the hidden states are the same.
    normal = torch.randn(min(tokens * shape.hidden, 1_000_003), generator=generator).to(torch.bfloat16)
    copies = math.ceil(tokens * shape.hidden / normal.numel())
    hidden = normal.repeat(copies)[: tokens * shape.hidden].view(tokens, shape.hidden).contiguous()
    weights = torch.rand(tokens, shape.top_k, generator=generator).softmax(-1)

    steps: list[tuple[int, torch.Tensor]] = []
    if tokens == 1:
        orders = [torch.randperm(shape.experts, generator=generator) for _ in range(layers)]
        for token in range(math.lcm(shape.experts, shape.top_k) // shape.top_k):
            places = torch.arange(token * shape.top_k, (token + 1) * shape.top_k) % shape.experts
            steps += [(layer, order[places].view(1, -1)) for layer, order in enumerate(orders)]
    else:
        for _ in range(math.ceil((16 if tokens <= FEW else 2) / layers)):
            for layer in range(layers):
                scores = torch.rand(tokens, experts or shape.experts, generator=generator)
                steps.append((layer, scores.topk(shape.top_k, dim=-1).indices.contiguous()))
    return Work(hidden, weights, steps)
