"""Rules applied to the modules of a model: which rule each module has, and the devices that follow from that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
from ktransformers.place.device_map import DecoderLayers, DeviceMap, find_decoder_layers, spread_layers
from ktransformers.place.rules import NAME, Rule


def first_rules(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Rule]:
    """Module -> the rule that it has: the first that fits, or its parent's; under one that is not recursive, that."""
    found: dict[str, Rule] = {}
    closed: set[str] = set()
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        above = found.get(parent) if name else None
        if parent in closed and name:
            closed.add(name)
            own = None
        else:
            own = next((rule for rule in rules if rule.fits(name, module)), None)
            if own is not None and not own.recursive:
                closed.add(name)
        chosen = own or above
        if chosen is not None:
            found[name] = chosen
    return found


def devices_by_rules(model: nn.Module, rules: Sequence[Rule], devices: Sequence[str]) -> DeviceMap:
    """`model` may be a skeleton; `devices` are what the plan spreads layers over where no rule says otherwise. `cuda`
    alone is the GPU that a module would have anyway."""
    stack, experts = find_decoder_layers(model), expert_modules(model)
    found = first_rules(model, rules)
    layers = _transferred(spread_layers(stack.count, devices), found, devices[0])
    said = _layer_devices(found, stack, experts)
    for number, words in said.items():
        if len(set(words.values())) > 1:
            given = ", ".join(f"{name} on {device}" for name, device in list(words.items())[:3])
            raise InputError(NAME, given, "one device for all of a layer but its experts")
        layers[number] = next(iter(words.values()))
    asked: Any = model
    names = {id(module): name for name, module in model.named_modules()}
    ends = [names.get(id(module), "") for module in (asked.get_input_embeddings(), asked.get_output_embeddings())]
    embedding, head = (_own(found.get(name), layers[0]) for name in ends)
    return DeviceMap(tuple(layers), embedding, head, _expert_devices(found, experts, layers, stack))


def _own(rule: Rule | None, otherwise: str) -> str:
    device = None if rule is None else rule.device
    return otherwise if device is None or device == "cuda" else device


def _transferred(layers: list[str], found: dict[str, Rule], first: str) -> list[str]:
    """`transfer_map` of any module: from that layer on, the other device."""
    for rule in {id(rule): rule for rule in found.values() if rule.transfers}.values():
        start = first if rule.device in (None, "cuda", "cpu") else str(rule.device)
        steps = sorted(rule.transfers.items())
        layers = [next((d for at, d in reversed(steps) if number >= at), start) for number in range(len(layers))]
    return layers


def _layer_devices(
    found: dict[str, Rule], stack: DecoderLayers, experts: dict[str, nn.Module]
) -> dict[int, dict[str, str]]:
    """Layer -> module -> device, of what rules say of modules with numbers of their own."""
    said: dict[int, dict[str, str]] = {}
    for name, rule in found.items():
        number = stack.number_of(name)
        if number is None or rule.transfers or any(name.startswith(f"{one}.") for one in experts):
            continue
        device = rule.out if name in experts else rule.device
        if device is not None and device != "cuda":
            said.setdefault(number, {})[name] = device
    return said


def _expert_devices(
    found: dict[str, Rule], experts: dict[str, nn.Module], layers: Sequence[str], stack: DecoderLayers
) -> dict[str, str]:
    """By layer of experts: cpu, or the layer's device where they are to be computed on a GPU. A prefill on the GPU with
    answers from the CPU is what the engine decides by itself."""
    devices_of_experts = {}
    for name in experts:
        rule, number = found.get(name), stack.number_of(name)
        if rule is None or rule.device is None or number is None:
            continue
        if rule.device != "cpu":
            devices_of_experts[name] = layers[number]
        elif rule.prefill in (None, "cpu"):
            devices_of_experts[name] = "cpu"
    return devices_of_experts
