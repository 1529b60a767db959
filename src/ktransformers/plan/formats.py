"""Weight formats of routed experts as data: bits of a number, what scales add, and whether this version computes it.

A format's bytes are exact for bf16, whose tiles are laid out here as csrc/moe/weights.cpp does it; for the others they
follow from bits, group and scale, which their strips add a percent to at most (csrc/kernels/format.h). `executable` is
what decides whether a plan is proposed by itself or only with `--all`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.errors import InputError

TILE_K, BLOCK_N, TILE_BYTES = 32, 32, 1024  # csrc/types.h: a block is two tiles side by side, 2 KB per step of K


@dataclass(frozen=True)
class WeightFormat:
    name: str
    bits: float  # of one weight
    group: int  # weights that share a scale
    scale_bytes: float  # of one group
    executable: bool
    exact: bool  # the released bf16 numbers, unchanged
    meaning: str

    @property
    def bytes_per_weight(self) -> float:
        return self.bits / 8 + self.scale_bytes / self.group


FORMATS = {
    found.name: found
    for found in (
        WeightFormat("bf16", 16, 1, 0, True, True, "as released, in 1 KB tiles"),
        WeightFormat("fp8", 8, 128 * 128, 4, True, False, "e4m3, one f32 scale for a block of 128 x 128"),
        WeightFormat("int8", 8, 2048, 4, True, False, "one f32 scale for a channel"),
        WeightFormat("int4", 4, 32, 2, True, False, "one bf16 scale for 32 weights"),
    )
}


# Bits that GGUF's smaller types take with all that belongs to them. They are computed as released and not proposed:
# nothing here writes them.
SMALL = {
    "tq1_0": 1.6875, "tq2_0": 2.0625, "iq1_s": 1.5625, "iq1_m": 1.75, "iq2_xxs": 2.0625, "iq2_xs": 2.3125,
    "iq2_s": 2.5625, "q2_k": 2.625, "iq3_xxs": 3.0625, "iq3_s": 3.4375, "q3_k": 3.4375,
}  # fmt: skip
RELEASED = {name: WeightFormat(name, bits, 1, 0, True, False, "as GGUF has it") for name, bits in SMALL.items()}


def format_of(name: str) -> WeightFormat:
    found = FORMATS.get(name) or RELEASED.get(name)
    if found is None:
        raise InputError("format", name, "one of " + ", ".join([*FORMATS, *RELEASED]))
    return found


# Released formats beside these -> the one with as many bytes, or the next larger.
ALIKE = {
    **dict.fromkeys(("mxfp4", "nvfp4", "gptq", "q4_0", "q4_1", "q4_k", "iq4_nl", "iq4_xs"), "int4"),
    **dict.fromkeys(("mxfp8", "q8_0", "q5_0", "q5_1", "q5_k", "q6_k"), "int8"),
}


def counted_as(stored: str) -> str:
    """The format of these tables that a release takes in memory, where experts keep their bits."""
    return stored if stored in FORMATS or stored in RELEASED else ALIKE.get(stored, "bf16")


def tiles(size: int) -> int:
    return -(-size // TILE_K)


def block_bytes(k: int) -> int:
    """One block of 32 outputs by k: a padding tile where k is a multiple of 8 tiles, as weights.cpp lays it out."""
    steps = tiles(k)
    return steps * 2 * TILE_BYTES + (TILE_BYTES if steps and steps % 8 == 0 else 0)


def matrix_bytes(n: int, k: int) -> int:
    """A packed matrix of n outputs by k."""
    return -(-n // BLOCK_N) * block_bytes(k)


def packed_expert_bytes(hidden: int, intermediate: int, gated: bool, weights: WeightFormat) -> int:
    """One expert: gate and up side by side, and down."""
    wide = BLOCK_N * tiles(intermediate) * (2 if gated else 1)
    exact = matrix_bytes(wide, hidden) + matrix_bytes(hidden, intermediate)
    return exact if weights.bits == 16 else round(exact * weights.bytes_per_weight / 2)


def packed_lora_bytes(hidden: int, intermediate: int, gated: bool, rank: int) -> int:
    """One expert's factors as csrc/moe/lora.h stores them: ranks are padded to whole tiles of 32, gate and up share
    one A because PEFT adapts them as one matrix."""
    wide = BLOCK_N * tiles(intermediate) * (2 if gated else 1)
    padded = TILE_K * tiles(rank)
    return (
        matrix_bytes(padded, hidden)
        + matrix_bytes(wide, padded)
        + matrix_bytes(padded, intermediate)
        + matrix_bytes(hidden, padded)
    )
