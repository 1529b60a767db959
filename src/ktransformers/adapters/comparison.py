"""Is the adapter that computes here the one that was trained? Measured, not believed: log-probabilities of the same
rows under two models, and marks of every adapted module on the way, so that a difference has a place.

A row is its token ids `[T]`; its log-probabilities `[T - 1]` are those of each token after the ones before it. A mark
is a module's output `[T, out]` times a fixed random matrix `[out, 4]`: small enough to be kept, and no two outputs that
differ have the same. What "the same" means is measured on the spot: the rows are computed once more, together in one
padded batch and each cut in two with a cache, and the difference that this makes is the noise floor. The surprising
decision: another implementation (stock PEFT, another machine) may round its weights otherwise, so its floor is how far
its *base* is from ours; an adapter has to be as close as that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

PROJECTION_DIM = 4  # numbers for each token and module
FLOOR_FACTOR = 4.0  # how many times the floor counts as the same
MIN_TOLERANCE = 2e-5  # a log-probability of float32 cannot be known better after some layers
COARSE_FLOOR = 1e-3  # a floor above this (16-bit types) lets a router choose otherwise now and then
MAX_OUTLIERS = 0.02  # then this share of the tokens may be off by any amount; the mean has to hold all the same
MIN_PROJECTION_TOLERANCE = 1e-5  # and a mark, relative

Projections = Mapping[str, Sequence[Tensor]]  # module -> [T, MARKS] for each row, in the order of computation


@dataclass(frozen=True)
class LogprobsAndNorms:
    """One model on all rows."""

    logprobs: tuple[Tensor, ...]  # [T - 1] of each row, float32
    marks: Projections = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(row.numel() for row in self.logprobs)


@dataclass(frozen=True)
class LogprobDifference:
    max: float
    mean: float
    row: int = 0  # where it is largest
    token: int = 0
    each: Tensor = field(default_factory=lambda: torch.empty(0), compare=False, repr=False)  # of all tokens

    @property
    def none(self) -> bool:
        return self.max == 0

    def within(self, floor: LogprobDifference) -> bool:
        """NaN is within nothing."""
        beyond = float((~(self.each <= FLOOR_FACTOR * floor.max + MIN_TOLERANCE)).float().mean())
        few = beyond <= (MAX_OUTLIERS if floor.max > COARSE_FLOOR else 0.0)
        return few and self.mean <= FLOOR_FACTOR * floor.mean + MIN_TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {"max": self.max, "mean": self.mean, "row": self.row, "token": self.token}


def larger_difference(one: LogprobDifference, other: LogprobDifference) -> LogprobDifference:
    """The worse of two floors, in each respect."""
    return LogprobDifference(max(one.max, other.max), max(one.mean, other.mean), one.row, one.token)


def difference(found: LogprobsAndNorms, expected: LogprobsAndNorms) -> LogprobDifference:
    """Of log-probabilities, absolute."""
    pairs = list(zip(found.logprobs, expected.logprobs, strict=True))
    apart = [(one - other).abs() for one, other in pairs]
    worst = max(range(len(apart)), key=lambda row: _nan_as_inf(float(apart[row].max())))
    token = int(torch.nan_to_num(apart[worst], nan=torch.inf).argmax())
    mean = float(torch.cat(apart).mean())
    return LogprobDifference(float(apart[worst].max()), mean, worst, token + 1, torch.cat(apart))


def _nan_as_inf(value: float) -> float:
    return value if value == value else float("inf")


def projection_distances(found: Projections, expected: Projections) -> dict[str, float]:
    """Module -> how far its outputs are apart, relative, in the mean over tokens; in the order of computation."""
    names = [name for name in expected if name in found]
    return {name: _relative_distance(torch.cat(list(found[name])), torch.cat(list(expected[name]))) for name in names}


def _relative_distance(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)).mean())


def first_deviating_module(found: Projections, expected: Projections, floor: Mapping[str, float]) -> str | None:
    """The first module whose outputs differ by more than the noise: what comes after it differs because of it."""
    for name, apart in projection_distances(found, expected).items():
        if not apart <= FLOOR_FACTOR * floor.get(name, 0.0) + MIN_PROJECTION_TOLERANCE:
            return name
    return None


def plain_name(name: str) -> str:
    """As the model calls it, whatever PEFT has put around it."""
    return name.removeprefix("base_model.model.")


@contextmanager
def recording_projections(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Marks of these modules, by their plain names, of every call while it is open: one tensor `[rows, MARKS]` each."""
    wanted = set(names)
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    known: dict[int, Tensor] = {}
    handles = []

    def listen(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            rows = rows.detach().reshape(-1, rows.shape[-1]).float().cpu()
            if rows.shape[1] not in known:
                known[rows.shape[1]] = _projection(rows.shape[1])
            found[name].append(rows @ known[rows.shape[1]])

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if plain_name(name) in wanted:
            listen(plain_name(name), module)
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _projection(width: int) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, PROJECTION_DIM, generator=generator) * float(width**-0.5)


