"""The devices that follow from the rules of a model's modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ktransformers.experts.contract import expert_modules
from ktransformers.ground.errors import InputError
from ktransformers.operators.plan import first_rules
from ktransformers.operators.rules import NAME, Rule
from ktransformers.place.device_map import (
    DecoderLayers,
    DeviceMap,
    find_decoder_layers,
    shares_embedding,
    spread_layers,
)


def devices_by_rules(model: nn.Module, rules: Sequence[Rule], devices: Sequence[str]) -> DeviceMap:
    """`model` may be a skeleton; `devices` are what the plan spreads layers over where no rule says otherwise. `cuda`
    alone is the GPU that a module would have anyway."""
    decoder_layers, experts = find_decoder_layers(model), expert_modules(model)
    rule_of = first_rules(model, rules)
    layers = _transferred(spread_layers(decoder_layers.count, devices), rule_of, devices[0])
    layer_devices = _layer_devices(rule_of, decoder_layers, experts)
    for number, words in layer_devices.items():
        if len(set(words.values())) > 1:
            given = ", ".join(f"{name} on {device}" for name, device in list(words.items())[:3])
            raise InputError(NAME, given, "one device for all of a layer but its experts")
        layers[number] = next(iter(words.values()))
    transformer: Any = model
    names = {id(module): name for name, module in model.named_modules()}
    end_names = [
        names.get(id(module), "")
        for module in (transformer.get_input_embeddings(), transformer.get_output_embeddings())
    ]
    embedding, head = (_device_or(rule_of.get(name), layers[0]) for name in end_names)
    if shares_embedding(model):
        embedding = head
    return DeviceMap(tuple(layers), embedding, head, _expert_devices(rule_of, experts, layers, decoder_layers))


def _device_or(rule: Rule | None, otherwise: str) -> str:
    device = None if rule is None else rule.device
    return otherwise if device is None or device == "cuda" else device


def _transferred(layers: list[str], rule_of: dict[str, Rule], first: str) -> list[str]:
    """`transfer_map` of any module: from that layer on, the other device."""
    for rule in {id(rule): rule for rule in rule_of.values() if rule.transfers}.values():
        start = first if rule.device in (None, "cuda", "cpu") else str(rule.device)
        steps = sorted(rule.transfers.items())
        layers = [next((d for at, d in reversed(steps) if number >= at), start) for number in range(len(layers))]
    return layers


def _layer_devices(
    rule_of: dict[str, Rule], decoder_layers: DecoderLayers, experts: dict[str, nn.Module]
) -> dict[int, dict[str, str]]:
    """Layer -> module -> device, of what rules say of modules with weights of their own."""
    layer_devices: dict[int, dict[str, str]] = {}
    for name, rule in rule_of.items():
        number = decoder_layers.number_of(name)
        if number is None or rule.transfers or any(name.startswith(f"{one}.") for one in experts):
            continue
        device = rule.out if name in experts else rule.device
        if device is not None and device != "cuda":
            layer_devices.setdefault(number, {})[name] = device
    return layer_devices


def _expert_devices(
    rule_of: dict[str, Rule], experts: dict[str, nn.Module], layers: Sequence[str], decoder_layers: DecoderLayers
) -> dict[str, str]:
    """By layer of experts: cpu, or the layer's device where they are to be computed on a GPU. A prefill on the GPU with
    answers from the CPU is what the engine decides by itself."""
    devices_of_experts = {}
    for name in experts:
        rule, number = rule_of.get(name), decoder_layers.number_of(name)
        if rule is None or rule.device is None or number is None:
            continue
        if rule.device != "cpu":
            devices_of_experts[name] = layers[number]
        elif rule.prefill in (None, "cpu"):
            devices_of_experts[name] = "cpu"
    return devices_of_experts


def devices_of_modules(model: nn.Module, device_map: DeviceMap) -> dict[str, str]:
    """Module -> its device; experts are on their layer's device here, wherever they are computed."""
    transformer: Any = model
    decoder_layers = find_decoder_layers(model)
    ends = {id(transformer.get_output_embeddings()): device_map.head}
    ends[id(transformer.get_input_embeddings())] = device_map.embedding
    devices = {}
    for name, module in model.named_modules():
        number = decoder_layers.number_of(name)
        devices[name] = ends.get(id(module), device_map.layers[0 if number is None else number])
    return devices
