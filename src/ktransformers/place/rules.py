"""`kt_optimize_rule`: the YAML form of KTransformers' optimize rules, read into `Rule`s. A file is a list of `match`
and `replace`; the first match wins over the plan.

Taken from a rule: `generate_device` and `out_device` of `replace.kwargs` (of experts the first says where they are
computed, the second where their layer is; elsewhere the first is the module's own), `prefill_device`, `transfer_map` of
the whole model (layer -> device from there on), and the CPU `backend`. `match.name` is a regular expression,
`match.class` a class whose last word is compared; both together must fit. The operators that such files name are
KTransformers' own and are computed by this package; any other class is refused, because operators cannot be
replaced.

Where a recipe names a file that does not exist, its name says the same, as in
`DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml`: fine-tuning, AMX, four GPUs (two where no number stands). Without `amx` the
name means llamafile, that is, any CPU. `place/rule_devices.py` applies rules to a model's modules.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from ktransformers.errors import InputError
from ktransformers.files import read_yaml, short, validate
from ktransformers.patterns import FilePatterns

if TYPE_CHECKING:
    from torch import nn

DEVICES = re.compile(r"cpu|meta|cuda(:\d+)?", re.IGNORECASE)
NAME = "kt_optimize_rule"
BACKENDS = {"amxbf16": "amx", "amxint8": "amx", "amxint4": "amx", "llamafile": "any", "auto": "any"}


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
    name: FilePatterns | None
    kind: str | None  # last word of the class
    device: str | None  # generate_device
    prefill: str | None
    out: str | None
    transfers: dict[int, str]
    recursive: bool
    backend: str | None = None  # of the CPU, as the file writes it

    def fits(self, name: str, module: nn.Module) -> bool:
        if self.name is not None and not self.name.fits(name):
            return False
        return self.kind is None or self.kind in {item.__name__ for item in type(module).__mro__}


def read_rules(path: str | Path) -> tuple[Rule, ...]:
    entries = read_yaml(path, f"{NAME}: a YAML list of match/replace")
    if not isinstance(entries, list) or not entries:
        raise InputError(NAME, f"{path}, which holds no list", "a list of match/replace entries")
    return tuple(_rule(path, at, entry) for at, entry in enumerate(entries))


def _rule(path: str | Path, at: int, entry: Any) -> Rule:
    where = f"{path}, entry {at + 1}"
    read = validate(_Entry, entry, f"{NAME}: {where}", "an entry has match, with name or class, and replace")
    if read.match.name is None and read.match.kind is None:
        raise InputError(NAME, f"{where}: an empty match", "a name, a class, or both")
    if read.replace.kind != "default" and not read.replace.kind.startswith("ktransformers."):
        given = f"{where}: class {read.replace.kind}"
        raise InputError(NAME, given, "default, or an operator of KTransformers", "operators cannot be replaced")
    kwargs = read.replace.kwargs or {}
    layers = kwargs.get("transfer_map") or {}
    if not isinstance(layers, dict):
        raise InputError(NAME, f"{where}: transfer_map {short(layers)}", "numbers of layers with their devices")
    transfers = {_layer(where, key): _device(where, value) for key, value in layers.items()}
    devices = {
        word: None if kwargs.get(word) is None else _device(where, kwargs[word])
        for word in ("generate_device", "prefill_device", "out_device")
    }
    kind = None if read.match.kind is None else read.match.kind.rpartition(".")[2]
    recursive = read.recursive and read.replace.recursive
    given_devices = (devices["generate_device"], devices["prefill_device"], devices["out_device"])
    backend = None if kwargs.get("backend") is None else str(kwargs["backend"])
    if backend is not None and backend.lower() not in BACKENDS:
        raise InputError(NAME, f"{where}: backend {backend}", "one of " + ", ".join(BACKENDS))
    pattern = None if read.match.name is None else FilePatterns(f"{where}: match.name", [read.match.name], "search")
    return Rule(pattern, kind, *given_devices, transfers, recursive, backend)


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
    named = {item for rule in rules for item in (rule.device, rule.prefill, rule.out, *rule.transfers.values()) if item}
    return {item for item in named if item.startswith("cuda:")}


@dataclass(frozen=True)
class RuleSummary:
    source: str  # "file" or "name"
    backend: str  # "amx" or "any"
    gpus: int  # 0: the rule keeps everything on the CPU
    training: bool


def summary_of_name(path: str) -> RuleSummary:
    name = Path(path).stem.lower()
    multi_gpu = re.search(r"multi-gpu(?:-(\d+))?", name)
    gpus = int(multi_gpu[1] or 2) if multi_gpu else 1
    return RuleSummary("name", "amx" if re.search(r"(^|-)amx(-|$)", name) else "any", gpus, "-sft-" in f"-{name}-")


def _summary_of_file(path: Path) -> RuleSummary:
    rules = read_rules(path)
    backends = [rule.backend for rule in rules if rule.backend is not None]
    if small := next((word for word in backends if "int" in word.lower()), None):
        raise InputError(NAME, f"backend {small} in {path}", "AMXBF16 or llamafile", "experts train in bf16")
    words = (word for rule in rules for word in (rule.device, rule.prefill, rule.out) if word is not None)
    gpus = {word for word in words if word.startswith("cuda")}
    return RuleSummary("file", BACKENDS[backends[-1].lower()] if backends else "any", len(gpus), True)


def summarise_for_training(path: str) -> tuple[RuleSummary, str]:
    """What a recipe's rule means, and the line that says so."""
    file = Path(path)
    summary = _summary_of_file(file) if file.is_file() else summary_of_name(path)
    source = "its name, as there is no such file" if summary.source == "name" else "the file"
    cpu = "AMX where the CPU has it" if summary.backend == "amx" else "whatever the CPU has"
    gpus = (
        f"layers spread over {summary.gpus} GPUs, or as many of them as there are"
        if summary.gpus > 1
        else "one GPU, where there is one"
    )
    return summary, f"kt_optimize_rule: from {source}: {cpu}; {gpus}"
