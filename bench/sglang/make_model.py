"""A checkpoint of random numbers with the shapes of Qwen3-30B-A3B and fewer layers, in the released layout.

    python bench/sglang/make_model.py DIRECTORY --layers 8

Every layer has a file with attention, router and norms, and one with gate_proj, up_proj and down_proj of its experts,
in bf16. 8 layers take 9.6 GB. The experts' numbers are FP8 numbers times a power of two, so that DIRECTORY-fp8, where
they are stored in FP8 with scales of 128 x 128 blocks, is the same model. `--adapter NAME` also writes a LoRA adapter
in the form that SGLang reads, on attention and on all experts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SIZES = {"hidden": 2048, "intermediate": 768, "experts": 128, "vocabulary": 32000}
FP8_SCALE = 2.0**-11  # 448 of these are more than the largest of the random numbers
TINY = {"hidden": 256, "intermediate": 128, "experts": 8, "vocabulary": 512}


def config(sizes: dict[str, int], layers: int) -> dict[str, Any]:
    heads = sizes["hidden"] // 64
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": sizes["hidden"],
        "intermediate_size": 3 * sizes["hidden"],
        "moe_intermediate_size": sizes["intermediate"],
        "num_experts": sizes["experts"],
        "num_experts_per_tok": min(8, sizes["experts"] // 2),
        "norm_topk_prob": True,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 8),
        "head_dim": 128,
        "vocab_size": sizes["vocabulary"],
        "hidden_act": "silu",
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


class Writer:
    """Tensors of random numbers, made on the GPU where there is one, and the index of the files that hold them."""

    def __init__(self, directory: Path, seed: int = 0) -> None:
        self.directory = directory
        self.index: dict[str, str] = {}
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 0.02) -> torch.Tensor:
        numbers = torch.randn(*shape, device=self.device, generator=self._generator) * scale
        return numbers.to(torch.bfloat16).cpu()

    def fp8(self, *shape: int) -> torch.Tensor:
        """In units of FP8_SCALE."""
        numbers = torch.randn(*shape, device=self.device, generator=self._generator) * (0.02 / FP8_SCALE)
        return numbers.to(torch.float8_e4m3fn).cpu()

    def save(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, str(self.directory / name))
        self.index.update(dict.fromkeys(tensors, name))

    def link(self, file: Path, index: dict[str, str]) -> None:
        """A file of another checkpoint, whose index is given."""
        (self.directory / file.name).unlink(missing_ok=True)
        (self.directory / file.name).symlink_to(file.resolve())
        self.index.update({key: name for key, name in index.items() if name == file.name})


def make(directory: Path, layers: int, sizes: dict[str, int] = SIZES) -> None:
    fields = config(sizes, layers)
    in_fp8 = directory.with_name(f"{directory.name}-fp8")
    for target in (directory, in_fp8):
        target.mkdir(parents=True, exist_ok=True)
    writer, fp8_writer = Writer(directory), Writer(in_fp8)
    hidden = sizes["hidden"]
    outer = {
        "model.embed_tokens.weight": writer.normal(sizes["vocabulary"], hidden),
        "lm_head.weight": writer.normal(sizes["vocabulary"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    writer.save("model-outer.safetensors", outer)
    for layer in range(layers):
        writer.save(f"model-{layer:03d}.safetensors", attention_and_router(writer, fields, layer))
        for name in ("model-outer.safetensors", f"model-{layer:03d}.safetensors"):
            fp8_writer.link(directory / name, writer.index)
        codes = expert_codes(writer, sizes, layer)
        decoded = {name: (code.float() * FP8_SCALE).to(torch.bfloat16) for name, code in codes.items()}
        writer.save(f"experts-{layer:03d}.safetensors", decoded)
        scales = {f"{name}_scale_inv": block_scales(code) for name, code in codes.items()}
        fp8_writer.save(f"experts-{layer:03d}.safetensors", {**codes, **scales})
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    for one, extra in ((writer, {}), (fp8_writer, {"quantization_config": quantization})):
        (one.directory / "config.json").write_text(json.dumps({**fields, **extra}))
        document = {"metadata": {}, "weight_map": one.index}
        (one.directory / "model.safetensors.index.json").write_text(json.dumps(document))


def attention_and_router(writer: Writer, fields: dict[str, Any], layer: int) -> dict[str, torch.Tensor]:
    stem, hidden = f"model.layers.{layer}.", fields["hidden_size"]
    attention, keys = fields["num_attention_heads"] * 128, fields["num_key_value_heads"] * 128
    shapes = {"q_proj": (attention, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    shapes["o_proj"] = (hidden, attention)
    tensors = {f"{stem}self_attn.{name}.weight": writer.normal(*shape) for name, shape in shapes.items()}
    for name in ("q_norm", "k_norm"):
        tensors[f"{stem}self_attn.{name}.weight"] = torch.ones(128, dtype=torch.bfloat16)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{stem}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    tensors[f"{stem}mlp.gate.weight"] = writer.normal(fields["num_experts"], hidden)
    return tensors


def expert_codes(writer: Writer, sizes: dict[str, int], layer: int) -> dict[str, torch.Tensor]:
    hidden, intermediate, count = sizes["hidden"], sizes["intermediate"], sizes["experts"]
    gate_up = writer.fp8(count, 2 * intermediate, hidden)
    down = writer.fp8(count, hidden, intermediate)
    codes = {}
    for expert in range(count):
        stem = f"model.layers.{layer}.mlp.experts.{expert}."
        codes[f"{stem}gate_proj.weight"] = gate_up[expert, :intermediate].contiguous()
        codes[f"{stem}up_proj.weight"] = gate_up[expert, intermediate:].contiguous()
        codes[f"{stem}down_proj.weight"] = down[expert].contiguous()
    return codes


def block_scales(code: torch.Tensor) -> torch.Tensor:
    return torch.full((-(-code.shape[0] // 128), -(-code.shape[1] // 128)), FP8_SCALE)


def make_adapter(directory: Path, base: Path, seed: int, attention: bool, rank: int = 8) -> None:
    """LoRA of rank `rank` on every expert, with `attention` on o_proj too; large enough to change greedy tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    model = json.loads((base / "config.json").read_text())
    hidden, intermediate = model["hidden_size"], model["moe_intermediate_size"]
    writer = Writer(directory, seed)
    tensors: dict[str, torch.Tensor] = {}

    def pair(name: str, inputs: int, outputs: int) -> None:
        tensors[f"{name}.lora_A.weight"] = writer.normal(rank, inputs, scale=0.05)
        tensors[f"{name}.lora_B.weight"] = writer.normal(outputs, rank, scale=0.05)

    for layer in range(model["num_hidden_layers"]):
        stem = f"model.layers.{layer}."
        if attention:
            pair(f"{stem}self_attn.o_proj", model["num_attention_heads"] * model["head_dim"], hidden)
        for expert in range(model["num_experts"]):
            for name in ("gate_proj", "up_proj"):
                pair(f"{stem}mlp.experts.{expert}.{name}", hidden, intermediate)
            pair(f"{stem}mlp.experts.{expert}.down_proj", intermediate, hidden)
    save_file(tensors, str(directory / "adapter_model.safetensors"))
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [*(["o_proj"] if attention else []), "gate_proj", "up_proj", "down_proj"],
        "base_model_name_or_path": str(base),
    }
    (directory / "adapter_config.json").write_text(json.dumps(fields))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for tests of these scripts")
    parser.add_argument("--adapter", action="append", default=[], metavar="NAME", help="also DIRECTORY-NAME, a LoRA")
    parser.add_argument("--experts-only", nargs="+", default=[], metavar="NAME", help="adapters without attention")
    args = parser.parse_args()
    if not (args.directory / "model.safetensors.index.json").exists():
        make(args.directory, args.layers, TINY if args.tiny else SIZES)
    for number, name in enumerate(args.adapter, 1):
        target = args.directory.with_name(f"{args.directory.name}-{name}")
        make_adapter(target, args.directory, number, attention=name not in args.experts_only)
    print(f"made {args.directory}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
