"""Counts routed tokens of a model without a placement engine, by a hook at every layer of experts. The counts are
statistics from which a later run, or another machine, places residents. A placement engine counts by itself."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from ktransformers.experts.backend import packed_experts
from ktransformers.experts.contract import expert_modules
from ktransformers.place.residents import Row


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
