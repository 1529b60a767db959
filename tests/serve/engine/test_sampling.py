"""Sampling settings, and log-probabilities."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from ktransformers.serve.engine.sampling import Sampling, make_generator, sample_token, score_tokens


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


def test_scores_are_logprobs_of_the_model() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    (score,) = score_tokens(logits, [2], 2)
    logs = logits.log_softmax(-1)[0].tolist()
    assert score.logprob == pytest.approx(logs[2]) and [token for token, _ in score.top] == [1, 2]
