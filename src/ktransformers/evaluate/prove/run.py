"""`kt prove`: compares an adapter in the trainer's model, in the server and in stock PEFT, on the same rows of tokens.

The rows are those that training recorded (`adapters/proof_record.py`), otherwise a few sentences. One model is in
memory at a time: first the trainer's model (loaded as `kt train` does, the adapter attached by PEFT) with its noise
floor, then the server over HTTP, base and adapter mixed in one batch, and asked with messages too
(`prove/messages.py`), then stock transformers and PEFT if they fit. A program computes tokens for which two experts tie
with the experts that the program before it has chosen (`adapters/router_choices.py`).
Each comparison is a `ProofCheck`; one that fails names the tensor or layer at fault. This module prints nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from ktransformers.adapters.config import check_for_peft
from ktransformers.adapters.content import Content, open_content
from ktransformers.adapters.convert import read_adapter
from ktransformers.adapters.formats import detect_format
from ktransformers.adapters.manifest import check_manifest, read_manifest
from ktransformers.adapters.proof_record import ProofRecord, read_record
from ktransformers.adapters.router_choices import ChoiceComparison, compare_choices
from ktransformers.checkpoint.gguf_directory import is_gguf_directory
from ktransformers.evaluate.prove.messages import ProofCheck, ProofFailed, check_messages
from ktransformers.evaluate.prove.server import (
    bound_matrices,
    find_names,
    measure_served_layers,
    score_rows,
    score_rows_replayed,
    start_server,
)
from ktransformers.evaluate.prove.ties import can_explain, explain_by_ties
from ktransformers.ground import system
from ktransformers.ground.client import Client
from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import AS_RELEASED
from ktransformers.modeling.prepare import uses_kt_method
from ktransformers.modeling.spec import ModelSpec, device_for, dtype_name, parse_dtype
from ktransformers.serve.flags import Launch
from ktransformers.serve.launch import LogLine, check_packages
from ktransformers.serve.target import Target, resolve_target

SAMPLE_TEXTS = (
    "The lighthouse keeper wrote down the weather every evening: wind, clouds, and how far one could see.",
    "To make the dough, mix flour, water, salt and a little yeast, then wait until it has doubled in size.",
    "Question: what is seventeen plus twenty-five?\nAnswer: forty-two, because seventeen and twenty-five make that.",
    "Es war einmal ein Müller, der hatte drei Söhne, seine Mühle, einen Esel und einen Kater.",
)
SERVED_PRECISION = "bf16"  # in which a server computes experts
STOCK_MEMORY_FACTOR = 1.25  # of the weights' size: stock PEFT materialises the delta of a layer
MAX_MEMORY_SHARE = 0.9  # of the free memory for the stock model


@dataclass(frozen=True)
class Proof:
    output: str
    base: str
    dtype: str
    rows: int
    tokens: int
    sample: str  # origin of the rows
    floor: LogprobDifference
    effect: LogprobDifference  # of the adapter against the base
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
            "checks": [check.to_json() for check in self.checks],
        }


@dataclass(frozen=True)
class TrainerRun:
    """Outputs of the trainer's model on the rows."""

    base: LogprobsAndNorms
    adapter: LogprobsAndNorms
    floor: NoiseFloor
    consumed: int
    modules: tuple[str, ...]
    reopen: Callable[[], Any]  # the model with its adapter, loaded again


