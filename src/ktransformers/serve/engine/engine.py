"""The engine: continuous batching in one thread. `step` says it all: take, admit, gather, compute, draw, deliver.

Every step computes one piece of each running sequence in one forward pass: the new token of those that answer, and of
those whose prompt is not computed yet as much as `chunk` allows, in order of arrival. A sequence is admitted when its
prompt has room in the slots. When an answer finds no room to grow, the youngest sequence gives its slot away, waits at
the head of the queue and is computed again later; its reader notices a pause. The queue is bounded: who comes when it
is full is refused at once. Callers live in other threads: `submit`, `cancel` and `stop` may be called from any, and
news reaches them through the `deliver` of each sequence, called in the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ktransformers.errors import InputError, KTError
from ktransformers.log import logger
from ktransformers.serve.engine.forward import Chunk, Forward, ForwardResult, SequentialForward
from ktransformers.serve.engine.head import Reader
from ktransformers.serve.engine.kv_cache import KVCache, Owner
from ktransformers.serve.engine.sampling import Score, choose, scores
from ktransformers.serve.engine.sequence import Event, Sequence

LOG = logger(__name__)
IDLE = 0.05  # seconds between looks at deadlines while nothing runs


class QueueFull(KTError):
    """More requests wait than may wait."""


class Stopped(KTError):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class Limits:
    running: int = 16  # sequences in a batch
    queued: int = 128  # sequences that wait
    chunk: int = 512  # prompt tokens in a step
    tokens: int = 32768  # room of all slots together
    context: int = 4096  # prompt and answer of one sequence


@dataclass
class Counts:
    """Since the start; read by /metrics."""

    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    scored_tokens: int = 0  # of prompts whose log-probabilities were asked for
    preempted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    first_token_seconds: float = 0.0
    first_tokens: int = 0
    busy_seconds: float = 0.0


class ServeEngine:
    def __init__(self, forward: Forward | SequentialForward, limits: Limits) -> None:
        self.forward, self.limits, self.counts = forward, limits, Counts()
        self.slots = KVCache(limits.tokens, forward.whole_prefixes)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._inbox: deque[Sequence] = deque()
        self._gone: set[Owner] = set()
        self._wake = threading.Condition()
        self._accepting, self._alive = True, True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name="kt-engine", daemon=True)
        self._thread.start()

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """All of them or none; raises QueueFull, Stopped or InputError."""
        wanted = list(sequences)
        for one in wanted:
            room = min(self.limits.context, self.limits.tokens)
            if len(one.tokens) + one.ask.max_tokens > room:
                given = f"{len(one.tokens)} tokens and {one.ask.max_tokens} to answer"
                raise InputError("max_tokens", given, f"together at most {room}", "shorten the prompt or ask for less")
        with self._wake:
            if not self._accepting:
                raise Stopped("the server is shutting down")
            if len(self.waiting) + len(self._inbox) + len(wanted) > self.limits.queued:
                raise QueueFull(f"{self.limits.queued} requests are waiting already")
            self._inbox.extend(wanted)
            self._wake.notify()

    def cancel(self, sequences: Iterable[Sequence]) -> None:
        """Their readers have left."""
        for one in sequences:
            one.cancelled = True
        with self._wake:
            self._wake.notify()

    def forget(self, owner: Owner) -> None:
        """An adapter was unloaded: what was computed with it is of no more use."""
        with self._wake:
            self._gone.add(owner)
            self._wake.notify()

    def stop(self, patience: float = 0.0) -> None:
        """Take nothing more, let what runs end within `patience` seconds, then end."""
        with self._wake:
            self._accepting = False
        end = time.monotonic() + patience
        while time.monotonic() < end and self.busy:
            time.sleep(0.02)
        with self._wake:
            self._alive = False
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self._inbox)

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def replayed(self) -> int:
        """Steps that came out of a CUDA graph."""
        return 0 if self.forward.graphs is None else self.forward.graphs.replayed

    def _loop(self) -> None:
        while True:
            with self._wake:
                if not self._alive:
                    break
                if not self.busy and not self._gone:
                    self._wake.wait()
                    continue
            try:
                if not self.step():
                    with self._wake:
                        self._wake.wait(IDLE)
            except Exception as error:  # one bad batch must not end the server
                LOG.exception("a step failed")
                self._drop_all(f"{type(error).__name__}: {error}")
        self._drop_all("the server was stopped")

    def step(self) -> bool:
        """One batch; False where there was nothing to compute."""
        self._take()
        self._admit()
        began = time.monotonic()
        batch = self._gather()
        if not batch:
            return False
        found = self.forward.run([piece for _, piece in batch])
        for (one, piece), part in zip(batch, found, strict=True):
            try:
                self._advance(one, piece, part)
            except Exception as error:  # of this sequence alone: its grammar, its tokens
                LOG.exception("a sequence failed")
                self._close(one, "error", error=f"{type(error).__name__}: {error}")
        self.counts.steps += 1
        self.counts.busy_seconds += time.monotonic() - began
        return True

    def _take(self) -> None:
        with self._wake:
            self.waiting.extend(self._inbox)
            self._inbox.clear()
            gone, self._gone = self._gone, set()
        now = time.monotonic()
        for one in [*self.running, *self.waiting]:
            if one.cancelled:
                self._close(one, "cancelled")
            elif one.ask.deadline is not None and now > one.ask.deadline:
                self._close(one, "timeout", one.text.end())
        self.waiting = deque(one for one in self.waiting if not one.finished)
        wanted = [*self.running, *self.waiting]
        for owner in gone:
            self.slots.forget(owner)
            if any(one.ask.adapter is not None and one.ask.adapter.owner == owner for one in wanted):
                with self._wake:
                    self._gone.add(owner)  # until its last request has ended
            elif self.forward.graphs is not None:
                self.forward.graphs.forget(owner)

    def _admit(self) -> None:
        held: list[Sequence] = []
        while self.waiting and len(self.running) < self.limits.running:
            one = self.waiting.popleft()
            if one.after is not None and not one.after.finished and not one.after.prompt_done:
                held.append(one)
                continue
            owner = one.ask.adapter.owner if one.ask.adapter else None
            slot = self.slots.take(owner, one.tokens, (one.ask.logprobs or 0) if one.ask.prompt_logprobs else None)
            if slot is None:
                held.append(one)
                break
            one.slot = slot
            if one.ask.prompt_logprobs and slot.length:
                one.prompt_scores = [score.with_top(one.ask.logprobs or 0) for score in slot.scores]
            one.cached = min(slot.length, len(one.ask.prompt))
            self.running.append(one)
        self.waiting.extendleft(reversed(held))

    def _gather(self) -> list[tuple[Sequence, Chunk]]:
        batch: list[tuple[Sequence, Chunk]] = []
        left = self.limits.chunk
        for one in list(self.running):
            if one.slot is None:  # gave its slot away to one before it
                continue
            missing = len(one.tokens) - one.computed
            count = missing if missing == 1 else min(missing, left)
            if not count or not self._room(one):
                continue
            left -= count if missing > 1 else 0
            position, end = one.computed, one.computed + count
            read = _reader(one, position) if one.ask.prompt_logprobs and not one.prompt_told else None
            tokens, last, greedy = one.tokens[position:end], count == missing, one.greedy
            piece = Chunk(one.slot, tokens, position, one.ask.adapter, read, last, last and greedy)
            batch.append((one, piece))
        return [(one, piece) for one, piece in batch if one.slot is piece.slot]

    def _room(self, one: Sequence) -> bool:
        while one.slot is not None and not self.slots.grow(one.slot, len(one.tokens)):
            youngest = self.running[-1]
            self.running.remove(youngest)
            assert youngest.slot is not None
            self.slots.release(youngest.slot)
            youngest.slot = None
            self.waiting.appendleft(youngest)
            self.counts.preempted += 1
        return one.slot is not None

    def _advance(self, one: Sequence, piece: Chunk, found: ForwardResult | None) -> None:
        prompt = one.ask.prompt
        self.counts.prompt_tokens += max(0, min(piece.position + len(piece.tokens), len(prompt)) - piece.position)
        if piece.read is not None:
            self.counts.scored_tokens += len(piece.tokens)
            if piece.position + len(piece.tokens) >= len(prompt):
                self._tell_prompt(one, piece)
        if not piece.last or found is None:
            return
        if one.ask.max_tokens == 0:
            self._close(one, "length")
            return
        row, token = found.logits, found.token
        if token is None:
            allowed = None if one.grammar is None else one.grammar.allowed(row.numel())
            token = choose(row.float(), one.ask.sampling, prompt, one.new, one.draw, allowed)
        told = () if one.ask.logprobs is None else tuple(scores(row.float()[None], [token], one.ask.logprobs))
        one.tokens.append(token)
        self.counts.new_tokens += 1
        if one.first_token is None:
            one.first_token = time.monotonic()
            self.counts.first_token_seconds += one.first_token - one.arrived
            self.counts.first_tokens += 1
        self._deliver(one, token, told)

    def _tell_prompt(self, one: Sequence, piece: Chunk) -> None:
        piece.slot.scores, piece.slot.top = list(one.prompt_scores), one.ask.logprobs or 0
        one.prompt_told = True
        one.deliver(Event(prompt_scores=tuple(one.prompt_scores), cached=one.cached))

    def _deliver(self, one: Sequence, token: int, told: tuple[Score, ...]) -> None:
        if token in one.ask.stop_tokens:
            self._close(one, "stop", one.text.end(), told)
            return
        if one.grammar is not None:
            one.grammar.accept(token)
        ready = one.text.add(token)
        if one.text.stopped is not None:
            self._close(one, "stop", ready, told)
        elif len(one.new) >= one.ask.max_tokens:
            self._close(one, "length", ready + one.text.end(), told)
        else:
            one.deliver(Event(ready, told, (), None, len(one.new), one.cached))

    def _close(self, one: Sequence, finish: str, text: str = "", told: tuple[Score, ...] = (), error: str = "") -> None:
        if one in self.running:
            self.running.remove(one)
        if one.slot is not None:
            self.slots.release(one.slot)
            one.slot = None
        self.counts.finished[finish] = self.counts.finished.get(finish, 0) + 1
        one.end(finish, text, told, error)

    def _drop_all(self, error: str) -> None:
        """After a failed step nobody knows what the slots hold."""
        with self._wake:
            self.waiting.extend(self._inbox)
            self._inbox.clear()
        for one in [*self.running, *self.waiting]:
            self._close(one, "error", error=error)
        self.waiting.clear()
        self.slots.clear()


def _reader(one: Sequence, position: int) -> Reader:
    """Scores the prompt from a piece that begins at `position`; its row i speaks of the token after it."""

    def read(first: int, logits: Tensor) -> None:
        at = position + first + 1
        del one.prompt_scores[at:]  # it may have lost its slot half-way and be at it again
        following = one.ask.prompt[at : at + logits.shape[0]]
        if following:
            one.prompt_scores += scores(logits[: len(following)].float(), following, one.ask.logprobs or 0)

    return read
