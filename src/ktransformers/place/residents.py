"""Which experts are resident on the GPU: a budget for all layers together, spent by a strategy.

`uniform` gives every layer the same number (the first layers one more if it does not divide) and takes the lowest ids;
`frequency` takes the (layer, expert) pairs with most tokens; `front-loading` fills whole layers from the first on;
`random` draws pairs with seed 42. Statistics are counts `[layers, experts]` under the layers' names, in a safetensors
or JSON file; kt-kernel's `.pt` files (`logical_count` `[buffer, layers, experts]`, or that tensor alone) are read too,
without executing pickled code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_json
from ktransformers.ground.options.placement import STRATEGIES


class RoutingCounter:
    """Rows of each expert by module name, until `close`."""

    def __init__(self, model: nn.Module) -> None:
        self.counts: dict[str, Row] = {}
        self._handles = []
        for name, module in expert_modules(model).items():
            self._handles.append(module.register_forward_pre_hook(self._counting(name, _experts(module))))

    def _counting(self, name: str, experts: int) -> Any:
        self.counts[name] = np.zeros(experts, np.int64)

        def count(module: nn.Module, args: tuple[Any, ...]) -> None:
            ids = args[1].detach().cpu().numpy().reshape(-1)
            self.counts[name] += np.bincount(ids[(ids >= 0) & (ids < experts)], minlength=experts)

        return count

    def statistics(self) -> tuple[list[str], list[Row]]:
        """Names of the modules, and the rows of each expert of each."""
        return list(self.counts), list(self.counts.values())

    def reset(self) -> None:
        for row in self.counts.values():
            row[:] = 0

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _experts(module: Any) -> int:
    kt = packed_experts(module)
    return int(module.num_experts if kt is None else kt.contract.shape.num_experts)


SEED = 42

Row = NDArray[np.int64]  # [experts]
Counts = NDArray[np.int64]  # [layers, experts]


def budget(layers: int, experts: int, expert_bytes: int, *, count: int = 0, ratio: float = 0.0, size: int = 0) -> int:
    """Experts in all layers together: `count` per layer, a `ratio` of all (wins over `count`), or `size` bytes."""
    if not 0 <= ratio <= 1:
        raise InputError("gpu_experts_ratio", ratio, "a number from 0 to 1")
    if not 0 <= count <= experts:
        raise InputError("num_gpu_experts", count, f"0 to {experts}, the experts of a layer")
    if ratio:
        return round(ratio * layers * experts)
    if count:
        return layers * count
    return min(layers * experts, size // expert_bytes)


def choose(strategy: str, total: int, layers: int, experts: int, counts: Counts | None = None) -> list[tuple[int, ...]]:
    """Residents of each layer, in order."""
    if strategy not in STRATEGIES:
        raise InputError("expert_placement_strategy", strategy, "one of " + ", ".join(STRATEGIES))
    total = min(total, layers * experts)
    chosen = np.zeros((layers, experts), bool)
    if strategy == "uniform":
        for layer in range(layers):
            chosen[layer, : total // layers + (layer < total % layers)] = True
    elif strategy == "front-loading":
        chosen.reshape(-1)[:total] = True
    elif strategy == "random":
        chosen.reshape(-1)[np.random.default_rng(SEED).permutation(layers * experts)[:total]] = True
    else:
        if counts is None or counts.shape != (layers, experts):
            given = "none" if counts is None else f"shape {list(counts.shape)}"
            raise InputError(
                "statistics", given, f"[{layers}, {experts}] for frequency", "record them, or take uniform"
            )
        chosen.reshape(-1)[np.argsort(-counts.reshape(-1), kind="stable")[:total]] = True
    return [tuple(np.flatnonzero(row).tolist()) for row in chosen]


def save_counts(path: Path, names: Sequence[str], counts: Sequence[Row] | Counts) -> None:
    """`.json`, or safetensors under any other name."""
    if path.suffix == ".json":
        write_json(path, {name: row.tolist() for name, row in zip(names, counts, strict=True)})
        return
    from safetensors.numpy import save_file

    draft = path.with_name(path.name + ".part")
    save_file({name: np.ascontiguousarray(row) for name, row in zip(names, counts, strict=True)}, str(draft))
    draft.replace(path)


def load_counts(path: Path, names: Sequence[str], experts: int | None = None) -> list[Row]:
    """Counts of these layers; `experts`: the number per layer to check for, if given."""
    if not path.is_file():
        raise InputError("statistics", path, "a file that exists")
    counts = _logical_count(path, names) if path.suffix in (".pt", ".pth") else _by_name(path, names)
    for row in counts:
        if experts is not None and len(row) != experts:
            raise InputError(str(path), f"counts of {len(row)} experts", f"{experts}, as the model has")
    return counts


def _logical_count(path: Path, names: Sequence[str]) -> list[Row]:
    """The file counts all decoder layers, dense ones included, so a layer's row is the number in its name; a file with
    only the layers of experts has them in order."""
    import pickle

    import torch

    try:
        # weights_only: only tensors and plain containers are unpickled.
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            str(path), f"no file of tensors alone ({reason})", "logical_count as torch.save wrote it"
        ) from (error)
    table = loaded.get("logical_count") if isinstance(loaded, dict) else loaded
    if not isinstance(table, torch.Tensor) or table.dim() not in (2, 3):
        raise InputError(str(path), type(table).__name__, "logical_count, [buffer, layers, experts]")
    table_of_layers: Counts = (table.sum(0) if table.dim() == 3 else table).to(torch.int64).numpy()
    if len(table_of_layers) == len(names):
        return list(table_of_layers)
    numbers = [layer_number(name) for name in names]
    if any(number is None or number >= len(table_of_layers) for number in numbers):
        raise InputError(
            str(path), f"counts of {len(table_of_layers)} layers", f"those of {len(names)} layers of experts"
        )
    return [table_of_layers[number] for number in numbers if number is not None]


def layer_number(name: str) -> int | None:
    """Number of the decoder layer that a module belongs to."""
    match = re.search(r"\.(\d+)\.", f".{name}.")
    return int(match[1]) if match else None


def _by_name(path: Path, names: Sequence[str]) -> list[Row]:
    if path.suffix == ".json":
        try:
            counts = {name: np.asarray(row, np.int64) for name, row in json.loads(path.read_text()).items()}
        except (ValueError, AttributeError) as error:
            raise InputError(str(path), str(error), "an object of lists of numbers") from error
    else:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            counts = load_file(str(path))
        except SafetensorError as error:
            raise InputError(str(path), str(error), "a safetensors file of counts") from error
    missing = [name for name in names if name not in counts]
    if missing:
        raise InputError(
            str(path),
            f"no counts of {missing[0]}",
            f"counts of {len(names)} layers",
            "record them with kt_record_experts",
        )
    return [counts[name] for name in names]
