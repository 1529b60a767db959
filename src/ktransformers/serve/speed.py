"""Prefill and decode speed of a model, measured through the engine that serves it.

Tests have llama-bench's names: `pp512` is a prompt of 512 tokens until its first new token, `tg128` decodes 128 tokens,
`@ d1024` after a prompt of that length. Several sequences share each step, and a rate is that of all of them together.
Prompts are random and never repeat, so that no cached prefix is reused; no stop token ends a sequence early. Times are
those at which the engine delivers tokens; loading and one warm-up round are not measured.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ktransformers.ground.errors import KTError
from ktransformers.serve.sampling.sampling import Sampling
from ktransformers.serve.scheduler.engine import ServeEngine
from ktransformers.serve.scheduler.sequence import Event, GenerationRequest, Sequence


@dataclass(frozen=True)
class SpeedTest:
    prompt: int = 0  # tokens of a prefill test; 0: a decode test
    new: int = 0
    depth: int = 0  # prompt tokens before the first decoded one

    @property
    def name(self) -> str:
        word = f"pp{self.prompt}" if self.prompt else f"tg{self.new}"
        return word + (f" @ d{self.depth}" if self.depth else "")

    @property
    def max_tokens(self) -> int:
        """Tokens of one sequence, at most."""
        return max(self.prompt, 1, self.depth) + self.new + 2


@dataclass(frozen=True)
class Speed:
    test: SpeedTest
    sequences: int
    samples: tuple[float, ...]  # tokens/s of every measured round

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


def measure_speeds(
    engine: ServeEngine,
    tokenizer: Any,
    tests: list[SpeedTest],
    *,
    vocabulary: int,
    repetitions: int = 5,
    sequences: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Speed]:
    """Steps the engine in this thread: it must not run in its own."""
    rng = random.Random(0)
    for test in tests:
        samples = []
        for round_number in range(repetitions + 1):
            if progress is not None:
                progress(f"{test.name}, {'warming up' if not round_number else f'{round_number} of {repetitions}'}")
            rate = _measure_round(engine, tokenizer, test, sequences, rng, vocabulary)
            samples += [rate] if round_number else []
        yield Speed(test, sequences, tuple(samples))


def _measure_round(
    engine: ServeEngine, tokenizer: Any, test: SpeedTest, count: int, rng: random.Random, vocabulary: int
) -> float:
    """Tokens per second, all sequences together."""
    firsts: dict[int, float] = {}
    times: list[float] = []  # of every delivered token
    finished: list[Event] = []

    def make_callback(index: int) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            now = time.perf_counter()
            times.append(now)
            firsts.setdefault(index, now)
            if event.finish is not None:
                finished.append(event)

        return on_event

    sequences = []
    for index in range(count):
        prompt = tuple(rng.randrange(vocabulary) for _ in range(test.prompt or max(1, test.depth)))
        request = GenerationRequest(prompt, 1 if test.prompt else test.new + 1, Sampling(temperature=0.0))
        sequences.append(Sequence(request, tokenizer, make_callback(index)))
    started = time.perf_counter()
    engine.submit(sequences)
    while len(finished) < count:
        engine.step()
    error = next((event.error for event in finished if event.error), None)
    if error:
        raise KTError(error)
    if test.prompt:
        return count * test.prompt / (max(firsts.values()) - started)
    ready = max(firsts.values())  # from here on every sequence decodes
    return sum(delivered > ready for delivered in times) / (times[-1] - ready)
