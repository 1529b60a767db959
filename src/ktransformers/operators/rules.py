"""`kt_optimize_rule`: the YAML form of KTransformers' optimize rules, read into `Rule`s. A file is a list of `match`
and `replace`; the first rule that fits a module is the module's.

`match.name` is a regular expression that is searched in the module's name, `match.class` a class whose last word is
compared, whatever its case; both together must fit. `replace.class` is an operator by its import path, or `default`:
the module stays, and the rule says where it is. `replace.kwargs` are the operator's keywords. With `recursive: False`
modules below are not matched again.

A file is looked up as it is named, then its last part among the names that `builtin.py` generates, as in
`DeepSeek-V3-Chat-sft-amx-multi-gpu-4.yaml`: fine-tuning, AMX, four GPUs (two where no number stands). Without `amx` the
name means llamafile, that is, any CPU. In files of a user's own a GPU with a number must exist; generated files name as
many GPUs as their name says, and are spread over as many as there are. A recipe for training may have a name without a
file that ends as those do.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from ktransformers.ground.errors import InputError, nearest
from ktransformers.ground.files import MAX_YAML_BYTES, is_file, parse_yaml, read_text, short, validate
from ktransformers.ground.patterns import FilePatterns
from ktransformers.operators.builtin import rule_files

if TYPE_CHECKING:
    from torch import nn

DEVICES = re.compile(r"cpu|meta|cuda(:\d+)?", re.IGNORECASE)
NAME = "kt_optimize_rule"
EXPECTED = f"{NAME}: a YAML list of match/replace"
DEFAULT = "default"
SAMPLES = Path(__file__).with_name("samples")
DEVICE_KEYWORDS = ("generate_device", "prefill_device", "out_device")
PLACES = (*DEVICE_KEYWORDS, "transfer_map")
# Words of the names in the guides that the generated names leave out.
IGNORED_WORDS = re.compile(r"-(infer|serve)(?=-|\.)")
# End of a name that says what a recipe asks for; `<gpu-count>` stands in the guides for the last part.
NAME_WORDS = re.compile(r".+?(?P<words>(-sft)?(-amx)?(-multi-gpu(-[1-9]\d*)?|-<[^<>]+>)?)")
# Classes of KTransformers' own models -> those of stock transformers, where they differ in more than case.
STOCK_CLASSES = {
    "deepseekv2yarnrotaryembedding": "deepseekv2rotaryembedding",
    "deepseekv3yarnrotaryembedding": "deepseekv3rotaryembedding",
}


class _Match(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    kind: str | None = Field(None, alias="class")


class _Replace(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: str = Field(DEFAULT, alias="class")
    kwargs: dict[str, Any] | None = None
    recursive: bool = True  # some files have it one level deeper than others


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    match: _Match
    replace: _Replace = Field(default_factory=lambda: _Replace.model_validate({}))
    recursive: bool = True


@dataclass(frozen=True)
class Rule:
    where: str  # file and entry
    name: FilePatterns | None
    kind: str | None  # last word of the class
    operator: str  # import path, or DEFAULT
    arguments: Mapping[str, Any]  # `kwargs` as written
    device: str | None  # generate_device
    prefill: str | None
    out: str | None
    transfers: dict[int, str]
    recursive: bool
    shown: str = ""  # what it matches, as written

    def fits(self, name: str, module: nn.Module) -> bool:
        if self.name is not None and not self.name.fits(name):
            return False
        if self.kind is None:
            return True
        word = self.kind.lower()
        return STOCK_CLASSES.get(word, word) in {item.__name__.lower() for item in type(module).__mro__}


@dataclass(frozen=True)
class RuleFile:
    path: Path
    shipped: bool  # with the package
    rules: tuple[Rule, ...] = field(repr=False)

    @property
    def gpus(self) -> int:
        """GPUs that are named by numbers, counted up to the highest; 0: none is."""
        return max((int(device.removeprefix("cuda:")) + 1 for device in devices_of(self.rules)), default=0)

    def on_machine(self, available: int, *, cpu_only: bool = False) -> tuple[tuple[Rule, ...], str]:
        """The rules for a run that has `available` GPUs, and a line that says what was changed, empty if nothing was. A
        GPU that a user's file names and that does not exist is refused, unless the run is to be on the CPU."""
        named, available = self.gpus, 0 if cpu_only else available
        on_gpu = named or any(rule.device == "cuda" or rule.out == "cuda" for rule in self.rules)
        if named > available and not self.shipped and not cpu_only:
            missing = next(device for device in sorted(devices_of(self.rules)) if _number(device) >= available)
            seen = "no GPU" if not available else f"cuda:0 to cuda:{available - 1}" if available > 1 else "cuda:0"
            expected = f"what torch sees here, {seen}"
            remedy = "`cuda` is the GPU that a module would have, or the CPU"
            raise InputError(NAME, f"{missing} in {self.path}", expected, remedy)
        if not available:
            line = f"{NAME}: {'as asked' if cpu_only else 'there is no GPU'}: everything is computed on the CPU"
            return tuple(_renamed(rule, lambda device: "cuda") for rule in self.rules), line if on_gpu else ""
        if named <= available:
            return self.rules, ""

        def spread(device: str) -> str:
            return f"cuda:{_number(device) * available // named}"

        line = f"{NAME}: written for {named} GPUs, spread over the {available} of this machine"
        return tuple(_renamed(rule, spread) for rule in self.rules), line


