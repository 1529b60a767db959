"""The engine: continuous batching in one thread. `step` is the whole cycle: receive, admit, build a batch, compute it,
sample, deliver.

Every step computes one chunk of each running sequence in one forward pass: the new token of sequences that decode, and
for prompts that are not computed yet up to `chunked_prefill_size` tokens in order of arrival. A sequence is admitted
when the KV cache has capacity for its prompt, and, where lower tiers of the cache hold its beginning, when that is in
host memory (`cache_tiers.py`). When a decoding sequence cannot grow, the youngest one is preempted: it
gives up its slot, returns to the head of the queue and is recomputed later, so its stream pauses. The queue is bounded:
requests that arrive while it is full are refused at once. When memory runs out in a step, the sequence with the most
tokens in it ends, everything that is only cached is evicted, and the others go on.

In 16 bits a product of other shape rounds otherwise, so a near-tie between two tokens may fall the other way beside
other requests. With `deterministic` every chunk is a forward pass of its own, its borders depend on the position in the
sequence alone, and no cached prefix is reused: the same request then has the same bits whatever else is served.

`submit`, `cancel` and `stop` may be called from any thread; events reach callers through each sequence's `deliver`,
called in the engine's thread.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ktransformers.ground.errors import InputError, KTError, is_panic
from ktransformers.ground.log import logger
from ktransformers.ground.out_of_memory import HOST, describe_shortage, exhausted_memory
from ktransformers.serve.cache.kv_cache import KVCache, Owner
from ktransformers.serve.cache.snapshots import next_chunk_end
from ktransformers.serve.cache.tier_counts import Rate
from ktransformers.serve.sampling.sampling import Score, draw_tokens, sample_token, score_tokens, uniform
from ktransformers.serve.scheduler.forward import Chunk, Forward, ForwardResult, SequentialForward
from ktransformers.serve.scheduler.head import LogitsReader
from ktransformers.serve.scheduler.sequence import Event, Sequence

if TYPE_CHECKING:
    from ktransformers.serve.cache.cache_tiers import CacheTiers

LOG = logger(__name__)
DEADLINE_POLL_SECONDS = 0.05  # between checks of deadlines while nothing can run
FETCH_POLL_SECONDS = 0.001  # while a sequence waits for blocks from disk and nothing else runs
MIN_PREFILL_TOKENS = 64  # of a prompt whose rate is measured


class QueueFull(KTError):
    """The queue holds as many requests as it may."""


class Unavailable(KTError):
    """Something that every step needs is gone for now, such as a host with experts."""


class Stopped(KTError):
    """The engine accepts no more requests."""


@dataclass(frozen=True)
class Limits:
    max_running_requests: int = 16  # sequences in a batch
    max_queued_requests: int = 128  # sequences in the queue
    chunked_prefill_size: int = 512  # prompt tokens in a step
    max_total_tokens: int = 32768  # capacity of the KV cache
    context_length: int = 4096  # prompt and new tokens of one sequence
    deterministic: bool = False  # results are independent of other requests, in 16 bits too


@dataclass
class Counts:
    """Counters since the start, read by /metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    scored_tokens: int = 0  # of prompts whose log-probabilities were requested
    preempted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    busy_seconds: float = 0.0


