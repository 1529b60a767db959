"""What rules make of a model, as `kt rules` shows it: every module with its operator, device, format and bytes. Bytes
of quantized weights are those of values and scales; a packed store adds up to a few percent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ktransformers.experts.contract import expert_modules
from ktransformers.ground.linear_storage import rest_word
from ktransformers.operators.base_operator import RuledModel
from ktransformers.operators.linear import KEEP
from ktransformers.operators.plan import OperatorPlan, plan_operators
from ktransformers.operators.rules import RuleFile
from ktransformers.place.rule_devices import devices_by_rules, devices_of_modules
from ktransformers.plan.formats import bytes_in_format
from ktransformers.quantized.weight import MIN_WEIGHTS

HOST = "cpu"
BF16_BYTES = 2


@dataclass(frozen=True)
class ModuleReport:
    name: str
    stock: str  # class
    operator: str  # class, or "default"; empty: no rule
    device: str
    computed: str  # of experts: where; otherwise the device
    format: str
    weights: int
    bytes: int
    rule: str  # entry of the file, empty: none


@dataclass(frozen=True)
class RuleReport:
    modules: tuple[ModuleReport, ...]
    bytes: dict[str, int]  # by device
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {"modules": [asdict(module) for module in self.modules], "bytes": self.bytes, "notes": list(self.notes)}


def report_rules(
    model: nn.Module, file: RuleFile, released: str = "bf16", quantized_bytes: float | None = None
) -> RuleReport:
    """Of a skeleton, with every GPU that the file names. `released` is the format of the experts in the model's files,
    `quantized_bytes` what a number of its linear layers takes if these are quantised there. They stay quantized unless
    an operator stores them otherwise; other weights, the head among them, are counted in bf16."""
    device_map = devices_by_rules(model, file.rules, ["cuda:0"] if _names_gpu(file) else [HOST])
    devices = devices_of_modules(model, device_map)
    plan = plan_operators(model, file.rules, devices)
    experts = expert_modules(model)
    assigned = {item.name: item for item in plan.assignments}
    transformer: Any = model
    coded = RuledModel(model).quantizable_names if quantized_bytes is not None else frozenset()
    coded -= {name for name, module in model.named_modules() if module is transformer.get_output_embeddings()}
    modules, totals = [], dict[str, int]()
    seen: set[int] = set()
    for name, module in model.named_modules():
        parameters = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen |= {id(p) for p in parameters}
        weights = sum(parameter.numel() for parameter in parameters)
        item, rule = assigned.get(name), plan.rule_of.get(name)
        if item is None and not weights:
            continue
        computed = device_map.experts.get(name, HOST) if name in experts else devices[name]
        otherwise = released if name in experts else "bf16" if item is not None or name not in coded else KEEP
        spec = (item.outcome.format if item is not None else None) or otherwise
        if spec == KEEP and (name not in coded or weights < MIN_WEIGHTS):
            spec = "bf16"
        size = round(weights * _bytes_per_number(spec, quantized_bytes))
        for place in {HOST, computed} if name in experts else {devices[name]}:  # residents are in host memory as well
            totals[place] = totals.get(place, 0) + size
        operator = item.operator.__name__ if item is not None else "" if rule is None else "default"
        modules.append(
            ModuleReport(
                name,
                type(module).__name__,
                operator,
                devices[name],
                computed,
                spec,
                weights,
                size,
                "" if rule is None else rule.where.rpartition(", ")[2],
            )
        )
    return RuleReport(tuple(modules), dict(sorted(totals.items())), _notes(file, plan))


def _bytes_per_number(spec: str, quantized_bytes: float | None) -> float:
    if spec == KEEP and quantized_bytes is not None:
        return quantized_bytes
    return BF16_BYTES if spec == "bf16" else bytes_in_format(rest_word(spec))


def _names_gpu(file: RuleFile) -> bool:
    return any((device or "").startswith("cuda") for rule in file.rules for device in (rule.device, rule.out)) or any(
        rule.transfers for rule in file.rules
    )


def _notes(file: RuleFile, plan: OperatorPlan) -> tuple[str, ...]:
    gpus = (f"written for {file.gpus} GPUs",) if file.gpus else ()
    return (*gpus, *plan.notes)


def rows(modules: Sequence[ModuleReport]) -> list[tuple[str, ModuleReport, int, int]]:
    """(name with `*` for the numbers of layers, a module of the group, modules, bytes): those that differ in nothing
    else are one row."""
    groups: dict[tuple[str, ...], list[ModuleReport]] = {}
    for module in modules:
        parts = ["*" if part.isdigit() else part for part in module.name.split(".")]
        key = (".".join(parts), module.stock, module.operator, module.device, module.computed, module.format)
        groups.setdefault(key, []).append(module)
    return [(key[0], group[0], len(group), sum(item.bytes for item in group)) for key, group in groups.items()]
