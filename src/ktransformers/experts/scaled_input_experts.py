"""Experts whose input, not output, is multiplied by the router's score (Llama 4), for the experts interface.

Such a block computes the sum of E_e(score_e x) over the chosen experts e. transformers' module for it has the
parameters of the contract (`contract.py`), transposed, but none of its attributes: it takes the rows of all tokens for
all experts, scaled by a score that is 0 for those that were not chosen, and is not dispatched. `adapt_experts` gives
the modules of a model the attributes of the contract, and their blocks a forward that calls the experts once for each
choice with `score x`, the chosen ids and weights of 1. E_e(0) is 0, so both are the same sum.

A block is recognised by its parts (`router`, `experts`, `shared_expert`) and by numbers: a small copy of it is computed
both ways. Experts are called with one row per token, as in every other family, so LoRA by request needs nothing else.
Adapters are those of stock PEFT on the stock module, whose A and B are exchanged (`Contract.lora_exchanged`).
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation

from ktransformers.experts.contract import UNMARKED_TRANSPOSED, is_experts

PARTS = ("router", "experts", "shared_expert")
PARAMETERS = {"gate_up_proj", "down_proj"}
SMALL = {"hidden_size": 12, "intermediate_size": 8, "num_local_experts": 5}  # of the copy
PROBED_ROWS = 16
MAX_ERROR = 1e-10  # relative, in float64


def adapt_experts(model: nn.Module) -> int:
    """Puts the experts of all such blocks behind the experts interface; returns how many there are. The parameters may
    be on the meta device."""
    blocks: list[Any] = [module for module in model.modules() if _may_scale_input(module)]
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    adapted = 0
    for block in blocks:
        config = next((one for one in configs if _fits(one, block)), None)
        if config is not None and _computes_the_same(type(block), type(block.experts), config, int(block.top_k)):
            _adapt(block, config)
            adapted += 1
    return adapted


def _may_scale_input(module: nn.Module) -> bool:
    block: Any = module
    if not all(isinstance(getattr(block, part, None), nn.Module) for part in PARTS):
        return False
    if type(getattr(block, "top_k", None)) is not int or is_experts(block.experts):
        return False
    return {name for name, _ in block.experts.named_parameters()} == PARAMETERS and hasattr(block.experts, "act_fn")


def _fits(config: Any, block: Any) -> bool:
    """Whether it is the configuration that a block is made of."""
    sizes = tuple(getattr(config, name, None) for name in ("num_local_experts", "hidden_size"))
    return sizes == tuple(block.experts.gate_up_proj.shape[:2])


@functools.cache
def _dispatched(experts_class: Any) -> Any:
    """The class with the experts interface. Its own forward computes chosen experts one after the other."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            rows, choices = torch.where(top_k_index == expert)
            gated = self._apply_gate(hidden_states[rows] @ self.gate_up_proj[expert])
            products = (gated @ self.down_proj[expert]) * top_k_weights[rows, choices, None]
            out = out.index_add(0, rows, products.to(out.dtype))
        return out

    made = type(experts_class.__name__, (experts_class,), {"forward": forward})
    return use_experts_implementation(made)


@functools.cache
def _routing(block_class: Any) -> Any:
    """The class with a forward that calls the experts for chosen tokens only."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = hidden_states.reshape(-1, hidden_states.shape[-1])
        scores, logits = self.router(hidden)
        chosen = torch.topk(logits, self.top_k, dim=1).indices  # as the router chooses
        ones = scores.new_ones(hidden.shape[0], 1)
        out = self.shared_expert(hidden)
        for column in range(self.top_k):
            choice = chosen[:, column : column + 1]
            out = out + self.experts(hidden * scores.gather(1, choice), choice, ones)
        return out, logits

    return type(block_class.__name__, (block_class,), {"forward": forward})


def _adapt(block: Any, config: Any) -> None:
    experts: Any = block.experts
    experts.__class__ = _dispatched(experts.__class__)
    experts.config = config
    experts.has_gate, experts.has_bias, experts.has_post_expert_norm = True, False, False
    # The stock module has no `is_transposed`, and adapters of stock PEFT for it are those of a module without.
    experts.is_transposed, experts.is_concatenated, experts._is_expert_parallel = False, True, False
    setattr(experts, UNMARKED_TRANSPOSED, True)
    block.__class__ = _routing(block.__class__)


def _computes_the_same(block_class: type[nn.Module], experts_class: type[nn.Module], config: Any, top_k: int) -> bool:
    """Whether a small block of these classes has the same outputs and gradients after it was adapted."""
    small = copy.deepcopy(config)
    for name, size in (SMALL | {"num_experts_per_tok": min(top_k, SMALL["num_local_experts"])}).items():
        setattr(small, name, size)
    small._experts_implementation_internal = "eager"
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        block: Any = block_class(small).double()
        if type(block.experts) is not experts_class:
            return False
        for parameter in block.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64)
        rows = torch.randn(PROBED_ROWS, SMALL["hidden_size"], dtype=torch.float64)
        results = []
        for adapted in (False, True):
            if adapted:
                _adapt(block, small)
            given = rows.clone().requires_grad_()
            output = block(given)[0].reshape(rows.shape)
            output.square().sum().backward()
            results.append((output.detach(), given.grad))
    return all(float((a - b).norm()) <= MAX_ERROR * float(b.norm()) for a, b in zip(*results, strict=True))
