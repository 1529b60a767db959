"""Compares two models on the same rows: log-probabilities, and a random projection of every adapted module's output, so
that a difference can be attributed to a module. `kt prove` uses it to check that an adapter computes what was trained.

A row is its token ids `[T]`; its log-probabilities `[T - 1]` are those of each token given the tokens before it. A
projection is a module's output `[T, out]` times a fixed random matrix `[out, 4]`: small enough to store, and different
outputs have different projections. Equality is relative to a noise floor measured in the same run: the rows are
computed again in one padded batch and again in two pieces with a KV cache, and the difference is the floor. Another
implementation (stock PEFT, another machine) may round weights differently, so its floor is the distance between its
*base* model and ours; an adapter must be as close as that.

Where two experts tie in a router, two correct programs may choose different ones. `replay` gives a measurement the
router choices of another one, which it computes with instead of its own (`router_choices.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ktransformers.adapters.names import PREFIX
from ktransformers.adapters.router_choices import (
    PADDING,
    Flips,
    RouterChoices,
    input_distances,
    random_projection,
    recording_choices,
    same_choices,
)
from ktransformers.ground.progress import counted

PROJECTION_DIM = 4  # projected values per token and module
FLOOR_FACTOR = 4.0  # differences up to this multiple of the floor count as equal
MIN_TOLERANCE = 2e-5  # float32 log-probabilities are not more precise than this after several layers
COARSE_FLOOR = 1e-3  # above this floor (16-bit types) a router may occasionally choose other experts
MAX_OUTLIERS = 0.02  # then this share of tokens may differ by any amount; the limit on the mean still applies
MIN_PROJECTION_TOLERANCE = 1e-5  # of projections, relative

Projections = Mapping[str, Sequence[Tensor]]  # module -> [T, MARKS] for each row, in the order of computation


@dataclass(frozen=True)
class LogprobsAndNorms:
    """Log-probabilities, projections and router choices of one model on all rows."""

    logprobs: tuple[Tensor, ...]  # [T - 1] of each row, float32
    projections: Projections = field(default_factory=dict)
    routers: RouterChoices | None = None  # None: not recorded

    @property
    def tokens(self) -> int:
        return sum(row.numel() for row in self.logprobs)


@dataclass(frozen=True)
class LogprobDifference:
    max: float
    mean: float
    row: int = 0  # position of the maximum
    token: int = 0
    # Of all rows, concatenated.
    per_token: Tensor = field(default_factory=lambda: torch.empty(0), compare=False, repr=False)

    @property
    def is_zero(self) -> bool:
        return self.max == 0

    def within(self, floor: LogprobDifference) -> bool:
        """Whether the difference is within the floor; NaN never is."""
        beyond = float((~(self.per_token <= token_limit(floor))).float().mean())
        outliers_ok = beyond <= (MAX_OUTLIERS if floor.max > COARSE_FLOOR else 0.0)
        return outliers_ok and self.mean <= FLOOR_FACTOR * floor.mean + MIN_TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {"max": self.max, "mean": self.mean, "row": self.row, "token": self.token}


def token_limit(floor: LogprobDifference) -> float:
    """The largest difference of a token that the floor allows."""
    return FLOOR_FACTOR * floor.max + MIN_TOLERANCE


def larger_difference(first: LogprobDifference, second: LogprobDifference) -> LogprobDifference:
    """The elementwise maximum of two noise floors."""
    return LogprobDifference(max(first.max, second.max), max(first.mean, second.mean), first.row, first.token)


def difference(measured: LogprobsAndNorms, expected: LogprobsAndNorms) -> LogprobDifference:
    """Absolute difference of the log-probabilities."""
    pairs = list(zip(measured.logprobs, expected.logprobs, strict=True))
    errors = [(actual - reference).abs() for actual, reference in pairs]
    worst = max(range(len(errors)), key=lambda row: _nan_as_inf(float(errors[row].max())))
    token = int(torch.nan_to_num(errors[worst], nan=torch.inf).argmax())
    mean = float(torch.cat(errors).mean())
    return LogprobDifference(float(errors[worst].max()), mean, worst, token + 1, torch.cat(errors))


def _nan_as_inf(value: float) -> float:
    return value if value == value else float("inf")


def projection_distances(measured: Projections, expected: Projections) -> dict[str, float]:
    """Module -> relative distance of its outputs, averaged over tokens, in order of computation."""
    names = [name for name in expected if name in measured]
    return {
        name: _relative_distance(torch.cat(list(measured[name])), torch.cat(list(expected[name]))) for name in names
    }


def _relative_distance(measured: Tensor, expected: Tensor) -> float:
    return float(((measured - expected).norm(dim=1) / expected.norm(dim=1).clamp(min=1e-30)).mean())


def first_deviating_module(measured: Projections, expected: Projections, floor: Mapping[str, float]) -> str | None:
    """The first module whose outputs differ by more than the noise; later ones differ as a consequence."""
    for name, distance in projection_distances(measured, expected).items():
        if not distance <= FLOOR_FACTOR * floor.get(name, 0.0) + MIN_PROJECTION_TOLERANCE:
            return name
    return None


def plain_name(name: str) -> str:
    """The model's own name, without PEFT's prefix."""
    return name.removeprefix(PREFIX)


@contextmanager
def recording_projections(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[Tensor]]]:
    """Projections of these modules, by plain name, for every forward call in the block: `[rows, PROJECTION_DIM]` per
    call."""
    wanted = set(names)
    recorded: dict[str, list[Tensor]] = {name: [] for name in names}
    matrices: dict[int, Tensor] = {}
    handles = []

    def add_hook(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            rows = rows.detach().reshape(-1, rows.shape[-1]).float().cpu()
            if rows.shape[1] not in matrices:
                matrices[rows.shape[1]] = random_projection(rows.shape[1], PROJECTION_DIM)
            recorded[name].append(rows @ matrices[rows.shape[1]])

        handles.append(module.register_forward_hook(hook))

    for name, module in model.named_modules():
        if plain_name(name) in wanted:
            add_hook(plain_name(name), module)
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def logprobs_of(logits: Tensor, row: Sequence[int]) -> Tensor:
    """`[T, V]` and the row's tokens `[T]` -> `[T - 1]`."""
    following = torch.tensor(list(row[1:]), device=logits.device)
    logprobs: Tensor = logits[:-1].float().log_softmax(-1).gather(-1, following[:, None])[:, 0]
    return logprobs.cpu()