def prove(
    output: str | Path,
    log: LogLine,
    *,
    server: str | None = None,
    api_key: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
) -> Proof:
    """Raises ProofFailed if the files are wrong already, InputError if there is nothing to prove."""
    directory = Path(output)
    if server is None:
        check_packages()
    target = resolve_target(str(directory))
    if not target.adapters:
        raise InputError(str(directory), "a model", "the output directory of a training, or another PEFT adapter")
    content = open_content(directory)
    tensor_check, counts = check_tensors(content, str(target.model))
    record = read_record(directory)
    device = device_for(device)
    model_dtype = parse_dtype(record.dtype if record is not None and dtype == "auto" else dtype, device)
    rows, sample = _sample_rows(record, target)
    log(f"the trainer's graph: {target.model} in {dtype_name(model_dtype)}, {len(rows)} rows")
    trainer = run_trainer_model(target, content, rows, model_dtype, device, target.precision, record)
    floor = trainer.floor.replayed
    checks = [tensor_check, _check_consumed(trainer, content)]
    if record is not None:
        checks.append(check_record(record, trainer))
    gc.collect()
    rounded = trainer
    if target.precision != SERVED_PRECISION:
        log(f"the same with experts in {SERVED_PRECISION}, as they are served")
        rounded = run_trainer_model(target, content, rows, model_dtype, device, SERVED_PRECISION)
        gc.collect()
    launch = Launch(
        str(directory),
        dtype=dtype_name(model_dtype),
        device=device,
        max_running_requests=2 * len(rows),
        max_total_tokens=8192,
        rest=_trained_rest(target, device, model_dtype),
    )
    log(f"our server: {server}" if server else "our server, on a free port of this machine")
    with nullcontext((server, None)) if server else start_server(launch, target, log) as (address, service):
        client = Client(address, api_key if server else None)
        served = _check_served(client, service, target, rows, rounded, counts["matrices"], record)
    checks += [_with_rounding(check, target, rounded, trainer) for check in served]
    gc.collect()
    log("stock transformers and PEFT")
    checks.append(check_stock(target, rows, model_dtype, device, trainer))
    counts |= {"consumed": trainer.consumed}
    effect = difference(trainer.adapter, trainer.base)
    names = str(directory), str(target.model), dtype_name(model_dtype)
    return Proof(*names, len(rows), trainer.base.tokens, sample, floor, effect, tuple(checks), counts)


