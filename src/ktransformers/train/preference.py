"""Preference losses with LLaMA-Factory's definitions.

Log-probabilities are sums over an answer's tokens `[pairs]`; orpo, simpo and ipo use means. orpo and simpo need no
reference. `pref_ftx` adds the mean negative log-probability of the chosen answer. Every loss has one value per pair, so
that a batch can be split into parts and weighted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ktransformers.train.settings import PreferenceSettings

REFERENCE_FREE_LOSSES = ("orpo", "simpo")


@dataclass(frozen=True)
class AnswerLogprobs:
    """Summed log-probabilities and token counts of the chosen and the rejected answers, each `[pairs]`."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    def mean(self) -> tuple[Tensor, Tensor]:
        return self.chosen / self.chosen_tokens, self.rejected / self.rejected_tokens


def pair_losses(
    policy: AnswerLogprobs, reference: tuple[Tensor, Tensor] | None, settings: PreferenceSettings
) -> Tensor:
    """`reference` holds the same sums under the base, None for losses without a reference."""
    beta, loss = settings.pref_beta, settings.pref_loss
    chosen, rejected = policy.mean()
    if loss == "orpo":
        odds = (chosen - rejected) - (torch.log1p(-chosen.exp()) - torch.log1p(-rejected.exp()))
        losses = -chosen - beta * F.logsigmoid(odds)
    elif loss == "simpo":
        losses = -F.logsigmoid(beta * (chosen - rejected) - settings.simpo_gamma)
    else:
        assert reference is not None
        base_chosen, base_rejected = reference
        if loss == "ipo":
            base_chosen, base_rejected = base_chosen / policy.chosen_tokens, base_rejected / policy.rejected_tokens
            margin = (chosen - rejected) - (base_chosen - base_rejected)
            losses = (margin - 1 / (2 * beta)) ** 2
        else:
            margin = (policy.chosen - policy.rejected) - (base_chosen - base_rejected)
            if loss == "hinge":
                losses = torch.relu(1 - beta * margin)
            else:
                flipped = settings.dpo_label_smoothing
                losses = -F.logsigmoid(beta * margin) * (1 - flipped) - F.logsigmoid(-beta * margin) * flipped
    return losses - settings.pref_ftx * chosen if settings.pref_ftx else losses


def implicit_rewards(
    policy: AnswerLogprobs, reference: tuple[Tensor, Tensor] | None, beta: float
) -> tuple[Tensor, Tensor]:
    """The implicit rewards of the chosen and rejected answers, for the log."""
    if reference is None:
        chosen, rejected = policy.mean()
        return beta * chosen.detach(), beta * rejected.detach()
    return beta * (policy.chosen - reference[0]).detach(), beta * (policy.rejected - reference[1]).detach()
