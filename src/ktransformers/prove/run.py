"""`kt prove`: an adapter under the trainer's graph, under the server and under stock PEFT, on the same rows.

The rows are those that training recorded (`adapters/proof_record.py`), else a few sentences. One model is in memory at
a time: the trainer's graph (loaded as `kt train` does, the adapter attached by PEFT) is measured first, its noise floor
with it; then the server answers over HTTP, base and adapter mixed in one batch; then stock transformers and PEFT where
they fit. Each is a `ProofCheck`; the first that fails says which tensor or layer is the culprit. Nothing is printed
here."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktransformers import system
from ktransformers.adapters.comparison import (
    LogprobDifference,
    LogprobsAndNorms,
    NoiseFloor,
    adapted_modules,
    difference,
    first_deviating_module,
    larger_difference,
    measure,
    measure_noise_floor,
)
from ktransformers.adapters.content import Content, open_content
from ktransformers.adapters.convert import read_adapter
from ktransformers.adapters.dialects import detect_dialect
from ktransformers.adapters.manifest import check_manifest, read_manifest
from ktransformers.adapters.proof_record import ProofRecord, read_record
from ktransformers.errors import InputError, KTError
from ktransformers.nn.prepare import uses_kt_method
from ktransformers.prove.server import ask, bound_matrices, find_names, in_process, served_marks
from ktransformers.serve.client import Client
from ktransformers.serve.flags import Launch
from ktransformers.serve.launch import Say, check_packages, dtype_of
from ktransformers.serve.target import Target, resolve

TEXTS = (
    "The lighthouse keeper wrote down the weather every evening: wind, clouds, and how far one could see.",
    "To make the dough, mix flour, water, salt and a little yeast, then wait until it has doubled in size.",
    "Question: what is seventeen plus twenty-five?\nAnswer: forty-two, because seventeen and twenty-five make that.",
    "Es war einmal ein Müller, der hatte drei Söhne, seine Mühle, einen Esel und einen Kater.",
)
SERVED = "bf16"  # is what a server computes experts in
STOCK_ROOM = 1.25  # times the weights: what stock PEFT builds of a layer's difference comes on top
FREE = 0.9  # of the free memory may be used for stock


@dataclass(frozen=True)
class ProofCheck:
    what: str
    passed: bool | None  # None: could not be done here
    said: str
    difference: LogprobDifference | None = None
    culprit: str = ""  # tensor or layer


@dataclass(frozen=True)
class Proof:
    output: str
    base: str
    dtype: str
    rows: int
    tokens: int
    sample: str  # where the rows are from
    floor: LogprobDifference
    effect: LogprobDifference  # of the adapter on the base
    checks: tuple[ProofCheck, ...]
    counts: dict[str, int] = field(default_factory=dict)  # trained, saved, consumed

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    @property
    def culprit(self) -> str:
        return next((check.culprit for check in self.checks if check.passed is False), "")

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("output", "base", "dtype", "rows", "tokens", "sample", "counts")},
            "passed": self.passed,
            "culprit": self.culprit or None,
            "floor": self.floor.to_json(),
            "effect": self.effect.to_json(),
            "checks": [
                {
                    "what": check.what,
                    "passed": check.passed,
                    "said": check.said,
                    "difference": check.difference and check.difference.to_json(),
                    "culprit": check.culprit or None,
                }
                for check in self.checks
            ],
        }


class ProofFailed(KTError):
    """A tensor is wrong before anything was computed."""

    def __init__(self, check: ProofCheck) -> None:
        super().__init__(f"{check.culprit}: {check.said}")
        self.check = check


@dataclass(frozen=True)
class TrainerRun:
    """The trainer's graph on the rows."""

    base: LogprobsAndNorms
    adapter: LogprobsAndNorms
    floor: NoiseFloor
    consumed: int
    modules: tuple[str, ...]