def logprobs_of(logits: Tensor, row: Sequence[int]) -> Tensor:
    """`[T, V]` and the row's tokens `[T]` -> `[T - 1]`."""
    following = torch.tensor(list(row[1:]), device=logits.device)
    found: Tensor = logits[:-1].float().log_softmax(-1).gather(-1, following[:, None])[:, 0]
    return found.cpu()


def measure(model: Any, rows: Sequence[Sequence[int]], names: Sequence[str] = ()) -> LogprobsAndNorms:
    """Each row by itself, in one piece; marks of the modules that are named."""
    device = next(model.parameters()).device
    found: list[Tensor] = []
    marks: dict[str, list[Tensor]] = {name: [] for name in names}
    for row in rows:
        with evaluating(model), recording_projections(model, names) as seen:
            logits = model(input_ids=torch.tensor([list(row)], device=device), use_cache=False).logits[0]
        found.append(logprobs_of(logits, row))
        for name, parts in seen.items():
            marks[name].append(torch.cat(parts) if parts else torch.empty(0, PROJECTION_DIM))
    return LogprobsAndNorms(tuple(found), marks)


def measure_batched(model: Any, rows: Sequence[Sequence[int]]) -> LogprobsAndNorms:
    """All rows in one batch, padded at their ends."""
    device, longest = next(model.parameters()).device, max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    with evaluating(model):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return LogprobsAndNorms(tuple(logprobs_of(logits[at, : len(row)], row) for at, row in enumerate(rows)))


def measure_with_cache(model: Any, rows: Sequence[Sequence[int]], names: Sequence[str] = ()) -> LogprobsAndNorms:
    """Each row in two pieces, the second on a cache of the first."""
    device = next(model.parameters()).device
    found: list[Tensor] = []
    marks: dict[str, list[Tensor]] = {name: [] for name in names}
    for row in rows:
        middle, cache, parts = len(row) // 2 + 1, DynamicCache(config=model.config), []
        with evaluating(model), recording_projections(model, names) as seen:
            for piece in (row[:middle], row[middle:]):
                ids = torch.tensor([list(piece)], device=device)
                if ids.numel():
                    parts.append(model(input_ids=ids, past_key_values=cache, use_cache=True).logits[0])
        found.append(logprobs_of(torch.cat(parts), row))
        for name, pieces in seen.items():
            marks[name].append(torch.cat(pieces) if pieces else torch.empty(0, PROJECTION_DIM))
    return LogprobsAndNorms(tuple(found), marks)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; afterwards as it was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True)
class NoiseFloor:
    """What changes when nothing has changed but how the rows lie in batches."""

    logprobs: LogprobDifference
    marks: Mapping[str, float]


def measure_noise_floor(model: Any, rows: Sequence[Sequence[int]], alone: LogprobsAndNorms) -> NoiseFloor:
    names = list(alone.marks)
    pieces = measure_with_cache(model, rows, names)
    together = measure_batched(model, rows)
    noise = larger_difference(difference(pieces, alone), difference(together, alone))
    return NoiseFloor(noise, projection_distances(pieces.marks, alone.marks))


def adapted_modules(model: nn.Module) -> list[str]:
    """Plain names of the modules that PEFT has adapted, in the order of the model; experts once."""
    found: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and not name.endswith(".base_layer"):
            found[plain_name(name)] = None
    return list(found)
