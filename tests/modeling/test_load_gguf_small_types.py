"""Models with experts in GGUF's smallest types: the file, the packed directory and an adapter on them, against the
model with the weights that the `gguf` package decodes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.checkpoint.recode import KEEP
from ktransformers.nn import load_model
from ktransformers.plan.formats import format_of
from tests.support.gguf_blocks import SMALL, random_blocks
from tests.support.loaded_models import EXACT, stores, training_logits
from tests.support.packing import pack
from tests.support.releases import write_gguf
from tests.support.tiny_models import build, logits, save, tokens

ROLES = ("gate", "up", "down")
LAYERS = len(SMALL) // len(ROLES)
SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "num_hidden_layers": LAYERS}


def in_small_types(model: PreTrainedModel, file: Path) -> None:
    """Writes the experts alone, every type once; the model gets their numbers in bf16."""
    import gguf

    random, tensors = np.random.default_rng(0), dict[str, tuple[Any, str]]()
    numbers = model.state_dict()
    for layer in range(LAYERS):
        gate_up = numbers[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = numbers[f"model.layers.{layer}.mlp.experts.down_proj"]
        for role, matrix in zip(ROLES, (gate_up[:, :256], gate_up[:, 256:], down), strict=True):
            kind = SMALL[layer * len(ROLES) + ROLES.index(role)]
            data = random_blocks(kind, matrix.shape[:2], 256, random)
            quantised = gguf.GGMLQuantizationType[kind.upper()]
            read = torch.from_numpy(gguf.quants.dequantize(data, quantised))
            shrink = 2.0 ** round(math.log2(0.1 / read.std().item()))  # to the size of ordinary weights
            data = random_blocks(kind, matrix.shape[:2], 256, random, 0.01 * shrink)
            tensors[f"blk.{layer}.ffn_{role}_exps.weight"] = (data, kind.upper())
            matrix.copy_(torch.from_numpy(gguf.quants.dequantize(data, quantised)).bfloat16())
    write_gguf(file, "qwen3moe", {}, tensors)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The model's directory, a GGUF of its experts, and the directory with these numbers in bf16."""
    pytest.importorskip("gguf")
    folder = tmp_path_factory.mktemp("small")
    model = build("qwen3_moe", **SIZES)
    full = save(model, folder / "full")
    in_small_types(model, folder / "experts.gguf")
    return full, folder / "experts.gguf", save(model, folder / "plain")


def test_file_and_packed_directory_match_the_decoded_model(models: tuple[Path, Path, Path], tmp_path: Path) -> None:
    full, experts, plain = models
    actual = load_model(full, experts=experts, dtype=torch.float32)
    assert [store.formats[role] for store in stores(actual) for role in ROLES] == list(SMALL)
    for store in stores(actual):  # what a plan counts, and a few bytes of each block for padding
        released = sum(4 * 256 * 256 * format_of(kind).bytes_per_weight for kind in store.formats.values())
        assert released <= store.packed_bytes <= released + 4 * 24 * 256
    want = logits(load_model(plain, dtype=torch.float32))
    assert want.std() > 0.1
    torch.testing.assert_close(training_logits(actual), want, rtol=EXACT, atol=EXACT)
    done = pack(full, tmp_path / "packed", KEEP, experts=experts)
    assert all(matrix.kept for layer in done.report.layers for matrix in layer.matrices.values())
    assert torch.equal(logits(load_model(tmp_path / "packed", dtype=torch.float32)), logits(actual))


def test_adapter_gets_the_gradients_of_the_decoded_model(models: tuple[Path, Path, Path]) -> None:
    from peft import LoraConfig, get_peft_model

    full, experts, plain = models
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    grads = []
    for model in (load_model(full, experts=experts, dtype=torch.float32), load_model(plain, dtype=torch.float32)):
        torch.manual_seed(0)
        adapted = get_peft_model(model, LoraConfig(r=4, target_parameters=targets))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
        adapted(tokens(), labels=tokens()).loss.backward()
        grads.append({name: p.grad for name, p in adapted.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == 4 * LAYERS
    for name, grad in grads[0].items():
        assert grad.norm() > 0 and torch.equal(grad, grads[1][name]), name
