"""Records which experts the routers of a model choose for every token, and replays the choices of another program.

Two correct programs round differently, so where two experts have the same score to within a rounding, they may choose
different ones. From that token on their numbers differ, and comparing them says nothing about the adapter. So the
program that runs second computes such a token with the experts, and the routing weights, of the first
(`RouterRecorder`): all tokens remain comparable under the limits of a model without ties. Whether a choice may be
replaced is judged afterwards by `compare_choices`: it is a tie if the scores of the two programs differ by no more than
the measured difference of the hidden states explains. Any other differing choice is a fault of the router.

A router is not found by its class. Experts are those of transformers' experts interface (`experts/contract.py`), their
arguments are hidden states `[T, H]`, ids and weights `[T, k]`, and the scores of a choice are what the enclosing block
passes to `torch.topk`, groups of experts first in families that have them. If the ids do not come from `torch.topk`
(sampled or tabulated ones), the layer has no scores: its choices are compared, but neither judged nor replaced.

Tokens of all rows are numbered consecutively, N in all; a forward pass says which of them it computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ktransformers.adapters.names import PREFIX
from ktransformers.experts.contract import expert_modules

INPUT_DIM = 8  # of the random projection that measures how far hidden states differ
# Relative difference of scores per relative difference of hidden states. Measured in routers of 18 families: 1 to 12,
# up to 25 where logits are eight times as large; thousands for a router with other weights.
SCORE_GAIN = 64.0
SCORE_ROUNDING = 16.0  # roundings of a score, in the dtype of the hidden states and relative to the largest score
PADDING = -1  # a row of a batch that is none of the tokens
TOPK_FUNCTIONS = (torch.topk, Tensor.topk)

Flips = Mapping[tuple[str, int], float]  # (layer, token) -> largest gap, relative to the largest score


@dataclass(frozen=True)
class TopkChoice:
    """One `torch.topk` of a router: the chosen candidates (experts, or groups of them) and the best of the others."""

    ids: Tensor  # [N, k + 1], the last one not chosen
    scores: Tensor  # [N, k + 1], float32
    scale: Tensor  # [N], the largest magnitude of a finite score

    def gaps(self, tokens: Tensor) -> Tensor:
        """By how much the last chosen score exceeds the next."""
        scores = self.scores[tokens]
        return scores[:, :-1].amin(1) - scores[:, -1]

    def relative_gaps(self, tokens: Tensor) -> Tensor:
        """The same relative to the largest score."""
        return self.gaps(tokens) / self.scale[tokens].clamp(min=1e-30)


@dataclass(frozen=True)
class LayerChoices:
    """The choices of one router."""

    chosen: Tensor  # [N, k] ids of the router; PADDING: the token was not computed
    ids: Tensor  # [N, k] ids that the experts computed: those of the router, or the replayed ones
    weights: Tensor  # [N, k] of `ids`, in the model's dtype
    inputs: Tensor  # [N, INPUT_DIM] projection of the hidden states, float32
    epsilon: float  # of the hidden states' dtype
    selections: tuple[TopkChoice, ...]  # none: the choice was not made by torch.topk


@dataclass(frozen=True)
class RouterChoices:
    """The choices of all routers of a model for all tokens."""

    lengths: tuple[int, ...]  # tokens of each row
    layers: Mapping[str, LayerChoices]  # by the plain name of the experts, in order of computation

    def position(self, token: int) -> tuple[int, int]:
        """(row, token in the row)"""
        row = 0
        while token >= self.lengths[row]:
            token, row = token - self.lengths[row], row + 1
        return row, token

    def to_tensors(self) -> dict[str, Tensor]:
        """`LAYER/FIELD` and `LAYER/FIELD.I` of selection I -> tensor, ids in int16."""
        tensors = {}
        for name, layer in self.layers.items():
            fields = {"ids": layer.ids, "weights": layer.weights, "inputs": layer.inputs}
            for index, selection in enumerate(layer.selections):
                fields |= {f"ids.{index}": selection.ids, f"scores.{index}": selection.scores}
                fields[f"scale.{index}"] = selection.scale
            fields["epsilon"] = torch.tensor(layer.epsilon)
            for key, tensor in fields.items():
                stored = tensor.to(torch.int16) if key.startswith("ids") else tensor
                tensors[f"{name}/{key}"] = stored.contiguous()
        return tensors

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], names: Sequence[str], lengths: Sequence[int]) -> RouterChoices:
        """Reads what `to_tensors` made, replayed choices as chosen ones; raises KeyError if a tensor is missing,
        ValueError if one does not fit."""
        layers = {}
        for name in names:
            fields = {
                key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")
            }
            epsilon = float(fields.pop("epsilon"))
            if any(len(tensor) != sum(lengths) for tensor in fields.values()):
                raise ValueError(f"router choices of {name} for other than {sum(lengths)} tokens")
            layers[name] = _layer_of_fields(fields, epsilon)
        return RouterChoices(tuple(lengths), layers)


def _layer_of_fields(fields: Mapping[str, Tensor], epsilon: float) -> LayerChoices:
    count = sum(key.startswith("ids.") for key in fields)
    selections = tuple(
        TopkChoice(fields[f"ids.{index}"].long(), fields[f"scores.{index}"], fields[f"scale.{index}"])
        for index in range(count)
    )
    ids = fields["ids"].long()
    chosen = fields.get("chosen", ids)
    return LayerChoices(chosen, ids, fields["weights"], fields["inputs"], epsilon, selections)


@dataclass(frozen=True)
class ChoiceDifference:
    """A token for which two programs choose different experts."""

    layer: str
    row: int
    token: int
    experts: tuple[int, ...]  # chosen by this program only
    instead_of: tuple[int, ...]  # chosen by the other one only
    gap: float  # between the last chosen score and the next, in this program
    distance: float  # between the scores of the two programs
    limit: float  # of `distance`: what the difference of the hidden states explains

    def __str__(self) -> str:
        return f"token {self.token} of row {self.row} in {self.layer}"

    def describe(self) -> str:
        experts, others = ", ".join(map(str, self.experts)), ", ".join(map(str, self.instead_of))
        return (
            f"token {self.token} of row {self.row} is routed to experts {experts} instead of {others}: scores are "
            f"{self.gap:.2g} apart and differ by {self.distance:.2g}, inputs explain {self.limit:.2g}"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "row": self.row,
            "token": self.token,
            "experts": list(self.experts),
            "instead_of": list(self.instead_of),
            **{name: _finite(getattr(self, name)) for name in ("gap", "distance", "limit")},
        }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class ChoiceComparison:
    ties: tuple[ChoiceDifference, ...] = ()
    faults: tuple[ChoiceDifference, ...] = ()  # which the difference of the hidden states does not explain
    unjudged: int = 0  # differing choices of routers without scores, which were not replayed

    def __str__(self) -> str:
        parts = []
        if self.ties:
            ties = "1 tie between experts, at" if len(self.ties) == 1 else f"{len(self.ties)} ties, the first at"
            parts.append(f"{ties} {self.ties[0]}")
        if self.unjudged:
            parts.append(f"{self.unjudged} choices differ in routers without scores, which may be ties")
        return "; ".join(parts)


def same_choices(first: RouterChoices, second: RouterChoices) -> bool:
    """Whether all routers choose the same experts for every token that both have computed."""
    names = first.layers.keys() & second.layers.keys()
    return not any(len(_differing(first.layers[name].chosen, second.layers[name].ids)) for name in names)


def input_distances(measured: RouterChoices, expected: RouterChoices) -> dict[str, float]:
    """Layer -> largest relative difference of the hidden states before its router."""
    names = measured.layers.keys() & expected.layers.keys()
    return {name: float(_shift(measured.layers[name], expected.layers[name]).max()) for name in names}


def _shift(layer: LayerChoices, reference: LayerChoices) -> Tensor:
    """Of every token, relative; 0 where one was not computed."""
    computed = (layer.chosen >= 0).all(1) & (reference.chosen >= 0).all(1)
    size: Tensor = reference.inputs.norm(dim=1).clamp(min=1e-30)
    distance: Tensor = (layer.inputs - reference.inputs).norm(dim=1) / size
    return distance.masked_fill(~computed, 0.0)


def compare_choices(measured: RouterChoices | None, expected: RouterChoices | None) -> ChoiceComparison | None:
    """Judge every token for which the routers of the two programs choose differently; None: one of them was not
    recorded. `measured` must have replayed `expected`, or else all that follows such a token has other inputs. What
    `expected` itself replayed is of no concern: its scores belong to its own choices."""
    if measured is None or expected is None:
        return None
    ties: list[ChoiceDifference] = []
    faults: list[ChoiceDifference] = []
    unjudged = 0
    for name, layer in measured.layers.items():
        if (reference := expected.layers.get(name)) is None:
            continue
        tokens = _differing(layer.chosen, reference.chosen)
        if not _can_judge(layer, reference):
            unjudged += len(tokens)
            continue
        for difference, explained in _judge(measured, name, layer, reference, tokens):
            (ties if explained else faults).append(difference)
    return ChoiceComparison(tuple(ties), tuple(faults), unjudged)


def _differing(ids: Tensor, reference: Tensor) -> Tensor:
    """Tokens whose ids are not the same set."""
    if ids.shape != reference.shape:
        return torch.arange(len(ids))
    computed = (ids >= 0).all(1) & (reference >= 0).all(1)
    return (computed & (ids.sort(1).values != reference.sort(1).values).any(1)).nonzero()[:, 0]


def _can_judge(layer: LayerChoices, reference: LayerChoices) -> bool:
    shapes = [[selection.ids.shape for selection in one.selections] for one in (layer, reference)]
    return bool(layer.selections) and layer.ids.shape == reference.ids.shape and shapes[0] == shapes[1]


def _judge(
    measured: RouterChoices, name: str, layer: LayerChoices, reference: LayerChoices, tokens: Tensor
) -> Iterator[tuple[ChoiceDifference, bool]]:
    """Every difference with whether it is a tie. Selections are judged in order: once a group of experts differs, the
    scores of the following selection belong to other experts."""
    shift = _shift(layer, reference)[tokens]
    changed = torch.zeros(len(tokens), dtype=torch.bool)
    explained = torch.ones(len(tokens), dtype=torch.bool)
    gaps, distances, limits = torch.zeros(3, len(tokens))
    for index, (selection, other) in enumerate(zip(layer.selections, reference.selections, strict=True)):
        is_last = torch.tensor(index + 1 == len(layer.selections))
        distance = _score_distance(selection, other, tokens)
        scale = torch.maximum(selection.scale[tokens], other.scale[tokens])
        limit = (SCORE_GAIN * shift + SCORE_ROUNDING * max(layer.epsilon, reference.epsilon)) * scale
        pending, beyond = ~changed, ~(distance <= limit)
        chosen = selection.ids[tokens, :-1].sort(1).values, other.ids[tokens, :-1].sort(1).values
        changes = (chosen[0] != chosen[1]).any(1)
        shown = pending & explained & (changes | beyond | is_last)
        gaps = torch.where(shown, selection.gaps(tokens), gaps)
        distances, limits = torch.where(shown, distance, distances), torch.where(shown, limit, limits)
        explained &= ~(pending & beyond)
        changed |= changes
    explained &= changed  # otherwise the experts were given others than the selected ones
    for index, token in enumerate(tokens.tolist()):
        own, others = set(layer.chosen[token].tolist()), set(reference.chosen[token].tolist())
        experts, instead_of = tuple(sorted(own - others)), tuple(sorted(others - own))
        gap, distance_here, limit_here = float(gaps[index]), float(distances[index]), float(limits[index])
        row, position = measured.position(token)
        difference = ChoiceDifference(name, row, position, experts, instead_of, gap, distance_here, limit_here)
        yield difference, bool(explained[index])


def _score_distance(first: TopkChoice, second: TopkChoice, tokens: Tensor) -> Tensor:
    """The largest difference of a candidate's scores, as far as both programs have it among their candidates; one that
    only one program has scores at most as much as the last candidate of the other."""
    scores = first.scores[tokens], second.scores[tokens]
    match = first.ids[tokens][:, :, None] == second.ids[tokens][:, None, :]
    excluded = scores[0].isneginf()[:, :, None] & scores[1].isneginf()[:, None, :]  # by both, as of other groups
    shared = (scores[0][:, :, None] - scores[1][:, None, :]).abs().masked_fill(~match | excluded, 0.0)
    largest = shared.amax((1, 2))
    for own, other, known in ((scores[0], scores[1], match.any(2)), (scores[1], scores[0], match.any(1))):
        excess = (own - other.amin(1, keepdim=True)).masked_fill(known | own.isneginf(), 0.0)
        largest = torch.maximum(largest, excess.amax(1))
    return largest


class _TopkCalls(TorchFunctionMode):
    """Keeps the arguments and results of `torch.topk` over the last dimension. For rows in `flipped` whose gap is not
    larger than given there, relative to the largest score, the best candidates that were not chosen, all that score the
    same, take the place of the last chosen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Tensor, Tensor]] = []  # scores [..., n], ids [..., k]
        self.rows = 0  # of the block that is being computed
        self.flipped: dict[int, float] = {}  # row -> gap

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in TOPK_FUNCTIONS:
            return result
        given = dict(zip(("input", "k", "dim", "largest"), args, strict=False)) | (kwargs or {})
        scores, ids = given["input"], result[1]
        if given.get("dim", -1) not in (-1, scores.dim() - 1) or not given.get("largest", True):
            return result
        if self.flipped and scores.numel() == self.rows * scores.shape[-1] and ids.shape[-1] < scores.shape[-1]:
            ids = _flip(scores.detach(), ids, self.flipped)
            result = torch.return_types.topk((scores.gather(-1, ids), ids))
        self.calls.append((scores.detach().clone(), ids.detach().clone()))
        return result


