"""`prepare`: a directory beside a checkpoint, through which any program's `from_pretrained` finds packed experts.

Frontends that are not ours name a directory and pass no options. Transformers learns from config.json how a checkpoint
is quantised and refuses a second method, so the new directory holds links to the files and a config.json of its own
whose method is ours, with the source's recorded inside. Where everything but the experts is plain no weight is read or
copied; otherwise (fp8 attention, GGUF) those tensors are written anew in bf16, and the experts stay where they are, at
a path that config.json names. The type of a model that stock transformers does not know is replaced by the one that
computes the same. The source itself is not touched.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ktransformers.checkpoint.quantisation import describe
from ktransformers.checkpoint.rest import WEIGHTS, divide
from ktransformers.checkpoint.shards import INDEX
from ktransformers.checkpoint.sources import PlainTensor, Source, open_source
from ktransformers.checkpoint.sources.gguf import gguf_files
from ktransformers.errors import InputError
from ktransformers.files import sync, write_json

METHOD = "kt"
# Checkpoints whose own type stock transformers lacks: the type that computes the same, and its class.
SAME_AS = {"kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM")}
# A vision model around one of those. A transformers that lacks it loads the text part alone.
AROUND = {"kimi_k25"}
KEYS = ("quantization_config", "compression_config")  # the second is what older compressed-tensors files say


@dataclass(frozen=True)
class PreparedDirectory:
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


def config_file(path: Path) -> Path | None:
    """Of a directory, or beside a GGUF file; None where the weights have to say themselves what they are."""
    folder = path.parent if path.is_file() else path
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if not gguf_files(path) and not any(folder.glob("_layer_*")):
        read_config(folder)  # says what is missing
    return None


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


def is_ours(directory: Path) -> bool:
    """Prepared or packed: its experts are read by ktransformers alone."""
    _, taken = take_quantisation(read_config(directory))
    return taken is not None and taken.get("quant_method") == METHOD


def prepare(source: str | Path, directory: str | Path, experts: str | Path | None = None) -> PreparedDirectory:
    """Write `directory`, which must not exist; whole or not at all. `experts` as in `load_model`."""
    origin, target = Path(source).absolute(), Path(directory).absolute()
    if target.exists() or target.is_symlink():
        raise InputError(str(target), "something that exists", "a new directory", "remove it or name another")
    words, quantised, weights = _open(origin)
    method = {"quant_method": METHOD} | ({} if quantised is None else {"source": quantised})
    if experts is not None:
        place = Path(experts).absolute()
        there = None if config_file(place) is None else _open(place)[1]
        method = {"quant_method": METHOD, "experts": str(place)} | ({} if there is None else {"source": there})
    elif weights.quantised:
        method["experts"] = str(origin)
    stock = in_stock_terms(words) | {"quantization_config": method}
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        draft.mkdir()
        if weights.quantised:
            _write_rest(weights, draft)
        links = _link(origin, draft, weights=not weights.quantised)
        write_json(draft / "config.json", stock)
        draft.rename(target)
        sync(target.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(draft)
        raise
    kind = None if quantised is None else describe(quantised)
    return PreparedDirectory(str(target), str(origin), str(stock.get("model_type")), kind, links)


def _open(origin: Path) -> tuple[dict[str, Any], dict[str, Any] | None, Source]:
    """Configuration without its quantisation, that, and the weights."""
    file = config_file(origin)
    if file is None:
        weights = open_source(origin)
        words = weights.config()
        if words is None:
            raise InputError(
                str(origin), "experts alone", "a model", "pass them as `experts`, beside a model's directory"
            )
        return words, None, weights
    words, quantised = take_quantisation(read_config(file.parent))
    if quantised is not None and quantised.get("quant_method") == METHOD:
        raise InputError(str(origin), "a directory that is prepared already", "the checkpoint itself")
    return words, quantised, open_source(origin, quantised)


def _link(origin: Path, draft: Path, *, weights: bool) -> int:
    """What the draft has not of its own: everything, or all but the weights."""
    if not origin.is_dir():
        return 0
    entries = [entry for entry in sorted(origin.iterdir()) if entry.name != "config.json" and entry.name[0] != "."]
    if not weights:
        entries = [entry for entry in entries if not entry.name.endswith(WEIGHTS) and entry.name[:7] != "_layer_"]
    for entry in entries:
        (draft / entry.name).symlink_to(entry.resolve())
    return len(entries)


def _write_rest(weights: Source, draft: Path) -> None:
    """Plain shards. Where the experts would be lies one number under the name of their matrix: a program that does not
    know the method stops at its shape instead of leaving them random."""
    marks = [
        PlainTensor(f"{root}.experts.down_proj", torch.uint8, (1,), lambda: torch.zeros(1, dtype=torch.uint8))
        for root in weights.expert_roots
    ]
    shards = divide([*weights.rest(), *marks], {"format": "pt"})
    for shard in shards:
        shard.write(draft, lambda _: None)
        weights.release()
    names = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    write_json(draft / INDEX, {"metadata": {"total_size": sum(shard.bytes for shard in shards)}, "weight_map": names})
