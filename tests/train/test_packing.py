"""Packed rows do not see each other: in families whose code does not give its masks the positions, and otherwise the
run is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import masking_utils

from ktransformers.ground.errors import InputError
from ktransformers.train import packed_attention, packing
from ktransformers.train import plan as planning
from ktransformers.train.packed_attention import PACKED_ROWS, use_packed_attention
from ktransformers.train.packing import packing_error, require_masked_layers, separate_rows, unmasked_layers
from ktransformers.train.plan import make_plan
from ktransformers.train.resolve import read_settings
from tests.support.tiny_models import build, rounding_otherwise, tie_experts
from tests.support.training import recipe
from tests.support.training_runs import difference, first_gradients, run

INDEXED = {"index_topk": 8}
UNMASKED = {
    "qwen3_next": "linear_attention",
    "qwen3_5_moe_text": "linear_attention",
    "kimi_linear": "linear_attention",
    "jamba": "linear_attention",
    "bailing_hybrid": "linear_attention",
    "lfm2_moe": "conv",
    "deepseek_v4": "heavily_compressed_attention",
    "zaya": "hybrid",
}


@pytest.mark.parametrize(
    ("family", "changes", "told_by_stock"),
    [
        ("qwen3_moe", {}, True),
        ("gpt_oss", {}, False),
        ("afmoe", {}, False),
        ("granitemoehybrid", {}, False),
        ("deepseek_v32", INDEXED, True),
        ("glm_moe_dsa", INDEXED, True),
        ("hy_v4", INDEXED, True),
        ("minimax", {}, True),
        ("nemotron_h", {}, True),
    ],
)
def test_rows_are_kept_apart(family: str, changes: dict[str, Any], told_by_stock: bool) -> None:
    model = build(family, **changes)
    assert (packing_error(model) < 1e-5) == told_by_stock
    require_masked_layers(model)
    use_packed_attention(model)
    separate_rows(model)
    assert packing_error(model) < 1e-5
    assert not masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._local_mapping
    ids = torch.arange(3, 15)[None]
    whole, again = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(whole, again) and torch.allclose(whole, build(family, **changes)(ids).logits, atol=1e-5)


@pytest.mark.parametrize("family", UNMASKED)
def test_layers_without_masks_are_refused_without_weights(family: str) -> None:
    model = build(family)
    with pytest.raises(InputError, match=f"packing.*{family}.*{UNMASKED[family]}.*kt_tokens_per_batch"):
        require_masked_layers(model)
    with torch.device("meta"):
        assert unmasked_layers(type(model)(model.config)) == unmasked_layers(model)


def test_what_mixes_tokens_is_found_without_layer_types() -> None:
    model: Any = build("qwen3_moe")
    assert unmasked_layers(model) is None
    model._is_stateful = True
    assert unmasked_layers(model) == "a recurrent state"
    model.model.layers[0].self_attn.mix = torch.nn.Conv1d(4, 4, 3)
    assert unmasked_layers(model) == "the convolution model.layers.0.self_attn.mix"


def test_proof_refuses_rows_that_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By logits and not by names: the masks are told nothing, or the family recurs under another name."""
    monkeypatch.setattr(packing, "tell_masks_the_rows", lambda model: None)
    with pytest.raises(InputError, match="gpt_oss, where the logits of packed rows differ by 0"):
        separate_rows(build("gpt_oss"))
    monkeypatch.undo()
    for family in ("qwen3_next", "lfm2_moe"):
        with pytest.raises(InputError, match=f"packing.*{family}"):
            separate_rows(build(family))


def test_packed_attention_gives_way_to_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a family whose code gives its attention neither the positions nor the borders of the rows."""
    monkeypatch.setattr(packed_attention, "_row_lengths", lambda query, kwargs: [query.shape[2]])
    model: Any = build("qwen3_moe")
    assert use_packed_attention(model) and model.config._attn_implementation == PACKED_ROWS
    separate_rows(model)
    assert model.config._attn_implementation == "sdpa" and packing_error(model) < 1e-5


def test_tied_experts_do_not_prevent_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows round otherwise than rows alone, so they choose otherwise between experts that tie."""
    model: Any = build("qwen3_moe")
    tie_experts(model)
    use_packed_attention(model)
    with rounding_otherwise(model, 1e-6):
        with monkeypatch.context() as context:
            context.setattr(packing, "max_logit_error", lambda dtype: float("inf"))
            assert packing_error(model) > 0.01  # without replay
        separate_rows(model)
        assert packing_error(model) < 1e-4
    assert model.config._attn_implementation == PACKED_ROWS


def test_rows_that_see_each_other_are_refused_beside_tied_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build("qwen3_moe")
    tie_experts(model)
    monkeypatch.setattr(packed_attention, "_row_lengths", lambda query, kwargs: [query.shape[2]])
    use_packed_attention(model)
    with rounding_otherwise(model, 1e-6):
        assert packing_error(model) > 0.01


def test_refused_before_data_is_read(
    model_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*args: Any) -> Any:
        raise AssertionError("data was read")

    monkeypatch.setattr(planning, "read_datasets", read)
    with pytest.raises(InputError, match=r"packing.*lfm2_moe"):
        make_plan(read_settings(recipe(model_of("lfm2_moe"), tmp_path / "x", packing=True)))


def test_gradients_of_packed_rows_equal_those_of_single_rows(model_of: Callable[[str], Path], tmp_path: Path) -> None:
    """gpt_oss, whose masks are not told the positions by its own code: the sum over the rows of a step is the same."""
    keys = recipe(model_of("gpt_oss"), tmp_path / "x", max_samples=4, cutoff_len=512, kt_tokens_per_batch="off")
    keys |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    alone = first_gradients(keys)
    packed = first_gradients(keys | {"packing": True, "gradient_accumulation_steps": 1})
    assert difference(packed, alone) < 1e-4
    run(keys | {"packing": True, "max_steps": 1})
