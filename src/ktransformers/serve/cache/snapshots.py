"""Copies of a sequence's convolution and recurrent states at earlier positions.

Keys and values of a prefix are a part of the sequence's; a state is of its last token only. So that a conversation that
diverges, or another sequence with the same beginning, need not be computed from its first token, a slot keeps copies of
its states at some positions. Their number is bounded: the copy whose neighbours are nearest is dropped first, so the
last ones stay dense and earlier ones are spread over the sequence. The last one before the border stays: where the next
prompt of a conversation diverges if its template strips the thinking of earlier turns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


class States(dict[int, dict[str, Tensor]]):
    """The states of one sequence: layer -> name -> state."""

    def put(self, layer: int, name: str, state: Tensor) -> None:
        self.setdefault(layer, {})[name] = state


SNAPSHOT_TOKENS = 512  # a copy at every multiple that a chunk ends at
LAST_BLOCK_TOKENS = 64  # and, of a longer prompt, at the last multiple of this before its generation prompt
MAX_SNAPSHOTS = 4  # of a sequence


def copy_states(states: States) -> States:
    return States({layer: {name: state.clone() for name, state in kept.items()} for layer, kept in states.items()})


def state_bytes(states: States) -> int:
    return sum(state.numel() * state.element_size() for kept in states.values() for state in kept.values())


@dataclass
class Snapshots:
    """Of one sequence, by the number of tokens before them."""

    by_position: dict[int, States] = field(default_factory=dict)
    border: int = 0  # the copy before it stays

    def __len__(self) -> int:
        return len(self.by_position)

    def add(self, position: int, states: States) -> None:
        self.by_position[position] = copy_states(states)
        if len(self) > MAX_SNAPSHOTS:
            self.drop_one()

    def last(self, position: int) -> int:
        """The last position with a copy, up to `position`; 0: none."""
        return max((kept for kept in self.by_position if kept <= position), default=0)

    def drop_after(self, position: int) -> None:
        self.by_position = {kept: states for kept, states in self.by_position.items() if kept <= position}

    def drop_one(self) -> None:
        """The one whose neighbours are nearest to each other; the last one has none after it and stays longest."""
        positions, kept = [0, *sorted(self.by_position)], self.last(self.border)
        gaps = {positions[at]: positions[at + 1] - positions[at - 1] for at in range(1, len(positions) - 1)}
        if len(gaps) > 1:
            gaps.pop(kept, None)
        del self.by_position[min(gaps, key=lambda position: gaps[position], default=positions[-1])]


def next_chunk_end(position: int, end: int, prompt: int, shared: bool, generation_prompt: int = 0) -> tuple[int, bool]:
    """Where a chunk of tokens `position` .. `end` - 1 is cut so that a copy can be made, and whether one is made.

    The prompt has `prompt` tokens, the last `generation_prompt` of which templates write otherwise in history.
    `shared`: other sequences wait to copy it, and compute its last token only."""
    last = prompt - max(1, generation_prompt)
    stops = [end // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS]
    if generation_prompt and last < stops[0] <= prompt:
        stops[0] -= SNAPSHOT_TOKENS  # the next prompt diverges before it
    if prompt > SNAPSHOT_TOKENS:
        stops.append(last // LAST_BLOCK_TOKENS * LAST_BLOCK_TOKENS)
    if shared:
        stops.append(prompt - 1)
    stop = max((stop for stop in stops if position < stop <= end), default=None)
    return (end, False) if stop is None else (stop, True)
