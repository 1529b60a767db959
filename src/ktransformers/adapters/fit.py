"""Changes ranks and scalings to what a format supports, with the delta unchanged.

A rank grows by zero padding. A change of scaling is compensated in B: exact for powers of two, otherwise in f32, whose
rounding (one part in 2^24) is the only one that a conversion makes. If a dtype was asked for (`PairForm.rounds`), B is
scaled in float64 and rounded to it once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ktransformers.adapters.lora import Adapter, Experts, Module, PairForm
from ktransformers.experts.lora import LoraPair


def is_power_of_two(ratio: float) -> bool:
    return math.frexp(ratio)[0] == 0.5


def refit_form(form: PairForm, rank: int, scaling: float) -> PairForm:
    exact = scaling == form.scaling or is_power_of_two(form.scaling / scaling)
    dtype = form.dtype if exact or form.rounds else torch.promote_types(form.dtype, torch.float32)
    return replace(form, rank=rank, scaling=scaling, dtype=dtype)


def refit_pair(pair: LoraPair, form: PairForm) -> LoraPair:
    """The pair in the given form: rank padded, scaling folded into B."""
    a, b = pair.a, pair.b
    if pair.scaling != form.scaling:
        b = (b.double() * (pair.scaling / form.scaling)).to(form.dtype)
    padding = form.rank - pair.rank
    if padding:
        a = torch.cat([a, a.new_zeros(*a.shape[:-2], padding, a.shape[-1])], dim=-2)
        b = torch.cat([b, b.new_zeros(*b.shape[:-1], padding)], dim=-1)
    return LoraPair(a, b, form.scaling)


def refit_adapter(adapter: Adapter, target_form: Callable[[str, PairForm], PairForm]) -> Adapter:
    """Every pair in the form `target_form(role, form)`; the role of a module that is not an expert is ""."""
    experts = tuple(_experts(layer, target_form) for layer in adapter.experts)
    return replace(adapter, experts=experts, modules=tuple(_module(module, target_form) for module in adapter.modules))


def _experts(layer: Experts, target_form: Callable[[str, PairForm], PairForm]) -> Experts:
    forms = {role: target_form(role, form) for role, form in layer.forms.items()}

    def read() -> Mapping[str, LoraPair]:
        return {role: refit_pair(pair, forms[role]) for role, pair in layer.read().items()}

    return replace(layer, forms=forms, read=read)


def _module(module: Module, target_form: Callable[[str, PairForm], PairForm]) -> Module:
    form = target_form("", module.form)
    return replace(module, form=form, read=lambda: refit_pair(module.read(), form))


def most_common_scaling(adapter: Adapter) -> float:
    """The most common scaling of the expert matrices, or of the modules if there are no experts."""
    experts = [form.scaling for layer in adapter.experts for form in layer.forms.values()]
    counts = Counter(experts or [module.form.scaling for module in adapter.modules])
    return counts.most_common(1)[0][0] if counts else 1.0


def make_uniform(adapter: Adapter) -> Adapter:
    """One rank and one scaling for everything, for readers without rank patterns."""
    rank = max((form.rank for form in adapter.forms()), default=1)
    scaling = most_common_scaling(adapter)
    return refit_adapter(adapter, lambda _, form: refit_form(form, rank, scaling))


def survives_dtype(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether a cast to `dtype` loses nothing."""
    return tensor.dtype == dtype or bool(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor))
