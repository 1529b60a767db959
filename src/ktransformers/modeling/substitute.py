"""Parts of a stock model replaced by code of ours that computes the same. No model family is named.

A `Substitution` has three steps. `recognise` finds what looks like it: parts, sizes, dtypes, a device, the parameters
of a forward; nothing is computed. `probe` calls the stock code with random or marked inputs, compares it with ours
(`matches`), and returns what ours has to know of it. None leaves the stock code in place, and so does an exception:
code that was not written for such inputs is another computation. `replace` puts ours into the model through a
`Restore`, which can put the stock code back.

Ours calls the stock code wherever it does not apply, for gradients or large batches for example. Replacements that can
only be probed with the arguments of a real call do so in their first one. ARCHITECTURE.md has the table of all
substitutions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ktransformers.ground.errors import InputError

log = logging.getLogger(__name__)

PROBE_ERRORS = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)
TWO_TOKENS = torch.tensor([[0, 1]])

Target = TypeVar("Target")
Found = TypeVar("Found")
Result = TypeVar("Result")


class Tolerance(NamedTuple):
    """Largest difference, relative by the norm of the whole tensor."""

    float32: float
    bits16: float


ROUNDING = Tolerance(1e-5, 1e-2)  # the same operations, rounded at other places
ABSORBED = Tolerance(1e-5, 2e-2)  # latent attention, whose products are also in another order
RECURRENCE = Tolerance(1e-4, 1e-2)  # a state after sums in another order


def matches(ours: Tensor, stock: object, tolerance: Tolerance = ROUNDING) -> bool:
    """Whether both have the same shape and dtype, and the same values within the tolerance."""
    if not isinstance(stock, Tensor) or ours.shape != stock.shape or ours.dtype != stock.dtype:
        return False
    limit = tolerance.float32 if stock.dtype == torch.float32 else tolerance.bits16
    return bool((ours.float() - stock.float()).norm() <= limit * stock.float().norm())


def random_numbers() -> Callable[..., Tensor]:
    """A function from a shape to normally distributed float32: the same numbers in every run and for every device."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


def attempt(call: Callable[[], Result | None]) -> Result | None:
    """What the call returns; None if the stock code or ours does not accept its arguments."""
    try:
        return call()
    except PROBE_ERRORS:
        return None


class Restore(ExitStack):
    """What was replaced. `close`, or the end of a `with`, puts the stock code back, the last replacement first."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute. One that belongs to the class of the owner, or to nobody, is deleted again."""
        if name in vars(owner) or (hasattr(owner, name) and not hasattr(type(owner), name)):
            self.callback(setattr, owner, name, getattr(owner, name))
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def put_attention(self, model: Any, implementation: str) -> None:
        self.callback(model.set_attn_implementation, model.config._attn_implementation)
        model.set_attn_implementation(implementation)


@dataclass(frozen=True)
class Substitution(Generic[Target, Found]):
    """`recognise` yields the parts of a model that look like it, modules as a rule, which the other two are given."""

    name: str
    recognise: Callable[[nn.Module], Iterable[Target]]
    probe: Callable[[Target], Found | None]
    replace: Callable[[Target, Found, Restore], None]

    def apply(self, model: nn.Module, restore: Restore | None = None) -> int:
        """Returns how many parts were replaced. Each is replaced before the next one is recognised."""
        recognised, replaced = 0, 0
        for target in self.recognise(model):
            with torch.no_grad():
                found = attempt(functools.partial(self.probe, target))
            if found is not None:
                self.replace(target, found, restore or Restore())
            recognised, replaced = recognised + 1, replaced + (found is not None)
        if recognised:
            log.debug("%s: %d of %d replaced", self.name, replaced, recognised)
        return replaced


def unprobed(target: object) -> bool:
    """The probe of a substitution that is recognised without a computation, or compared in its first call."""
    return True


def call_with_two_tokens(model: Any, expected: str) -> None:
    """For probes that look at what the modules of a model are given. `expected`: what a model is that can be called."""
    try:
        with torch.inference_mode():
            model(input_ids=TWO_TOKENS.to(next(model.parameters()).device), use_cache=False)
    except PROBE_ERRORS as error:
        raise InputError("model", f"{model.config.model_type} ({error})", expected) from error