def prove(
    output: str | Path,
    say: Say,
    *,
    server: str | None = None,
    api_key: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Proof:
    """Raises Failed where the files are wrong already, InputError where there is nothing to prove."""
    folder = Path(output)
    if server is None:
        check_packages()
    target = resolve(str(folder))
    if not target.adapters:
        raise InputError(str(folder), "a model", "the output directory of a training, or another PEFT adapter")
    content = open_content(folder)
    tensors = check_tensors(content, str(target.model))
    record = read_record(folder)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    word = record.dtype if record is not None and dtype == "auto" else dtype
    kind = dtype_of(word, device)
    rows, sample = _rows(record, target)
    say(f"the trainer's graph: {target.model} in {_spelled(kind)}, {len(rows)} rows")
    graph = trainer_graph(target, content, rows, kind, device, target.precision)
    floor = graph.floor.logprobs
    checks = [tensors[0], _consumed(graph, content)]
    if record is not None:
        checks.append(against_record(record, graph))
    gc.collect()
    rounded = graph
    if target.precision != SERVED:
        say(f"the same with experts in {SERVED}, as they are served")
        rounded = trainer_graph(target, content, rows, kind, device, SERVED)
        gc.collect()
    launch = Launch(str(folder), dtype=_spelled(kind), device=device, running=2 * len(rows), tokens=8192)
    say(f"our server: {server}" if server else "our server, on a free port of this machine")
    served = against_server(server, api_key, launch, target, rows, rounded, tensors[1]["matrices"], say)
    checks += [_rounded(check, target, rounded, graph) for check in served]
    gc.collect()
    say("stock transformers and PEFT")
    checks.append(against_stock(target, rows, kind, device, graph))
    counts = tensors[1] | {"consumed": graph.consumed}
    effect = difference(graph.adapter, graph.base)
    names = str(folder), str(target.model), _spelled(kind)
    return Proof(*names, len(rows), graph.base.tokens, sample, floor, effect, tuple(checks), counts)


def _spelled(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(record: ProofRecord | None, target: Target) -> tuple[list[list[int]], str]:
    if record is not None:
        kind = "held-out rows" if record.held_out else "rows (none were held out)"
        return [list(row) for row in record.rows], f"{kind} of the training"
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(target.model)
    return [tokenizer(text)["input_ids"] for text in TEXTS], "sentences of our own: training recorded none"


def check_tensors(content: Content, model: str) -> tuple[ProofCheck, dict[str, int]]:
    """The files: every tensor as the manifest says, every tensor with its place in this model."""
    source, document = detect_dialect(content), read_manifest(content.directory)
    if source.name != "peft":
        raise InputError(
            str(content.path), f"an adapter in {source.description}", "PEFT's", "`kt convert --to peft` first"
        )
    try:
        if document is not None:
            check_manifest(content, document)
        adapter = read_adapter(content.path, model=model, verify=document is None)
    except InputError as error:
        name, _, said = str(error).partition(": given ")
        raise ProofFailed(ProofCheck("tensors", False, said, culprit=name)) from error
    matrices = len(adapter.modules) + sum(len(layer.forms) for layer in adapter.experts)
    counts = {"saved": len(content.tensors), "matrices": matrices}
    if document is None:
        return ProofCheck(
            "tensors", None, f"no manifest: what {len(content.tensors)} tensors were is not known"
        ), counts
    counts["trained"] = len(document["tensors"])
    pairs = sum(source.pairs_per_layer(layer) for layer in adapter.experts) + len(adapter.modules)
    placed = 2 * pairs + len(adapter.extras)
    said = f"{counts['trained']} trained, {counts['saved']} saved, {placed} with a place in the model; hashes agree"
    return ProofCheck("tensors", counts["trained"] == counts["saved"] == placed, said), counts


def trainer_graph(
    target: Target,
    content: Content,
    rows: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: str,
    precision: str = SERVED,
) -> TrainerRun:
    """`precision`: of the experts."""
    from peft import PeftModel

    from ktransformers.nn import load_model

    where = None if device == "cpu" else device
    experts = target.experts_of(None)
    stock = load_model(target.model, experts=experts, dtype=dtype, device=where, precision=precision)
    base = measure(stock, rows)
    model: Any = PeftModel.from_pretrained(stock, target.adapters[0][1])
    consumed = _read_back(model, content)
    modules = adapted_modules(model)
    adapter = measure(model, rows, modules)
    floor = measure_noise_floor(model, rows, adapter)
    with model.disable_adapter():
        off, off_floor = measure(model, rows), measure_noise_floor(model, rows, base)
    if not difference(off, base).is_zero:
        said = "the base computes otherwise while an adapter is attached and off"
        raise ProofFailed(ProofCheck("trainer's graph", False, said, difference(off, base), "base"))
    noise = NoiseFloor(larger_difference(floor.logprobs, off_floor.logprobs), floor.projections)
    return TrainerRun(base, adapter, noise, consumed, tuple(modules))


def _read_back(model: Any, content: Content) -> int:
    """How many tensors of the file are in PEFT's model, number for number."""
    from peft import get_peft_model_state_dict

    state: dict[str, Tensor] = get_peft_model_state_dict(model)
    for name, stored in content.tensors.items():
        if name not in state:
            raise ProofFailed(ProofCheck("trainer's graph", False, "PEFT has no place for it", culprit=name))
        if not torch.equal(state[name].float().cpu(), stored.read().float()):
            raise ProofFailed(
                ProofCheck("trainer's graph", False, "PEFT did not read it as it is in the file", culprit=name)
            )
    content.release()
    left = sorted(set(state) - set(content.tensors))
    if left:
        raise ProofFailed(
            ProofCheck("trainer's graph", False, "PEFT expects it and the file lacks it", culprit=left[0])
        )
    return len(state)


def _consumed(graph: TrainerRun, content: Content) -> ProofCheck:
    said = f"{graph.consumed} of {len(content.tensors)} tensors are in the graph, number for number"
    return ProofCheck("trainer's graph", graph.consumed == len(content.tensors), said)


def compared(
    what: str, found: LogprobsAndNorms, expected: LogprobsAndNorms, floor: LogprobDifference, where: Callable[[], str]
) -> ProofCheck:
    """`where` is asked for the culprit only if it is needed."""
    apart = difference(found, expected)
    if apart.is_zero:
        return ProofCheck(what, True, "the same to the bit", apart)
    said = f"max {apart.max:.2g}, mean {apart.mean:.2g}; the floor is {floor.max:.2g} and {floor.mean:.2g}"
    if apart.within(floor):
        return ProofCheck(what, True, said, apart)
    return ProofCheck(what, False, f"{said}; largest at token {apart.token} of row {apart.row}", apart, where())


def against_record(record: ProofRecord, graph: TrainerRun) -> ProofCheck:
    """The numbers that the trainer's own model said before it was saved, maybe on another machine."""
    control = difference(record.base, graph.base)
    floor = larger_difference(graph.floor.logprobs, control)
    other = not control.is_zero  # another machine, another dtype, other threads: every layer is a little off
    noise = {name: max(value, control.mean if other else 0.0) for name, value in graph.floor.projections.items()}
    place = first_deviating_module(graph.adapter.projections, record.adapter.projections, noise)
    found = compared("as trained", graph.adapter, record.adapter, floor, lambda: place or "the output")
    if found.passed and place is not None and not other:
        said = f"outputs differ from those of training; log-probabilities: {found.said}"
        return replace(found, passed=False, said=said, culprit=place)
    return found


def against_server(
    url: str | None,
    key: str | None,
    launch: Launch,
    target: Target,
    rows: Sequence[Sequence[int]],
    graph: TrainerRun,
    matrices: int,
    say: Say,
) -> list[ProofCheck]:
    if url is not None:
        return _served(Client(url, key), target, rows, graph, matrices, lambda name: "")
    with in_process(launch, target, say) as (address, service):

        def where(name: str) -> str:
            projections = served_marks(Client(address, None), service, name, rows, graph.modules)
            return (
                first_deviating_module(projections, graph.adapter.projections, graph.floor.projections) or "the output"
            )

        return _served(Client(address, None), target, rows, graph, matrices, where)


def _rounded(check: ProofCheck, target: Target, rounded: TrainerRun, graph: TrainerRun) -> ProofCheck:
    """Where training was more exact than a server is, its answers are said with how far that is from training."""
    pairs = {"server, adapter": (rounded.adapter, graph.adapter), "server, base": (rounded.base, graph.base)}
    if target.precision == SERVED or check.what not in pairs:
        return check
    apart = difference(*pairs[check.what])
    said = f"trained with experts in {target.precision}, served in {SERVED}: max {apart.max:.2g}, mean {apart.mean:.2g}"
    return replace(check, said=f"{check.said}; {said}")


def _served(
    client: Client,
    target: Target,
    rows: Sequence[Sequence[int]],
    graph: TrainerRun,
    matrices: int,
    where: Callable[[str], str],
) -> list[ProofCheck]:
    base, adapter, loaded = find_names(client, target)
    try:
        with ThreadPoolExecutor(2 * len(rows)) as pool:  # base and adapter in one batch
            asked = [pool.submit(ask, client, name, row) for row in rows for name in (adapter, base)]
            answers = [one.result() for one in asked]
        ours = LogprobsAndNorms(tuple(answers[0::2])), LogprobsAndNorms(tuple(answers[1::2]))
        floor = graph.floor.logprobs
        same = compared("server, base", ours[1], graph.base, floor, lambda: f"base ({base})")
        mine = compared("server, adapter", ours[0], graph.adapter, floor, lambda: where(adapter) or adapter)
        if mine.passed is False and difference(ours[0], ours[1]).is_zero:
            mine = replace(mine, said=f"{mine.said}; it answers as the base does: the adapter is not applied")
        return [_placed(client, adapter, matrices), mine, same]
    finally:
        if loaded:
            client.open("/v1/unload_lora_adapter", {"lora_name": loaded}).close()


def _placed(client: Client, adapter: str, matrices: int) -> ProofCheck:
    """What the server says that it has bound."""
    bound = bound_matrices(client, adapter)
    if bound is None:
        return ProofCheck("server, tensors", None, "it does not say how many matrices it has bound")
    said = f"{bound} of {matrices} matrices with factors are bound"
    return ProofCheck("server, tensors", bound == matrices, said, culprit="" if bound == matrices else adapter)


def against_stock(
    target: Target, rows: Sequence[Sequence[int]], dtype: torch.dtype, device: str, graph: TrainerRun
) -> ProofCheck:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from ktransformers.checkpoint import Shards

    packed = target.experts_of(None) or (target.model if uses_kt_method(target.model) else None)
    if packed is not None:  # this process has taught transformers to read them, which proves nothing
        return ProofCheck("stock PEFT", None, f"the experts are those of {packed}, which only ktransformers reads")
    shards = Shards.of_directory(target.model)
    numbers = sum(torch.Size(shards.shape(name)).numel() for name in shards.names)
    needed = int(numbers * dtype.itemsize * STOCK_ROOM)
    free = system.memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]
    if needed > free * FREE:
        said = f"left out: it needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
        return ProofCheck("stock PEFT", None, said)
    stock: Any = AutoModelForCausalLM.from_pretrained(target.model, dtype=dtype)
    stock = stock.to(device)
    base = measure(stock, rows)
    model: Any = PeftModel.from_pretrained(stock, target.adapters[0][1])
    adapter = measure(model, rows, graph.modules)
    if target.precision == SERVED:
        _round_experts(model)
    rounded = measure(model, rows)
    control, rounding = difference(base, graph.base), difference(rounded, adapter)
    floor = larger_difference(graph.floor.logprobs, larger_difference(control, rounding))

    def where() -> str:
        noise = dict.fromkeys(graph.modules, max(floor.max, 1e-3))
        return first_deviating_module(graph.adapter.projections, adapter.projections, noise) or "the output"

    found = compared("stock PEFT", graph.adapter, adapter, floor, where)
    return replace(found, said=f"{found.said}; bases are {control.max:.2g} apart")


def _round_experts(model: Any) -> None:
    """Experts compute with factors in bf16 here: what that alone changes belongs to the floor."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and ".experts." in name:
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
