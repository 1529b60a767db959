"""Random models of released shapes: whole and linked, as they are loaded and as they are planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.plan import Choice, Serving, open_shape, profile
from ktransformers.plan.memory import predict_memory
from ktransformers.quant.plan import parse_formats
from ktransformers.quant.random_model import cut_config, distinct_layers, plan_random, random_tensor, write_random

QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def made(folder: Path, distinct: int, word: str = "bf16", **changes: Any) -> Path:
    plan = plan_random(QWEN | changes, folder / "shape", parse_formats(word))
    model = write_random(plan, folder / "model", distinct)
    assert (model.layers, model.distinct) == (3, min(3, distinct))
    return model.directory


def test_whole_model_has_the_sizes_of_its_configuration(tmp_path: Path) -> None:
    directory = made(tmp_path, 3, "int4")
    shape = open_shape(str(directory))
    assert (shape.layers, shape.expert_layers, shape.experts, shape.stored) == (3, 3, 8, "int4")
    model: Any = load_model(directory, dtype=torch.float32)
    assert model.model.embed_tokens.weight.shape == (512, 64) and model.config.vocab_size == 512
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    assert not torch.equal(gates[0], gates[1])
    assert model(torch.arange(3, 40)[None]).logits.isfinite().all()


def test_linked_layers_share_their_experts_and_no_router(tmp_path: Path) -> None:
    directory = made(tmp_path, 1)
    assert len(list(directory.glob("packed-*.safetensors"))) == 1
    model: Any = load_model(directory, dtype=torch.float32)
    stores = [module.kt.store.memory() for module in expert_modules(model).values()]
    assert len({store["down"].data_ptr() for store in stores}) == 1  # mapped once
    assert not torch.equal(model.model.layers[0].mlp.gate.weight, model.model.layers[2].mlp.gate.weight)
    assert model(torch.arange(3, 40)[None]).logits.isfinite().all()


def test_linked_model_is_planned_as_it_is(tmp_path: Path) -> None:
    whole, linked = (open_shape(str(made(tmp_path / name, count))) for name, count in (("whole", 3), ("linked", 1)))
    assert whole.expert_layers == linked.expert_layers == 3 and whole.numbers == linked.numbers
    assert whole.mapped_experts == 3 * linked.mapped_experts > 0
    plans = [predict_memory(shape, Serving(), Choice("bf16"), profile("arm2")) for shape in (whole, linked)]
    assert plans[0].host == plans[1].host and not plans[0].host["experts"]
    assert plans[0].mapped - plans[1].mapped == 2 * linked.mapped_experts
    copied = predict_memory(whole, Serving(), Choice("int8"), profile("arm2"))
    assert copied.host["experts"] > 0 and copied.mapped < plans[0].mapped  # another format is packed in memory


def test_tokens_of_a_batch_take_many_experts(tmp_path: Path) -> None:
    """As those of a trained model do: without a large embedding hidden states of random layers would be alike."""
    model: Any = load_model(made(tmp_path, 3, num_experts=32), dtype=torch.float32)
    used: list[int] = []
    for module in expert_modules(model).values():
        module.register_forward_pre_hook(lambda _, args: used.append(len(args[1].unique())))
    model(torch.randint(3, 512, (1, 64), generator=torch.Generator().manual_seed(0)))
    assert min(used) >= 28


def test_distinct_layers_are_some_caches_large(tmp_path: Path) -> None:
    plan = plan_random(QWEN, tmp_path / "shape", parse_formats("bf16"))
    assert distinct_layers(plan) == 3  # all of them are far smaller than a cache


def test_layers_of_another_shape_have_files_of_their_own(tmp_path: Path) -> None:
    config = QWEN | {"num_hidden_layers": 4, "mlp_only_layers": [0]}
    plan = plan_random(config, tmp_path / "shape", parse_formats("bf16"))
    model = write_random(plan, tmp_path / "model", 2)
    assert (model.layers, model.distinct) == (3, 2)
    again = write_random(plan, tmp_path / "model", 2)
    assert again == model  # found there


def test_cut_configurations() -> None:
    config = {"num_hidden_layers": 4, "layer_types": ["a", "b", "a", "b"]}
    assert cut_config(config, 2) == ({"num_hidden_layers": 2, "layer_types": ["a", "b"]}, 4)
    nested, total = cut_config({"text_config": config}, None)
    assert total == 4 and nested["text_config"] == config
    assert cut_config({"hybrid_override_pattern": "MEM*"}, 2) == ({"hybrid_override_pattern": "ME"}, 4)
    with pytest.raises(InputError, match="1 to 4"):
        cut_config(config, 5)


def test_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="without layers of experts"):
        plan_random(QWEN | {"mlp_only_layers": [0, 1, 2]}, tmp_path / "shape", parse_formats("bf16"))


def test_random_tensors_differ_by_name_and_repeat() -> None:
    first, again, other = (
        random_tensor(name, (64, 32), torch.bfloat16) for name in ("a.weight", "a.weight", "b.weight")
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert float(first.float().std()) == pytest.approx(32**-0.5, rel=0.1)
    assert random_tensor("norm.weight", (4,), torch.float32).tolist() == [1.0] * 4
    assert not random_tensor("bias", (4,), torch.float32).any()
