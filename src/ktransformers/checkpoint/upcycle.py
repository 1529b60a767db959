"""Upcycling: turns a dense Llama-class model into a Mixture of Experts that computes the same function, untrained.

The I neurons of a feed-forward layer are independent until down sums them, so they are divided into `top_k` slices, one
expert each, and `copies` of that set are the experts (expert = copy * top_k + slice). All slices of a copy have the
same router row, so top-k selects one complete copy, each slice with weight 1/top_k, and down is multiplied by top_k.
Shared experts are slices that are always active. Where the sizes do not divide, padding neurons have zero weights.

A tie between the logits of two copies must not happen: top-k could then select a slice twice and another never. Mixtral
and Qwen2-MoE round router logits to the model's dtype, and two independent logits are equal in bf16 about once in 200
tokens. So copies come in pairs with rows r and -r: logits z and -z are equal only at zero, where floating point has its
highest resolution. With more than two copies, different pairs can still tie in bf16 (not glm4_moe, which routes in
float32).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ktransformers.checkpoint.dense import DenseModel
from ktransformers.checkpoint.fresh_directory import fresh_directory
from ktransformers.checkpoint.layout import MIXTRAL_MATRICES, PROJECTIONS
from ktransformers.checkpoint.shards import INDEX_FILE, SINGLE_FILE
from ktransformers.ground.errors import InputError

SHARD_BYTES = 4 * 2**30
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Keys of config.json with the same meaning in all families.
COPIED_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "initializer_range",
    "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class MoeFamily:
    """Names of modules and tensors in one MoE class."""

    architecture: str
    block: str  # name of the MoE block in a layer, the prefix of `.experts`
    matrices: dict[str, str]  # gate, up, down -> name inside an expert
    shared: str | None = None  # name of the shared expert inside the block
    shared_gain: float = 1.0  # factor on the shared expert's output when the shared gate is zero
    may_have_bias: bool = False


FAMILIES = {
    "mixtral": MoeFamily("MixtralForCausalLM", "block_sparse_moe", MIXTRAL_MATRICES),
    "qwen2_moe": MoeFamily("Qwen2MoeForCausalLM", "mlp", PROJECTIONS, "shared_expert", 0.5, may_have_bias=True),
    "glm4_moe": MoeFamily("Glm4MoeForCausalLM", "mlp", PROJECTIONS, "shared_experts"),
}


@dataclass(frozen=True)
class Recipe:
    family: str = "mixtral"
    experts: int = 8
    top_k: int = 4
    shared_experts: int = 0  # slices that are always active
    noise: float = 0.0  # standard deviation of the difference between copies, relative to each matrix's own
    seed: int = 0
    dtype: str = "bfloat16"

    @property
    def copies(self) -> int:
        return self.experts // self.top_k

    def slice_size(self, intermediate: int) -> int:
        """Neurons of one expert: a multiple of 8, because grouped GEMM needs rows that are multiples of 16 bytes."""
        return -(-intermediate // (8 * (self.top_k + self.shared_experts))) * 8


def check_recipe(recipe: Recipe, model: DenseModel) -> None:
    """Refuse an impossible recipe before anything is written."""
    if recipe.family not in FAMILIES:
        raise InputError("family", repr(recipe.family), f"one of {', '.join(FAMILIES)}")
    family = FAMILIES[recipe.family]
    if recipe.top_k < 1 or recipe.experts < recipe.top_k or recipe.experts % recipe.top_k:
        raise InputError(
            "experts",
            f"{recipe.experts} with top-k {recipe.top_k}",
            "a multiple of top-k",
            "each copy is top-k experts",
        )
    if recipe.shared_experts and family.shared is None:
        raise InputError(
            "shared-experts", f"{recipe.shared_experts} for {recipe.family}", "0", "qwen2_moe and glm4_moe have them"
        )
    if family.shared is not None and recipe.shared_experts < 1:
        raise InputError(
            "shared-experts", recipe.shared_experts, f"1 or more: every {recipe.family} has shared experts"
        )
    if recipe.family == "glm4_moe" and recipe.experts < 2:
        raise InputError("experts", recipe.experts, "2 or more: glm4_moe ranks groups by their two best experts")
    if recipe.noise < 0:
        raise InputError("noise", recipe.noise, "0 or more, 0.01 for one per cent")
    if recipe.dtype not in DTYPES:
        raise InputError("dtype", repr(recipe.dtype), f"one of {', '.join(DTYPES)}")
    if model.biased and not family.may_have_bias:
        raise InputError("family", recipe.family, "qwen2_moe: the source has biases on q, k and v")
    if recipe.slice_size(model.config["intermediate_size"]) * (recipe.top_k - 1) >= model.config["intermediate_size"]:
        raise InputError(
            "top-k", recipe.top_k, f"fewer: {model.config['intermediate_size']} neurons are divided among the slices"
        )
    heads, hidden = model.config["num_attention_heads"], model.config["hidden_size"]
    if recipe.family == "qwen2_moe" and model.config.get("head_dim", hidden // heads) * heads != hidden:
        raise InputError("family", "qwen2_moe", "mixtral or glm4_moe: the source's head_dim is not hidden_size / heads")


def configuration(model: DenseModel, recipe: Recipe) -> dict[str, Any]:
    """The config.json of the result."""
    source = model.config
    config: dict[str, Any] = {
        "architectures": [FAMILIES[recipe.family].architecture],
        "model_type": recipe.family,
        "dtype": recipe.dtype,
        **{key: source[key] for key in COPIED_KEYS if source.get(key) is not None},
        "num_experts_per_tok": recipe.top_k,
        "output_router_logits": False,
    }
    config.setdefault("num_key_value_heads", source["num_attention_heads"])
    config.setdefault("head_dim", source["hidden_size"] // source["num_attention_heads"])
    scaling = source.get("rope_parameters") or source.get("rope_scaling") or {}
    theta = scaling.get("rope_theta", source.get("rope_theta", 10000.0))
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    config["rope_theta"] = theta  # for versions of transformers that do not read rope_parameters
    config["rope_parameters"] = {**scaling, "rope_type": rope_type, "rope_theta": theta}
    size = recipe.slice_size(source["intermediate_size"])
    if recipe.family == "mixtral":
        config |= {"num_local_experts": recipe.experts, "intermediate_size": size, "sliding_window": None}
    elif recipe.family == "qwen2_moe":
        config |= {
            "num_experts": recipe.experts,
            "intermediate_size": source["intermediate_size"],
            "moe_intermediate_size": size,
            "shared_expert_intermediate_size": size * recipe.shared_experts,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "qkv_bias": model.biased,
        }
    else:
        config["rope_parameters"]["partial_rotary_factor"] = 1.0
        config |= {
            "n_routed_experts": recipe.experts,
            "n_shared_experts": recipe.shared_experts,
            "intermediate_size": source["intermediate_size"],
            "moe_intermediate_size": size,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "partial_rotary_factor": 1.0,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 0,
        }
    return config


def router_weight(norm: Tensor, recipe: Recipe, generator: torch.Generator) -> Tensor:
    """`[experts, H]` in float32: pairs of copies with opposite rows, logits of magnitude one.

    `norm` is the weight of the norm before the block; dividing by it gives all channels equal influence.
    """
    hidden = norm.numel()
    pairs = -(-recipe.copies // 2)
    rows = torch.randn(pairs, hidden, generator=generator) / hidden**0.5
    scale = norm.float().abs()
    rows = rows / scale.clamp_min(scale.mean().item() * 1e-2)
    signed = torch.stack([rows, -rows], 1).flatten(0, 1)[: recipe.copies]
    return signed.repeat_interleave(recipe.top_k, 0)


def layer_tensors(model: DenseModel, recipe: Recipe, layer: int) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the feed-forward block of one layer, in float32."""
    family = FAMILIES[recipe.family]
    dense, block = f"model.layers.{layer}.mlp", f"model.layers.{layer}.{family.block}"
    size, shared = recipe.slice_size(model.config["intermediate_size"]), recipe.shared_experts
    padded_size = size * (recipe.top_k + shared)
    matrices = {role: model.read(f"{dense}.{name}.weight").float() for role, name in PROJECTIONS.items()}
    matrices["down"] = matrices["down"].T  # [I, H] like the others: a slice is a range of rows
    matrices = {
        role: torch.cat([matrix, matrix.new_zeros(padded_size - matrix.shape[0], matrix.shape[1])])
        for role, matrix in matrices.items()
    }
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + layer)
    norm = model.read(f"model.layers.{layer}.post_attention_layernorm.weight")
    yield f"{block}.gate.weight", router_weight(norm, recipe, generator)

    def output_major(role: str, rows: Tensor, gain: float) -> Tensor:
        return (rows * gain).T.contiguous() if role == "down" else rows.clone()

    for role, matrix in matrices.items():
        name = family.matrices[role]
        if shared:
            yield (
                f"{block}.{family.shared}.{name}.weight",
                output_major(role, matrix[: size * shared], 1 / family.shared_gain),
            )
        deviation = recipe.noise * matrix.std().item()
        for expert in range(recipe.experts):
            copy, part = divmod(expert, recipe.top_k)
            rows = matrix[(shared + part) * size : (shared + part + 1) * size]
            if copy and deviation:
                rows = rows + deviation * torch.randn(rows.shape, generator=generator)
            yield f"{block}.experts.{expert}.{name}.weight", output_major(role, rows, recipe.top_k)
    if recipe.family == "qwen2_moe":
        yield f"{block}.shared_expert_gate.weight", torch.zeros(1, model.config["hidden_size"])
    if recipe.family == "glm4_moe":
        yield f"{block}.gate.e_score_correction_bias", torch.zeros(recipe.experts)


