"""Attention within chunks of positions, and queries scaled by their position (Llama 4), in batches: the stock model's
logits, whatever row a token is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ktransformers.ground.errors import InputError
from ktransformers.serve.attention import query_scales
from ktransformers.serve.attention.attention import _cut_at_chunks
from ktransformers.serve.attention.step import Span
from ktransformers.serve.attention.windows import rule_chunk, rule_window
from ktransformers.serve.cache.kv_cache import KVSlot
from ktransformers.serve.scheduler.forward import Chunk, Forward, make_forward
from ktransformers.serve.scheduler.head import collect_rows
from tests.support.tiny_models import build

PROMPTS = [[(7 * at + 3) % 96 for at in range(60)], [(11 * at + 5) % 96 for at in range(43)]]
RELEASED = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
CPU = torch.device("cpu")


def stock_logits(model: Any) -> list[Tensor]:
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in PROMPTS]


def computed_in_chunks(forward: Any) -> list[Tensor]:
    """Chunks of a prompt across several chunks of positions, beside new tokens of the other sequence."""
    slots = KVSlot.together(2, 64)
    logits: list[list[Tensor]] = [[], []]
    steps = [((1, 0, 6), (0, 0, 29)), ((0, 29, 30), (1, 6, 38)), ((0, 30, 33), (1, 38, 39))]
    steps += [((1, at, at + 1), (0, at - 6, at - 5)) for at in (39, 40, 41, 42)]
    steps += [((0, 37, 60),)]
    for step in steps:
        forward.run([Chunk(slots[i], PROMPTS[i][a:b], a, None, collect_rows(logits[i])) for i, a, b in step])
    return [torch.cat(rows).float() for rows in logits]


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_types": ["full_attention", "full_attention"]}, {"no_rope_layers": [1, 1]}],
    ids=["released", "scaled", "chunked"],
)
def test_batches_equal_stock(changes: dict[str, Any]) -> None:
    stock = stock_logits(build("llama4_text", **changes))
    forward = make_forward(build("llama4_text", **changes))
    assert isinstance(forward, Forward)
    forward.check_against_stock()
    for measured, expected in zip(computed_in_chunks(forward), stock, strict=True):
        assert float((measured.log_softmax(-1) - expected.log_softmax(-1)).abs().max()) < 1e-4


@pytest.mark.parametrize("changes", [{"attention_chunk_size": 64}, {"floor_scale": 64}])
def test_both_matter(changes: dict[str, Any]) -> None:
    one, other = stock_logits(build("llama4_text")), stock_logits(build("llama4_text", **changes))
    assert float((one[0] - other[0]).norm() / one[0].norm()) > 0.01


def test_check_sees_scales_and_chunks_of_thousands_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama4_text", **RELEASED)
    forward = make_forward(model)
    assert isinstance(forward, Forward)
    forward.check_against_stock()
    assert model.config.attention_chunk_size == 8192  # only for the check
    monkeypatch.setattr("ktransformers.serve.attention.attention.scale_queries", lambda module, query, positions: query)
    with pytest.raises(InputError, match="whose logits differ"):
        forward.check_against_stock()
    monkeypatch.undo()
    monkeypatch.setattr("ktransformers.serve.attention.attention._cut_at_chunks", lambda span, chunk: [span])
    with pytest.raises(InputError, match="whose logits differ"):
        forward.check_against_stock()


def test_stock_scaling_is_on_again_after_a_call() -> None:
    model: Any = build("llama4_text")
    forward = make_forward(model)
    forward.run([Chunk(KVSlot.alone(64), PROMPTS[0][:5], 0, None)])
    scaled = [module for module in model.modules() if hasattr(module, query_scales.SCALED_ATTRIBUTE)]
    assert len(scaled) == 1 and scaled[0].attn_temperature_tuning is True


def test_rules() -> None:
    def chunked(size: int) -> Any:
        return lambda batch, head, query, key: (key <= query) & (key // size == query // size)

    assert [rule_chunk(chunked(size), CPU) for size in (2, 7, 8192)] == [2, 7, 8192]
    with pytest.raises(ValueError, match="does not slide"):
        rule_window(chunked(8192), CPU)
    with pytest.raises(ValueError, match="neither"):
        rule_chunk(lambda batch, head, query, key: (key <= query) & (query - key < 50), CPU)
    with pytest.raises(ValueError, match="neither"):
        rule_chunk(lambda batch, head, query, key: (key <= query) & ((key + 3) // 8 == (query + 3) // 8), CPU)


def test_spans_are_cut_at_chunks() -> None:
    pieces = list(_cut_at_chunks(Span(KVSlot.alone(0), 3, 23, 6), 8))
    assert [(piece.first, piece.last, piece.position) for piece in pieces] == [
        (3, 5, 6),
        (5, 13, 8),
        (13, 21, 16),
        (21, 23, 24),
    ]
