"""CUDA graphs of work that Python would launch again and again: when one is captured, into which memory, and what
happens when that fails.

`GraphCache` is the life cycle of every graph in this project: a key (shapes, dtypes, addresses) is counted, at its
third occurrence the work is run once and captured, from then on it is replayed; what cannot be captured is refused with
one log line and goes on eagerly. Three caches use it: expert passes (`place/gpu/expert_graphs.py`), attention
of training steps (`modeling/attention_graphs/`), decode steps of the server (`serve/graphs/step_graphs.py`).
`KT_GRAPHS` names those that are on. What a key is, what belongs to a graph and which graphs are evicted first is the
caller's.

Captures do not go through `torch.cuda.graph`: that uses one stream, the first device's, for all devices, and empties
the allocator's cache at every capture.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from ktransformers.ground.log import logger

CAPTURE_AT = 3  # occurrences of a key: a shape that comes once or twice is not worth a capture
# Graphs of a cache; further keys run eagerly.
MAX_GRAPHS = 48
MAX_COUNTED = 256  # keys that are counted at a time
PADDING_STEP = 64  # tokens

K = TypeVar("K", bound=Hashable)
G = TypeVar("G")
T = TypeVar("T")
LOG = logger(__name__)


def padded_tokens(tokens: int) -> int:
    """The size of the graph for so many tokens: multiples of 64, from 1024 tokens on of an eighth of the batch or less,
    so that a few graphs serve all sizes."""
    step = max(PADDING_STEP, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


class GraphPool:
    """The memory that graphs on a device share. They replay one after another, and what a replay leaves for its reader
    is either outside of the pool or read before the next replay.

    torch frees the memory of a pool with its last graph and does not take such a pool up again, so the pool is that of
    any graph that still exists, or a new one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.exhausted = False  # no GPU memory was left for a graph
        self.reported: set[str] = set()  # refusals that were logged: layers of a model fail alike
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def record(self, run: Callable[[], T], warm_up: Callable[[], object] | None = None) -> Callable[[], T]:
        """A function that does what `run` does and returns what it returned when it was captured. `warm_up`, by default
        `run`, is called before: kernels have to be loaded. On a CPU the function is `run` itself."""
        (warm_up or run)()
        if self.device.type != "cuda":
            return run
        graph = torch.cuda.CUDAGraph()
        pool = next((one.pool() for one in self._graphs), None)
        output = capture(graph, run, self.device, pool)
        self._graphs.add(graph)

        def replay() -> T:
            graph.replay()
            return output

        return replay


class Refusal(enum.Enum):
    """What follows from a capture that failed."""

    RETRY = enum.auto()  # the caller has made room
    KEY = enum.auto()  # no graph for this key
    CACHE = enum.auto()  # no further graph in this cache
    POOL = enum.auto()  # no further graph in any cache of the pool


def refuse_all(key: object, error: Exception) -> Refusal:
    """Without memory the whole pool is closed; any other error will come again for the next key."""
    return Refusal.POOL if isinstance(error, torch.OutOfMemoryError) else Refusal.CACHE


class GraphCache(Generic[K, G]):
    """Graphs by key. `name` is the subject of the log line. A cache that is not `enabled` never captures. Graphs that
    exist when a cache is closed stay until they are evicted: a pass that was replayed may have to be repeated."""

    def __init__(self, name: str, pool: GraphPool, *, enabled: bool = True, max_graphs: int = MAX_GRAPHS) -> None:
        self.name, self.pool, self.max_graphs = name, pool, max_graphs
        self.captured: dict[K, G] = {}
        self.refused: set[K] = set()
        self._closed = not enabled
        self._counts: dict[K, tuple[Hashable, int]] = {}  # the first caller and its occurrences

    @property
    def closed(self) -> bool:
        """Whether nothing will be captured any more."""
        return self._closed or self.pool.exhausted

    def get(self, key: K) -> G | None:
        return self.captured.get(key)

    def may_capture(self, key: K) -> bool:
        """Whether the key can have a graph one day; one that has a graph can have a new one."""
        full = key not in self.captured and len(self.captured) >= self.max_graphs
        return not (self.closed or full or key in self.refused)

    def due(self, key: K, caller: Hashable = None) -> bool:
        """Counts this occurrence; whether it is time to capture. Where several callers share a key, the layers of a
        model for example, those of the first one count: one in a pass over all of them."""
        if not self.may_capture(key):
            return False
        if len(self._counts) > MAX_COUNTED:
            self._counts.clear()
        first, count = self._counts.get(key, (caller, 0))
        count += first == caller
        self._counts[key] = first, count
        return count >= CAPTURE_AT

    def capture(
        self,
        key: K,
        make: Callable[[], G],
        subject: str = "",
        on_failure: Callable[[K, Exception], Refusal] = refuse_all,
    ) -> G | None:
        """The graph that `make` warms up and records; None: refused. `subject` describes a key that is refused alone.

        Errors of any kind are a refusal, because the work itself is still to be done, and can be, eagerly."""
        while self.may_capture(key):
            try:
                graph = make()
            except Exception as error:
                self._refuse(key, error, on_failure(key, error), subject)
            else:
                self.captured[key] = graph
                return graph
        return None

    def _refuse(self, key: K, error: Exception, refusal: Refusal, subject: str) -> None:
        if refusal is Refusal.RETRY:
            return
        if refusal is Refusal.KEY:
            self.refused.add(key)
        elif refusal is Refusal.CACHE:
            self._closed = True
        else:
            self.pool.exhausted = True
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        reason = "no GPU memory is left" if out_of_memory else f"{type(error).__name__}: {error}"
        subject = subject if refusal is Refusal.KEY else self.name
        line = f"no further CUDA graphs of {subject}, run eagerly instead: {reason}"
        if line not in self.pool.reported:
            self.pool.reported.add(line)
            LOG.warning("%s", line)

    def evict(self, matches: Callable[[K], bool] = lambda key: True) -> None:
        """Drop graphs. Their occurrences stay counted: when a key comes again it is captured at once."""
        self.captured = {key: graph for key, graph in self.captured.items() if not matches(key)}

    def reset(self, matches: Callable[[K], bool] = lambda key: True) -> None:
        """Forget occurrences and refusals of keys; a closed cache stays closed."""
        self.refused = {key for key in self.refused if not matches(key)}
        self._counts = {key: count for key, count in self._counts.items() if not matches(key)}

    def close(self) -> None:
        """Drop all graphs and capture none any more."""
        self._closed = True
        self.evict()


def capture(graph: torch.cuda.CUDAGraph, run: Callable[[], T], device: torch.device, pool: Any) -> T:
    """What `run` returns while it is captured. When a capture fails, torch's random numbers go on as if they were being
    captured, and the next dropout anywhere is an error; a capture that succeeds puts that right, so an empty one
    follows before the error is raised."""
    with torch.cuda.device(device):
        try:
            return _capture_on_side_stream(graph, run, pool)
        except Exception:
            with contextlib.suppress(RuntimeError):
                torch.cuda.synchronize(device)
                _capture_on_side_stream(torch.cuda.CUDAGraph(), torch.empty(1, device=device).zero_, None)
            raise


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures on a device."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _capture_on_side_stream(graph: torch.cuda.CUDAGraph, run: Callable[[], T], pool: Any) -> T:
    current = torch.cuda.current_stream()
    side = capture_stream(current.device)
    torch.cuda.synchronize()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        # In this mode other threads may wait for their own copies meanwhile.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            output = run()
        finally:
            graph.capture_end()
    current.wait_stream(side)
    return output
