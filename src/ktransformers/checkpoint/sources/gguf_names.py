"""llama.cpp's names of tensors in the words of Hugging Face, for the families whose weights it takes as they are.

Within a layer a row of the table says which module a tensor is; `.weight` and `.bias` stay. Three things do not fit a
table. Rows of q and k of the architecture `llama` (Mixtral) are in another order, because llama.cpp rotates
neighbouring pairs of a head and transformers its two halves. Newer files of MLA models hold `kv_b_proj` in two tensors,
that of keys transposed. And the gate of Qwen's shared expert is a vector where the model has a matrix of one row. A
name without a row is refused, because leaving it out would leave a part of the model random.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.ground.errors import InputError

TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROLES = ("gate", "up", "down")
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
ATTENTION = {f"attn_{word}": f"self_attn.{word}_proj" for word in "qkv"} | {"attn_output": "self_attn.o_proj"}
HEADS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLA = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.kv_b_proj",
    "attn_v_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
DENSE = {f"ffn_{role}": f"mlp.{role}_proj" for role in ROLES}
ROUTER = {"ffn_gate_inp": "mlp.gate"}
NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<leaf>\w+)\.(?P<ending>weight|bias)")
EXPERTS = re.compile(r"ffn_(?P<role>gate|up|down|gate_up)_exps")
OLD = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<role>gate|up|down)\.(?P<expert>\d+)\.weight")


def shared_expert(block: str) -> dict[str, str]:
    return {f"ffn_{role}_shexp": f"mlp.{block}.{role}_proj" for role in ROLES}


@dataclass(frozen=True)
class GGUFFamily:
    rows: Mapping[str, str]
    permuted: bool = False  # rows of q and k


FAMILIES = {  # by llama.cpp's architecture
    "llama": GGUFFamily(NORMS | ATTENTION | ROUTER | DENSE, permuted=True),
    "qwen2moe": GGUFFamily(
        NORMS
        | ATTENTION
        | ROUTER
        | DENSE
        | shared_expert("shared_expert")
        | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
    ),
    "qwen3moe": GGUFFamily(NORMS | ATTENTION | HEADS | ROUTER | DENSE),
    "deepseek2": GGUFFamily(
        NORMS | MLA | ROUTER | DENSE | shared_expert("shared_experts") | {"exp_probs_b": "mlp.gate.e_score_correction"}
    ),
    "gpt-oss": GGUFFamily(
        NORMS
        | ATTENTION
        | {"ffn_gate_inp": "mlp.router", "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn"}
    ),
}


def family_of(path: str, architecture: str) -> GGUFFamily:
    if architecture not in FAMILIES:
        raise InputError(
            path, f"architecture {architecture!r}", "one of " + ", ".join(FAMILIES),
            "take everything but the experts from the Hugging Face directory of the model",
        )  # fmt: skip
    return FAMILIES[architecture]


def is_expert(name: str) -> bool:
    match = NAME.fullmatch(name)
    return bool(OLD.fullmatch(name) or (match and EXPERTS.fullmatch(match["leaf"])))


def is_left_out(name: str) -> bool:
    """Nothing of the model's own: a layer that predicts more tokens, and a table that config.json stands for."""
    return ".nextn." in name or name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def hugging_face(name: str, family: GGUFFamily) -> str:
    if name in TOP:
        return TOP[name]
    match = NAME.fullmatch(name)
    module = family.rows.get(match["leaf"]) if match else None
    if match is None or module is None:
        raise InputError(name, "a tensor without a known place in the model", "those of its family", "report it")
    ending = match["ending"]
    if match["leaf"] == "attn_sinks":
        ending = "sinks"
    if match["leaf"] == "exp_probs_b":
        return f"model.layers.{match['layer']}.{module}_bias"
    return f"model.layers.{match['layer']}.{module}.{ending}"


def unpermute(matrix: Tensor, heads: int) -> Tensor:
    """`[heads, d/2, 2, H] -> [heads, 2, d/2, H]`."""
    pairs = matrix.reshape(heads, matrix.shape[0] // heads // 2, 2, *matrix.shape[1:])
    return pairs.transpose(1, 2).reshape(matrix.shape)


def join_kv(keys: Tensor, values: Tensor) -> Tensor:
    """`[heads, rank, nope]` and `[heads, v, rank]` -> `[heads (nope + v), rank]`."""
    return torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)