class ServeEngine:
    def __init__(self, forward: Forward | SequentialForward, limits: Limits) -> None:
        self.forward, self.limits, self.counts = forward, limits, Counts()
        spare_states = limits.max_running_requests
        self.kv_cache = KVCache(
            limits.max_total_tokens, reuse=not limits.deterministic, spare_states=spare_states, fp8=forward.fp8_cache
        )
        self.memory_advice = ""  # what to change when memory runs out
        self.raise_launched: Callable[[], None] = lambda: None  # errors of experts that a step did not wait for
        self.unavailable: Callable[[], str] = lambda: ""  # why no step can run now; empty: steps can run
        self.tiers: CacheTiers | None = None
        self.prefill_rate = Rate()  # prompt tokens/s of one sequence, from its admission to its first token
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._submitted: deque[Sequence] = deque()
        self._unloaded: set[Owner] = set()
        self._wakeup = threading.Condition()
        self._accepting, self._alive = True, True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="kt-engine", daemon=True)
        self._thread.start()

    def attach_tiers(self, tiers: CacheTiers) -> None:
        """Use tiers of the KV cache below the slots."""
        self.tiers = self.kv_cache.lower = tiers

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue all of them or none; raises QueueFull, Stopped, Unavailable or InputError."""
        submitted = list(sequences)
        for sequence in submitted:
            limit = min(self.limits.context_length, self.limits.max_total_tokens)
            if len(sequence.tokens) + sequence.request.max_tokens > limit:
                given = f"{len(sequence.tokens)} prompt tokens and {sequence.request.max_tokens} new ones"
                raise InputError("max_tokens", given, f"together at most {limit}", "shorten the prompt or ask for less")
        if reason := self.unavailable():
            raise Unavailable(reason)
        with self._wakeup:
            if not self._accepting:
                raise Stopped("the server is shutting down")
            if len(self.waiting) + len(self._submitted) + len(submitted) > self.limits.max_queued_requests:
                raise QueueFull(f"{self.limits.max_queued_requests} requests are queued already")
            self._submitted.extend(submitted)
            self._wakeup.notify()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """End sequences whose client has disconnected."""
        for sequence in sequences:
            sequence.cancelled = True
        with self._wakeup:
            self._wakeup.notify()

    def drop_adapter(self, owner: Owner) -> None:
        """Evict the slots and graphs of an adapter that was unloaded."""
        with self._wakeup:
            self._unloaded.add(owner)
            self._wakeup.notify()

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Accept nothing more, give running sequences `grace_seconds` to end, then end the thread."""
        with self._wakeup:
            self._accepting = False
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and self.busy:
            time.sleep(0.02)
        with self._wakeup:
            self._alive = False
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self._submitted)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def replayed(self) -> int:
        """Steps that replayed a CUDA graph."""
        return 0 if self.forward.graphs is None else self.forward.graphs.replayed

    def _loop(self) -> None:
        while True:
            with self._wakeup:
                if not self._alive:
                    break
                saving = self.tiers is not None and self.tiers.pending
                if not self.busy and not self._unloaded and not saving:
                    self._wakeup.wait()
                    continue
            try:
                if not self.step():
                    with self._wakeup:
                        fetching = any(sequence.fetch is not None for sequence in self.waiting)
                        self._wakeup.wait(FETCH_POLL_SECONDS if fetching else DEADLINE_POLL_SECONDS)
            except BaseException as error:  # one failed batch must not end the server
                if not (isinstance(error, Exception) or is_panic(error)):
                    raise
                if isinstance(error, Unavailable):
                    self._fail_all(str(error), "unavailable")
                    continue
                LOG.exception("a step failed; it ends %s", ", ".join(sorted(self._request_ids())) or "no request")
                self._fail_all(f"{type(error).__name__}: {error}")
        self._end("the server was stopped")

    def _end(self, error: str) -> None:
        """End every sequence, and leave what is cached in the lower tiers as far as there is time."""
        try:
            self._close_all(error)  # first: sequences that wait hold rows of the host tier
            if self.tiers is not None:
                self.tiers.flush()
        except Exception:
            LOG.exception("the KV cache was not saved")
        finally:
            self._fail_all(error)
            if self.tiers is not None:
                self.tiers.close()

    def step(self) -> bool:
        """Compute one batch; False: there was nothing to compute."""
        self._receive()
        if self.tiers is not None:
            self.tiers.advance()
        self._admit()
        started = time.monotonic()
        batch = self._build_batch()
        if not batch:
            self._drop_ahead()
            return False
        results = self._run(batch)
        if results is None:
            return True
        results = self._draw(batch, results)
        for (sequence, chunk), result in zip(batch, results, strict=True):
            try:
                self._process_result(sequence, chunk, result)
            except BaseException as error:  # of this sequence only: its grammar, its tokens
                if not (isinstance(error, Exception) or is_panic(error)):
                    raise
                LOG.exception("a sequence of request %s failed", sequence.request.request_id)
                self._close(sequence, "error", error=f"{type(error).__name__}: {error}")
        if not self.running:
            self._drop_ahead()
        self.counts.steps += 1
        self.counts.busy_seconds += time.monotonic() - started
        return True

    def _run(self, batch: list[tuple[Sequence, Chunk]]) -> list[ForwardResult | None] | None:
        """The forward pass; None: memory ran out, and one sequence was ended for it."""
        try:
            results = self._forward([chunk for _, chunk in batch])
            self.raise_launched()
            for _, chunk in batch:
                if chunk.takes_snapshot:
                    self.kv_cache.take_snapshot(chunk.slot)
            return results
        except Exception as error:
            if exhausted_memory(error) is None:
                raise
            self._drop_ahead()
            largest, chunk = max(reversed(batch), key=lambda entry: len(entry[1].tokens))
            self._end_for_memory(largest, len(chunk.tokens), error)
        for sequence, chunk in batch:
            if chunk.slot.states or chunk.slot.hf_cache is not None:  # which may have advanced beyond its tokens
                self.kv_cache.discard(chunk.slot)
                if sequence.slot is chunk.slot:
                    self._requeue(sequence)
            else:  # no result of the step is used: its tokens are computed again
                chunk.slot.truncate(chunk.position)
        return None

    def _forward(self, chunks: list[Chunk]) -> list[ForwardResult | None]:
        if not self.limits.deterministic:
            return self.forward.run(chunks)
        results = []
        for chunk in chunks:
            (result,) = self.forward.run([chunk])  # its logits are valid until the next call
            logits = None if result is None or result.logits is None else result.logits.clone()
            results.append(None if result is None else ForwardResult(logits, result.token))
        return results

    def _end_for_memory(self, sequence: Sequence, tokens: int, error: Exception) -> None:
        shortage = describe_shortage(error, exhausted_memory(error) or HOST)
        line = f"out of memory: {shortage}, in a step with {tokens} tokens of this request"
        line += f"; in this order: {self.memory_advice}" if self.memory_advice else ""
        LOG.error("request %s ended: %s", sequence.request.request_id, line)
        if sequence.slot is not None:
            self.kv_cache.discard(sequence.slot)
            sequence.slot = None
        self._close(sequence, "out_of_memory", error=line)
        self.kv_cache.evict_idle()
        traceback.clear_frames(error.__traceback__)  # which hold tensors of the failed step
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _drop_ahead(self) -> None:
        """Wait for a step that was launched before it was asked for, and forget it and the slots that it refers to."""
        if self.forward.graphs is not None:
            self.forward.graphs.drop_ahead()

    def _requeue(self, sequence: Sequence) -> None:
        """Back to the head of the queue, without its slot; it is computed again."""
        self.running.remove(sequence)
        sequence.slot = None
        self.waiting.appendleft(sequence)

    def _request_ids(self) -> set[str]:
        return {sequence.request.request_id for sequence in [*self.running, *self.waiting]} - {""}

    def _receive(self) -> None:
        """Queue what was submitted, end cancelled and timed-out sequences, drop what unloaded adapters left."""
        with self._wakeup:
            self.waiting.extend(self._submitted)
            self._submitted.clear()
            unloaded, self._unloaded = self._unloaded, set()
        now = time.monotonic()
        for sequence in [*self.running, *self.waiting]:
            if sequence.cancelled:
                self._close(sequence, "cancelled")
            elif sequence.request.deadline is not None and now > sequence.request.deadline:
                self._close(sequence, "timeout", sequence.text.end())
        self.waiting = deque(sequence for sequence in self.waiting if not sequence.finished)
        pending = [*self.running, *self.waiting]
        for owner in unloaded:
            self.kv_cache.evict_owner(owner)
            if any(sequence.owner == owner for sequence in pending):
                with self._wakeup:
                    self._unloaded.add(owner)  # again at the next step, until its last request has ended
            elif self.forward.graphs is not None:
                self.forward.graphs.forget(owner)

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
                    if not self._fetched(sequence):
                        continue
                    if not self._allocate(sequence):
                        break
                    self.running.append(sequence)
                except Exception as error:
                    if exhausted_memory(error) is None:
                        raise
                    self._end_for_memory(sequence, len(sequence.tokens), error)
                deferred.pop()
        finally:
            self.waiting.extendleft(reversed(deferred))

    def _fetched(self, sequence: Sequence) -> bool:
        """Fetch what lower tiers hold of the sequence; False: some of it is still being read. They hold no scores."""
        if self.tiers is None or sequence.request.prompt_logprobs:
            return True
        in_slots = self.kv_cache.cached_tokens(*_key(sequence))
        if sequence.fetch is not None and in_slots < sequence.fetch.start:  # the slot was evicted meanwhile
            self.tiers.release(sequence.fetch)
            sequence.fetch = None
        if sequence.fetch is None:
            root = self.tiers.root_of(sequence.request.adapter)
            sequence.fetch = self.tiers.fetch(root, sequence.tokens, in_slots, self.prefill_rate)
        if not sequence.fetch.ready and time.monotonic() > sequence.fetch.deadline:
            self.tiers.cut(sequence.fetch)
        return sequence.fetch.ready

    def _allocate(self, sequence: Sequence) -> bool:
        """Give the sequence a slot with everything of it that is cached; False: no capacity now."""
        top_logprobs = (sequence.request.logprobs or 0) if sequence.request.prompt_logprobs else None
        self._drop_ahead()  # it may write to the slot of a sequence that has ended, and does not know this sequence
        slot = sequence.slot = self.kv_cache.allocate(*_key(sequence), top_logprobs)
        if slot is None:
            return False
        slot.snapshots.border = sequence.request.border
        if self.tiers is not None:
            slot.root = self.tiers.root_of(sequence.request.adapter)
            if sequence.fetch is not None:
                self.kv_cache.reused_tokens += self.tiers.restore(sequence.fetch, slot, sequence.tokens)
                sequence.fetch = None
        if sequence.request.prompt_logprobs and slot.length:
            sequence.prompt_scores = [score.with_top(sequence.request.logprobs or 0) for score in slot.scores]
        sequence.cached = min(slot.length, len(sequence.request.prompt))
        sequence.admitted = time.monotonic()
        return True

    def _build_batch(self) -> list[tuple[Sequence, Chunk]]:
        batch: list[tuple[Sequence, Chunk]] = []
        prompt_budget = self.limits.chunked_prefill_size
        for sequence in list(self.running):
            if sequence.slot is None:  # preempted for a sequence before it
                continue
            uncomputed = len(sequence.tokens) - sequence.computed
            if self.limits.deterministic:
                token_count = self._deterministic_count(sequence)
                token_count = token_count if token_count <= max(1, prompt_budget) else 0
            else:
                token_count = uncomputed if uncomputed == 1 else min(uncomputed, prompt_budget)
            if not token_count or not self._try_reserve(sequence):
                continue
            position = sequence.computed
            end, snapshot = self._cut_for_snapshot(sequence, position + token_count)
            token_count = end - position
            prompt_budget -= token_count if uncomputed > 1 else 0
            scores_prompt = sequence.request.prompt_logprobs and not sequence.prompt_scores_sent
            reader = _prompt_scorer(sequence, position) if scores_prompt else None
            tokens, last, greedy = sequence.tokens[position:end], token_count == uncomputed, sequence.greedy
            adapter, greedy = sequence.request.adapter, last and greedy
            continues = greedy and self._continues(sequence, end)
            chunk = Chunk(sequence.slot, tokens, position, adapter, reader, last, greedy, snapshot, continues)
            batch.append((sequence, chunk))
        return [(sequence, chunk) for sequence, chunk in batch if sequence.slot is chunk.slot]

    def _continues(self, sequence: Sequence, end: int) -> bool:
        """Whether a greedy sequence computed up to `end` needs nothing but the token that follows, and, unless that
        ends it, another token, for which its slot has capacity."""
        if self.limits.deterministic or sequence.request.logprobs is not None or sequence.slot is None:
            return False
        return sequence.new_count + 1 < sequence.request.max_tokens and end < sequence.slot.capacity

    def _cut_for_snapshot(self, sequence: Sequence, end: int) -> tuple[int, bool]:
        """Where a chunk up to `end` ends, and whether a copy of the states is made there."""
        if not self.forward.states or self.limits.deterministic:
            return end, False
        prompt = len(sequence.request.prompt)
        shared = end >= prompt > sequence.computed and any(one.shares_prompt_with is sequence for one in self.waiting)
        return next_chunk_end(sequence.computed, end, prompt, shared, sequence.request.generation_prompt)

    def _deterministic_count(self, sequence: Sequence) -> int:
        """Tokens of the next chunk by position alone: the prompt in pieces of `chunked_prefill_size`, then one at a
        time, also where a preempted sequence is computed again."""
        left = len(sequence.request.prompt) - sequence.computed
        return min(left, self.limits.chunked_prefill_size) if left > 0 else 1

    def _try_reserve(self, sequence: Sequence) -> bool:
        """`_reserve`; False also if memory ran out, which ends the sequence."""
        try:
            return self._reserve(sequence)
        except Exception as error:
            if exhausted_memory(error) is None:
                raise
            self._end_for_memory(sequence, len(sequence.tokens), error)
            return False

    def _reserve(self, sequence: Sequence) -> bool:
        """Grow the slot to the sequence's tokens, preempting the youngest sequences; False: it was preempted itself."""
        while sequence.slot is not None and not self.kv_cache.grow(sequence.slot, len(sequence.tokens)):
            youngest = self.running[-1]
            assert youngest.slot is not None
            self.kv_cache.release(youngest.slot)
            self._requeue(youngest)
            self.counts.preempted += 1
        return sequence.slot is not None

    def _draw(
        self, batch: list[tuple[Sequence, Chunk]], results: list[ForwardResult | None]
    ) -> list[ForwardResult | None]:
        """The results with tokens of the sequences that are sampled from their logits as these are, drawn together. A
        row that has no probabilities is left to its sequence, which ends with an error."""
        drawn = [
            (index, sequence, result.logits)
            for index, ((sequence, _), result) in enumerate(zip(batch, results, strict=True))
            if result is not None and result.token is None and result.logits is not None and sequence.is_drawn
        ]
        if not drawn:
            return results
        settings = [sequence.request.sampling for _, sequence, _ in drawn]
        uniforms = [uniform(sequence.rng) for _, sequence, _ in drawn]
        try:
            tokens = draw_tokens([logits for _, _, logits in drawn], settings, uniforms)
        except Exception as error:
            if exhausted_memory(error) is None:
                raise
            tokens = draw_tokens([logits.cpu() for _, _, logits in drawn], settings, uniforms)
        filled = list(results)
        for (index, _, logits), token in zip(drawn, tokens, strict=True):
            filled[index] = ForwardResult(logits, token)
        return filled

    def _process_result(self, sequence: Sequence, chunk: Chunk, result: ForwardResult | None) -> None:
        prompt = sequence.request.prompt
        self.counts.prompt_tokens += max(0, min(chunk.position + len(chunk.tokens), len(prompt)) - chunk.position)
        if chunk.logits_reader is not None:
            self.counts.scored_tokens += len(chunk.tokens)
            if chunk.position + len(chunk.tokens) >= len(prompt):
                self._deliver_prompt_scores(sequence, chunk)
        if not chunk.wants_logits or result is None:
            return
        if sequence.request.max_tokens == 0:
            self._close(sequence, "length")
            return
        logits, token = result.logits, result.token
        if token is None:
            assert logits is not None, "logits of a sequence that is not greedy"
            allowed = None if sequence.grammar is None else sequence.grammar.allowed(logits.numel())
            sampling, new_tokens = sequence.request.sampling, sequence.new_tokens
            token = sample_token(logits.float(), sampling, prompt, new_tokens, sequence.rng, allowed)
        scores: tuple[Score, ...] = ()
        if sequence.request.logprobs is not None:
            assert logits is not None, "logits of a sequence with scores"
            scores = tuple(score_tokens(logits.float()[None], [token], sequence.request.logprobs))
        sequence.tokens.append(token)
        self.counts.new_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
            self.counts.first_token_seconds += sequence.first_token - sequence.arrived
            self.counts.first_tokens += 1
            if len(prompt) - sequence.cached >= MIN_PREFILL_TOKENS:
                self.prefill_rate.add(len(prompt) - sequence.cached, sequence.first_token - sequence.admitted)
        self._deliver(sequence, token, scores)

    def _deliver_prompt_scores(self, sequence: Sequence, chunk: Chunk) -> None:
        chunk.slot.scores, chunk.slot.top_logprobs = list(sequence.prompt_scores), sequence.request.logprobs or 0
        sequence.prompt_scores_sent = True
        sequence.deliver(Event(prompt_scores=tuple(sequence.prompt_scores), cached=sequence.cached))

    def _deliver(self, sequence: Sequence, token: int, scores: tuple[Score, ...]) -> None:
        if token in sequence.request.stop_tokens:
            self._close(sequence, "stop", sequence.text.end(), scores)
            return
        if sequence.grammar is not None:
            sequence.grammar.accept(token)
        ready = sequence.text.add(token)
        if sequence.text.stopped is not None:
            self._close(sequence, "stop", ready, scores)
        elif sequence.new_count >= sequence.request.max_tokens:
            self._close(sequence, "length", ready + sequence.text.end(), scores)
        else:
            sequence.deliver(Event(ready, scores, (), None, sequence.new_count, sequence.cached))

    def _close(
        self, sequence: Sequence, finish: str, text: str = "", scores: tuple[Score, ...] = (), error: str = ""
    ) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        if sequence.slot is not None:
            self.kv_cache.release(sequence.slot)
            sequence.slot = None
        if sequence.fetch is not None and self.tiers is not None:
            self.tiers.release(sequence.fetch)
            sequence.fetch = None
        self.counts.finished[finish] = self.counts.finished.get(finish, 0) + 1
        sequence.end(finish, text, scores, error)

    def _fail_all(self, error: str, finish: str = "error") -> None:
        """End every sequence with an error and clear the cache: after a failed step its contents are undefined."""
        try:
            self._drop_ahead()
        except Exception:  # of the GPU: no request waits for this step
            LOG.exception("a step that was launched ahead failed")
        for sequence in [*self.running, *self.waiting]:
            if sequence.slot is not None:  # not released: that may save it to a lower tier
                self.kv_cache.discard(sequence.slot)
                sequence.slot = None
        self._close_all(error, finish)
        self.kv_cache.clear()
        if self.tiers is not None:
            self.tiers.forget_all()

    def _close_all(self, error: str, finish: str = "error") -> None:
        with self._wakeup:
            self.waiting.extend(self._submitted)
            self._submitted.clear()
        for sequence in [*self.running, *self.waiting]:
            self._close(sequence, finish, error=error)
        self.waiting.clear()


def _key(sequence: Sequence) -> tuple[Owner, list[int]]:
    """What its slot is found by."""
    return sequence.owner, sequence.tokens


def _prompt_scorer(sequence: Sequence, position: int) -> LogitsReader:
    """Scores the prompt from the logits of a chunk that begins at `position`: row i predicts token position + i + 1."""

    def read(first: int, logits: Tensor) -> None:
        start = position + first + 1
        del sequence.prompt_scores[start:]  # from before a preemption, computed again
        following = sequence.request.prompt[start : start + logits.shape[0]]
        if following:
            top = sequence.request.logprobs or 0
            sequence.prompt_scores += score_tokens(logits[: len(following)].float(), following, top)

    return read
