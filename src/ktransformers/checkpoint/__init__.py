"""Checkpoints on disk: finds the tensors of experts and reads them layer by layer. Independent of model code."""

from __future__ import annotations

from ktransformers.checkpoint.encoded import Encoded, decode
from ktransformers.checkpoint.encoder import encode
from ktransformers.checkpoint.experts import ExpertChunk, ExpertShape, check_experts, read_experts
from ktransformers.checkpoint.layout import ExpertTensors, find_experts, locate
from ktransformers.checkpoint.shards import Shards

__all__ = [
    "Encoded",
    "ExpertChunk",
    "ExpertShape",
    "ExpertTensors",
    "Shards",
    "check_experts",
    "decode",
    "encode",
    "find_experts",
    "locate",
    "read_experts",
]
