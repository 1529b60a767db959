"""Merges an adapter into a model with quantised experts, or quantises while merging: the output is a packed directory
like that of `kt quant`, its experts encoded once from the float32 sum.

Layers are processed one by one (`quant/convert.py`): memory is that of one layer's factors and one expert per thread,
and a killed run resumes. The output is written to a hidden directory next to its target. Before the rename, its
distributions are compared with those of the base with the adapter (`divergence.py`); above the limit it is removed. The
limit of 0.1 nats per token corresponds to about a tenth of perplexity: for a model of 135 million parameters int8
measures 0.0017 and passes, int4 in groups of 32 measures 0.17 and does not.
"""

from __future__ import annotations

import gc
import math
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.adapters.adapter_template import write_adapter_template
from ktransformers.adapters.config import CONFIG_FILE as CONFIG
from ktransformers.adapters.content import open_content
from ktransformers.adapters.convert import read_adapter
from ktransformers.adapters.divergence import (
    CALIBRATION_TOKENS,
    MAX_KL,
    Divergence,
    calibration_text,
    check_divergence,
    measure_divergence,
)
from ktransformers.adapters.lora import Adapter
from ktransformers.adapters.manifest import MANIFEST_FILE as MANIFEST
from ktransformers.adapters.origin import FoldedLayer, FoldedOrigin, open_origin
from ktransformers.checkpoint.fresh_directory import check_disjoint, check_target, replace_directory
from ktransformers.checkpoint.packed import is_packed
from ktransformers.checkpoint.recode import KEEP
from ktransformers.checkpoint.recode import check_target as check_format
from ktransformers.checkpoint.sources import open_source
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_json
from ktransformers.modeling.prepare import read_checkpoint_facts
from ktransformers.quant.conversion_run import Progress
from ktransformers.quant.convert import convert
from ktransformers.quant.origin import Origin
from ktransformers.quant.plan import ConversionPlan, parse_formats, plan_conversion
from ktransformers.quant.report import QuantizationReport, write_report

RECORD_FILE = "kt_merge.json"


@dataclass(frozen=True)
class PackedMerge:
    out: str
    changed: int  # matrices with a delta, counting all experts of a layer as one
    kept_layers: int  # finished by an earlier run
    seconds: float
    report: QuantizationReport
    max_kl: float
    divergence: Divergence | None  # None if not requested

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["report"]
        divergence = None if self.divergence is None else self.divergence.to_json()
        return fields | {"receipt": self.report.to_json(), "divergence": divergence}


def wants_packing(model: Path) -> bool:
    """Whether the base is packed, quantised, or not safetensors; then the merged model is a packed directory too."""
    if not model.is_dir() or is_packed(model):
        return True
    source = read_checkpoint_facts(model)
    return source.experts is not None or open_source(model, source.rest).quantised


def merge_packed(
    model: str | Path,
    adapter: str | Path,
    out: str | Path,
    *,
    formats: dict[str, str] | None = None,
    threads: int | None = None,
    calib: Path | None = None,
    tokens: int = CALIBRATION_TOKENS,
    max_kl: float = MAX_KL,
    unchecked: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PackedMerge:
    """`formats` are those of `quant.plan.wanted`; None keeps the formats of the base."""
    model, adapter, out = Path(model), Path(adapter), Path(out).absolute()
    if not max_kl > 0:
        raise InputError("max-kl", max_kl, "more than 0")
    if calib is not None and not calib.is_file():
        raise InputError("calib", f"{calib}, which does not exist", "a text file or JSON lines")
    check_disjoint([model, out])
    check_disjoint([adapter, out])
    check_target(out, overwrite)
    plan = _plan(model, adapter, formats or parse_formats(KEEP), threads)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.merging")
    if partial.exists():  # left by a run that was killed while comparing, perhaps with another adapter
        shutil.rmtree(partial)
    conversion = convert(plan, partial, progress=progress)
    plan.origin.release()
    report, divergence = conversion.report, None
    if not unchecked:
        divergence = _check_quality(model, adapter, partial, calib, tokens, max_kl, plan)
        report = replace(report, calibration=divergence.calibration())
        write_report(partial, report)
    for stale in (MANIFEST, CONFIG):  # copied from an adapter or an earlier merge in the base's directory
        (partial / stale).unlink(missing_ok=True)
    write_adapter_template(adapter, partial)
    assert isinstance(plan.origin, FoldedOrigin)
    result = PackedMerge(
        str(out), plan.origin.changed, conversion.kept_layers, conversion.seconds, report, max_kl, divergence
    )
    divergence_fields = None if divergence is None else divergence.to_json()
    limit = max_kl if math.isfinite(max_kl) else None
    write_json(
        partial / RECORD_FILE,
        {"base": model.name, "adapter": adapter.name, "max_kl": limit, "divergence": divergence_fields},
    )
    replace_directory(partial, out)
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
                problem = f"{role} in {layer.formats[role]}, which an adapter changes"
                raise InputError(
                    layer.origin.module, problem, "a format that can be written", "--format int8"
                ) from error
    return plan


def _read(adapter: Path, base: Origin) -> Adapter:
    """The adapter, checked against the base; a standalone GGUF model is represented by the config from its header."""
    if (base.directory / "config.json").is_file():
        return read_adapter(adapter, model=str(base.directory))
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / "config.json", base.config)
        return read_adapter(adapter, model=folder)


def _check_quality(
    model: Path, adapter: Path, merged: Path, calib: Path | None, tokens: int, limit: float, plan: ConversionPlan
) -> Divergence:
    """The divergence; above the limit, or if it cannot be measured, the output is removed."""
    try:
        gc.collect()
        with calibration_text(calib) as text:
            divergence = measure_divergence(model, adapter, merged, text, tokens=tokens, base_bytes=plan.source_bytes)
    except InputError as error:
        shutil.rmtree(merged)
        remedy = "--unchecked writes it without"
        raise InputError("merge", f"a model that could not be compared ({error})", "a comparison", remedy) from error
    try:
        check_divergence(divergence, limit)
    except InputError:
        shutil.rmtree(merged)
        raise
    return divergence
