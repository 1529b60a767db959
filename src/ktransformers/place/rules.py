"""Placement rules in the YAML form of KTransformers' optimize rules: a list of `match` and `replace`, the first match
wins, in place of what the plan says.

Taken from a rule: `generate_device` and `out_device` of `replace.kwargs` (of experts the first says where they are
computed, the second where their layer is; elsewhere the first is the module's own), `prefill_device`, and
`transfer_map` of the whole model, layer -> device from there on. `match.name` is a regular expression, `match.class` a
class whose last word is compared; both together must fit. The operators that such files name are KTransformers' own;
they are computed by what is here. A class from elsewhere is refused: replacing operators is not possible.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import nn

from ktransformers.errors import InputError
from ktransformers.nn.contract import expert_modules
from ktransformers.place.device_map import DecoderLayers, DeviceMap, find_stack, spread

DEVICES = re.compile(r"cpu|meta|cuda(:\d+)?", re.IGNORECASE)
NAME = "kt_optimize_rule"


class _Match(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    kind: str | None = Field(None, alias="class")


class _Replace(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: str = Field("default", alias="class")
    kwargs: dict[str, Any] | None = None
    recursive: bool = True  # some files have it one level deeper than others


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    match: _Match
    replace: _Replace = Field(default_factory=lambda: _Replace.model_validate({}))
    recursive: bool = True


@dataclass(frozen=True)
class Rule:
    name: re.Pattern[str] | None
    kind: str | None  # last word of the class
    device: str | None  # generate_device
    prefill: str | None
    out: str | None
    transfers: dict[int, str]
    recursive: bool

    def fits(self, name: str, module: nn.Module) -> bool:
        if self.name is not None and self.name.search(name) is None:
            return False
        return self.kind is None or self.kind in {one.__name__ for one in type(module).__mro__}


def read_rules(path: str | Path) -> tuple[Rule, ...]:
    try:
        entries: Any = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(NAME, f"{path} ({' '.join(str(error).split())})", "a YAML list of match/replace") from error
    if not isinstance(entries, list) or not entries:
        raise InputError(NAME, f"{path}, which holds no list", "a list of match/replace entries")
    return tuple(_rule(path, at, entry) for at, entry in enumerate(entries))


def _rule(path: str | Path, at: int, entry: Any) -> Rule:
    where = f"{path}, entry {at + 1}"
    try:
        read = _Entry.model_validate(entry)
        pattern = None if read.match.name is None else re.compile(read.match.name)
    except (ValidationError, re.error) as error:
        first = str(error).splitlines()
        raise InputError(NAME, f"{where}: {' '.join(first[:3])}", "match with name or class, and replace") from error
    if read.match.name is None and read.match.kind is None:
        raise InputError(NAME, f"{where}: an empty match", "a name, a class, or both")
    if read.replace.kind != "default" and not read.replace.kind.startswith("ktransformers."):
        given = f"{where}: class {read.replace.kind}"
        raise InputError(NAME, given, "default, or an operator of KTransformers", "operators cannot be replaced")
    kwargs = read.replace.kwargs or {}
    transfers = {_layer(where, key): _device(where, value) for key, value in (kwargs.get("transfer_map") or {}).items()}
    devices = {
        word: None if kwargs.get(word) is None else _device(where, kwargs[word])
        for word in ("generate_device", "prefill_device", "out_device")
    }
    kind = None if read.match.kind is None else read.match.kind.rpartition(".")[2]
    recursive = read.recursive and read.replace.recursive
    given_devices = (devices["generate_device"], devices["prefill_device"], devices["out_device"])
    return Rule(pattern, kind, *given_devices, transfers, recursive)


def _layer(where: str, key: Any) -> int:
    if not str(key).isdigit():
        raise InputError(NAME, f"{where}: transfer_map with {key!r}", "numbers of layers")
    return int(key)


def _device(where: str, word: Any) -> str:
    if not isinstance(word, str) or not DEVICES.fullmatch(word):
        raise InputError(NAME, f"{where}: device {word!r}", "cpu, cuda, or cuda:N")
    return word.lower()


def devices_of(rules: Sequence[Rule]) -> set[str]:
    """Every GPU that is named with its number."""
    named = {one for rule in rules for one in (rule.device, rule.prefill, rule.out, *rule.transfers.values()) if one}
    return {one for one in named if one.startswith("cuda:")}


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


def homes_by(model: nn.Module, rules: Sequence[Rule], devices: Sequence[str]) -> DeviceMap:
    """`model` may be a skeleton; `devices` are what the plan spreads layers over where no rule says otherwise. `cuda`
    alone is the GPU that a module would have anyway."""
    stack, experts = find_stack(model), expert_modules(model)
    found = first_rules(model, rules)
    layers = _transferred(spread(stack.count, devices), found, devices[0])
    said = _said_of_layers(found, stack, experts)
    for number, words in said.items():
        if len(set(words.values())) > 1:
            given = ", ".join(f"{name} on {device}" for name, device in list(words.items())[:3])
            raise InputError(NAME, given, "one device for all of a layer but its experts")
        layers[number] = next(iter(words.values()))
    asked: Any = model
    names = {id(module): name for name, module in model.named_modules()}
    ends = [names.get(id(module), "") for module in (asked.get_input_embeddings(), asked.get_output_embeddings())]
    embedding, head = (_own(found.get(name), layers[0]) for name in ends)
    return DeviceMap(tuple(layers), embedding, head, _said_of_experts(found, experts, layers, stack))


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


def _said_of_layers(
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


def _said_of_experts(
    found: dict[str, Rule], experts: dict[str, nn.Module], layers: Sequence[str], stack: DecoderLayers
) -> dict[str, str]:
    """By layer of experts: cpu, or the layer's device where they are to be computed on a GPU. A prefill on the GPU with
    answers from the CPU is what the engine decides by itself."""
    homes = {}
    for name in experts:
        rule, number = found.get(name), stack.number_of(name)
        if rule is None or rule.device is None or number is None:
            continue
        if rule.device != "cpu":
            homes[name] = layers[number]
        elif rule.prefill in (None, "cpu"):
            homes[name] = "cpu"
    return homes
