"""LoRA on the experts of the tiny checkpoint of `sglang_files.py`, as files that SGLang reads and as dense weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.sglang_files import EXPERTS, HIDDEN, INTERMEDIATE, Checkpoint

RANK, ALPHA = 4, 8
SHAPES = {"gate": (HIDDEN, INTERMEDIATE), "up": (HIDDEN, INTERMEDIATE), "down": (INTERMEDIATE, HIDDEN)}
Factors = list[list[dict[str, tuple[Tensor, Tensor]]]]  # [layer][expert] role -> A [r, in], B [out, r]


def write_expert_adapter(
    path: Path, layers: int, seed: int, attention: bool = False, mlp: bool = False, experts: bool = True
) -> Factors:
    """`attention` adds LoRA on o_proj, `mlp` on a shared expert."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    factors: Factors = []

    def pair(name: str, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
        a = (torch.randn(RANK, inputs, generator=draw) / inputs**0.5).bfloat16()
        b = (torch.randn(outputs, RANK, generator=draw) / RANK**0.5).bfloat16()
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
        return a, b

    for layer in range(layers):
        stem = f"model.layers.{layer}."
        if attention:
            pair(f"{stem}self_attn.o_proj", HIDDEN, HIDDEN)
        if mlp:
            pair(f"{stem}mlp.shared_expert.down_proj", INTERMEDIATE, HIDDEN)
        factors.append([])
        for expert in range(EXPERTS if experts else 0):
            name = f"{stem}mlp.experts.{expert}."
            factors[layer].append({role: pair(f"{name}{role}_proj", *shape) for role, shape in SHAPES.items()})
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(path / "adapter_model.safetensors"))
    targets = (["gate_proj", "up_proj", "down_proj"] if experts or mlp else []) + (["o_proj"] if attention else [])
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0}
    (path / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "target_modules": targets}))
    return factors


def with_lora(checkpoint: Checkpoint, factors: list[dict[str, tuple[Tensor, Tensor]]], layer: int) -> Checkpoint:
    """The checkpoint with the factors of one layer added to its experts, in float64."""
    merged = []
    for matrices, pairs in zip(checkpoint.experts[layer], factors, strict=True):
        sums = []
        for matrix, role in zip(matrices, ("gate", "up", "down"), strict=True):
            a, b = pairs[role]
            sums.append(matrix.double() + ALPHA / RANK * (b.double() @ a.double()))
        merged.append(tuple(sums))
    experts = [*checkpoint.experts]
    experts[layer] = merged  # type: ignore[call-overload]
    return Checkpoint(checkpoint.path, experts)
