"""Which sequences the next step computes, and which of their tokens. The scheduler reserves capacity of the cache; it
touches no model and no tensor.

A sequence waits until the cache has capacity for it, first come, first served, and then runs until it ends. Every step
has the decode token of every running sequence, and prompts share what is left of the step's time (`step_costs.py`):
while others wait for their next token a prompt gets little of a step, alone as much as is efficient. A quarter of the
time is for the prompt that has waited for the most steps, so each is computed further within as many steps as there are
prompts; the rest is for the one with the fewest tokens left, so that a short prompt is not stuck behind a long one. If
a sequence cannot grow, the one that was admitted last is preempted: it gives up its capacity, goes back to the head of
the queue and is computed again. With `deterministic` the borders of chunks depend on the position alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ktransformers.ground.out_of_memory import exhausted_memory
from ktransformers.serve.cache.snapshots import next_chunk_end
from ktransformers.serve.scheduler.sequence import Sequence
from ktransformers.serve.scheduler.step_costs import FIRST_CHUNK, StepCosts

# The share of a step's time for prompts that the prompt has which has waited for the most steps.
OLDEST_SHARE = 0.25
# Prompt tokens of a step, however slow they are.
MIN_CHUNK = 32
# Tokens that each running sequence may grow by before a preempted one is admitted again.
PREEMPTED_MARGIN = 64


@dataclass(frozen=True)
class Limits:
    max_running_requests: int = 16  # sequences in a batch
    max_queued_requests: int = 128  # sequences in the queue
    chunked_prefill_size: int = 512  # prompt tokens in a step, at most
    max_total_tokens: int = 32768  # capacity of the KV cache
    context_length: int = 4096  # prompt and new tokens of one sequence
    deterministic: bool = False  # results are independent of other requests, in 16 bits too


@dataclass(frozen=True)
class TokenRange:
    """Tokens `first` .. `end` - 1 of a sequence, which one step computes."""

    sequence: Sequence
    first: int
    end: int
    takes_snapshot: bool = False  # of the states after the last of them


class Capacity(Protocol):
    """Where what is computed of sequences is kept (`SequenceCache`)."""

    def fetched(self, sequence: Sequence) -> bool:
        """Whether everything of it that lower tiers hold has arrived."""

    def has_room(self, tokens: int) -> bool: ...

    def allocate(self, sequence: Sequence) -> bool:
        """Reserve capacity for all its tokens; False: there is none now."""

    def grow(self, sequence: Sequence) -> bool:
        """The same for a sequence that has capacity, for its tokens of now."""

    def release(self, sequence: Sequence) -> None: ...


class Scheduler:
    """`out_of_memory` ends a sequence for which no memory could be allocated; `snapshots`: copies of states are made at
    borders of chunks."""

    def __init__(
        self,
        limits: Limits,
        cache: Capacity,
        out_of_memory: Callable[[Sequence, Exception], None],
        *,
        snapshots: bool = False,
    ) -> None:
        self.limits, self.costs = limits, StepCosts()
        self._cache, self._out_of_memory, self._snapshots = cache, out_of_memory, snapshots
        self.running: list[Sequence] = []  # in order of admission
        self.waiting: deque[Sequence] = deque()
        self.preempted = 0
        self._steps = 0

    def schedule(self) -> list[TokenRange]:
        """The ranges of the next step, for which capacity is reserved."""
        self._steps += 1
        self._admit()
        decoding = [sequence for sequence in self.running if self._decodes(sequence)]
        ranges = [self._range(sequence, 1) for sequence in decoding if self._reserve(sequence)]
        prompts = [sequence for sequence in self.running if not self._decodes(sequence)]
        share = self._whole_chunks if self.limits.deterministic else self._share_time
        for sequence, count in share(prompts, [entry.first for entry in ranges]) if prompts else ():
            if self._reserve(sequence):
                sequence.scheduled = self._steps
                ranges.append(self._range(sequence, count))
        return [entry for entry in ranges if entry.sequence.slot is not None]

    def learn(self, ranges: Iterable[TokenRange], seconds: float) -> None:
        """A step with these ranges took so long."""
        self.costs.learn(((entry.first, entry.end - entry.first) for entry in ranges), seconds)

    def requeue(self, sequence: Sequence) -> None:
        """Back to the head of the queue without its capacity: it is computed again."""
        self._cache.release(sequence)
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence that has ended."""
        self._cache.release(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def _admit(self) -> None:
        deferred: list[Sequence] = []
        try:
            while self.waiting and len(self.running) < self.limits.max_running_requests:
                sequence = self.waiting.popleft()
                deferred.append(sequence)  # in the queue again unless it is admitted, also after an error
                first = sequence.shares_prompt_with
                if first is not None and not first.finished and not first.prompt_computed:
                    continue
                try:
                    if not self._cache.fetched(sequence):
                        continue
                    margin = PREEMPTED_MARGIN * len(self.running) if sequence.preempted else 0
                    if margin and not self._cache.has_room(len(sequence.tokens) + margin):
                        break
                    if not self._cache.allocate(sequence):
                        break
                    sequence.scheduled = self._steps
                    self.running.append(sequence)
                except Exception as error:
                    if exhausted_memory(error) is None:
                        raise
                    self._out_of_memory(sequence, error)
                deferred.pop()
        finally:
            self.waiting.extendleft(reversed(deferred))

    def _decodes(self, sequence: Sequence) -> bool:
        """Whether its next token is the last one that is known, or, with `deterministic`, behind its prompt."""
        return sequence.uncomputed == 1 or (self.limits.deterministic and sequence.prompt_computed)

    def _share_time(self, prompts: list[Sequence], decoding: list[int]) -> Iterator[tuple[Sequence, int]]:
        """How many tokens of which prompts join the decode tokens at these positions."""
        costs, limit = self.costs, self.limits.chunked_prefill_size
        by_length = sorted(prompts, key=lambda sequence: sequence.uncomputed)
        tokens, seconds = limit, math.inf
        if not decoding:
            tokens = costs.tokens_alone(max(sequence.computed for sequence in prompts), limit)
        elif costs.known:
            seconds = costs.prompt_seconds()
        else:
            tokens = min(limit, FIRST_CHUNK)
        counts: dict[Sequence, int] = {}
        oldest = min(prompts, key=lambda sequence: sequence.scheduled)
        for sequence, share in [(oldest, OLDEST_SHARE), *((sequence, 1.0) for sequence in by_length)]:
            first = sequence.computed + counts.get(sequence, 0)
            left = len(sequence.tokens) - first
            least = 0 if counts else min(MIN_CHUNK, tokens)
            count = min(left, max(least, min(math.ceil(share * tokens), costs.tokens_in(first, share * seconds))))
            if count > 0:
                counts[sequence] = counts.get(sequence, 0) + count
                tokens, seconds = tokens - count, seconds - costs.seconds_of(first, count)
        yield from counts.items()

    def _whole_chunks(self, prompts: list[Sequence], decoding: list[int]) -> Iterator[tuple[Sequence, int]]:
        """The same by position alone: prompts in pieces of `chunked_prefill_size`, in turn."""
        tokens = limit = self.limits.chunked_prefill_size
        for sequence in sorted(prompts, key=lambda sequence: sequence.scheduled):
            count = min(limit, len(sequence.request.prompt) - sequence.computed)
            if count <= tokens:
                tokens -= count
                yield sequence, count

    def _range(self, sequence: Sequence, count: int) -> TokenRange:
        """The next `count` tokens, or fewer, up to where a copy of the states is made."""
        first, snapshot = sequence.computed, False
        end = first + count
        if self._snapshots:
            prompt = len(sequence.request.prompt)
            shared = end >= prompt > first and any(one.shares_prompt_with is sequence for one in self.waiting)
            end, snapshot = next_chunk_end(first, end, prompt, shared, sequence.request.generation_prompt)
        return TokenRange(sequence, first, end, snapshot)

    def _reserve(self, sequence: Sequence) -> bool:
        """Capacity for the sequence's tokens, for which the youngest sequences are preempted; False: it was preempted
        itself, or memory ran out, which ends it."""
        try:
            while sequence.slot is not None and not self._cache.grow(sequence):
                self.running[-1].preempted = True
                self.requeue(self.running[-1])
                self.preempted += 1
        except Exception as error:
            if exhausted_memory(error) is None:
                raise
            self._out_of_memory(sequence, error)
        return sequence.slot is not None
