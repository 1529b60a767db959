"""`prepare`: a directory beside a checkpoint, through which any program's `from_pretrained` finds packed experts.

Frontends that are not ours name a directory and pass no options. Transformers learns from config.json how a checkpoint
is quantised and refuses a second method, so the new directory holds links to the files and a config.json of its own
whose method is ours, with the source's recorded inside. No weight is read or copied. The type of a model that stock
transformers does not know is replaced by the one that computes the same. The source itself is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.checkpoint.quantisation import describe
from ktransformers.errors import InputError
from ktransformers.files import sync, write_json

METHOD = "kt"
# Checkpoints whose own type stock transformers lacks: the type that computes the same, and its class.
SAME_AS = {"kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM")}
# A vision model around one of those. A transformers that lacks it loads the text part alone.
AROUND = {"kimi_k25"}
KEYS = ("quantization_config", "compression_config")  # the second is what older compressed-tensors files say


@dataclass(frozen=True)
class Prepared:
    directory: str
    source: str
    model_type: str
    quantised: str | None  # the source's own method, in words
    links: int


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a Hugging Face directory."""
    file = directory / "config.json"
    if not file.is_file():
        raise InputError(
            str(directory),
            "no directory with a config.json",
            "a local Hugging Face directory",
            "`hf download` makes one",
        )
    try:
        words = json.loads(file.read_text())
    except ValueError as error:
        raise InputError(str(file), str(error), "a JSON object") from error
    if not isinstance(words, dict):
        raise InputError(str(file), f"a JSON {type(words).__name__}", "a JSON object")
    return words


def in_stock_terms(words: dict[str, Any]) -> dict[str, Any]:
    """The configuration under the names that stock transformers knows, nested text model included."""
    found = dict(words)
    if found.get("model_type") in AROUND and not _known(found["model_type"]) and "text_config" in found:
        return in_stock_terms(found["text_config"])
    if isinstance(found.get("text_config"), dict):
        found["text_config"] = in_stock_terms(found["text_config"])
    if found.get("model_type") in SAME_AS:
        found["model_type"], kind = SAME_AS[found["model_type"]]
        if "architectures" in found:
            found["architectures"] = [kind]
        found.pop("auto_map", None)
    return found


def _known(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def take_quantisation(words: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The configuration without its quantisation, and what that was, wherever it stood."""
    left, taken = dict(words), None
    if isinstance(left.get("text_config"), dict):
        left["text_config"], taken = take_quantisation(left["text_config"])
    for key in KEYS:
        taken = left.pop(key, None) or taken
    return left, taken


def prepare(source: str | Path, directory: str | Path) -> Prepared:
    """Write `directory`, which must not exist; whole or not at all."""
    origin, target = Path(source).absolute(), Path(directory).absolute()
    words = read_config(origin)
    if target.exists() or target.is_symlink():
        raise InputError(str(target), "something that exists", "a new directory", "remove it or name another")
    left, quantised = take_quantisation(words)
    if quantised is not None and quantised.get("quant_method") == METHOD:
        raise InputError(str(origin), "a directory that is prepared already", "the checkpoint itself")
    stock = in_stock_terms(left)
    stock["quantization_config"] = {"quant_method": METHOD} | ({} if quantised is None else {"source": quantised})
    entries = [entry for entry in sorted(origin.iterdir()) if entry.name != "config.json" and entry.name[0] != "."]
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.mkdir()
        for entry in entries:
            (draft / entry.name).symlink_to(entry.resolve())
        write_json(draft / "config.json", stock)
        draft.rename(target)
        sync(target.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(draft)
        raise
    method = None if quantised is None else describe(quantised)
    return Prepared(str(target), str(origin), str(stock.get("model_type")), method, len(entries))
