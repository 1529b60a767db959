"""How long a step takes, learned from the steps themselves: a + b * tokens + c * pairs of a query and a key.

`a` is what a step with a prompt costs whatever its size (reading weights, launching), `b` a token, `c` a pair; none is
negative. Each step with a prompt is one equation, and old ones fade. An equation is divided by its seconds, so that
relative errors are minimised: a step that something else on the machine delayed counts little. Steps of decode tokens
alone are not on this line, because few tokens use few experts: they have a running mean of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

TARGET_SECONDS = 0.2  # that prompts add to a step while others wait for their next token
DECODE_STEPS = 2.0  # or as long as that many decode steps, if these are slow
PASS_SHARE = 0.3  # or that share of `a`: steps with smaller chunks spend most of their time on it
ALONE_SECONDS = 1.0  # of a step that nobody waits for, so that the next request does not wait long
ALONE_PASSES = 5.0  # or that many times `a`
FIRST_CHUNK = 512  # tokens, before anything is learned, and at least as many where nobody waits
MOST_PAIRS = 1 << 27  # of a query and a key in such a step: a mask has some bytes for each
RIDGE = 1e-6  # added to the diagonal: small costs where equations do not tell them apart
FADE = 0.98  # of older steps, at each new one
DECODE_FADE = 0.9
UNITS = np.array([1.0, 64.0, 64.0 * 4096])  # of a, b, c: what is not known yet is assigned to b first


class StepCosts:
    def __init__(self) -> None:
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)
        self._costs, self._turn = [0.0, 0.0, 0.0], 0
        self.decode_seconds = 0.0  # of a step of decode tokens alone

    @property
    def known(self) -> bool:
        return any(self._costs)

    def learn(self, ranges: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step with these (first position, tokens) took so long."""
        listed = list(ranges)
        if all(count == 1 for _, count in listed):
            # A step that compiles, captures or reads pages takes long once: the mean rises slowly and falls at once.
            known = self.decode_seconds or seconds
            self.decode_seconds = min(seconds, DECODE_FADE * known + (1 - DECODE_FADE) * min(seconds, 4 * known))
            return
        pairs = sum(pairs_of(first, count) for first, count in listed)
        equation = np.array([1.0, sum(count for _, count in listed), pairs]) / UNITS / max(seconds, 1e-6)
        self._products = FADE * self._products + np.outer(equation, equation)
        self._sums = FADE * self._sums + equation
        self._costs = list(_solve(self._products, self._sums) / UNITS)

    def seconds_of(self, first: int, count: int) -> float:
        """Predicted for so many tokens from a position on, in a step that is made anyway."""
        return self._costs[1] * count + self._costs[2] * pairs_of(first, count)

    def tokens_in(self, first: int, seconds: float) -> int:
        """How many tokens from a position on are predicted to take so long."""
        linear, square = self._costs[1] + self._costs[2] * (first + 0.5), self._costs[2] / 2
        if seconds <= 0 or not linear + square or math.isinf(seconds):
            return 0 if seconds <= 0 else 2**31
        return int(2 * seconds / (linear + math.sqrt(linear * linear + 4 * square * seconds)))

    def prompt_seconds(self) -> float:
        """What prompts may add to a step while others wait for their next token. Every fourth step has half of it:
        from steps of one size alone `a` cannot be told from the rest, and chunks would shrink without effect."""
        self._turn += 1
        seconds = max(TARGET_SECONDS, DECODE_STEPS * self.decode_seconds, PASS_SHARE * self._costs[0])
        return seconds if self._turn % 4 else seconds / 2

    def tokens_alone(self, first: int, limit: int) -> int:
        """Tokens of a step that nobody waits for: a power of two, so that small changes of the costs do not move the
        borders of chunks, and with them the last bits of an answer."""
        tokens = self.tokens_in(first, max(ALONE_SECONDS, ALONE_PASSES * self._costs[0])) if self.known else 0
        tokens = min(tokens, MOST_PAIRS // (first + 1))
        return min(limit, 1 << (max(FIRST_CHUNK, min(tokens, limit)).bit_length() - 1))


def pairs_of(first: int, count: int) -> float:
    """Each token attends to itself and all before it."""
    return count * (first + (count + 1) / 2)


def _solve(products: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The least squares without negative costs: the most negative one is left out until none is."""
    used, solution = [0, 1, 2], np.zeros(3)
    while used:
        part = products[np.ix_(used, used)]
        values = np.linalg.solve(part + RIDGE * np.trace(part) * np.eye(len(used)), sums[used])
        if values.min() >= 0:
            solution[used] = values
            break
        del used[int(values.argmin())]
    return solution
