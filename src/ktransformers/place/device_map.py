"""The layers of a model on several GPUs in one process: a device per module, and hooks that move hidden states.

Decoder layers are spread in equal runs, as the plan counts them; embedding, last norm and head are on the first GPU, so
that token ids enter and logits leave on the same device. Experts stay in host memory; each layer's engine is on its
layer's GPU (`place/placement.py`). accelerate's dispatch is not used: it reads "cpu" in a device map as weights to be
uploaded to a GPU, where a rule of ours means that they are computed on the CPU; and what is left is one hook per layer
that moves its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.experts.contract import expert_modules
from ktransformers.ground import system
from ktransformers.ground.errors import InputError
from ktransformers.quantized.weight import keep_embedding_on_host


@dataclass(frozen=True)
class DecoderLayers:
    """The module list of a model's decoder layers."""

    name: str  # of the module list
    count: int

    def layer(self, number: int) -> str:
        return f"{self.name}.{number}"

    def number_of(self, name: str) -> int | None:
        """Number of the decoder layer that a module belongs to."""
        head, _, rest = name.partition(f"{self.name}.")
        index = rest.partition(".")[0]
        return int(index) if not head and index.isdigit() else None


def find_decoder_layers(model: nn.Module) -> DecoderLayers:
    """The longest module list that contains experts; in a model without experts, the longest."""
    lists = {name: len(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    experts = list(expert_modules(model))
    with_experts = {name: size for name, size in lists.items() if any(item.startswith(f"{name}.") for item in experts)}
    candidates = with_experts or lists
    if not candidates:
        raise InputError("layers", f"none in {type(model).__name__}", "a module list of decoder layers")
    name = max(candidates, key=lambda name: candidates[name])
    return DecoderLayers(name, candidates[name])


def spread_layers(layers: int, devices: Sequence[str]) -> list[str]:
    """A device for each layer, in runs of equal length, the shorter runs first."""
    ends = [layers * (place + 1) // len(devices) for place in range(len(devices))]
    return [next(device for device, end in zip(devices, ends, strict=True) if number < end) for number in range(layers)]


@dataclass(frozen=True)
class DeviceMap:
    """Devices of the decoder layers, of embedding and head, and of layers of experts that a rule names."""

    layers: tuple[str, ...]
    embedding: str
    head: str
    experts: Mapping[str, str]  # module name -> "cpu", or the GPU on which all of its experts are resident

    @property
    def spans_devices(self) -> bool:
        return len({*self.layers, self.embedding, self.head}) > 1

    @property
    def gpus(self) -> tuple[str, ...]:
        """The devices of dense (non-expert) weights, in the order of their names."""
        return tuple(sorted(device for device in {*self.layers, self.embedding, self.head} if device != "cpu"))

    @property
    def resident_layers(self) -> list[str]:
        """Layers of experts that a rule makes resident with all of their experts."""
        return [name for name, device in self.experts.items() if device != "cpu"]


def move_to_devices(model: nn.Module, device_map: DeviceMap) -> None:
    """Move everything but the experts, and add hooks that move the inputs of each module. A head that shares the
    embedding's weight takes it to its own device. An embedding on the CPU before layers on a GPU has its table in host
    memory and is looked up on that GPU (`quantized/host_rows.py`), so that token ids need not come back to the host."""
    transformer: Any = model
    decoder_layers = find_decoder_layers(model)
    layers: Any = model.get_submodule(decoder_layers.name)
    inputs, outputs = transformer.get_input_embeddings(), transformer.get_output_embeddings()
    embedding = device_map.head if shares_embedding(model) else device_map.embedding
    if embedding == "cpu" and device_map.layers[0] != "cpu" and keep_embedding_on_host(model, pin=True):
        embedding = device_map.layers[0]
    names = {module: name for name, module in model.named_modules()}
    device_of_module: dict[nn.Module, str] = {layers[number]: device for number, device in enumerate(device_map.layers)}
    device_of_module[inputs] = embedding
    if outputs is not None:
        device_of_module[outputs] = device_map.head
    placed_modules = {module for placed in device_of_module for module in placed.modules()}
    for module in names:  # other modules go to the first layer's device
        if module not in placed_modules:
            _move_own(module, torch.device(device_map.layers[0]))
            if not list(module.children()):
                device_of_module[module] = device_map.layers[0]
    # All on the CPU, or on the GPU that is current unless another is chosen.
    is_default = len(set(device_of_module.values())) == 1 and embedding in ("cpu", "cuda", "cuda:0")
    for module, device in device_of_module.items():
        module.to(device)
        module.register_forward_pre_hook(_move_inputs_hook(torch.device(device)), with_kwargs=True)
        if device.startswith("cuda") and not is_default:
            make_current(module, torch.device(device))
    if not is_default:  # the HF Trainer reads it before it moves a model
        model.hf_device_map = {names[module]: device for module, device in device_of_module.items()}  # type: ignore[assignment]


def shares_embedding(model: nn.Module) -> bool:
    """Whether the weight of the head is that of the input embedding."""
    transformer: Any = model
    outputs = transformer.get_output_embeddings()
    return outputs is not None and outputs.weight is transformer.get_input_embeddings().weight


def run_on(model: nn.Module, device: torch.device | str) -> None:
    """Of a model that was loaded to one device: a GPU other than the first is current while the model, its decoder, a
    layer or the head is called, in any thread."""
    if not torch.device(device).index:
        return
    transformer: Any = model
    layers: Any = model.get_submodule(find_decoder_layers(model).name)
    modules = [model, transformer.base_model, *layers, transformer.get_output_embeddings()]
    for module in dict.fromkeys(module for module in modules if module is not None):
        make_current(module, torch.device(device))


def _move_own(module: nn.Module, device: torch.device) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data = parameter.data.to(device)
    for index, buffer in module.named_buffers(recurse=False):
        setattr(module, index, buffer.to(device))


def make_current(module: nn.Module, device: torch.device) -> None:
    """While the module is called, its GPU is the current one: Triton launches kernels there, wherever tensors are."""
    entered: list[int] = []

    def enter(*_: Any) -> None:
        entered.append(torch.cuda.current_device())
        torch.cuda.set_device(device)

    def leave(*_: Any) -> None:
        if entered:  # none where an earlier hook has failed
            torch.cuda.set_device(entered.pop())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)


def _move_inputs_hook(device: torch.device) -> Any:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _to(args, device), _to(kwargs, device)

    return hook


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value if value.device == device else value.to(device, non_blocking=device.type == "cuda")
    if type(value) in (tuple, list):
        return type(value)(_to(item, device) for item in value)
    if type(value) is dict:
        return {name: _to(item, device) for name, item in value.items()}
    return value  # KV caches and the like have devices of their own


def visible_gpus(count: int) -> list[str]:
    """The first `count` GPUs of this process."""
    available = len(system.gpus())
    if count > available:
        raise InputError(
            "GPUs", f"{count} asked for", f"at most {available}, the GPUs that torch sees", "leave it out to use one"
        )
    return [f"cuda:{place}" for place in range(count)]
