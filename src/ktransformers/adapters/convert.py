"""Converts an adapter from one format into another, with the number of tensors checked on both sides.

Every tensor is checked before anything is written: names, shapes, finite numbers, the manifest's checksums if there is
a manifest, and the model's sizes if its config.json is available. All outputs appear together or none does.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ktransformers.adapters.canonical import canonicalize
from ktransformers.adapters.config import CONFIG_FILE as CONFIG
from ktransformers.adapters.config import parse_config
from ktransformers.adapters.content import Content, open_content
from ktransformers.adapters.fit import refit_adapter
from ktransformers.adapters.formats import detect_format, find_format
from ktransformers.adapters.lora import Adapter, Extra
from ktransformers.adapters.manifest import MANIFEST_FILE as MANIFEST
from ktransformers.adapters.manifest import check_manifest, read_manifest, write_manifest, write_manifest_of
from ktransformers.adapters.model import ModelFacts, find_facts
from ktransformers.adapters.parse import ReadContext, check_complete
from ktransformers.checkpoint.dense import TOKENIZER_FILES
from ktransformers.checkpoint.fresh_directory import check_disjoint, check_target, fresh_directory
from ktransformers.checkpoint.rest import copy_small_files
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object
from ktransformers.ground.log import logger

LOG = logger(__name__)
OUTPUT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Output:
    path: str
    tensors: int
    target_modules: tuple[str, ...]


@dataclass(frozen=True)
class Conversion:
    """Summary of a conversion; `to_json` is what the command prints."""

    source: str  # format
    dialect: str
    read: int  # tensors
    layers: int  # with experts
    experts: int  # in each
    shared: bool  # gate and up use the same A
    model: str | None  # family that the adapter was checked against, None without config.json
    merged: Output
    expert_only: Output | None = None
    nonexpert_only: Output | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_adapter(
    path: str | Path, *, model: str | None = None, lora_alpha: float | None = None, verify: bool = True
) -> Adapter:
    """Reads and checks an adapter of any format and returns its canonical form; `model` locates the base model's
    config.json."""
    return _read(open_content(path), model, lora_alpha, verify)[0]


def _read(content: Content, model: str | None, lora_alpha: float | None, verify: bool) -> tuple[Adapter, str]:
    document = read_manifest(content.directory)
    if document is not None and content.path.is_file():
        # The manifest may describe another adapter in the same directory.
        listed = {tensor["file"] for tensor in document["tensors"].values()}
        document = document if content.path.name in listed else None
    if verify:
        if document is not None:
            check_manifest(content, document)
        else:
            for stored in content.tensors.values():
                stored.read()  # which refuses NaN and infinite numbers
    context = ReadContext(_find_facts(content, model, document), lora_alpha, document)
    source = detect_format(content)
    raw = source.read(content, context)
    if document is not None and "lora_dropout" in document:  # PEFT's file says 0: it has no dropout on experts
        raw = replace(raw, config={**raw.config, "lora_dropout": document["lora_dropout"]})
    partial = parse_config({"r": 1, "lora_alpha": 1, **raw.config}, CONFIG).partial
    check_complete(raw.experts, raw.modules, context.facts, partial)
    adapter = canonicalize(replace(raw, experts=tuple(sorted(raw.experts, key=lambda layer: layer.layer))))
    content.release()
    for theirs, ours in adapter.stored():
        LOG.info("Loaded adapter weight: %s -> %s", theirs, ours)
    return adapter, source.name


def _find_facts(content: Content, model: str | None, document: dict[str, Any] | None) -> ModelFacts | None:
    """Facts of the given model, else of the manifest's, else of the model that adapter_config.json names."""
    if model is not None and (facts := find_facts(model)) is not None:
        return facts
    if document is not None and isinstance(document.get("model"), dict):
        return ModelFacts.from_json(document["model"], f"{content.directory / MANIFEST}: model")
    file = content.directory / CONFIG
    if content.metadata is not None or not file.is_file():
        return None
    base = read_json_object(file, "PEFT's adapter_config.json, a JSON object").get("base_model_name_or_path")
    try:
        return find_facts(base if isinstance(base, str) else None)
    except InputError:  # a path of another machine has no facts
        return None


def write_adapter(adapter: Adapter, target: str | Path, to: str, *, overwrite: bool = False) -> Output:
    """Writes one directory in one format, with its manifest."""
    with fresh_directory(Path(target), overwrite) as directory:
        return _write(adapter, directory, Path(target), to)


