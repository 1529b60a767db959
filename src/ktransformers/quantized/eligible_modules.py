"""Which modules of a model may be quantized, by what they are for: linear layers and embeddings,
but not routers, gates and indexers, whose rounding would change which experts or keys are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeGuard

from torch import nn

# Ends of the names of modules that choose among experts.
ROUTERS = ("gate", "router")


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """A linear layer whose product is `F.linear` of its weight: `nn.Linear`, or a class that does not change that."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def quantizable_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Linear layers that may be quantized, by what they are for, whatever their size."""
    for name, module in quantizable_modules(model):
        if isinstance(module, nn.Linear):
            yield name, module


def quantizable_modules(model: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Embedding]]:
    """Modules whose weights may be quantized."""
    routers = _router_modules(model)
    for prefix, module in model.named_modules():
        if hasattr(module, "experts") or module in routers:  # linear layers next to experts are the router and gates
            continue
        if hasattr(module, "index_topk"):  # an indexer, which chooses keys
            continue
        for name, child in module.named_children():
            if child not in routers and (is_plain_linear(child) or isinstance(child, nn.Embedding)):
                yield f"{prefix}.{name}" if prefix else name, child


def _router_modules(model: nn.Module) -> set[nn.Module]:
    """With everything in them: some have linear layers of their own, and some experts are not named so."""
    found = [
        child
        for block in model.modules()
        for name, child in block.named_children()
        if name.startswith("router") or (hasattr(block, "experts") and name.endswith(ROUTERS))
    ]
    return {module for router in found for module in router.modules()}