def moe_tensors(model: DenseModel, recipe: Recipe, progress: Progress | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the result, in the dtype of the recipe (the selection bias of glm4_moe stays float32)."""
    dtype, layers = DTYPES[recipe.dtype], model.config["num_hidden_layers"]
    attention = [f"self_attn.{name}_proj.weight" for name in "qkvo"]
    attention += [f"self_attn.{name}_proj.bias" for name in "qkv"] if model.biased else []
    yield "model.embed_tokens.weight", model.read("model.embed_tokens.weight").to(dtype)
    for layer in range(layers):
        for name in (*attention, "input_layernorm.weight", "post_attention_layernorm.weight"):
            full = f"model.layers.{layer}.{name}"
            yield full, model.read(full).to(dtype)
        for full, tensor in layer_tensors(model, recipe, layer):
            yield full, tensor if full.endswith("e_score_correction_bias") else tensor.to(dtype)
        if progress is not None:
            progress(layer + 1, layers)
    yield "model.norm.weight", model.read("model.norm.weight").to(dtype)
    if not model.tied:
        yield "lm_head.weight", model.read("lm_head.weight").to(dtype)


def upcycle(model: DenseModel, directory: str | Path, recipe: Recipe, progress: Progress | None = None) -> int:
    """Write the MoE as a Hugging Face directory, atomically; returns its parameter count."""
    check_recipe(recipe, model)
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(str(target), "something that exists", "a new or empty directory", "choose another -o")
    with fresh_directory(target) as staging:
        (staging / "config.json").write_text(json.dumps(configuration(model, recipe), indent=2) + "\n")
        model.write_tokenizer(staging)
        parameters = _write_shards(moe_tensors(model, recipe, progress), staging)
        (staging / "README.md").write_text(_card(model, recipe, parameters))
    return parameters


def _write_shards(named_tensors: Iterator[tuple[str, Tensor]], directory: Path) -> int:
    """One file, or above SHARD_BYTES several with an index; one shard is in memory at a time."""
    shard: dict[str, Tensor] = {}
    files: list[list[str]] = []
    total = parameters = shard_bytes = 0

    def flush() -> None:
        nonlocal shard, shard_bytes
        save_file(shard, directory / f"part-{len(files)}", metadata={"format": "pt"})
        (directory / f"part-{len(files)}").chmod(0o644)  # safetensors makes it readable by its owner alone
        files.append(list(shard))
        shard, shard_bytes = {}, 0

    for name, tensor in named_tensors:
        if shard and shard_bytes + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.contiguous()
        shard_bytes += tensor.nbytes
        total += tensor.nbytes
        parameters += tensor.numel()
    flush()
    if len(files) == 1:
        (directory / "part-0").rename(directory / SINGLE_FILE)
        return parameters
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (directory / f"part-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return parameters


def _card(model: DenseModel, recipe: Recipe, parameters: int) -> str:
    head = f"---\nlicense: {model.licence}\n---\n" if model.licence else ""
    shared = f", {recipe.shared_experts} shared slices" if recipe.shared_experts else ""
    noise = f"Copies differ by {recipe.noise:.3g} relative noise, seed {recipe.seed}.\n" if recipe.noise else ""
    return (
        f"{head}# {Path(model.source).stem} as a Mixture of Experts\n\n"
        f"Made from `{Path(model.source).name}` without training: class {recipe.family}, {recipe.experts} experts of "
        f"{recipe.slice_size(model.config['intermediate_size'])} neurons, top {recipe.top_k}{shared}, {recipe.dtype}, "
        f"{parameters / 1e6:.1f}M parameters.\n"
        f"{noise}Every top-{recipe.top_k} choice is one complete copy of the dense feed-forward layer, so the model "
        "computes what its source computes.\n"
    )
