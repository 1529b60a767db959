"""config.json with sizes that no model has is refused before any library builds what it says."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ktransformers.adapters import find_facts
from ktransformers.checkpoint.dense import open_dense
from ktransformers.checkpoint.model_config import LARGEST, MAY_BE_ZERO, check_model_config, read_model_config
from ktransformers.ground.errors import InputError
from ktransformers.modeling.load import load_config, load_model
from ktransformers.plan.model_shape import open_shape
from ktransformers.quant.origin import Origin
from tests.support.tiny_models import COMMON, FAMILIES

ABSURD: dict[str, list[Any]] = {
    "num_local_experts": [2**40, -1, "8", 8.0, True, float("nan")],
    "num_experts": [2**40],
    "num_hidden_layers": [2**40, 0, [2**40]],
    "hidden_size": [2**40, 0, None],
    "num_attention_heads": [0, 2**63],
    "layer_types": ["full_attention", [1]],
    "quantization_config": ["fp8", {"quant_method": 3}],
    "model_type": [3, ["qwen3_moe"]],
    "num_experts_per_tok": [100],
    "rope_parameters": [{"rope_type": "yarn", "factor": "x"}, {"full_attention": {"rope_theta": "x"}}],
    "text_config": [3, {"num_experts": 2**40}],
}


def write(folder: Path, **changes: Any) -> Path:
    fields = {"model_type": "qwen3_moe"} | COMMON | FAMILIES["qwen3_moe"]
    (folder / "config.json").write_text(json.dumps(fields | changes))
    return folder


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in ABSURD.items() for value in values])
def test_every_reader_refuses_an_absurd_value(key: str, value: Any, tmp_path: Path) -> None:
    write(tmp_path, **{key: value})
    start = time.monotonic()
    if value is None:
        read_model_config(tmp_path)  # the same as a missing key
        return
    for read in (read_model_config, load_config, load_model, Origin, open_dense, open_shape, find_facts):
        with pytest.raises(InputError, match=r"config\.json: (text_config\.)?" + key.partition("_")[0]):
            read(str(tmp_path) if read in (open_shape, find_facts) else tmp_path)  # type: ignore[operator]
    assert time.monotonic() - start < 10


def test_error_of_transformers_names_the_file(tmp_path: Path) -> None:
    write(tmp_path, model_type="no_such_model")
    with pytest.raises(InputError, match=r"config\.json: given .*no_such_model"):
        load_config(tmp_path)
    write(tmp_path, rope_parameters=3)
    with pytest.raises(InputError, match=r"config\.json: given "):
        load_config(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_configurations_of_the_families_pass(family: str) -> None:
    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family]))
    check_model_config(json.loads(config.to_json_string(use_diff=False)), "config.json")
    assert set(LARGEST) >= MAY_BE_ZERO


def test_heads_without_rotary_dimensions_are_no_absurd_value(tmp_path: Path) -> None:
    """glm5_next: `head_dim` is the number of rotary dimensions, of which it has none."""
    read_model_config(write(tmp_path, head_dim=0, qk_rope_head_dim=0))
    with pytest.raises(InputError, match="head_dim: given 0"):
        read_model_config(write(tmp_path, head_dim=0))
