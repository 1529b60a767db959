"""Rules resolved for a model before it is loaded: which operator every matched module becomes, with which arguments and
in which format. The model may be on the meta device; nothing is changed.

`plan_operators` is the one place where rules are checked: a class that cannot be imported, a keyword that its
constructor does not have, a module that the operator cannot serve, a rule that matches no module, and a layer of
`transfer_map` that the model lacks are errors. `operators/load.py` carries the plan out.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ktransformers.ground.errors import InputError, nearest
from ktransformers.operators.base_operator import BaseInjectedModule, Match, Outcome, RuledModel
from ktransformers.operators.experts import KTransformersExperts
from ktransformers.operators.linear import KEEP
from ktransformers.operators.rules import DEFAULT, NAME, PLACES, Rule

CONTRACT = ("self", "key", "gguf_loader", "config", "orig_module")  # of a constructor; the others are keywords
MODULES = ("experts", "linear", "attention", "RoPE", "models", "gate")  # of ktransformers.operators
PACKAGE = "ktransformers.operators"


@dataclass(frozen=True)
class Assignment:
    """A module and the operator that its own rule gives it."""

    name: str
    stock: str  # class of the module
    rule: Rule
    operator: type[BaseInjectedModule]
    match: Match

    @property
    def outcome(self) -> Outcome:
        return self.match.outcome


@dataclass(frozen=True)
class OperatorPlan:
    assignments: tuple[Assignment, ...]
    rule_of: Mapping[str, Rule]  # of every module, its parent's included
    notes: tuple[str, ...]

    @property
    def encodes(self) -> bool:
        """Whether numbers are rounded to a format on the way."""
        return any(item.outcome.format not in (None, KEEP) for item in self.assignments)

    @property
    def expert_formats(self) -> dict[str, str]:
        """Layer of experts -> the format that it is encoded in while it is loaded."""
        return {
            item.name: item.outcome.format
            for item in self.assignments
            if item.outcome.format is not None and issubclass(item.operator, KTransformersExperts)
        }


def first_rules(model: nn.Module, rules: Sequence[Rule]) -> dict[str, Rule]:
    """Module -> the rule that it has: the first that fits, or its parent's; under one that is not recursive, that."""
    return {name: own or inherited for name, own, inherited in _rules_of_modules(model, rules) if own or inherited}  # type: ignore[misc]


def _rules_of_modules(model: nn.Module, rules: Sequence[Rule]) -> Iterable[tuple[str, Rule | None, Rule | None]]:
    """(module, its own rule, its parent's)."""
    rule_of: dict[str, Rule | None] = {}
    closed: set[str] = set()
    names = [name for name, _ in model.named_modules()]
    for rule in rules:
        if rule.name is not None:
            rule.name.prefetch(names)
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        inherited = rule_of.get(parent) if name else None
        own = None
        if parent in closed and name:
            closed.add(name)
        else:
            own = next((rule for rule in rules if rule.fits(name, module)), None)
            if own is not None and not own.recursive:
                closed.add(name)
        rule_of[name] = own or inherited
        yield name, own, inherited


def plan_operators(model: nn.Module, rules: Sequence[Rule], devices: Mapping[str, str] | None = None) -> OperatorPlan:
    """`devices`: module -> the device that it is going to be on; modules without one are on the CPU."""
    own = {name: rule for name, rule, _ in _rules_of_modules(model, rules) if rule is not None}
    modules = dict(model.named_modules())
    _check_matches(rules, model, {id(rule) for rule in own.values()})
    _check_transfers(rules, modules)
    ruled, classes = RuledModel(model), {rule.operator: find_operator(rule) for rule in rules}
    for rule in rules:
        check_keywords(rule, classes[rule.operator])
    assignments, notes = [], dict[str, None]()
    for name, rule in own.items():
        operator, module = classes[rule.operator], modules[name]
        if operator is None:
            continue
        match = Match(rule.where, name, module, ruled, rule.arguments, (devices or {}).get(name, "cpu"))
        outcome = operator.check(match)
        assignment = Assignment(name, type(module).__name__, rule, operator, replace(match, outcome=outcome))
        assignments.append(assignment)
        notes |= dict.fromkeys(outcome.general)
    notes |= dict.fromkeys(_notes_of_modules(assignments))
    notes |= {
        f"{rule.where}: earlier rules have taken every module that it matches": None for rule in _idle(rules, own)
    }
    return OperatorPlan(tuple(assignments), first_rules(model, rules), tuple(notes))


