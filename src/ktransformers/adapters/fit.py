"""Ranks and scalings as a dialect wants them, with the delta unchanged.

A rank grows by zeros. A scaling is changed by its inverse in B: exact by powers of two, otherwise in f32, whose
rounding (one part in 2^24) is the only one that any conversion makes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ktransformers.adapters.lora import Adapter, Experts, LoraPair, Module, PairForm


def is_power_of_two(ratio: float) -> bool:
    return math.frexp(ratio)[0] == 0.5


def refit_form(form: PairForm, rank: int, scaling: float) -> PairForm:
    exact = scaling == form.scaling or is_power_of_two(form.scaling / scaling)
    dtype = form.dtype if exact else torch.promote_types(form.dtype, torch.float32)
    return replace(form, rank=rank, scaling=scaling, dtype=dtype)


def refit_pair(pair: LoraPair, form: PairForm) -> LoraPair:
    """The pair as `form` says: rank padded, scaling folded into B."""
    a, b = pair.a, pair.b
    if pair.scaling != form.scaling:
        b = (b.double() * (pair.scaling / form.scaling)).to(form.dtype)
    lack = form.rank - pair.rank
    if lack:
        a = torch.cat([a, a.new_zeros(*a.shape[:-2], lack, a.shape[-1])], dim=-2)
        b = torch.cat([b, b.new_zeros(*b.shape[:-1], lack)], dim=-1)
    return LoraPair(a, b, form.scaling)


def refit_adapter(adapter: Adapter, wanted: Callable[[str, PairForm], PairForm]) -> Adapter:
    """Every pair as `wanted(role, form)` says; the role of a module that is no expert is ""."""
    experts = tuple(_experts(layer, wanted) for layer in adapter.experts)
    return replace(adapter, experts=experts, modules=tuple(_module(module, wanted) for module in adapter.modules))


def _experts(layer: Experts, wanted: Callable[[str, PairForm], PairForm]) -> Experts:
    forms = {role: wanted(role, form) for role, form in layer.forms.items()}

    def read() -> Mapping[str, LoraPair]:
        return {role: refit_pair(pair, forms[role]) for role, pair in layer.read().items()}

    return replace(layer, forms=forms, read=read)


def _module(module: Module, wanted: Callable[[str, PairForm], PairForm]) -> Module:
    form = wanted("", module.form)
    return replace(module, form=form, read=lambda: refit_pair(module.read(), form))


def most_common_scaling(adapter: Adapter) -> float:
    """The scaling that most expert matrices have, or most modules where there are no experts."""
    experts = [form.scaling for layer in adapter.experts for form in layer.forms.values()]
    found = Counter(experts or [module.form.scaling for module in adapter.modules])
    return found.most_common(1)[0][0] if found else 1.0


def make_uniform(adapter: Adapter) -> Adapter:
    """One rank and one scaling for everything, for readers that know no patterns."""
    rank = max((form.rank for form in adapter.forms()), default=1)
    scaling = most_common_scaling(adapter)
    return refit_adapter(adapter, lambda _, form: refit_form(form, rank, scaling))


def survives_dtype(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the numbers survive the dtype."""
    return tensor.dtype == dtype or bool(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor))
