"""The model and the adapters that `serve.py` measures: Qwen3-MoE with the experts of a shape and random numbers.

Written as an ordinary checkpoint, a shard for each layer, so that all programs open the same directory. Tokens are
numbers here: the tokenizer is a small one from the tests and only turns them into some text.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shapes import Shape, make_weights

if TYPE_CHECKING:
    import torch

TOKENIZER = Path(__file__).resolve().parent.parent / "tests" / "data" / "minimind_6400"


@dataclass(frozen=True)
class Attention:
    heads: int
    groups: int  # of keys and values
    head: int  # numbers of a head
    vocabulary: int


ATTENTION = {
    "qwen3-30b": Attention(32, 4, 128, 151936),
    "dsv2-lite": Attention(16, 16, 128, 102400),
    "tiny": Attention(8, 2, 64, 6400),
}


def make_model(folder: Path, shape: Shape, layers: int, vocabulary: int | None = None) -> Path:
    """As it lies there already, if it is the same; `vocabulary`: if not that of the shape."""
    import torch
    from safetensors.torch import save_file

    attention = ATTENTION[shape.name]
    attention = attention if vocabulary is None else replace(attention, vocabulary=vocabulary)
    made = {"shape": asdict(shape), "layers": layers, "attention": asdict(attention)}
    mark = folder / "made.json"
    if mark.is_file() and json.loads(mark.read_text()) == made:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * columns**-0.5).bfloat16()

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    wide, narrow = attention.heads * attention.head, attention.groups * attention.head
    index: dict[str, str] = {}

    def write(number: int, tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{number:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, name))

    for layer in range(layers):
        root, weights = f"model.layers.{layer}", make_weights(shape, seed=layer)
        tensors = {
            f"{root}.self_attn.q_proj.weight": matrix(wide, shape.hidden),
            f"{root}.self_attn.k_proj.weight": matrix(narrow, shape.hidden),
            f"{root}.self_attn.v_proj.weight": matrix(narrow, shape.hidden),
            f"{root}.self_attn.o_proj.weight": matrix(shape.hidden, wide),
            f"{root}.self_attn.q_norm.weight": ones(attention.head),
            f"{root}.self_attn.k_norm.weight": ones(attention.head),
            f"{root}.input_layernorm.weight": ones(shape.hidden),
            f"{root}.post_attention_layernorm.weight": ones(shape.hidden),
            f"{root}.mlp.gate.weight": matrix(shape.experts, shape.hidden),
        }
        for expert in range(shape.experts):
            for role in ("gate", "up", "down"):
                stacked = getattr(weights, role)
                tensors[f"{root}.mlp.experts.{expert}.{role}_proj.weight"] = stacked[expert].clone()
        write(layer + 1, tensors)
    ends = {
        "model.embed_tokens.weight": matrix(attention.vocabulary, shape.hidden),
        "lm_head.weight": matrix(attention.vocabulary, shape.hidden),
        "model.norm.weight": ones(shape.hidden),
    }
    write(layers + 1, ends)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    (folder / "config.json").write_text(json.dumps(_config(shape, attention, layers), indent=1))
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    mark.write_text(json.dumps(made))
    return folder


def _config(shape: Shape, attention: Attention, layers: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "moe_intermediate_size": shape.intermediate,
        "intermediate_size": 3 * shape.hidden,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "num_hidden_layers": layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.head,
        "vocab_size": attention.vocabulary,
        "max_position_embeddings": 32768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "eos_token_id": None,
        "bos_token_id": None,
    }


def make_adapter(folder: Path, model: Path, shape: Shape, layers: int, rank: int, seed: int) -> Path:
    """LoRA on attention and experts, as `kt train` would leave it."""
    import torch

    from ktransformers.adapters import LoraPair, adapter_from_tensors, facts_from_config, write_adapter

    attention = ATTENTION[shape.name]
    generator = torch.Generator().manual_seed(1000 + seed)

    def pair(outputs: int, inputs: int, *stack: int) -> LoraPair:
        a = torch.randn(*stack, rank, inputs, generator=generator) * inputs**-0.5
        return LoraPair(a, torch.randn(*stack, outputs, rank, generator=generator) * 0.02, 2.0)

    wide, narrow = attention.heads * attention.head, attention.groups * attention.head
    sizes = {"q_proj": (wide, shape.hidden), "k_proj": (narrow, shape.hidden)}
    sizes |= {"v_proj": (narrow, shape.hidden), "o_proj": (shape.hidden, wide)}
    experts, linears = {}, {}
    for layer in range(layers):
        experts[f"model.layers.{layer}.mlp"] = {
            "gate": pair(shape.intermediate, shape.hidden, shape.experts),
            "up": pair(shape.intermediate, shape.hidden, shape.experts),
            "down": pair(shape.hidden, shape.intermediate, shape.experts),
        }
        for name, size in sizes.items():
            linears[f"model.layers.{layer}.self_attn.{name}"] = pair(*size)
    facts = facts_from_config(json.loads((model / "config.json").read_text()))
    adapter = adapter_from_tensors(experts, linears, model=facts, config={"base_model_name_or_path": str(model)})
    write_adapter(adapter, folder, "peft", overwrite=True)
    return folder
