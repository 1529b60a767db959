"""Checkpoints on disk: which tensors are experts, and reading them layer by layer. Knows no model code."""

from __future__ import annotations

from ktransformers.checkpoint.encoded import Encoded, decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape, check, read
from ktransformers.checkpoint.layout import ExpertTensors, find_experts, locate
from ktransformers.checkpoint.shards import Shards

__all__ = [
    "Encoded",
    "ExpertChunk",
    "ExpertShape",
    "ExpertTensors",
    "Shards",
    "check",
    "decode",
    "encode",
    "find_experts",
    "locate",
    "read",
]
