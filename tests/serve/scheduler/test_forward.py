"""Forward passes in chunks against the stock model, greedy tokens, and model families that are refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.adapters import logit_error
from ktransformers.ground.errors import InputError
from ktransformers.nn import load_model
from ktransformers.serve.attention.attention import ATTENTION_NAME
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.sampling.sampling import Sampling, make_generator, sample_token
from ktransformers.serve.scheduler import forward as forward_module
from ktransformers.serve.scheduler.forward import Chunk, Forward, SequentialForward, argmax_of_rows, make_forward
from ktransformers.serve.scheduler.head import collect_rows
from tests.support.tiny_models import build, rounding_otherwise, save, tie_experts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_argmax_of_rows_matches_single_rows(dtype: torch.dtype) -> None:
    """As row by row in float32, including the first of equal maxima."""
    torch.manual_seed(0)
    logits = torch.randn(5, 20011).to(dtype)
    logits[1] = logits[1].round()
    logits[2] = -torch.inf
    logits[3, 17:] = -0.0
    logits[3, :17] = -1
    logits[3, 40] = 0.0
    logits[4, [50, 19000]] = torch.inf
    plain, draw = Sampling(temperature=0), make_generator(Sampling(), 0)
    one_by_one = [sample_token(row.float(), plain, (0,), (), draw) for row in logits]
    assert one_by_one[2:] == [0, 17, 50]
    assert argmax_of_rows(logits, [0, 1, 2, 3, 4]) == one_by_one
    assert argmax_of_rows(logits, [3, 1]) == [one_by_one[3], one_by_one[1]] and argmax_of_rows(logits, []) == []


def test_greedy_chunks_return_their_token() -> None:
    model: Any = build("qwen3_moe")
    forward = Forward(model)
    read: list[torch.Tensor] = []
    requested = [([5, 6, 7], True, True), ([8, 9], False, False), ([1], True, False), ([2, 3], False, True)]
    pieces = [
        Chunk(slot, tokens, 0, None, collect_rows(read) if not at else None, greedy or last, greedy)
        for at, (slot, (tokens, last, greedy)) in enumerate(
            zip(KVSlot.together(len(requested), 16), requested, strict=True)
        )
    ]
    first, middle, drawn, last = forward.run(pieces)
    assert middle is None and first is not None and drawn is not None and last is not None
    assert read[0].shape[0] == 3 and torch.allclose(read[0][-1], first.logits, atol=1e-5)
    assert drawn.token is None and drawn.logits.shape == last.logits.shape == read[0].shape[1:]
    for actual in (first, last):
        assert actual.token == int(actual.logits.float().argmax())


def test_family_that_cannot_be_chunked_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"unlimited_ocr.*differ by"):
        make_forward(build("unlimited_ocr")).check_against_stock()


def tied_forward(way: type[Forward] | type[SequentialForward]) -> Any:
    model: Any = build("qwen3_moe")
    tie_experts(model, 1e-8)
    return way(model)


@pytest.mark.parametrize("way", [Forward, SequentialForward])
def test_tied_experts_are_served(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks round otherwise than a whole prompt, so they choose otherwise between experts that tie."""
    forward = tied_forward(way)
    with rounding_otherwise(forward.model, 1e-6):
        monkeypatch.setattr(logit_error, "compare_choices", lambda measured, expected: None)
        with pytest.raises(InputError, match="differ by 0"):
            forward.check_against_stock()
        monkeypatch.undo()
        assert forward.check_against_stock() > 0


def scale_attention(model: Any) -> None:
    """By 1.01 in the chunks."""
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: (output[0] * 1.01, *output[1:]) if is_served(model) else output
    )


def swap_experts(model: Any) -> None:
    """Experts compute other tokens than the router chose, in the chunks."""
    experts = model.model.layers[1].mlp.experts
    experts.register_forward_pre_hook(
        lambda module, args: (args[0], (args[1] + 2) % 6, *args[2:]) if is_served(model) else args
    )


def change_router(model: Any) -> None:
    """Other scores in the chunks."""
    model.model.layers[1].mlp.gate.register_forward_pre_hook(
        lambda module, args: (args[0].flip(-1),) if is_served(model) else args
    )


def is_served(model: Any) -> bool:
    return bool(model.config._attn_implementation == ATTENTION_NAME)


@pytest.mark.parametrize("damage", [scale_attention, swap_experts, change_router])
def test_wrong_chunks_are_refused_beside_tied_experts(damage: Any) -> None:
    forward = tied_forward(Forward)
    damage(forward.model)
    with rounding_otherwise(forward.model, 1e-6), pytest.raises(InputError, match="differ by"):
        forward.check_against_stock()


@pytest.fixture
def int8_forward(tmp_path: Path) -> Forward:
    """Two experts for every token: 24 rows of an expert in a whole prompt, few in a chunk."""
    path = save(build("qwen3_moe", num_experts=2, num_experts_per_tok=2), tmp_path / "model")
    model = load_model(path, dtype=torch.float32, isa="avx2", formats="int8")
    return Forward(model)


def test_quantised_experts_round_otherwise_in_chunks_and_are_served(
    int8_forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward_module, "round_weights", contextlib.nullcontext)
    with pytest.raises(InputError, match="differ by 0"):
        int8_forward.check_against_stock()
    monkeypatch.undo()
    assert int8_forward.check_against_stock() > 0


@pytest.mark.parametrize("damage", [scale_attention, change_router])
def test_wrong_chunks_are_refused_beside_quantised_experts(damage: Any, int8_forward: Forward) -> None:
    damage(int8_forward.model)
    with pytest.raises(InputError, match="differ by"):
        int8_forward.check_against_stock()


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral", "glm4_moe"])
def test_families_in_chunks_match_stock(family: str) -> None:
    """Sinks and windows, keys and values of different sizes, plain attention: `check_against_stock` compares."""
    assert Forward(build(family)).check_against_stock() > 0


def test_sliding_window_holds_across_chunks() -> None:
    """gpt_oss with a window of 8 and 40 tokens in uneven chunks against the stock model."""
    model: Any = build("gpt_oss")
    tokens = [(11 * at + 5) % 90 for at in range(40)]
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    forward, slot = Forward(model), KVSlot.alone(64)
    actual: list[torch.Tensor] = []
    for first, last in ((0, 13), (13, 14), (14, 33), (33, 40)):
        forward.run([Chunk(slot, tokens[first:last], first, None, collect_rows(actual))])
    assert torch.allclose(torch.cat(actual), expected, atol=1e-4)
