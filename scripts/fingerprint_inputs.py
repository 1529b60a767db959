"""What the sections of `fingerprint.py` compute with: random tensors and blocks of GGUF, batches, tiny stock models
with a tokenizer, stock PEFT's LoRA on them. Seeds are fixed.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
THREADS = 2
Keys = Iterator[tuple[str, Any]]

TINY: dict[str, Any] = {
    "vocab_size": 6400, "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "num_experts_per_tok": 2, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8, "norm_topk_prob": True},
    "qwen2_moe": {"num_experts": 5, "shared_expert_intermediate_size": 56},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "deepseek_v3": {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "head_dim": 8, "n_routed_experts": 6, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip
LORA: dict[str, Any] = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
}


class Skip(Exception):
    """What a section needs and this machine lacks."""


def need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"no package {', '.join(missing)}")


def allow_missing_pydantic() -> None:
    """Everything imports pydantic, but what is fingerprinted validates flat models alone: assignments will do."""
    if importlib.util.find_spec("pydantic") is not None:
        return

    class Model:
        def __init__(self, **fields: Any) -> None:
            self.__dict__.update(fields)

        @classmethod
        def model_validate(cls, fields: dict[str, Any]) -> Model:
            return cls(**fields)

    made = types.ModuleType("pydantic")
    passed = lambda *_, **__: lambda function: function  # noqa: E731
    made.__dict__.update(BaseModel=Model, ConfigDict=dict, ValidationError=ValueError, TypeAdapter=object)
    made.__dict__.update(Field=lambda default=None, **_: default, field_validator=passed, model_validator=passed)
    sys.modules["pydantic"] = made


def normal(seed: int) -> Callable[..., Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return lambda *shape, scale=1.0: torch.randn(*shape, generator=generator) * scale


def gguf_blocks(values: int, size: int, experts: int, rows: int, columns: int, seed: int) -> Any:
    """Random bytes. Scales are float16 at even offsets: without the highest bit of their exponents they are finite."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, columns // values * size), generator=generator).to(torch.uint8)
    blocks[..., 1::2] &= 0xBF
    return blocks


def tiny_model(directory: Path, family: str = "qwen3_moe") -> Path:
    """A stock model whose weights are bf16 numbers in float32, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(TINY | FAMILIES[family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    draw = normal(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name or "sinks" in name:
                parameter.copy_(draw(*parameter.shape, scale=1.25 / parameter.shape[-1] ** 0.5).bfloat16())
    model.save_pretrained(directory)
    for file in (ROOT / "tests" / "data" / "minimind_6400").glob("*.json"):
        shutil.copyfile(file, directory / file.name)
    return directory


def adapt(model: Any, seed: int = 5, rank: int = 4, **targets: Any) -> Any:
    """Stock PEFT's LoRA with B that is not zero."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=8, **(targets or LORA)))
    draw = normal(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(draw(*parameter.shape, scale=0.1))
    return model


def lora_gradients(model: Any, tokens: Any) -> Keys:
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    yield "loss", loss
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"grad/{name.removeprefix('base_model.model.')}", parameter.grad


def batch(tokens: int, experts: int, hidden: int, top_k: int = 2) -> tuple[Any, Any, Any, Any]:
    """Hidden states, ids, routing weights and the output's gradient. The first expert has a row of every token, so
    that there are experts with many rows and with few."""
    import torch

    draw = normal(tokens)
    scores, ids = draw(tokens, experts).softmax(-1).topk(top_k)
    ids[:, 0], ids[:, 1] = 0, ids.amax(1)
    if tokens > 1:
        ids[1, 1] = -1
    return draw(tokens, hidden).bfloat16(), ids, scores, draw(tokens, hidden).to(torch.bfloat16)
