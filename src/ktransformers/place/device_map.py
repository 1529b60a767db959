"""A model's layers on several GPUs, one process: who is where, and hidden states that follow.

Decoder layers are spread in equal runs, as the plan counts them; embedding, last norm and head are on the first GPU, so
that tokens go in and logits come out where everybody looks for them. Experts stay in host memory; each layer's engine
is on its layer's GPU (`placement.attach`). The surprising decision: accelerate's dispatch is not used. It takes "cpu"
in a map for weights that are to be brought to a GPU, where a rule means that they are computed there; and what is left
is one hook for each layer, which brings its tensors along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules


@dataclass(frozen=True)
class DecoderLayers:
    """Where a model's decoder layers are."""

    name: str  # of the list
    count: int

    def layer(self, number: int) -> str:
        return f"{self.name}.{number}"

    def number_of(self, name: str) -> int | None:
        """The decoder layer that a module belongs to."""
        head, _, rest = name.partition(f"{self.name}.")
        word = rest.partition(".")[0]
        return int(word) if not head and word.isdigit() else None


def find_stack(model: nn.Module) -> DecoderLayers:
    """The longest list of modules that has the experts in it; of a model without any, the longest."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    experts = list(expert_modules(model))
    holding = {name: size for name, size in lists.items() if any(one.startswith(f"{name}.") for one in experts)}
    found = holding or lists
    if not found:
        raise InputError("layers", f"none in {type(model).__name__}", "a list of decoder layers")
    name = max(found, key=lambda name: found[name])
    return DecoderLayers(name, found[name])


def spread(layers: int, devices: Sequence[str]) -> list[str]:
    """A device for each layer: runs of equal length, the shorter ones first."""
    ends = [layers * (place + 1) // len(devices) for place in range(len(devices))]
    return [next(device for device, end in zip(devices, ends, strict=True) if number < end) for number in range(layers)]


@dataclass(frozen=True)
class DeviceMap:
    """Devices by place: of the layers, of embedding and head, and what rules say of layers of experts."""

    layers: tuple[str, ...]
    embedding: str
    head: str
    experts: Mapping[str, str]  # module -> "cpu", or a GPU that holds all of its experts

    @property
    def several(self) -> bool:
        return len({*self.layers, self.embedding, self.head}) > 1

    @property
    def whole(self) -> list[str]:
        """Layers of experts that are resident as they are."""
        return [name for name, device in self.experts.items() if device != "cpu"]


def scatter(model: nn.Module, homes: DeviceMap) -> None:
    """Move everything but the experts, and let hidden states follow."""
    asked: Any = model
    stack = find_stack(model)
    layers: Any = model.get_submodule(stack.name)
    inputs, outputs = asked.get_input_embeddings(), asked.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    names = {module: name for name, module in model.named_modules()}
    homes_of: dict[nn.Module, str] = {layers[number]: device for number, device in enumerate(homes.layers)}
    homes_of[inputs] = homes.embedding
    if outputs is not None:
        homes_of[outputs] = homes.embedding if tied else homes.head
    inside = {module for placed in homes_of for module in placed.modules()}
    for module in names:  # what is neither a layer's nor an end is with the first layer
        if module not in inside:
            _move_own(module, torch.device(homes.layers[0]))
            if not list(module.children()):
                homes_of[module] = homes.layers[0]
    for module, device in homes_of.items():
        module.to(device)
        module.register_forward_pre_hook(_bring(torch.device(device)), with_kwargs=True)
    if homes.several:  # what the HF Trainer asks before it moves a model
        model.hf_device_map = {names[module]: device for module, device in homes_of.items()}  # type: ignore[assignment]


def _move_own(module: nn.Module, device: torch.device) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for word, buffer in module.named_buffers(recurse=False):
        setattr(module, word, buffer.to(device))


def _bring(device: torch.device) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _to(args, device), _to(kwargs, device)

    return hook


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=device.type == "cuda")
    if type(value) in (tuple, list):
        return type(value)(_to(one, device) for one in value)
    if type(value) is dict:
        return {name: _to(one, device) for name, one in value.items()}
    return value  # caches and the like know their devices


def visible(count: int) -> list[str]:
    """The first `count` GPUs of this process."""
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count > there:
        raise InputError("GPUs", f"{count} asked for", f"at most {there}, which are here", "leave it out to use one")
    return [f"cuda:{place}" for place in range(count)]
