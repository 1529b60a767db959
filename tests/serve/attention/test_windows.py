"""Sliding windows that a family keeps in its mask only: tokens past the window as from the stock model, and a check at
start that reaches across the edge of long windows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from ktransformers.ground.errors import InputError
from ktransformers.modeling.substitute import Restore
from ktransformers.serve.attention import attention
from ktransformers.serve.attention.windows import (
    MAX_WINDOW,
    WINDOW_ATTRIBUTE,
    read_windows,
    reduce_windows,
    rule_window,
)
from ktransformers.serve.scheduler.forward import Forward, make_forward
from tests.support.family_checks import served_tokens
from tests.support.slow_cases import others_slow
from tests.support.tiny_models import build

CPU = torch.device("cpu")
NEW_TOKENS = 12
WINDOWED: dict[str, dict[str, Any]] = {
    "phimoe": {"sliding_window": 40},
    "qwen2_moe": {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 2},
    "minimax": {"sliding_window": 40},
    "gpt_oss": {"sliding_window": 40},
}


def build_windowed(family: str) -> Any:
    return build(family, max_position_embeddings=256, **WINDOWED[family])


@pytest.mark.parametrize("family", others_slow(WINDOWED, ("qwen2_moe", "gpt_oss")))
def test_tokens_past_the_window_equal_stock(family: str) -> None:
    model = build_windowed(family)
    prompt = [(11 * at + 5) % 90 + 3 for at in range(100)]
    with torch.no_grad():
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, use_cache=True
        )
        unmasked = build(family, max_position_embeddings=256, **WINDOWED[family] | {"sliding_window": 4096})
        wide = unmasked.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None)
    forward = make_forward(model)
    assert isinstance(forward, Forward) and 40 in forward.windows.values()
    forward.check_against_stock()
    assert served_tokens(forward, prompt, NEW_TOKENS) == made[0, 100:].tolist() != wide[0, 100:].tolist()


@pytest.mark.parametrize("family", ["phimoe", "qwen2_moe"])
def test_check_at_start_reaches_across_a_long_window(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the window of the mask the check fails, although its texts are shorter than the window."""
    forward = make_forward(build_windowed(family))
    monkeypatch.setattr(attention, "WINDOW_ATTRIBUTE", "no_such_attribute")
    with pytest.raises(InputError, match=f"{family}, whose logits differ by"):
        forward.check_against_stock()


def test_windows_are_as_before_after_the_check() -> None:
    model = build_windowed("qwen2_moe")
    forward = Forward(model)
    before = dict(forward.windows)
    assert sorted(before.values(), key=str) == [40, None]
    with Restore() as restore:
        reduce_windows(model, restore)
        assert sorted(read_windows(model).values(), key=str) == [8, None]
    forward.check_against_stock()
    assert {name: getattr(model.get_submodule(name), WINDOW_ATTRIBUTE) for name in before} == before
    assert model.config.sliding_window == 40 and model.config._attn_implementation == attention.ATTENTION_NAME


def test_window_that_cannot_be_reduced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.serve.attention import windows

    forward = make_forward(build_windowed("phimoe"))
    monkeypatch.setattr(windows, "REDUCED_WINDOW", 40)
    with pytest.raises(InputError, match=r"phimoe, where model\.layers\.0\.self_attn has a window of 40 tokens"):
        forward.check_against_stock()


def test_mask_that_no_layer_uses_does_not_matter() -> None:
    """qwen2_moe without sliding layers makes a mask for them all the same, with a window of 0."""
    forward = make_forward(build("qwen2_moe"))
    assert isinstance(forward, Forward) and set(forward.windows.values()) == {None}
    assert forward.check_against_stock() > 0


def test_rule_of_a_mask() -> None:
    assert rule_window(causal_mask_function, CPU) is None
    for window in (1, 40, 4096, 2**14, 2**14 + 1, 2**14 + 127, 1_000_003, MAX_WINDOW - 1):
        assert rule_window(sliding_window_causal_mask_function(window), CPU) == window
    for rule in (
        chunked_causal_mask_function(64, torch.zeros(1, dtype=torch.long)),
        and_masks(causal_mask_function, lambda batch, head, query, key: key % 2 == 0),
        lambda batch, head, query, key: key < query + 3,
    ):
        with pytest.raises(ValueError, match="mask"):
            rule_window(rule, CPU)
