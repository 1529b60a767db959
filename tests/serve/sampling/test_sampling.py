"""Sampling settings, and log-probabilities."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ktransformers.ground.errors import KTError
from ktransformers.serve.sampling import sampling as sampling_module
from ktransformers.serve.sampling.sampling import (
    Sampling,
    draw_tokens,
    make_generator,
    sample_token,
    score_tokens,
    uniform,
)


def draws(sampling: Sampling, logits: torch.Tensor, count: int = 400, new: tuple[int, ...] = ()) -> Counter[int]:
    draw = make_generator(Sampling(seed=1), 0)
    return Counter(sample_token(logits, sampling, (0,), new, draw) for _ in range(count))


def test_sampling_settings_restrict_tokens() -> None:
    logits = torch.log(torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03]))
    assert set(draws(Sampling(temperature=0), logits)) == {0}
    assert set(draws(Sampling(top_k=2), logits)) == {0, 1}
    assert set(draws(Sampling(top_p=0.6), logits)) == {0, 1}  # the token that crosses the share belongs to it
    assert set(draws(Sampling(min_p=0.2), logits)) == {0, 1, 2}
    assert set(draws(Sampling(top_k=4, top_p=0.8), logits)) == {0, 1, 2}
    for least in (Sampling(top_p=5e-324), Sampling(temperature=5e-324), Sampling(temperature=1e-5), Sampling(min_p=1)):
        assert set(draws(least, logits)) == {0}
    shares = draws(Sampling(), logits, 4000)
    for token, share in enumerate([0.5, 0.25, 0.15, 0.07, 0.03]):
        assert shares[token] / 4000 == pytest.approx(share, abs=0.03)
    sharp = draws(Sampling(temperature=0.5), logits, 4000)
    assert sharp[0] / 4000 == pytest.approx(0.25 / 0.3408, abs=0.03)
    assert set(draws(Sampling(temperature=0, logit_bias={3: 100.0}), logits)) == {3}
    assert set(draws(Sampling(temperature=0, repetition_penalty=5.0), logits)) == {1}  # 0 is in the prompt
    assert set(draws(Sampling(temperature=0, presence_penalty=2.0), logits, new=(0, 1))) == {2}
    allowed = torch.tensor([False, False, True, False, True])
    assert sample_token(logits, Sampling(temperature=0), (0,), (), make_generator(Sampling(), 0), allowed) == 2


SETTINGS = [
    Sampling(), Sampling(temperature=0.6), Sampling(min_p=0.02), Sampling(top_k=20), Sampling(top_p=0.8),
    Sampling(top_p=0.9, min_p=0.01), Sampling(top_k=50, top_p=0.7, temperature=1.3), Sampling(top_k=400, min_p=0.05),
    Sampling(top_p=0.97, temperature=2.0),
]  # fmt: skip


def probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """By definition, with a sort of everything."""
    order = logits.argsort(descending=True)
    kept = order[: sampling.top_k] if 0 < sampling.top_k < logits.numel() else order
    weights = (logits[kept].double() / sampling.temperature).softmax(-1)
    weights[weights < sampling.min_p * weights.max()] = 0
    if sampling.top_p < 1:
        before = weights.cumsum(-1) - weights
        before[0] = -1
        weights[before >= sampling.top_p * weights.sum()] = 0
    return torch.zeros(logits.numel(), dtype=torch.float64).index_add(0, kept, weights / weights.sum())


@pytest.mark.parametrize("spread", [0.5, 3.0])  # a nucleus beyond the candidates, and within them
def test_a_draw_follows_the_distribution(spread: float) -> None:
    """Over a grid of u, every token comes as often as its probability says."""
    logits = spread * torch.randn(1500, generator=torch.Generator().manual_seed(4))
    count = 4000
    uniforms = ((torch.arange(count, dtype=torch.float64) + 0.5) / count).tolist()
    for sampling in SETTINGS:
        tokens = [draw_tokens(logits[None], [sampling], [u])[0] for u in uniforms[::40]]
        batch = draw_tokens(logits.expand(count, -1), [sampling] * count, uniforms)
        assert batch[::40] == tokens, "the other rows do not matter"
        found = torch.bincount(torch.tensor(batch), minlength=1500).double() / count
        expected = probabilities(logits, sampling)
        assert (found - expected).abs().max() < 1.01 / count + 1e-6, sampling
        assert not found[expected == 0].any(), sampling


def test_rows_of_a_batch_have_settings_of_their_own() -> None:
    logits = 2 * torch.randn(len(SETTINGS), 3000, generator=torch.Generator().manual_seed(5))
    uniforms = [uniform(make_generator(Sampling(seed=9), index)) for index in range(len(SETTINGS))]
    together = draw_tokens(logits, SETTINGS, uniforms)
    alone = [
        draw_tokens(logits[row : row + 1], [one], [u])[0]
        for row, (one, u) in enumerate(zip(SETTINGS, uniforms, strict=True))
    ]
    assert together == alone


@pytest.mark.parametrize("at_once", [32, 2])
def test_equal_logits_are_drawn_alike_in_every_batch(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits in bf16 often are equal; which of them top-k keeps must not depend on the other rows' settings."""
    monkeypatch.setattr(sampling_module, "ROWS_AT_ONCE", at_once)
    logits = 3 * torch.randn(2000, generator=torch.Generator().manual_seed(6)).bfloat16()
    sampling, uniforms = Sampling(top_k=20), ((torch.arange(100) + 0.5) / 100).tolist()
    alone = [draw_tokens([logits], [sampling], [u])[0] for u in uniforms]
    for other in (Sampling(top_k=50), Sampling(top_k=1000), Sampling(top_p=0.5), Sampling()):
        beside = [draw_tokens([logits, logits, logits], [other, sampling, other], [0.5, u, 0.5])[1] for u in uniforms]
        assert beside == alone
    order = sorted(range(2000), key=lambda token: (-float(logits[token]), token))
    assert set(alone) <= set(order[:20]) and order[0] in alone


def test_tokens_that_are_not_numbers_are_noticed() -> None:
    logits = torch.randn(300)
    logits.view(torch.int32)[7] = -(2**22)  # NaN with the sign that x86 gives to inf - inf
    assert logits[7].isnan() and draw_tokens([logits], [Sampling(top_k=5)], [0.1]) == [None]


@pytest.mark.gpu
def test_a_gpu_draws_the_same_tokens() -> None:
    logits = 2 * torch.randn(len(SETTINGS), 3000, generator=torch.Generator().manual_seed(5))
    uniforms = [0.05 + 0.1 * row for row in range(len(SETTINGS))]
    assert draw_tokens(logits.cuda(), SETTINGS, uniforms) == draw_tokens(logits, SETTINGS, uniforms)


def test_logits_without_probabilities_are_an_error() -> None:
    rows = torch.zeros(4, 10)
    rows[1, 3], rows[2] = torch.nan, -torch.inf
    for sampling in (Sampling(), Sampling(top_p=0.5), Sampling(top_k=3)):
        drawn = draw_tokens(rows, [sampling] * 4, [0.3] * 4)
        assert drawn[1] is None and drawn[2] is None and drawn[0] is not None and drawn[3] is not None
    with pytest.raises(KTError, match="no token can be drawn"):
        sample_token(rows[1], Sampling(), (0,), (), make_generator(Sampling(), 0))


def test_scores_are_logprobs_of_the_model() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    (score,) = score_tokens(logits, [2], 2)
    logs = logits.log_softmax(-1)[0].tolist()
    assert score.logprob == pytest.approx(logs[2]) and [token for token, _ in score.top] == [1, 2]