def _number(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def _renamed(rule: Rule, rename: Callable[[str], str]) -> Rule:
    """With other numbers of GPUs."""

    def one(device: str | None) -> str | None:
        return rename(device) if device is not None and device.startswith("cuda:") else device

    transfers = {layer: str(one(device)) for layer, device in rule.transfers.items()}
    return replace(rule, device=one(rule.device), prefill=one(rule.prefill), out=one(rule.out), transfers=transfers)


def operators_of(given: str | None) -> list[list[Any]]:
    """What a file computes, wherever that is: modules, operator and keywords of each rule that names an operator."""
    file = find_rules(given)
    return [
        [rule.shown, rule.operator, {word: value for word, value in rule.arguments.items() if word not in PLACES}]
        for rule in (() if file is None else file.rules)
        if rule.operator != DEFAULT
    ]


def own_sources(given: str | None) -> dict[str, str]:
    """Module of a user's own operators -> hash of its file: what these compute changes with it."""
    packages = {operator.rpartition(".")[0] for _, operator, _ in operators_of(given)}
    specs = {
        package: importlib.util.find_spec(package)
        for package in sorted(packages)
        if package and not package.startswith("ktransformers.")
    }
    return {
        package: hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
        for package, spec in specs.items()
        if spec is not None and spec.origin is not None
    }


def find_rules(given: str | Path | None) -> RuleFile | None:
    """The file that is named, or the generated one of its last part. None if no name is given, or one that a recipe may
    have without a file (`summary_of_name`)."""
    if given is None:
        return None
    path = Path(given)
    if is_file(path):
        return RuleFile(path, path.resolve().parent == SAMPLES, read_rules(path))
    name = IGNORED_WORDS.sub("", path.name)
    if (text := rule_files().get(name)) is not None:
        return RuleFile(Path(name), True, parse_rules(text, name))
    if _is_summary(path.stem):
        return None
    raise _missing(given)


def require_rules(given: str | Path) -> RuleFile:
    """The same where a name alone says nothing: serving, and `kt rules`."""
    rules = find_rules(given)
    if rules is None:
        raise _missing(given)
    return rules


def builtin_rules(given: str) -> tuple[str, str]:
    """The name and the text of a generated file."""
    name = IGNORED_WORDS.sub("", Path(given).name)
    if name not in rule_files():
        raise _missing(given)
    return name, rule_files()[name]


def _is_summary(stem: str) -> bool:
    match = NAME_WORDS.fullmatch(stem.lower())
    return match is not None and bool(match["words"])


def _missing(given: str | Path) -> InputError:
    expected = nearest(Path(given).name, rule_files(), "a YAML file of rules")
    return InputError(NAME, f"{given}, which does not exist", expected, "docs/operators.md lists the names")


def read_rules(path: str | Path) -> tuple[Rule, ...]:
    return parse_rules(read_text(path, EXPECTED, limit=MAX_YAML_BYTES), str(path))


def parse_rules(text: str, file: str) -> tuple[Rule, ...]:
    """`file` is the name of the text in errors."""
    entries = parse_yaml(text, file, EXPECTED)
    if not isinstance(entries, list) or not entries:
        raise InputError(NAME, f"{file}, which holds no list", "a list of match/replace entries")
    return tuple(_rule(f"{file}, entry {at + 1}", entry) for at, entry in enumerate(entries))


def _rule(where: str, entry: Any) -> Rule:
    read = validate(_Entry, entry, f"{NAME}: {where}", "an entry has match, with name or class, and replace")
    if read.match.name is None and read.match.kind is None:
        raise InputError(NAME, f"{where}: an empty match", "a name, a class, or both")
    kwargs = read.replace.kwargs or {}
    layers = kwargs.get("transfer_map") or {}
    if not isinstance(layers, dict):
        raise InputError(NAME, f"{where}: transfer_map {short(layers)}", "numbers of layers with their devices")
    transfers = {_layer(where, key): _device(where, value) for key, value in layers.items()}
    device, prefill, out = (
        None if kwargs.get(word) is None else _device(where, kwargs[word]) for word in DEVICE_KEYWORDS
    )
    kind = None if read.match.kind is None else read.match.kind.rpartition(".")[2]
    pattern = None if read.match.name is None else FilePatterns(f"{where}: match.name", [read.match.name], "search")
    shown = " and ".join(filter(None, [read.match.name, read.match.kind and f"class {read.match.kind}"]))
    recursive = read.recursive and read.replace.recursive
    operator = read.replace.kind
    return Rule(where, pattern, kind, operator, kwargs, device, prefill, out, transfers, recursive, shown)


def _layer(where: str, key: Any) -> int:
    if not str(key).isdigit():
        raise InputError(NAME, f"{where}: transfer_map with {key!r}", "numbers of layers")
    return int(key)


def _device(where: str, word: Any) -> str:
    if not isinstance(word, str) or not DEVICES.fullmatch(word):
        hint = nearest(str(word).lower(), ("cpu", "cuda", "cuda:0"), "")
        raise InputError(NAME, f"{where}: device {word!r}", "cpu, cuda, or cuda:N", hint)
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


def _summary_of_file(file: RuleFile) -> RuleSummary:
    backends = [str(rule.arguments["backend"]) for rule in file.rules if rule.arguments.get("backend") is not None]
    amx = bool(backends) and backends[-1].lower().startswith("amx")
    words = [word for rule in file.rules for word in (rule.device, rule.prefill, rule.out, *rule.transfers.values())]
    gpus = file.gpus or int(any(word == "cuda" for word in words))
    return RuleSummary("file", "amx" if amx else "any", gpus, True)


def summarise_for_training(path: str) -> tuple[RuleSummary, str]:
    """What a recipe's rule means, and the line that says so."""
    file = find_rules(path)
    summary = summary_of_name(path) if file is None else _summary_of_file(file)
    source = "its name, as there is no such file" if file is None else "the file"
    cpu = "AMX where the CPU has it" if summary.backend == "amx" else "whatever the CPU has"
    gpus = (
        f"layers spread over {summary.gpus} GPUs, or as many of them as there are"
        if summary.gpus > 1
        else "one GPU, where there is one"
    )
    return summary, f"kt_optimize_rule: from {source}: {cpu}; {gpus}"