def _flip(scores: Tensor, ids: Tensor, largest_gaps: Mapping[int, float]) -> Tensor:
    flat, flipped = scores.reshape(-1, scores.shape[-1]).float(), ids.reshape(-1, ids.shape[-1]).clone()
    for row, largest_gap in largest_gaps.items():
        others = flat[row].scatter(0, flipped[row], -torch.inf)
        scale = flat[row].masked_fill(flat[row].isinf(), 0.0).abs().max()
        if flat[row, flipped[row]].min() - others.max() <= largest_gap * scale:
            same = others >= others.max() - SCORE_ROUNDING * torch.finfo(flat.dtype).eps * scale
            flipped[row] = flat[row].masked_fill(same, torch.inf).topk(flipped.shape[1]).indices
    return flipped.reshape(ids.shape)


def token_numbers(lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The numbers of the tokens of each row."""
    return tuple(torch.arange(sum(lengths[:row]), sum(lengths[: row + 1])) for row in range(len(lengths)))


class RouterRecorder:
    """Hooks at the experts of a model that record the choices of their routers, and replace those that differ from
    `replay`. Only passes inside `forward_pass` are recorded. `flips`, (layer, token) -> relative gap: where the gap is
    not larger, a router chooses the best experts that it would not choose."""

    def __init__(
        self, model: nn.Module, lengths: Sequence[int], replay: RouterChoices | None = None, flips: Flips | None = None
    ) -> None:
        self.lengths, self._replay, self._flips = tuple(lengths), replay, flips or {}
        self._topk = _TopkCalls()
        self._tokens = torch.empty(0, dtype=torch.long)
        self._computed: dict[str, int] = {}  # tokens of the current pass
        self._layers: dict[str, dict[str, Tensor]] = {}
        self._epsilon: dict[str, float] = {}
        self._unusable: set[str] = set()
        self._handles = []
        for name, module in expert_modules(model).items():
            while name.endswith(".base_layer"):
                name = name.removesuffix(".base_layer")  # PEFT's wrappers
            block = model.get_submodule(name.rpartition(".")[0])
            plain = name.removeprefix(PREFIX)
            self._handles.append(block.register_forward_pre_hook(self._block_hook(plain)))
            self._handles.append(module.register_forward_pre_hook(self._hook(plain)))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def tokens_of_rows(self) -> tuple[Tensor, ...]:
        return token_numbers(self.lengths)

    @contextmanager
    def forward_pass(self, tokens: Tensor) -> Iterator[None]:
        """One pass, or several that compute these tokens (`[n]`, PADDING for rows that are none) in this order. It must
        be entered in the thread that calls the model."""
        self._tokens = tokens
        self._computed.clear()
        with self._topk:
            yield

    def choices(self) -> RouterChoices:
        """What was recorded; layers whose arguments were not understood are left out."""
        usable = {name: fields for name, fields in self._layers.items() if name not in self._unusable}
        layers = {name: _layer_of_fields(fields, self._epsilon[name]) for name, fields in usable.items()}
        return RouterChoices(self.lengths, layers)

    def _block_hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        """Forgets earlier calls of topk, which are not the router's, and finds the rows to flip."""
        flips = {token: gap for (layer, token), gap in self._flips.items() if layer == name}

        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            self._topk.calls.clear()
            self._topk.flipped = {}
            if flips and args:
                start, self._topk.rows = self._computed.get(name, 0), args[0].numel() // args[0].shape[-1]
                tokens = self._tokens[start : start + self._topk.rows].tolist()
                self._topk.flipped = {row: flips[token] for row, token in enumerate(tokens) if token in flips}

        return hook

    def _hook(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            calls, self._topk.calls, self._topk.flipped = self._topk.calls, [], {}
            if not len(self._tokens) or name in self._unusable:
                return None
            if len(args) < 3 or args[1].dim() != 2 or args[1].shape != args[2].shape:
                self._unusable.add(name)
                return None
            hidden, ids, weights = args[:3]
            start, rows = self._computed.get(name, 0), len(ids)
            self._computed[name] = start + rows
            tokens = self._tokens[start : start + rows]
            if len(tokens) != rows:
                self._unusable.add(name)
                return None
            recorded = _read_call(hidden, ids, weights, calls)
            self._epsilon[name] = torch.finfo(hidden.dtype).eps
            replaced = self._replaced_rows(name, tokens, recorded)
            if len(replaced) and self._replay is not None:
                reference, sources = self._replay.layers[name], tokens[replaced]
                recorded["ids"], recorded["weights"] = recorded["ids"].clone(), recorded["weights"].clone()
                recorded["ids"][replaced] = reference.ids[sources]
                recorded["weights"][replaced] = reference.weights[sources].to(weights.dtype)
            self._store(name, tokens, recorded)
            if not len(replaced):
                return None
            return (hidden, recorded["ids"].to(ids), recorded["weights"].to(weights), *args[3:])

        return hook

    def _replaced_rows(self, name: str, tokens: Tensor, recorded: dict[str, Tensor]) -> Tensor:
        """Rows of this call whose choice differs from the replayed one; none if the layer's scores are unknown."""
        reference = None if self._replay is None else self._replay.layers.get(name)
        chosen = recorded["chosen"]
        if reference is None or not reference.selections or "ids.0" not in recorded:
            return torch.empty(0, dtype=torch.long)
        if reference.ids.shape[1] != chosen.shape[1]:
            return torch.empty(0, dtype=torch.long)
        rows = (tokens != PADDING).nonzero()[:, 0]
        return rows[_differing(chosen[rows], reference.ids[tokens[rows]])]

    def _store(self, name: str, tokens: Tensor, recorded: dict[str, Tensor]) -> None:
        stored, rows = self._layers.setdefault(name, {}), tokens != PADDING
        total = sum(self.lengths)
        if stored and {key: value.shape[1:] for key, value in stored.items()} != {
            key: value.shape[1:] for key, value in recorded.items()
        }:
            self._unusable.add(name)
            return
        for key, value in recorded.items():
            if key not in stored:
                empty = PADDING if key in ("chosen", "ids") else 0
                stored[key] = torch.full((total, *value.shape[1:]), empty, dtype=value.dtype)
            stored[key][tokens[rows]] = value[rows]


@contextmanager
def recording_choices(
    model: nn.Module, rows: Sequence[Sequence[int]], replay: RouterChoices | None = None, flips: Flips | None = None
) -> Iterator[RouterRecorder]:
    recorder = RouterRecorder(model, [len(row) for row in rows], replay, flips)
    try:
        yield recorder
    finally:
        recorder.close()


def _read_call(
    hidden: Tensor, ids: Tensor, weights: Tensor, calls: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of one call of the experts, on the CPU; `ids.I`, `scores.I` and `scale.I` of its selections."""
    hidden = hidden.detach().reshape(len(ids), -1)
    projected = hidden.float() @ random_projection(hidden.shape[1], INPUT_DIM).to(hidden.device)
    chosen = ids.detach().long().cpu()
    recorded = {"chosen": chosen, "ids": chosen, "weights": weights.detach().cpu(), "inputs": projected.cpu()}
    # The best scores inside each group, of which a router uses the values alone, have a dimension more than its choice.
    calls = [(scores, picked) for scores, picked in calls if scores.dim() == calls[-1][0].dim()]
    flat = [(scores.reshape(-1, scores.shape[-1]), picked.reshape(-1, picked.shape[-1])) for scores, picked in calls]
    flat = [(scores, picked) for scores, picked in flat if len(scores) == len(ids)]
    if not flat or flat[-1][1].shape != ids.shape:
        return recorded
    if not torch.equal(flat[-1][1].sort(1).values, ids.detach().long().sort(1).values):
        return recorded
    selections = [(scores, picked) for scores, picked in flat if picked.shape[1] < scores.shape[1]]
    for index, (scores, picked) in enumerate(selections):
        scores = scores.float()
        others = scores.scatter(1, picked, -torch.inf)
        best, best_id = others.max(1, keepdim=True)
        recorded[f"ids.{index}"] = torch.cat([picked, best_id], 1).cpu()
        recorded[f"scores.{index}"] = torch.cat([scores.gather(1, picked), best], 1).cpu()
        recorded[f"scale.{index}"] = scores.masked_fill(scores.isinf(), 0.0).abs().amax(1).cpu()
    return recorded


def random_projection(width: int, columns: int) -> Tensor:
    """`[width, columns]`, the same in every program: its product with two different rows differs."""
    generator = torch.Generator().manual_seed(width)
    return torch.randn(width, columns, generator=generator) * float(width**-0.5)