def _trained_rest(target: Target, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> str:
    """Versions whose manifests do not say it trained on dense weights; a GPU has quantized ones in bf16 models
    alone."""
    has_codes = device == "cpu" or dtype == torch.bfloat16
    return (target.rest or "bf16") if has_codes else "bf16"


def _sample_rows(record: ProofRecord | None, target: Target) -> tuple[list[list[int]], str]:
    if record is not None:
        kind = "held-out rows" if record.held_out else "rows (none were held out)"
        return [list(row) for row in record.rows], f"{kind} of the training"
    from ktransformers.modeling.pretrained import read_tokenizer

    tokenizer = read_tokenizer(target.model)
    return [tokenizer(text)["input_ids"] for text in SAMPLE_TEXTS], "sentences of our own: training recorded none"


def check_tensors(content: Content, model: str) -> tuple[ProofCheck, dict[str, int]]:
    """Check the files: every tensor agrees with the manifest and belongs to a module of this model."""
    source, document = detect_format(content), read_manifest(content.directory)
    if source.name != "peft":
        raise InputError(
            str(content.path), f"an adapter in {source.description}", "PEFT's", "`kt convert --to peft` first"
        )
    try:
        if document is not None:
            check_manifest(content, document)
        adapter = read_adapter(content.path, model=model, verify=document is None)
    except InputError as error:
        name, _, detail = str(error).partition(": given ")
        raise ProofFailed("tensors", name, detail) from error
    matrices = len(adapter.modules) + sum(len(layer.forms) for layer in adapter.experts)
    counts = {"saved": len(content.tensors), "matrices": matrices}
    if document is None:
        detail = f"no manifest: {len(content.tensors)} tensors cannot be compared with training"
        return ProofCheck("tensors", None, detail), counts
    counts["trained"] = len(document["tensors"])
    pairs = sum(source.pairs_per_layer(layer) for layer in adapter.experts) + len(adapter.modules)
    placed = 2 * pairs + len(adapter.extras)
    detail = f"{counts['trained']} trained, {counts['saved']} saved, {placed} with a module in the model; hashes agree"
    return ProofCheck("tensors", counts["trained"] == counts["saved"] == placed, detail), counts


def run_trainer_model(
    target: Target,
    content: Content,
    rows: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: str,
    precision: str = SERVED_PRECISION,
    record: ProofRecord | None = None,
) -> TrainerRun:
    """Load the model as `kt train` does and measure base, adapter and noise floor; `precision`: of the experts. Router
    choices of `record` are replayed."""

    def open_base() -> Any:
        from ktransformers.modeling.load import open_model

        experts, rest = target.choose_experts(None), _trained_rest(target, device, dtype)
        spec = ModelSpec(target.model, experts, dtype=dtype, device=device, rest=rest, precision=precision)
        return open_model(spec)

    def attach_adapter(stock: Any) -> Any:
        from peft import PeftModel

        check_for_peft(target.adapters[0][1], stock)
        return PeftModel.from_pretrained(stock, target.adapters[0][1])

    stock = open_base()
    base_routers, adapter_routers = (None, None) if record is None else (record.base.routers, record.adapter.routers)
    base = measure(stock, rows, replay=base_routers)
    model = attach_adapter(stock)
    consumed = _compare_loaded_tensors(model, content)
    modules = adapted_modules(model)
    adapter = measure(model, rows, modules, adapter_routers)
    floor = measure_noise_floor(model, rows, adapter)
    with model.disable_adapter():
        disabled = measure(model, rows, replay=base_routers)
        disabled_floor = measure_noise_floor(model, rows, base)
    if not difference(disabled, base).is_zero:
        detail = "the base computes other values while an adapter is attached and disabled"
        raise ProofFailed("trainer's graph", "base", detail, difference(disabled, base))
    noise = NoiseFloor(
        larger_difference(floor.logprobs, disabled_floor.logprobs),
        larger_difference(floor.replayed, disabled_floor.replayed),
        floor.projections,
        floor.router_inputs,
    )
    return TrainerRun(base, adapter, noise, consumed, tuple(modules), lambda: attach_adapter(open_base()))


def _compare_loaded_tensors(model: Any, content: Content) -> int:
    """The number of tensors of the file that PEFT's model holds with equal values; raises ProofFailed at the first that
    differs."""
    from peft import get_peft_model_state_dict

    state: dict[str, Tensor] = get_peft_model_state_dict(model)
    for name, stored in content.tensors.items():
        if name not in state:
            raise ProofFailed("trainer's graph", name, "PEFT has no module for it")
        if not torch.equal(state[name].float().cpu(), stored.read().float()):
            raise ProofFailed("trainer's graph", name, "PEFT loaded other values than the file has")
    content.release()
    missing = sorted(set(state) - set(content.tensors))
    if missing:
        raise ProofFailed("trainer's graph", missing[0], "PEFT expects it and the file lacks it")
    return len(state)


def _check_consumed(trainer: TrainerRun, content: Content) -> ProofCheck:
    detail = f"{trainer.consumed} of {len(content.tensors)} tensors are in the graph, number for number"
    return ProofCheck("trainer's graph", trainer.consumed == len(content.tensors), detail)


def compare_outputs(
    what: str,
    outputs: LogprobsAndNorms,
    expected: LogprobsAndNorms,
    floor: LogprobDifference,
    find_culprit: Callable[[], str],
    routers: ChoiceComparison | None = None,
) -> ProofCheck:
    """`find_culprit` is called only if the outputs differ. `routers`: compared if one program replayed the other's."""
    differences = difference(outputs, expected)
    if routers is not None and routers.faults:
        return _router_fault(what, routers, differences)
    ties = f"; {routers}" if routers is not None and str(routers) else ""
    if differences.is_zero:
        return ProofCheck(what, True, f"the same to the bit{ties}", differences, routers=routers)
    detail = (
        f"max {differences.max:.2g}, mean {differences.mean:.2g}; the floor is {floor.max:.2g} and {floor.mean:.2g}"
    )
    if differences.within(floor):
        return ProofCheck(what, True, f"{detail}{ties}", differences, routers=routers)
    detail += f"; largest at token {differences.token} of row {differences.row}{ties}"
    if routers is None:
        detail += "; ties between experts were not looked for"
    return ProofCheck(what, False, detail, differences, find_culprit(), routers)


def _router_fault(what: str, routers: ChoiceComparison, differences: LogprobDifference, base: str = "") -> ProofCheck:
    """Names the widest gap in the first layer at fault; `base`: the word for a fault without the adapter."""
    layer, count = routers.faults[0].layer, len(routers.faults)
    fault = max((fault for fault in routers.faults if fault.layer == layer), key=lambda fault: fault.gap)
    detail = f"{base}{fault.describe()}" + (f"; {count} such choices" if count > 1 else "")
    return ProofCheck(what, False, detail, differences, fault.layer, routers)


def _floor_of(noise: NoiseFloor, *routers: ChoiceComparison | None) -> LogprobDifference:
    """The noise floor for programs of which one replayed the other; with ties in it where that was not possible."""
    replayed = all(comparison is not None and not comparison.unjudged for comparison in routers)
    return noise.replayed if replayed else noise.logprobs


def check_record(record: ProofRecord, trainer: TrainerRun) -> ProofCheck:
    """Compare with the outputs that training recorded before it saved, possibly on another machine."""
    control = difference(record.base, trainer.base)
    base_routers = compare_choices(trainer.base.routers, record.base.routers)
    if base_routers is not None and base_routers.faults:
        return _router_fault("as trained", base_routers, control, "in the base, ")
    routers = compare_choices(trainer.adapter.routers, record.adapter.routers)
    floor = larger_difference(_floor_of(trainer.floor, base_routers, routers), control)
    other_conditions = not control.is_zero  # another machine, dtype or thread count: every layer differs a little
    noise = {
        name: max(value, control.mean if other_conditions else 0.0) for name, value in trainer.floor.projections.items()
    }
    layer = first_deviating_module(trainer.adapter.projections, record.adapter.projections, noise)
    check = compare_outputs(
        "as trained", trainer.adapter, record.adapter, floor, lambda: layer or "the output", routers
    )
    if check.passed and layer is not None and not other_conditions:
        detail = f"outputs differ from those of training; log-probabilities: {check.detail}"
        return replace(check, passed=False, detail=detail, culprit=layer)
    return check


def _with_rounding(check: ProofCheck, target: Target, rounded: TrainerRun, trainer: TrainerRun) -> ProofCheck:
    """If training used a higher precision than the server, add the difference that the precision alone makes."""
    pairs = {"server, adapter": (rounded.adapter, trainer.adapter), "server, base": (rounded.base, trainer.base)}
    if target.precision == SERVED_PRECISION or check.what not in pairs:
        return check
    differences = difference(*pairs[check.what])
    precisions = f"trained with experts in {target.precision}, served in {SERVED_PRECISION}"
    detail = f"{check.detail}; {precisions}: max {differences.max:.2g}, mean {differences.mean:.2g}"
    return replace(check, detail=detail)


def _check_served(
    client: Client,
    service: Any | None,
    target: Target,
    rows: Sequence[Sequence[int]],
    trainer: TrainerRun,
    matrices: int,
    record: ProofRecord | None,
) -> list[ProofCheck]:
    """`service`: of the server, if it is in this process."""
    base, adapter, loaded = find_names(client, target)
    names = adapter, base

    def check(what: str, name: str, outputs: LogprobsAndNorms, expected: LogprobsAndNorms) -> ProofCheck:
        def find_culprit() -> str:
            if name == base:
                return f"base ({base})"
            if service is None:
                return adapter
            routers = trainer.adapter.routers
            projections = measure_served_layers(client, service, adapter, rows, trainer.modules, routers)
            noise = trainer.floor.projections
            return first_deviating_module(projections, trainer.adapter.projections, noise) or "the output"

        if difference(outputs, expected).within(trainer.floor.replayed):
            return compare_outputs(what, outputs, expected, trainer.floor.replayed, find_culprit)
        if service is None:
            expected, routers = _resolve_ties(trainer, rows, outputs, expected, name == adapter)
        else:
            outputs = score_rows_replayed(client, service, names, rows, name, expected.routers)
            routers = compare_choices(outputs.routers, expected.routers)
        return compare_outputs(what, outputs, expected, _floor_of(trainer.floor, routers), find_culprit, routers)

    try:
        served_adapter, served_base = score_rows(client, names, rows)
        base_check = check("server, base", base, served_base, trainer.base)
        adapter_check = check("server, adapter", adapter, served_adapter, trainer.adapter)
        if adapter_check.passed is False and difference(served_adapter, served_base).is_zero:
            adapter_check = replace(
                adapter_check, detail=f"{adapter_check.detail}; it answers as the base does: the adapter is not applied"
            )
        by_messages = check_messages(client, base, adapter, target, record)
        return [_check_bound_matrices(client, adapter, matrices), adapter_check, base_check, *by_messages]
    finally:
        if loaded:
            client.open("/v1/unload_lora_adapter", {"lora_name": loaded}).close()


def _resolve_ties(
    trainer: TrainerRun,
    rows: Sequence[Sequence[int]],
    outputs: LogprobsAndNorms,
    expected: LogprobsAndNorms,
    with_adapter: bool,
) -> tuple[LogprobsAndNorms, ChoiceComparison | None]:
    """The trainer's outputs with ties between experts resolved as a server elsewhere has; None: not possible."""
    if not can_explain(expected, trainer.floor):
        return expected, None
    model = trainer.reopen()
    with nullcontext() if with_adapter else model.disable_adapter():
        return explain_by_ties(model, rows, outputs, expected, trainer.floor)


def _check_bound_matrices(client: Client, adapter: str, matrices: int) -> ProofCheck:
    """Compare the number of matrices that the server reports as bound."""
    bound = bound_matrices(client, adapter)
    if bound is None:
        return ProofCheck("server, tensors", None, "it does not say how many matrices it has bound")
    detail = f"{bound} of {matrices} matrices with factors are bound"
    return ProofCheck("server, tensors", bound == matrices, detail, culprit="" if bound == matrices else adapter)


def check_stock(
    target: Target, rows: Sequence[Sequence[int]], dtype: torch.dtype, device: str, trainer: TrainerRun
) -> ProofCheck:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from ktransformers.checkpoint import Shards

    unreadable = uses_kt_method(target.model) or is_gguf_directory(target.model)
    packed = target.choose_experts(None) or (target.model if unreadable else None)
    if packed is not None:  # only our patches make transformers read them, so it would not be stock
        return ProofCheck("stock PEFT", None, f"the experts are those of {packed}, which only ktransformers reads")
    if _trained_rest(target) not in AS_RELEASED:
        detail = f"linear layers were trained in {target.rest}, which only ktransformers encodes"
        return ProofCheck("stock PEFT", None, detail)
    shards = Shards.of_directory(target.model)
    parameters = sum(torch.Size(shards.shape(name)).numel() for name in shards.names)
    needed = int(parameters * dtype.itemsize * STOCK_MEMORY_FACTOR)
    free = system.memory().available if device == "cpu" else torch.cuda.mem_get_info()[0]
    if needed > free * MAX_MEMORY_SHARE:
        detail = f"left out: it needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
        return ProofCheck("stock PEFT", None, detail)
    stock: Any = AutoModelForCausalLM.from_pretrained(target.model, dtype=dtype)
    stock = stock.to(device)
    base = measure(stock, rows, replay=trainer.base.routers)
    control, base_routers = difference(base, trainer.base), compare_choices(base.routers, trainer.base.routers)
    if base_routers is not None and base_routers.faults:
        return _router_fault("stock PEFT", base_routers, control, "in the base, ")
    check_for_peft(target.adapters[0][1], stock)
    model: Any = PeftModel.from_pretrained(stock, target.adapters[0][1])
    adapter = measure(model, rows, trainer.modules, trainer.adapter.routers)
    routers = compare_choices(adapter.routers, trainer.adapter.routers)
    if target.precision == SERVED_PRECISION:
        _round_experts(model)
    rounding = difference(measure(model, rows, replay=trainer.adapter.routers), adapter)
    own_floor = _floor_of(trainer.floor, base_routers, routers)
    floor = larger_difference(own_floor, larger_difference(control, rounding))

    def find_culprit() -> str:
        noise = dict.fromkeys(trainer.modules, max(floor.max, 1e-3))
        return first_deviating_module(trainer.adapter.projections, adapter.projections, noise) or "the output"

    check = compare_outputs("stock PEFT", trainer.adapter, adapter, floor, find_culprit, routers)
    return replace(check, detail=f"{check.detail}; bases are {control.max:.2g} apart")


def _round_experts(model: Any) -> None:
    """Round expert factors to bf16, as our kernels do: the change that this alone makes belongs to the noise floor."""
    for name, parameter in model.named_parameters():
        if "lora_" in name and ".experts." in name:
            parameter.data = parameter.data.to(torch.bfloat16).to(parameter.dtype)