def _notes_of_modules(assignments: Sequence[Assignment]) -> Iterable[str]:
    """Notes of several modules in one line each: what, and of how many."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for item in assignments:
        if item.outcome.note:
            reasons.setdefault((item.operator.__name__, item.outcome.note), []).append(item.name)
    for (operator, reason), names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{operator} of {names[0]}{more}: {reason}"


def _idle(rules: Sequence[Rule], own: Mapping[str, Rule]) -> list[Rule]:
    used = {id(rule) for rule in own.values()}
    return [rule for rule in rules if id(rule) not in used]


def _check_matches(rules: Sequence[Rule], model: nn.Module, used: set[int]) -> None:
    """Raises for a rule that fits no module, apart from those that earlier rules have taken."""
    for rule in rules:
        if id(rule) in used or any(rule.fits(name, module) for name, module in model.named_modules()):
            continue
        raise InputError(NAME, f"{rule.where}, which matches nothing ({rule.shown})", _nearest_module(rule, model))


def _nearest_module(rule: Rule, model: nn.Module) -> str:
    classes = {type(module).__name__ for _, module in model.named_modules()}
    if rule.kind is not None and rule.kind.lower() not in {kind.lower() for kind in classes}:
        near = difflib.get_close_matches(rule.kind, classes, n=1, cutoff=0.4)
        return f"`{near[0]}`, perhaps" if near else "a class of " + ", ".join(sorted(classes)[:8])
    literal = re.sub(r"\\d|[\\^$()\[\]*+?|]", "", rule.shown.partition(" and class ")[0])
    names = list(dict.fromkeys(re.sub(r"\.\d+\.", ".0.", name) for name, _ in model.named_modules()))
    near = difflib.get_close_matches(literal, names, n=1, cutoff=0.3)
    return f"the name of a module, as `{near[0]}`" if near else "the name of a module"


def _check_transfers(rules: Sequence[Rule], modules: Mapping[str, nn.Module]) -> None:
    lists = [len(module) for module in modules.values() if isinstance(module, nn.ModuleList)]
    layers = max(lists, default=0)
    for rule in rules:
        for layer, device in rule.transfers.items():
            if layer >= layers and device != "cuda":  # that is the same device, on a machine without GPUs
                expected = f"a layer of this model, 0 to {layers - 1}"
                raise InputError(NAME, f"{rule.where}: transfer_map with layer {layer}", expected)


def find_operator(rule: Rule) -> type[BaseInjectedModule] | None:
    """The class that a rule names; None for `default`."""
    if rule.operator == DEFAULT:
        return None
    package, _, name = rule.operator.rpartition(".")
    try:
        module = importlib.import_module(package) if package else None
    except ImportError as error:
        if error.name is not None and not package.startswith(error.name):
            given = f"{rule.where}: class {rule.operator} ({error})"
            raise InputError(NAME, given, "a class that can be imported") from error
        module = None
    found = None if module is None else getattr(module, name, None)
    if found is None:
        given = f"{rule.where}: class {rule.operator}, which cannot be imported"
        raise InputError(NAME, given, _nearest_operator(rule), "a class of your own: its folder in PYTHONPATH")
    if not (isinstance(found, type) and issubclass(found, BaseInjectedModule)):
        expected = f"a class that derives from {PACKAGE}.BaseInjectedModule"
        raise InputError(NAME, f"{rule.where}: class {rule.operator}", expected, "see docs/operators.md")
    return found


def operators() -> dict[str, type[BaseInjectedModule]]:
    """Import path -> class, of all operators of this package."""
    classes = {}
    for part in MODULES:
        module = importlib.import_module(f"{PACKAGE}.{part}")
        for name, value in vars(module).items():
            own = isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
            if own and issubclass(value, BaseInjectedModule):
                classes[f"{module.__name__}.{name}"] = value
    return classes


def _nearest_operator(rule: Rule) -> str:
    otherwise = "default, an operator of the package, or a class of your own"
    return nearest(rule.operator, [*operators(), DEFAULT], otherwise)


def keywords_of(operator: type[BaseInjectedModule] | None) -> tuple[str, ...]:
    """The keywords that a rule may give: parameters of the constructor, and of those that take its `**kwargs`."""
    if operator is None:
        return PLACES
    words: dict[str, None] = {}
    for item in operator.__mro__:
        words |= dict.fromkeys(vars(item).get("keywords", ()))
        if "__init__" not in vars(item) or item is nn.Linear or item is nn.Module:
            continue
        parameters = inspect.signature(vars(item)["__init__"]).parameters.values()
        named = [part.name for part in parameters if part.kind in (part.POSITIONAL_OR_KEYWORD, part.KEYWORD_ONLY)]
        words |= dict.fromkeys(named)
        if not any(part.kind is part.VAR_KEYWORD for part in parameters):
            break
    return tuple(word for word in words if word not in CONTRACT)


def check_keywords(rule: Rule, operator: type[BaseInjectedModule] | None) -> None:
    known = keywords_of(operator)
    for word in rule.arguments:
        if word not in known:
            expected = nearest(word, known, "one of " + ", ".join(known))
            name = DEFAULT if operator is None else operator.__name__
            raise InputError(NAME, f"{rule.where}: keyword {word} of {name}", expected)
