"""The next tokens of the sequences of a step, from its logits. Rows that nothing changes are drawn together. A row that
penalties, biases or a grammar change is drawn by itself."""

from __future__ import annotations

from collections.abc import Sequence as Listed

from torch import Tensor

from ktransformers.ground.out_of_memory import exhausted_memory
from ktransformers.serve.sampling.sampling import Score, draw_tokens, sample_token, score_tokens, uniform
from ktransformers.serve.scheduler.forward import ForwardResult
from ktransformers.serve.scheduler.head import LogitsReader
from ktransformers.serve.scheduler.sequence import Sequence


def draw_together(sequences: Listed[Sequence], results: Listed[ForwardResult | None]) -> list[ForwardResult | None]:
    """The results with the tokens of all sequences whose logits nothing changes. A row that has no probabilities is
    left to its sequence, which ends with an error."""
    drawn = [
        (index, sequence, result.logits)
        for index, (sequence, result) in enumerate(zip(sequences, results, strict=True))
        if result is not None and result.token is None and result.logits is not None and sequence.is_drawn
    ]
    filled = list(results)
    if not drawn:
        return filled
    settings = [sequence.request.sampling for _, sequence, _ in drawn]
    uniforms = [uniform(sequence.rng) for _, sequence, _ in drawn]
    try:
        tokens = draw_tokens([logits for _, _, logits in drawn], settings, uniforms)
    except Exception as error:
        if exhausted_memory(error) is None:
            raise
        tokens = draw_tokens([logits.cpu() for _, _, logits in drawn], settings, uniforms)
    for (index, _, logits), token in zip(drawn, tokens, strict=True):
        filled[index] = ForwardResult(logits, token)
    return filled


def next_token(sequence: Sequence, result: ForwardResult) -> tuple[int, tuple[Score, ...]]:
    """The token that follows, and its score where scores are requested."""
    logits, token, request = result.logits, result.token, sequence.request
    if token is None:
        assert logits is not None, "logits of a sequence that is not greedy"
        allowed = None if sequence.grammar is None else sequence.grammar.allowed(logits.numel())
        new_tokens = sequence.new_tokens
        token = sample_token(logits.float(), request.sampling, request.prompt, new_tokens, sequence.rng, allowed)
    if request.logprobs is None:
        return token, ()
    assert logits is not None, "logits of a sequence with scores"
    return token, tuple(score_tokens(logits.float()[None], [token], request.logprobs))


def prompt_scorer(sequence: Sequence, position: int) -> LogitsReader:
    """Scores the prompt from the logits of a chunk that begins at `position`: row i predicts token position + i + 1."""

    def read(first: int, logits: Tensor) -> None:
        start = position + first + 1
        del sequence.prompt_scores[start:]  # from before a preemption, computed again
        following = sequence.request.prompt[start : start + logits.shape[0]]
        if following:
            top = sequence.request.logprobs or 0
            sequence.prompt_scores += score_tokens(logits[: len(following)].float(), following, top)

    return read