def measure(
    model: Any,
    rows: Sequence[Sequence[int]],
    names: Sequence[str] = (),
    replay: RouterChoices | None = None,
    flips: Flips | None = None,
) -> LogprobsAndNorms:
    """Each row on its own, without a cache; projections of the named modules. `flips`: tokens, numbered over all rows,
    for which a router makes its second choice."""
    return _measure_pieces(model, rows, names, replay, lambda row: [row], flips)


def measure_with_cache(
    model: Any, rows: Sequence[Sequence[int]], names: Sequence[str] = (), replay: RouterChoices | None = None
) -> LogprobsAndNorms:
    """Each row in two pieces, the second with the KV cache of the first."""
    return _measure_pieces(model, rows, names, replay, lambda row: [row[: len(row) // 2 + 1], row[len(row) // 2 + 1 :]])


def _measure_pieces(
    model: Any,
    rows: Sequence[Sequence[int]],
    names: Sequence[str],
    replay: RouterChoices | None,
    split: Callable[[Sequence[int]], list[Sequence[int]]],
    flips: Flips | None = None,
) -> LogprobsAndNorms:
    device = next(model.parameters()).device
    logprobs: list[Tensor] = []
    projections: dict[str, list[Tensor]] = {name: [] for name in names}
    with evaluating(model), recording_choices(model, rows, replay, flips) as recorder:
        for row, tokens in counted("Measuring rows", list(zip(rows, recorder.tokens_of_rows(), strict=True))):
            pieces = [piece for piece in split(row) if len(piece)]
            cache: dict[str, Any] = {"use_cache": False}
            if len(pieces) > 1:
                cache = {"use_cache": True, "past_key_values": DynamicCache(config=model.config)}
            with recording_projections(model, names) as recorded, recorder.forward_pass(tokens):
                inputs = [torch.tensor([list(piece)], device=device) for piece in pieces]
                logits = [model(input_ids=ids, **cache).logits[0] for ids in inputs]
            logprobs.append(logprobs_of(torch.cat(logits), row))
            for name, parts in recorded.items():
                projections[name].append(torch.cat(parts) if parts else torch.empty(0, PROJECTION_DIM))
        return LogprobsAndNorms(tuple(logprobs), projections, recorder.choices())


def measure_batched(model: Any, rows: Sequence[Sequence[int]], replay: RouterChoices | None = None) -> LogprobsAndNorms:
    """All rows in one batch, padded at the end."""
    device, longest = next(model.parameters()).device, max(len(row) for row in rows)
    ids = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows], device=device)
    with evaluating(model), recording_choices(model, rows, replay) as recorder:
        tokens = torch.full((len(rows), longest), PADDING)
        for index, numbers in enumerate(recorder.tokens_of_rows()):
            tokens[index, : len(numbers)] = numbers
        with recorder.forward_pass(tokens.flatten()):
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        logprobs = tuple(logprobs_of(logits[index, : len(row)], row) for index, row in enumerate(rows))
        return LogprobsAndNorms(logprobs, routers=recorder.choices())


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Disables gradients and dropout, and restores the training flags afterwards."""
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
    """The difference that batching alone makes."""

    logprobs: LogprobDifference  # with ties between experts, if batching changes the choice of a router
    replayed: LogprobDifference  # without: every batch computes the experts that the single rows have chosen
    projections: Mapping[str, float]  # likewise without
    router_inputs: Mapping[str, float] = field(default_factory=dict)  # relative, of hidden states by layer; likewise


def measure_noise_floor(model: Any, rows: Sequence[Sequence[int]], single: LogprobsAndNorms) -> NoiseFloor:
    names = list(single.projections)

    def measure_twice(replay: RouterChoices | None) -> tuple[LogprobsAndNorms, LogprobsAndNorms]:
        return measure_with_cache(model, rows, names, replay), measure_batched(model, rows, replay)

    def largest(runs: Sequence[LogprobsAndNorms]) -> LogprobDifference:
        return larger_difference(*(difference(run, single) for run in runs))

    runs = measure_twice(None)
    floor, reference = largest(runs), single.routers
    if reference is not None and not all(run.routers and same_choices(run.routers, reference) for run in runs):
        runs = measure_twice(reference)
    projections = projection_distances(runs[0].projections, single.projections)
    distances = [input_distances(run.routers, reference) for run in runs if run.routers and reference]
    router_inputs = {name: max(entry.get(name, 0.0) for entry in distances) for entry in distances for name in entry}
    return NoiseFloor(floor, largest(runs), projections, router_inputs)


def adapted_modules(model: nn.Module) -> list[str]:
    """Plain names of the modules that PEFT adapted, in model order; the experts of a layer once."""
    names: dict[str, None] = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and not name.endswith(".base_layer"):
            names[plain_name(name)] = None
    return list(names)
