"""How fast a model reads a prompt and writes an answer here, measured through the engine that serves it.

Tests have llama-bench's names: `pp512` is a prompt of 512 tokens until its first new token, `tg128` are 128 tokens one
after the other, `@ d1024` behind a prompt of that length. Several sequences at a time share each step, and a rate is
that of all of them together. Prompts are random and never repeat, so that no computed prefix is found again; nothing
ends an answer early. Time is taken where the engine delivers tokens; loading and one unmeasured round are left out.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import KTError
from ktransformers.serve.engine.engine import ServeEngine
from ktransformers.serve.engine.sampling import Sampling
from ktransformers.serve.engine.sequence import Event, GenerationRequest, Sequence


@dataclass(frozen=True)
class Test:
    prompt: int = 0  # tokens that are read; 0: writing is measured
    new: int = 0
    depth: int = 0  # tokens before the first written one

    @property
    def name(self) -> str:
        word = f"pp{self.prompt}" if self.prompt else f"tg{self.new}"
        return word + (f" @ d{self.depth}" if self.depth else "")

    @property
    def room(self) -> int:
        """Tokens of one sequence."""
        return max(self.prompt, 1, self.depth) + self.new + 2


@dataclass(frozen=True)
class Speed:
    test: Test
    sequences: int
    samples: tuple[float, ...]  # tokens/s of every round

    @property
    def mean(self) -> float:
        return statistics.fmean(self.samples)

    @property
    def deviation(self) -> float:
        return statistics.stdev(self.samples) if len(self.samples) > 1 else 0.0


def measure(
    engine: ServeEngine,
    tokenizer: Any,
    tests: list[Test],
    *,
    vocabulary: int,
    repetitions: int = 5,
    sequences: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Speed]:
    """The engine must not be running in its own thread."""
    draw = random.Random(0)
    for test in tests:
        samples = []
        for round_number in range(repetitions + 1):
            if progress is not None:
                progress(f"{test.name}, {'warming up' if not round_number else f'{round_number} of {repetitions}'}")
            rate = _round(engine, tokenizer, test, sequences, draw, vocabulary)
            samples += [rate] if round_number else []
        yield Speed(test, sequences, tuple(samples))


def _round(engine: ServeEngine, tokenizer: Any, test: Test, count: int, draw: random.Random, vocabulary: int) -> float:
    """Tokens per second, all sequences together."""
    firsts: dict[int, float] = {}
    times: list[float] = []  # of every token
    ended: list[Event] = []

    def listener(index: int) -> Callable[[Event], None]:
        def hear(event: Event) -> None:
            now = time.perf_counter()
            times.append(now)
            firsts.setdefault(index, now)
            if event.finish is not None:
                ended.append(event)

        return hear

    made = []
    for index in range(count):
        prompt = tuple(draw.randrange(vocabulary) for _ in range(test.prompt or max(1, test.depth)))
        ask = GenerationRequest(prompt, 1 if test.prompt else test.new + 1, Sampling(temperature=0.0))
        made.append(Sequence(ask, tokenizer, listener(index)))
    begun = time.perf_counter()
    engine.submit(made)
    while len(ended) < count:
        engine.step()
    failed = next((event.error for event in ended if event.error), None)
    if failed:
        raise KTError(failed)
    if test.prompt:
        return count * test.prompt / (max(firsts.values()) - begun)
    ready = max(firsts.values())  # from here on every sequence writes
    return sum(at > ready for at in times) / (times[-1] - ready)
