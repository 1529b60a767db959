"""Maps every LoRA delta to the checkpoint tensor that it is added to, in that tensor's layout.

A Fold belongs to one tensor: a linear layer `[out, in]`, one matrix of one expert `[out, in]`, or a fused tensor of all
experts of a layer, `[E, 2I, H]` or transposed `[E, H, 2I]`, gate before up or interleaved. It computes the delta of one
slice at a time (one expert, or some rows of a matrix), which bounds memory. Whether a fused tensor is transposed is
decided by the shapes of all fused tensors of the layer; a pair without a tensor is an error before work starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ktransformers.adapters.lora import Adapter, Experts, Extra, Module
from ktransformers.adapters.names import name_in_model
from ktransformers.checkpoint import ExpertTensors, Shards, find_experts, locate
from ktransformers.checkpoint.layout import split_layer_name
from ktransformers.experts.lora import LoraPair
from ktransformers.ground.errors import InputError

FLOATS = {"BF16", "F16", "F32"}
PairReader = Callable[[], Mapping[str, LoraPair]]
TensorPosition = tuple[str, int, str]


@dataclass(frozen=True)
class Fold:
    name: str
    delta: Callable[[int, slice, torch.dtype], Tensor]  # (expert, rows, dtype) -> [rows, columns] of the tensor
    stacked: bool = False  # [E, rows, columns] rather than [rows, columns]
    replaces: bool = False  # the delta is the new value rather than a summand


class _LayerCache:
    """Caches the pairs of the layer read last, because all tensors of a layer share them."""

    def __init__(self) -> None:
        self._owner: Experts | None = None
        self._pairs: Mapping[str, LoraPair] = {}

    def pairs(self, owner: Experts) -> Mapping[str, LoraPair]:
        if self._owner is not owner:
            self._owner, self._pairs = owner, owner.read()
        return self._pairs


def plan_folds(adapter: Adapter, shards: Shards) -> dict[str, Fold]:
    """Tensor -> its fold; every pair of the adapter is used exactly once."""
    folds: list[Fold] = []
    positions = index_tensors(shards.names)
    for module in adapter.modules:
        folds.append(_fold_linear(module, find_tensor(positions, f"{module.name}.weight"), shards))
    for extra in adapter.extras:
        name = find_tensor(positions, extra.name)
        if shards.shape(name) != extra.shape:
            raise InputError(extra.name, f"shape {list(extra.shape)}", f"{list(shards.shape(name))}, as {name} has")
        folds.append(Fold(name, partial(_replacement_rows, extra), replaces=True))
    if adapter.experts:
        layers = find_experts(shards.names)
        interleaved = adapter.model is not None and adapter.model.interleaved
        cache = _LayerCache()
        for experts in adapter.experts:
            tensors = locate(layers, f"{experts.root}.experts")
            read = partial(cache.pairs, experts)
            if tensors.fused:
                folds += _fold_fused(experts, read, tensors, shards, interleaved)
            else:
                folds += _fold_per_expert(experts, read, tensors, shards)
    named = {fold.name: fold for fold in folds}
    if len(named) != len(folds):
        twice = next(fold.name for fold in folds if sum(other_fold.name == fold.name for other_fold in folds) > 1)
        raise InputError(twice, "two deltas", "one")
    return named


def index_tensors(names: Iterable[str]) -> dict[TensorPosition, list[str]]:
    """Position in the model -> tensors at that position, independent of prefixes and block names."""
    positions: dict[TensorPosition, list[str]] = {}
    for name in names:
        positions.setdefault(split_layer_name(name_in_model(name)), []).append(name)
    return positions


def find_tensor(positions: Mapping[TensorPosition, list[str]], name: str) -> str:
    """The one checkpoint tensor that an adapter refers to by `name`."""
    candidates = positions.get(split_layer_name(name_in_model(name)), [])
    if len(candidates) != 1:
        hint = (
            "tied to embed_tokens? untie it first" if name.startswith("lm_head") else "the adapter is of another model"
        )
        raise InputError(name, f"{len(candidates)} such tensors in the checkpoint", "one", hint)
    return candidates[0]


def _fold_linear(module: Module, name: str, shards: Shards) -> Fold:
    _check_tensor(shards, name, (module.form.outputs, module.form.inputs))
    return Fold(name, lambda _, rows, dtype: _delta_rows(module.read(), rows, dtype))


def _replacement_rows(extra: Extra, _: int, rows: slice, dtype: torch.dtype) -> Tensor:
    return extra.read()[rows].to(dtype)


def _delta_rows(pair: LoraPair, rows: slice, dtype: torch.dtype) -> Tensor:
    return (pair.b[rows].to(dtype) @ pair.a.to(dtype)).mul_(pair.scaling)


def _fold_per_expert(experts: Experts, read: PairReader, tensors: ExpertTensors, shards: Shards) -> list[Fold]:
    folds = []
    for expert in range(experts.experts):
        for role, form in experts.forms.items():
            name = tensors.single.get(expert, {}).get(role)
            if name is None:
                raise InputError(f"{tensors.root}.experts.{expert}: {role}", "no such tensor", "one for each expert")
            _check_tensor(shards, name, (form.outputs, form.inputs))
            folds.append(Fold(name, partial(_expert_rows, read, role, expert)))
    return folds


def _expert_rows(read: PairReader, role: str, expert: int, _: int, rows: slice, dtype: torch.dtype) -> Tensor:
    pair = read()[role]
    return _delta_rows(LoraPair(pair.a[expert], pair.b[expert], pair.scaling), rows, dtype)


def _fold_fused(
    experts: Experts, read: PairReader, tensors: ExpertTensors, shards: Shards, interleaved: bool
) -> list[Fold]:
    transposed = _is_transposed(experts, tensors, shards)
    folds = []
    for role, name in tensors.fused.items():
        parts = [part for part in role.split("_") if part in experts.forms]
        if role.endswith("bias") or not parts:
            continue
        if parts != role.split("_"):
            raise InputError(name, f"LoRA on {parts[0]} alone", "on gate and up, or on neither")
        outputs = sum(experts.forms[part].outputs for part in parts)
        shape = (outputs, experts.forms[parts[0]].inputs)
        _check_tensor(shards, name, (experts.experts, *(shape[::-1] if transposed else shape)))

        folds.append(Fold(name, partial(_fused_rows, read, parts, interleaved, transposed), stacked=True))
    used = {part for fold_role in tensors.fused for part in fold_role.split("_")}
    for role in experts.forms:
        if role not in used:
            raise InputError(f"{experts.root}.experts: {role}", "no such tensor in the checkpoint", "one")
    return folds


def _fused_rows(
    read: PairReader,
    parts: list[str],
    interleaved: bool,
    transposed: bool,
    expert: int,
    rows: slice,
    dtype: torch.dtype,
) -> Tensor:
    deltas = [_expert_rows(read, part, expert, 0, slice(None), dtype) for part in parts]
    joined = torch.stack(deltas, dim=1).flatten(0, 1) if interleaved and len(deltas) == 2 else torch.cat(deltas)
    return (joined.T if transposed else joined)[rows]


def _is_transposed(experts: Experts, tensors: ExpertTensors, shards: Shards) -> bool:
    """Decided by all fused tensors of the layer together, because a square one is ambiguous."""
    forms = experts.forms
    down = forms.get("down")
    inner = forms.get("up") or forms.get("gate")
    if inner is not None:
        hidden, intermediate = inner.inputs, inner.outputs
    else:
        assert down is not None
        hidden, intermediate = down.outputs, down.inputs
    orientations = set()
    for role, name in tensors.fused.items():
        if role.endswith("bias"):
            continue
        rows, columns = (hidden, intermediate) if role == "down" else (intermediate * len(role.split("_")), hidden)
        shape = shards.shape(name)[1:]
        if rows != columns and shape in ((rows, columns), (columns, rows)):
            orientations.add(shape == (columns, rows))
    if len(orientations) != 1:
        name = next(iter(tensors.fused.values()))
        expected = f"experts of {hidden} by {intermediate}, all transposed or none"
        raise InputError(name, f"shape {list(shards.shape(name))}", expected)
    return orientations.pop()


def _check_tensor(shards: Shards, name: str, shape: tuple[int, ...]) -> None:
    if shards.shape(name) != shape:
        raise InputError(name, f"shape {list(shards.shape(name))}", f"{list(shape)}, as the adapter's factors say")
    if shards.dtype(name) not in FLOATS:
        raise InputError(
            name,
            f"dtype {shards.dtype(name)}",
            " or ".join(sorted(FLOATS)),
            "`--format keep`, or another format, writes a packed directory",
        )
