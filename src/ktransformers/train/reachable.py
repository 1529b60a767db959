"""Which of the targeted modules can be trained: found by one small forward and backward pass before the adapter exists.

A linear module may be named like any other and still not take LoRA: its output does not reach the loss (an indexer
selects keys without gradients), the model uses its weight without calling it, its forward is not a product with its
weight (grouped projections), or PEFT refuses it for this architecture. Such modules would fail in the first step, or
after the last one for want of a gradient. They are left out of `all` and of names that also match other modules; a name
that matches only such modules is an error. What the data did not reach in a whole run (keys that are compressed by the
hundred, in shorter rows) is removed from the adapter when it is saved, because it would claim more than was trained.

A dry run has no weights. It passes tensors without numbers through the model (`predict_targets`), which tells what the
loss depends on; a gradient that is always zero, or a forward that has the shape of a product and is none, is found when
the run starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import linear
from transformers import PreTrainedModel

from ktransformers.adapters.comparison import evaluating
from ktransformers.experts.contract import expert_modules
from ktransformers.experts.peft_lora import refused_modules
from ktransformers.ground.errors import InputError
from ktransformers.modeling.substitute import Restore
from ktransformers.train.callbacks import GradientCheck
from ktransformers.train.settings import LoraSettings
from ktransformers.train.targets import Targets, find_targets

PROBE_TOKENS = 24
LONG_PROBE_TOKENS = 192  # for modules that nothing depended on: keys may be compressed by the hundred
MAX_PRODUCT_ERROR = 0.05  # relative, of the module's output against the product with its weight, in 16 bits too
NO_GRADIENT = "nothing that is learned depends on them"
WITHOUT_GRADIENTS = "the model calls them without gradients"
NOT_CALLED = "the model uses their weights without calling them"
NOT_LINEAR = "their forward is not a product with their weight"


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, without gradients of the model's own parameters."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        with evaluating(model), torch.enable_grad():
            yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _is_product(module: nn.Linear, given: Tensor, output: Tensor) -> bool:
    if given.shape[-1] != module.in_features or output.shape != (*given.shape[:-1], module.out_features):
        return False
    if isinstance(output, FakeTensor):
        return True
    with torch.no_grad():
        expected = linear(given, module.weight, module.bias).float()
        error = (output.float() - expected).norm() / expected.norm().clamp(min=1e-12)
    return bool(error <= MAX_PRODUCT_ERROR)


def _untrainable(model: Any, modules: dict[str, nn.Linear], length: int) -> dict[str, str]:
    """Module -> why it cannot be trained, found by a forward and a backward pass over so many tokens."""
    reasons = dict.fromkeys(modules, NOT_CALLED)
    probes: dict[str, Tensor] = {}  # zero, added to a module's output, whose gradient they get

    def add_probe(name: str, module: nn.Linear, args: tuple[Any, ...], output: Any) -> Any:
        if not args or not isinstance(output, Tensor) or not _is_product(module, args[0], output):
            reasons[name] = NOT_LINEAR
            return output
        if reasons[name] == NOT_CALLED:
            reasons[name] = NO_GRADIENT if torch.is_grad_enabled() else WITHOUT_GRADIENTS
            probes[name] = output.new_zeros(output.shape[-1]).requires_grad_()
        return output + probes[name] if name in probes else output

    def watch(name: str, module: nn.Linear) -> Any:
        return module.register_forward_hook(lambda _, args, output: add_probe(name, module, args, output))

    handles = [watch(name, module) for name, module in modules.items()]
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = torch.tensor([[(7 * at + 3) % vocabulary for at in range(length)]])
    try:
        with _frozen(model):
            logits = model(input_ids=tokens.to(next(model.parameters()).device), use_cache=False).logits
            if logits.requires_grad:
                logits.float().log_softmax(-1)[..., 0].sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    for name, probe in probes.items():
        if reasons[name] == NO_GRADIENT and probe.grad is not None and _is_nonzero(probe.grad):
            del reasons[name]
    return reasons


def _is_nonzero(gradient: Tensor) -> bool:
    return isinstance(gradient, FakeTensor) or bool(gradient.ne(0).any())


def _describe(reasons: dict[str, str]) -> str:
    parts = []
    for reason in dict.fromkeys(reasons.values()):
        counts = Counter(name.rpartition(".")[2] for name, given in reasons.items() if given == reason)
        parts.append(f"{', '.join(f'{name} ({count})' for name, count in counts.items())}: {reason}")
    return "; ".join(parts)


@contextmanager
def _experts_without_routing(model: nn.Module) -> Iterator[None]:
    """Experts that depend on the same tensors as before, and not on which expert a token goes to."""

    def forward(hidden: Tensor, ids: Tensor, weights: Tensor, *others: Any, **options: Any) -> Tensor:
        return hidden * weights.sum(-1, keepdim=True).to(hidden.dtype)

    with Restore() as restore:
        for module in expert_modules(model).values():
            restore.put(module, "forward", forward)
        yield


def predict_targets(model: PreTrainedModel, settings: LoraSettings) -> tuple[Targets, list[str]]:
    """As `trainable_targets`, of a model without numbers (`build_fake_model` in `train/model.py`). A family that cannot
    be called without numbers keeps all its targets, with a note."""
    parameter: Any = next(model.parameters())
    try:
        with parameter.fake_mode, _experts_without_routing(model):
            return trainable_targets(model, settings)
    except InputError:
        raise
    except Exception as error:  # models compute anything, and some need numbers for it
        note = f"modules that cannot be trained are found when the run starts ({type(error).__name__} without weights)"
        return find_targets(model, settings), [note]


def trainable_targets(model: PreTrainedModel, settings: LoraSettings) -> tuple[Targets, list[str]]:
    """The targets that can be trained, and a note on those that were left out. The model is loaded, without adapter."""
    targets = find_targets(model, settings)
    linears = {name: model.get_submodule(name) for name in targets.modules}
    modules = {name: module for name, module in linears.items() if isinstance(module, nn.Linear)}
    if not modules:
        return targets, []
    reasons = _untrainable(model, modules, PROBE_TOKENS)
    silent = {name: modules[name] for name, reason in reasons.items() if reason == NO_GRADIENT}
    if silent:
        reasons = {name: reason for name, reason in reasons.items() if name not in silent}
        reasons |= _untrainable(model, silent, LONG_PROBE_TOKENS)
    reasons |= dict.fromkeys(refused_modules(model, targets.modules), "PEFT refuses them for this architecture")
    if not reasons:
        return targets, []
    kept = tuple(name for name in targets.modules if name not in reasons)
    for target in settings.lora_target:
        single = find_targets(model, settings.model_copy(update={"lora_target": [target]}))
        if single.modules and not single.parameters and not set(single.modules) & set(kept):
            raise InputError("lora_target", f"{target} ({_describe(reasons)})", "modules that can be trained")
    return replace(targets, modules=kept), [f"left out of lora_target: {_describe(reasons)}"]


def drop_untrained(model: Any, gradient_check: GradientCheck) -> list[str]:
    """Removes the adapters of linear modules whose B never got a gradient, and is still zero; returns a note on them.
    Without any that were trained nothing is removed."""
    untrained = [
        name
        for name, trace in gradient_check.traces.items()
        if not trace.b_seen and trace.experts is None and hasattr(model.get_submodule(name), "base_layer")
    ]
    if not untrained or not any(trace.b_seen for trace in gradient_check.traces.values()):
        return []
    for name in untrained:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, model.get_submodule(name).base_layer)
        del gradient_check.traces[name], gradient_check.pairs[name]
    config = model.peft_config["default"]
    remaining = [name.removeprefix("base_model.model.") for name in gradient_check.traces]
    config.target_modules = {
        name for target in config.target_modules for name in remaining if f".{name}".endswith(f".{target}")
    }
    parameters = []
    for target in config.target_parameters or ():  # linear modules by their weight, and matrices of experts
        module = f".{target.removesuffix('.weight')}"
        linear_names = [name for name in remaining if f".{name}".endswith(module)]
        dropped = any(f".{name}".endswith(module) for name in untrained)
        parameters += [f"{name}.weight" for name in linear_names] if dropped else [target]
    config.target_parameters = parameters or None
    counts = Counter(name.rpartition(".")[2] for name in untrained)
    listed = ", ".join(f"{name} ({count})" for name, count in counts.items())
    return [f"not in the adapter, because no row of the data reached them: {listed}"]
