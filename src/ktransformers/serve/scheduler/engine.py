"""The engine: continuous batching in one thread. `step` is the whole cycle: receive, schedule, make inputs, run, draw,
commit.

The scheduler (`scheduler.py`) says which tokens of which sequences the next step computes, in one forward pass. The
queue is bounded: requests that arrive while it is full are refused at once. When memory runs out in a step, the
sequence with the most tokens in it ends, everything that is only cached is evicted, and the others go on.

bf16 products are not batch-invariant: a near-tie between two tokens may flip depending on what else is in the batch.
With `deterministic` every chunk is a forward pass of its own, its borders depend on the position in the sequence alone,
and no cached prefix is reused: the same request then has the same bits whatever else is served.

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

from ktransformers.ground.errors import InputError, KTError, is_panic
from ktransformers.ground.log import logger
from ktransformers.ground.out_of_memory import HOST, describe_shortage, exhausted_memory
from ktransformers.serve.cache.kv_cache import KVCache, Owner
from ktransformers.serve.sampling.sampling import Score
from ktransformers.serve.scheduler.forward import Chunk, Forward, ForwardResult, SequentialForward
from ktransformers.serve.scheduler.sampler import draw_together, next_token, prompt_scorer
from ktransformers.serve.scheduler.scheduler import Limits, Scheduler, TokenRange
from ktransformers.serve.scheduler.sequence import Event, Sequence
from ktransformers.serve.scheduler.sequence_cache import SequenceCache

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


@dataclass
class Counts:
    """Counters since the start, read by /metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    scored_tokens: int = 0  # of prompts whose log-probabilities were requested
    finished: dict[str, int] = field(default_factory=dict)
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    busy_seconds: float = 0.0


