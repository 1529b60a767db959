"""Folds an adapter into a model whose experts have few bits, or shall have: out comes a packed directory, as of `kt
quant`, whose experts were encoded once from the sum in float32.

Layers pass one by one (`quant/convert.py`): memory is that of one layer's factors and of an expert for each thread, and
a run that was killed goes on. The result grows in a hidden directory beside its place. Before it gets its name, its
distributions are compared with those of the base with the adapter (`divergence.py`); where they are further apart than
the limit, it is removed and nothing is left. The limit, 0.1 nats a token, is what costs about a tenth of perplexity: of
a model of 135 million parameters int8 makes 0.0017 and passes, int4 in groups of 32 makes 0.17 and does not."""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.adapters.config import FILE as CONFIG
from ktransformers.adapters.content import open_content
from ktransformers.adapters.convert import read_adapter
from ktransformers.adapters.divergence import (
    MAX_KL,
    TOKENS,
    Divergence,
    calibration_text,
    check_divergence,
    measure_divergence,
)
from ktransformers.adapters.lora import Adapter
from ktransformers.adapters.manifest import FILE as MANIFEST
from ktransformers.adapters.origin import FoldedLayer, FoldedOrigin, open_origin
from ktransformers.adapters.write import check_apart, check_target, replace_directory
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.recode import KEEP
from ktransformers.checkpoint.recode import check_target as check_format
from ktransformers.checkpoint.sources import open_source
from ktransformers.errors import InputError
from ktransformers.files import write_json
from ktransformers.nn.load import read_checkpoint_facts
from ktransformers.quant.convert import Progress, convert
from ktransformers.quant.origin import Origin
from ktransformers.quant.plan import ConversionPlan, parse_formats, plan_conversion
from ktransformers.quant.receipt import Receipt, write_receipt

RECORD = "kt_merge.json"


@dataclass(frozen=True)
class PackedMerge:
    out: str
    changed: int  # matrices with a delta, those of all experts of a layer as one
    kept_layers: int  # that an earlier run had finished
    seconds: float
    receipt: Receipt
    max_kl: float
    divergence: Divergence | None  # None: it was not asked for

    def to_json(self) -> dict[str, Any]:
        words = asdict(self) | {"receipt": self.receipt.to_json()}
        return words | {"divergence": None if self.divergence is None else self.divergence.to_json()}


def wants_packing(model: Path) -> bool:
    """A base that is packed or quantised, or no safetensors: merged, it is a packed directory, too."""
    if not model.is_dir() or is_packed(model):
        return True
    told = read_checkpoint_facts(model)
    return told.experts is not None or open_source(model, told.rest).quantised


def merge_packed(
    model: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    formats: dict[str, str] | None = None,
    threads: int | None = None,
    calib: Path | None = None,
    tokens: int = TOKENS,
    max_kl: float = MAX_KL,
    unchecked: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackedMerge:
    """`formats` are those of `convertplan.wanted`; None keeps the base's own."""
    model, adapter, out = Path(model), Path(adapter), Path(out).absolute()
    if not max_kl > 0:
        raise InputError("max-kl", max_kl, "more than 0")
    if calib is not None and not calib.is_file():
        raise InputError("calib", f"{calib}, which does not exist", "a text file or JSON lines")
    check_apart([model, out])
    check_apart([adapter, out])
    check_target(out, overwrite)
    plan = _plan(model, adapter, formats or parse_formats(KEEP), threads)
    out.parent.mkdir(parents=True, exist_ok=True)
    growing = out.with_name(f".{out.name}.merging")
    if growing.exists():  # finished by a run that was killed while it compared, perhaps with another adapter
        shutil.rmtree(growing)
    done = convert(plan, growing, progress=progress)
    plan.origin.release()
    receipt, divergence = done.receipt, None
    if not unchecked:
        divergence = _judge(model, adapter, growing, calib, tokens, max_kl, plan)
        receipt = replace(receipt, calibration=divergence.calibration())
        write_receipt(growing, receipt)
    for stale in (MANIFEST, CONFIG):  # of an adapter or of an earlier merge in the base's folder
        (growing / stale).unlink(missing_ok=True)
    assert isinstance(plan.origin, FoldedOrigin)
    result = PackedMerge(str(out), plan.origin.changed, done.kept_layers, done.seconds, receipt, max_kl, divergence)
    said = None if divergence is None else divergence.to_json()
    limit = max_kl if math.isfinite(max_kl) else None
    write_json(growing / RECORD, {"base": model.name, "adapter": adapter.name, "max_kl": limit, "divergence": said})
    replace_directory(growing, out)
    return result


def _plan(model: Path, adapter: Path, formats: dict[str, str], threads: int | None) -> ConversionPlan:
    base = open_origin(model)
    content = open_content(adapter)
    files = [content.directory / name for name in content.files]
    config = content.directory / CONFIG
    folded = FoldedOrigin(base, _read(adapter, base), [*files, *([config] if config.is_file() else [])])
    plan = plan_conversion(folded, formats, threads)
    for layer in plan.layers:
        assert isinstance(layer.origin, FoldedLayer)
        for role in layer.origin.lora.forms if layer.origin.lora is not None else ():
            try:
                check_format("format", layer.formats[role])
            except InputError as error:
                given = f"{role} in {layer.formats[role]}, which an adapter changes"
                raise InputError(layer.origin.module, given, "a format that can be written", "--format int8") from error
    return plan


def _read(adapter: Path, base: Origin) -> Adapter:
    """Checked against the base; of a GGUF file that stands alone, against what its header says."""
    if (base.directory / "config.json").is_file():
        return read_adapter(adapter, model=str(base.directory))
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", base.config)
        return read_adapter(adapter, model=folder)


def _judge(
    model: Path, adapter: Path, merged: Path, calib: Path | None, tokens: int, limit: float, plan: ConversionPlan
) -> Divergence:
    """The divergence; above the limit, or where it cannot be measured, nothing is left of what was written."""
    try:
        gc.collect()
        with calibration_text(calib) as text:
            found = measure_divergence(model, adapter, merged, text, tokens=tokens, base_bytes=plan.source_bytes)
    except InputError as error:
        shutil.rmtree(merged)
        remedy = "--unchecked writes it without"
        raise InputError("merge", f"a model that could not be compared ({error})", "a comparison", remedy) from error
    try:
        check_divergence(found, limit)
    except InputError:
        shutil.rmtree(merged)
        raise
    return found
