"""An option is one field of a pydantic class: its name, type, default, limits, help, flags and YAML keys.

`option` declares a field and `options_of` lists the fields of a class. Parsers (`add_flags`), lists of YAML keys and
the tables of the pages are made of these lists. `build` turns the values of a command line or of a file into an object;
a wrong value is an InputError that names the flag or key.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ktransformers.ground.errors import InputError, first_problem

CLOSED = ConfigDict(extra="forbid", protected_namespaces=())
T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    name: str
    kind: type  # of one value of a flag: bool takes none, texts and choices are str
    many: bool  # a flag takes several values
    required: bool
    default: Any
    help: str
    flags: tuple[str, ...]
    keys: tuple[str, ...]
    metavar: str

    @property
    def described(self) -> str:
        """The help, with the default of a flag that takes a value."""
        return self.help if self.kind is bool or self.default is None else f"{self.help}; default: {self.default}"


def option(default: Any, flags: str, help: str, *, keys: str = "", metavar: str = "", **limits: Any) -> Any:
    """Declares a field. `flags` and `keys` are words, the first is the name in errors; `limits` are pydantic's."""
    extra: dict[str, Any] = {"flags": flags.split(), "keys": keys.split(), "metavar": metavar}
    return Field(default, description=help, json_schema_extra=extra, **limits)


def options_of(model: Any) -> dict[str, Option]:
    """The fields of a pydantic class that have a help, by name."""
    infos = model.model_fields if issubclass(model, BaseModel) else model.__pydantic_fields__
    return {name: _read(name, info) for name, info in infos.items() if info.description}


def _read(name: str, info: Any) -> Option:
    extra, required = {"flags": (), "keys": (), "metavar": "", **(info.json_schema_extra or {})}, info.is_required()
    kinds = [kind for kind in get_args(info.annotation) or (info.annotation,) if kind is not type(None)]
    many = get_origin(info.annotation) is tuple
    kind = kinds[0] if kinds[0] in (bool, int, float) else str
    default = None if required or many else info.default
    words = tuple(extra["flags"]), tuple(extra["keys"])
    return Option(name, kind, many, required, default, str(info.description), *words, extra["metavar"])


def add_flags(parser: argparse._ActionsContainer, options: Mapping[str, Option]) -> None:
    """A flag that is not given has the option's default. The value of a required option is a positional argument of
    the parser as well, so its flag is stored as NAME_flag."""
    for name, entry in options.items():
        dest = f"{name}_flag" if entry.required else name
        if entry.flags and entry.kind is bool:
            parser.add_argument(*entry.flags, dest=dest, action="store_true", help=entry.described)
        elif entry.flags:
            several: dict[str, Any] = {"nargs": "+", "action": "extend"} if entry.many else {}
            shown, default = entry.metavar or name.upper(), entry.default
            texts: dict[str, Any] = {"help": entry.described, "metavar": shown}
            parser.add_argument(*entry.flags, dest=dest, type=entry.kind, default=default, **texts, **several)


def build(model: type[T], values: Mapping[str, Any], *, by_flag: bool = False) -> T:
    """An error names the field and has its help; with `by_flag` it names the flag. A value that is None means the
    default."""
    try:
        return model(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        path, given, expected = first_problem(error)
        name = path[0] if path else model.__name__
        entry = options_of(model).get(name)
        if entry is not None and by_flag and entry.flags:
            name = entry.flags[0].removeprefix("--")
        raise InputError(name, given, expected, entry.help if entry is not None else "") from None