class ServeEngine:
    def __init__(self, forward: Forward | SequentialForward, limits: Limits) -> None:
        self.forward, self.limits, self.counts = forward, limits, Counts()
        spare_states = limits.max_running_requests
        self.kv_cache = KVCache(
            limits.max_total_tokens,
            reuse=not limits.deterministic,
            spare_states=spare_states,
            fp8=forward.fp8_cache,
            longest=limits.context_length,
        )
        self.memory_advice = ""  # what to change when memory runs out
        self.raise_launched: Callable[[], None] = lambda: None  # errors of experts that a step did not wait for
        self.unavailable: Callable[[], str] = lambda: ""  # why no step can run now; empty: steps can run
        self.cache = SequenceCache(self.kv_cache, self._drop_ahead)
        snapshots = bool(forward.states) and not limits.deterministic
        self.scheduler = Scheduler(limits, self.cache, self._end_for_memory, snapshots=snapshots)
        self.running, self.waiting = self.scheduler.running, self.scheduler.waiting
        self._submitted = deque[Sequence]()
        self._unloaded: set[Owner] = set()
        self._wakeup = threading.Condition()
        self._accepting, self._alive = True, True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="kt-engine", daemon=True)
        self._thread.start()

    def attach_tiers(self, tiers: CacheTiers) -> None:
        """Use tiers of the KV cache below the slots."""
        self.cache.tiers = self.kv_cache.lower = tiers

    @property
    def tiers(self) -> CacheTiers | None:
        return self.cache.tiers

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
        started = time.monotonic()
        batch = self.scheduler.schedule()
        chunks = [self._chunk(scheduled) for scheduled in batch]
        results = self._run(batch, chunks) if batch else None
        if results is not None:
            self._commit(batch, chunks, draw_together([scheduled.sequence for scheduled in batch], results))
            seconds = time.monotonic() - started
            self.scheduler.learn(batch, seconds)
            self.counts.steps += 1
            self.counts.busy_seconds += seconds
        if not batch or not self.running:
            self._drop_ahead()
        return bool(batch)

    def _chunk(self, scheduled: TokenRange) -> Chunk:
        """What the forward pass is told of a sequence."""
        sequence, first, end = scheduled.sequence, scheduled.first, scheduled.end
        assert sequence.slot is not None
        scores_prompt = sequence.request.prompt_logprobs and not sequence.prompt_scores_sent
        reader = prompt_scorer(sequence, first) if scores_prompt else None
        last = end == len(sequence.tokens)
        greedy = last and sequence.greedy
        # Whether another token follows, unless this one ends the sequence, and its slot has capacity for it.
        follows = sequence.new_count + 1 < sequence.request.max_tokens and end < sequence.slot.capacity
        continues = greedy and follows and sequence.request.logprobs is None and not self.limits.deterministic
        tokens, adapter, snapshot = sequence.tokens[first:end], sequence.request.adapter, scheduled.takes_snapshot
        return Chunk(sequence.slot, tokens, first, adapter, reader, last, greedy, snapshot, continues)

    def _run(self, batch: list[TokenRange], chunks: list[Chunk]) -> list[ForwardResult | None] | None:
        """The forward pass; None: memory ran out, and one sequence was ended for it."""
        try:
            results = self._forward(chunks)
            if self.forward.device.type == "cuda" and all(result is None for result in results):
                # No token was read, so the device may still be computing, and the step's time would be the next one's.
                torch.cuda.synchronize(self.forward.device)
            self.raise_launched()
            for chunk in chunks:
                if chunk.takes_snapshot:
                    self.kv_cache.take_snapshot(chunk.slot)
            return results
        except Exception as error:
            if exhausted_memory(error) is None:
                raise
            self._drop_ahead()
            largest = max(reversed(batch), key=lambda scheduled: scheduled.end - scheduled.first)
            self._end_for_memory(largest.sequence, error, largest.end - largest.first)
        # The first of the batch is the head of the queue again.
        for scheduled, chunk in reversed(list(zip(batch, chunks, strict=True))):
            if chunk.slot.states or chunk.slot.hf_cache is not None:  # which may have advanced beyond its tokens
                self.kv_cache.discard(chunk.slot)
                if scheduled.sequence.slot is chunk.slot:
                    scheduled.sequence.slot = None
                    self.scheduler.requeue(scheduled.sequence)
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

    def _end_for_memory(self, sequence: Sequence, error: Exception, tokens: int | None = None) -> None:
        """End a sequence that had so many tokens in a step, or all of its own, when memory ran out."""
        shortage = describe_shortage(error, exhausted_memory(error) or HOST)
        count = len(sequence.tokens) if tokens is None else tokens
        line = f"out of memory: {shortage}, in a step with {count} tokens of this request"
        line += f"; in this order: {self.memory_advice}" if self.memory_advice else ""
        LOG.error("request %s ended: %s", sequence.request.request_id, line)
        self.cache.discard(sequence)
        self._close(sequence, "out_of_memory", error=line)
        self.kv_cache.evict_idle()
        traceback.clear_frames(error.__traceback__)  # which hold tensors of the failed step
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _drop_ahead(self) -> None:
        """Wait for a step that was launched before it was asked for, and forget it and the slots that it refers to."""
        if self.forward.graphs is not None:
            self.forward.graphs.drop_ahead()

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
        pending = [*self.running, *self.waiting]
        for owner in unloaded:
            self.kv_cache.evict_owner(owner)
            if any(sequence.owner == owner for sequence in pending):
                with self._wakeup:
                    self._unloaded.add(owner)  # again at the next step, until its last request has ended
            elif self.forward.graphs is not None:
                self.forward.graphs.forget(owner)
        if self.tiers is not None:
            self.tiers.advance()

    def _commit(self, batch: list[TokenRange], chunks: list[Chunk], results: list[ForwardResult | None]) -> None:
        """Add the new tokens to their sequences and deliver them."""
        for scheduled, chunk, result in zip(batch, chunks, results, strict=True):
            sequence = scheduled.sequence
            try:
                self._commit_chunk(sequence, chunk, result)
            except BaseException as error:  # of this sequence only: its grammar, its tokens
                if not (isinstance(error, Exception) or is_panic(error)):
                    raise
                LOG.exception("a sequence of request %s failed", sequence.request.request_id)
                self._close(sequence, "error", error=f"{type(error).__name__}: {error}")

    def _commit_chunk(self, sequence: Sequence, chunk: Chunk, result: ForwardResult | None) -> None:
        prompt, end = len(sequence.request.prompt), chunk.position + len(chunk.tokens)
        self.counts.prompt_tokens += max(0, min(end, prompt) - chunk.position)
        if chunk.logits_reader is not None:
            self.counts.scored_tokens += len(chunk.tokens)
            if end >= prompt:
                self._deliver_prompt_scores(sequence, chunk)
        if not chunk.wants_logits or result is None:
            return
        if sequence.request.max_tokens == 0:
            self._close(sequence, "length")
            return
        token, scores = next_token(sequence, result)
        sequence.tokens.append(token)
        self.counts.new_tokens += 1
        if sequence.first_token is None:
            sequence.first_token = time.monotonic()
            self.counts.first_token_seconds += sequence.first_token - sequence.arrived
            self.counts.first_tokens += 1
            if prompt - sequence.cached >= MIN_PREFILL_TOKENS:
                self.cache.prefill_rate.add(prompt - sequence.cached, sequence.first_token - sequence.admitted)
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
        self.scheduler.remove(sequence)
        self.counts.finished[finish] = self.counts.finished.get(finish, 0) + 1
        sequence.end(finish, text, scores, error)

    def _fail_all(self, error: str, finish: str = "error") -> None:
        """End every sequence with an error and clear the cache: after a failed step its contents are undefined."""
        try:
            self._drop_ahead()
        except Exception:  # of the GPU: no request waits for this step
            LOG.exception("a step that was launched ahead failed")
        for sequence in [*self.running, *self.waiting]:
            self.cache.discard(sequence)
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
