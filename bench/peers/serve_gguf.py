"""The checkpoint of `serve.py` as a GGUF file in BF16, written tensor by tensor: no more than one is in memory.

There is no vocabulary in it, only its size: tokens are numbers. Needs the gguf package and numpy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROLES = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
PLAIN = {  # name in the checkpoint -> name in GGUF, and whether llama.cpp wants float32
    "self_attn.q_proj.weight": ("attn_q.weight", False),
    "self_attn.k_proj.weight": ("attn_k.weight", False),
    "self_attn.v_proj.weight": ("attn_v.weight", False),
    "self_attn.o_proj.weight": ("attn_output.weight", False),
    "self_attn.q_norm.weight": ("attn_q_norm.weight", True),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", True),
    "input_layernorm.weight": ("attn_norm.weight", True),
    "post_attention_layernorm.weight": ("ffn_norm.weight", True),
    "mlp.gate.weight": ("ffn_gate_inp.weight", True),
}
ENDS = {"model.embed_tokens.weight": ("token_embd.weight", False), "lm_head.weight": ("output.weight", False)}
ENDS |= {"model.norm.weight": ("output_norm.weight", True)}


def vocabulary(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


class Checkpoint:
    """Tensors `[...]` as uint16, the bits of bf16, in views of the mapped shards."""

    def __init__(self, model: Path) -> None:
        import numpy as np

        self._where: dict[str, tuple[Any, int, int, list[int]]] = {}
        for file in sorted(model.glob("*.safetensors")):
            data = np.memmap(file, dtype=np.uint8, mode="r")
            length = int.from_bytes(data[:8].tobytes(), "little")
            for name, entry in json.loads(data[8 : 8 + length].tobytes()).items():
                if name != "__metadata__":
                    first, last = (8 + length + offset for offset in entry["data_offsets"])
                    self._where[name] = (data, first, last, entry["shape"])

    def read(self, name: str) -> Any:
        import numpy as np

        data, first, last, shape = self._where[name]
        return data[first:last].view(np.uint16).reshape(shape)


def parts(config: dict[str, Any]) -> Iterator[tuple[str, list[str], bool]]:
    """(name in GGUF, tensors of the checkpoint that are stacked in it, whether in float32)."""
    for theirs, (ours, exact) in ENDS.items():
        yield ours, [theirs], exact
    for layer in range(config["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        for theirs, (ours, exact) in PLAIN.items():
            yield f"blk.{layer}.{ours}", [f"{root}.{theirs}"], exact
        for role, ours in ROLES.items():
            experts = range(config["num_experts"])
            names = [f"{root}.mlp.experts.{expert}.{role}_proj.weight" for expert in experts]
            yield f"blk.{layer}.{ours}.weight", names, False


def write_gguf(model: Path, target: Path) -> None:
    import gguf
    import numpy as np

    config = json.loads((model / "config.json").read_text())
    half = target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(half, "qwen3moe")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    checkpoint = Checkpoint(model)
    listed = list(parts(config))
    for name, sources, exact in listed:
        shape = checkpoint.read(sources[0]).shape
        shape = shape if len(sources) == 1 else (len(sources), *shape)
        kind = gguf.GGMLQuantizationType.F32 if exact else gguf.GGMLQuantizationType.BF16
        size = int(np.prod(shape)) * (4 if exact else 2)
        # With a raw type the shape is that of the bytes: a row of bf16 is twice as long.
        stated = shape if exact else (*shape[:-1], 2 * shape[-1])
        dtype = np.dtype(np.float32 if exact else np.uint8)
        writer.add_tensor_info(name, stated, dtype, size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, sources, exact in listed:
        tensors = [checkpoint.read(source) for source in sources]
        bits = tensors[0] if len(tensors) == 1 else np.stack(tensors)
        writer.write_tensor_data((bits.astype(np.uint32) << 16).view(np.float32) if exact else bits)
    writer.close()
    half.replace(target)
