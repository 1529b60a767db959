"""What a tier of the KV cache has done since the start, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass, field

DECAY = 0.8  # of older measurements, at each new one


@dataclass
class Rate:
    """A running estimate of units per second, 0 until something was measured."""

    _units: float = 0.0
    _seconds: float = 0.0

    def add(self, units: float, seconds: float) -> None:
        self._units = DECAY * self._units + units
        self._seconds = DECAY * self._seconds + max(seconds, 1e-9)

    def raise_by(self, share: float) -> None:
        self._units *= 1 + share

    @property
    def value(self) -> float:
        return self._units / self._seconds if self._seconds else 0.0

    def seconds_for(self, units: float) -> float:
        """Predicted; 0 while nothing was measured."""
        return units / self.value if self.value else 0.0


@dataclass
class TierCounts:
    """Counters of one tier, read by /metrics."""

    hit_tokens: int = 0  # prompt tokens that came from this tier
    evictions: int = 0  # blocks
    dropped: int = 0  # blocks that were not stored because the tier could not take them in time
    errors: int = 0  # blocks that could not be read or written, or whose checksum was wrong
    skipped_tokens: int = 0  # that the tier had, but that were predicted to be computed sooner
    read_bytes: int = 0
    write_bytes: int = 0
    read_seconds: float = 0.0
    write_seconds: float = 0.0
    read_rate: Rate = field(default_factory=Rate)  # bytes/s

    def add_read(self, size: int, seconds: float) -> None:
        self.read_bytes += size
        self.read_seconds += seconds
        self.read_rate.add(size, seconds)

    def add_write(self, size: int, seconds: float) -> None:
        self.write_bytes += size
        self.write_seconds += seconds


@dataclass(frozen=True)
class TierState:
    """One tier as /metrics and /v1/models report it."""

    name: str
    blocks: int
    bytes: int
    limit_bytes: int
    counts: TierCounts
    note: str = ""  # why it no longer stores blocks