def _write(adapter: Adapter, directory: Path, target: Path, to: str) -> Output:
    if not (adapter.experts or adapter.modules or adapter.extras):
        raise InputError(str(target), "nothing to write", "an adapter with tensors for this output")
    records = find_format(to).write(adapter, directory)
    pairs = sum(find_format(to).pairs_per_layer(layer) for layer in adapter.experts) + len(adapter.modules)
    expected = 2 * pairs + len(adapter.extras)
    if len(records) != expected:
        raise InputError(str(target), f"{len(records)} tensors written", f"{expected}", "please report this")
    write_manifest(directory, records, **_facts_for_manifest(adapter, to, len(records)))
    return Output(str(target), len(records), tuple(adapter.target_names()))


def _facts_for_manifest(adapter: Adapter, name: str, tensors: int) -> dict[str, Any]:
    return {
        "dialect": name,
        "tensor_count": tensors,
        "gate_up": "shared" if adapter.shared else "split",
        "roots": [layer.root for layer in adapter.experts],
        "model": adapter.model.to_json() if adapter.model else None,
        "lora_dropout": adapter.config.get("lora_dropout", 0.0),
    }


def convert(
    source: str | Path,
    target: str | Path,
    to: str,
    *,
    expert_output_dir: str | Path | None = None,
    nonexpert_output_dir: str | Path | None = None,
    base_model_name_or_path: str | None = None,
    lora_alpha: float | None = None,
    dtype: str = "keep",
    overwrite: bool = False,
) -> Conversion:
    find_format(to)
    if dtype != "keep" and dtype not in OUTPUT_DTYPES:
        raise InputError(
            "dtype", repr(dtype), "keep, " + ", ".join(OUTPUT_DTYPES), "quantised adapters are not supported"
        )
    outputs = {"merged": target, "expert_only": expert_output_dir, "nonexpert_only": nonexpert_output_dir}
    targets = {name: Path(path) for name, path in outputs.items() if path is not None}
    check_disjoint([Path(source), *targets.values()])
    for path in targets.values():
        check_target(path, overwrite)
    content = open_content(source)
    adapter, source_format = _read(content, base_model_name_or_path, lora_alpha, verify=True)
    if base_model_name_or_path is not None:
        adapter = replace(adapter, config={**adapter.config, "base_model_name_or_path": base_model_name_or_path})
    if dtype != "keep":
        adapter = _cast(adapter, OUTPUT_DTYPES[dtype])
    parts = {"merged": adapter, "expert_only": adapter.only_experts(), "nonexpert_only": adapter.without_experts()}
    written = {}
    with contextlib.ExitStack() as stack:
        for name, path in targets.items():
            directory = stack.enter_context(fresh_directory(path, overwrite))
            written[name] = _write(parts[name], directory, path, to)
            if Path(source).is_dir():  # the adapter stays with the chat template that it was trained with
                copy_small_files(Path(source), directory, only=TOKENIZER_FILES)
    return Conversion(
        source=source_format,
        dialect=to,
        read=len(content.tensors),
        layers=len(adapter.experts),
        experts=adapter.experts[0].experts if adapter.experts else 0,
        shared=adapter.shared,
        model=adapter.model.model_type if adapter.model else None,
        **written,
    )


def _cast(adapter: Adapter, dtype: torch.dtype) -> Adapter:
    """The adapter as it will be written in `dtype`. The factors stay as they are until then, because a format may fold
    a scaling into them, by the square root of a rank for instance, and they should be rounded once."""

    def extra(value: Extra) -> Extra:
        return replace(value, dtype=dtype, read=lambda: value.read().to(dtype))

    cast = refit_adapter(adapter, lambda _, form: replace(form, dtype=dtype, rounds=True))
    return replace(cast, extras=tuple(map(extra, cast.extras)))


def describe_adapter(path: str | Path, *, model: str | None = None) -> None:
    """Writes kt_manifest.json for an adapter saved by other software, after reading it with every check."""
    content = open_content(path)
    stale = content.directory / MANIFEST
    stale.unlink(missing_ok=True)
    adapter, format_name = _read(content, model, None, verify=True)
    write_manifest_of(content, **_facts_for_manifest(adapter, format_name, len(content.tensors)))


__all__ = ["Conversion", "Output", "convert", "describe_adapter", "read_adapter", "write_adapter"]
