"""`BaseInjectedModule`, what every operator of a rule derives from, and the three steps of an operator's life.

1. `check(match)`, before anything is loaded, on a model without numbers: raises InputError for a module or keyword that
   the operator cannot serve, and says in what format its weights will be (`Outcome`).
2. `inject(match, loader, config)`, after stock transformers has loaded the model: returns the module that takes the
   place of the matched one. By default that is an object of the class, whose `load` is called.
3. `forward`, which by default is that of the original module.

An injected module shares the dictionaries of parameters, buffers and children with the original: names in state dicts
and adapters stay the same, a child that a later rule or PEFT replaces is the child that the original's forward calls,
and `to` moves both. Attributes that it lacks are the original's. The file has the name that operators written for
KTransformers import.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktransformers.operators.loader import Loader
from ktransformers.quantized.eligible_modules import quantizable_linears

SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class RuledModel:
    """The model that rules are applied to, with what operators ask about all of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @functools.cached_property
    def quantizable_names(self) -> frozenset[str]:
        """Linear layers that may be quantized: not routers and indexers."""
        return frozenset(name for name, _ in quantizable_linears(self.model))


@dataclass(frozen=True)
class Outcome:
    """What becomes of a matched module. `format` is that of its weights, None: as loaded. `keeps_stock`: the module
    stays the stock one, which computes what the operator stands for. `note` is of this module, `general` of all that
    have the rule."""

    format: str | None = None
    keeps_stock: bool = False
    note: str = ""
    general: tuple[str, ...] = ()


@dataclass(frozen=True)
class Match:
    """A module that a rule has matched."""

    where: str  # file and entry, for errors
    name: str
    module: nn.Module
    model: RuledModel
    arguments: Mapping[str, Any]  # keyword arguments of the rule
    device: str  # that the module is going to be on: "cpu", "cuda" or "cuda:N"
    outcome: Outcome = Outcome()  # that `check` returned; for `inject`

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")


class BaseInjectedModule(nn.Module):
    def __init__(
        self,
        key: str,
        gguf_loader: Loader,
        config: PreTrainedConfig,
        orig_module: nn.Module | None = None,
        generate_device: str = "cuda",
        prefill_device: str | None = None,
        **kwargs: Any,
    ) -> None:
        nn.Module.__init__(self)
        self.__dict__["orig_module"] = orig_module  # not a child: its children are shared
        if orig_module is not None:
            for name in SHARED:
                self.__dict__[name] = getattr(orig_module, name)
            self.training = orig_module.training
        self.key, self.gguf_loader, self.config, self.kwargs = key, gguf_loader, config, kwargs
        self.generate_device, self.prefill_device = generate_device, prefill_device or generate_device
        self.device = generate_device
        self._unloaded: dict[str, torch.dtype] = {}  # parameters that `unload` has dropped
        self.device_of_weights = torch.device("cpu")  # that they were on

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("orig_module")
            if original is None:
                raise
            return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """A tensor in place of a parameter is a frozen parameter."""
        parameters = self.__dict__.get("_parameters", {})
        if name in parameters and isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value.detach(), requires_grad=False)
        super().__setattr__(name, value)

    def train(self, mode: bool = True) -> BaseInjectedModule:
        super().train(mode)
        if self.orig_module is not None:
            self.orig_module.training = mode
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.orig_module.forward(*args, **kwargs)

    def load(self) -> None:
        """Called once, with the model loaded; the weights of the original are this module's. After `unload` they are
        read from the files again."""
        for name, dtype in self._unloaded.items():
            self._parameters[name] = nn.Parameter(
                self.gguf_loader.load_tensor(f"{self.key}.{name}", self.device_of_weights, dtype), requires_grad=False
            )
        self._unloaded = {}

    def unload(self) -> None:
        """Drop the weights, which are the original's too."""
        held = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
        self._unloaded |= {name: parameter.dtype for name, parameter in held.items()}
        for name, parameter in held.items():
            self._parameters[name], self.device_of_weights = None, parameter.device

    @classmethod
    def check(cls, match: Match) -> Outcome:
        return Outcome()

    @classmethod
    def inject(cls, match: Match, loader: Loader, config: PreTrainedConfig) -> nn.Module:
        arguments = {name: value for name, value in match.arguments.items() if name != "generate_device"}
        module = cls(match.name, loader, config, match.module, generate_device=match.device, **arguments)
        with torch.no_grad():
            module.load()
        return module


class StockOperator(BaseInjectedModule):
    """An operator whose work the stock module or another part of this package does: the module stays as it is.
    `keywords` are those that its rules may give in addition to devices."""

    keywords: tuple[str, ...] = ()

    @classmethod
    def check(cls, match: Match) -> Outcome:
        return Outcome(keeps_stock=True)

    @classmethod
    def inject(cls, match: Match, loader: Loader, config: PreTrainedConfig) -> nn.Module:
        return match.module
