"""`prepare`: writes a directory from which any program's `from_pretrained` loads a checkpoint with the "kt" method.

Third-party frontends pass a directory and no options. transformers reads the quantisation method from config.json and
accepts only one, so the new directory has symbolic links to the checkpoint's files and its own config.json with the
method "kt", which records the checkpoint's own quantisation. If everything but the experts is unquantised, no weight is
read or copied. Otherwise (fp8 attention, GGUF) those tensors are written in bf16, and config.json names the path of the
experts, which are not copied. A model type that stock transformers lacks is replaced by an equivalent one. The
checkpoint itself is not changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ktransformers.checkpoint.fresh_directory import fresh_directory
from ktransformers.checkpoint.model_config import read_model_config
from ktransformers.checkpoint.quantisation import accept, describe
from ktransformers.checkpoint.rest import WEIGHT_SUFFIXES, split_into_shards
from ktransformers.checkpoint.shards import INDEX_FILE
from ktransformers.checkpoint.sources import PlainTensor, Source, open_source
from ktransformers.checkpoint.sources.gguf import gguf_files
from ktransformers.ground import progress
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import write_json

QUANT_METHOD = "kt"
# Model types that stock transformers lacks -> equivalent type and its class.
EQUIVALENT_TYPES = {"kimi_k2": ("deepseek_v3", "DeepseekV3ForCausalLM")}
# Vision models around one of those. A transformers version that lacks them loads the text model alone.
VISION_WRAPPERS = {"kimi_k25"}
# Keys of config.json; compressed-tensors checkpoints of older versions use the second.
QUANTISATION_KEYS = ("quantization_config", "compression_config")


@dataclass(frozen=True)
class PreparedDirectory:
    directory: str
    source: str
    model_type: str
    quantised: str | None  # description of the checkpoint's own quantisation
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
    return read_model_config(directory)


def config_file(path: Path) -> Path | None:
    """The config.json of a directory or next to a GGUF file; None if the weights carry the configuration themselves."""
    folder = path.parent if path.is_file() else path
    if (folder / "config.json").is_file():
        return folder / "config.json"
    if not gguf_files(path) and not any(folder.glob("_layer_*")):
        read_config(folder)  # raises and names the missing file
    return None


def to_stock_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with model types of stock transformers, in a nested text model too."""
    stock = dict(config)
    if stock.get("model_type") in VISION_WRAPPERS and not _is_stock(stock["model_type"]) and "text_config" in stock:
        return to_stock_config(stock["text_config"])
    if isinstance(stock.get("text_config"), dict):
        stock["text_config"] = to_stock_config(stock["text_config"])
    if stock.get("model_type") in EQUIVALENT_TYPES:
        stock["model_type"], architecture = EQUIVALENT_TYPES[stock["model_type"]]
        if "architectures" in stock:
            stock["architectures"] = [architecture]
        stock.pop("auto_map", None)
    return stock


def _is_stock(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def split_quantisation(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The configuration without its quantisation, and the quantisation, at the top level or in the text model."""
    unquantised, quantisation = dict(config), None
    if isinstance(unquantised.get("text_config"), dict):
        unquantised["text_config"], quantisation = split_quantisation(unquantised["text_config"])
    for key in QUANTISATION_KEYS:
        quantisation = unquantised.pop(key, None) or quantisation
    return unquantised, quantisation


def uses_kt_method(directory: Path) -> bool:
    """Whether the directory is prepared or packed: only ktransformers can read its experts."""
    _, quantisation = split_quantisation(read_config(directory))
    return quantisation is not None and quantisation.get("quant_method") == QUANT_METHOD


@dataclass(frozen=True)
class CheckpointFacts:
    """How config.json describes the weights."""

    rest: dict[str, Any] | None = None  # quantisation of the weights in its directory
    experts: Path | None = None  # path of the experts, if they are elsewhere
    experts_quantised: dict[str, Any] | None = None  # quantisation of those


def read_checkpoint_facts(path: Path) -> CheckpointFacts:
    """From config.json; empty if there is none. A quantisation method that cannot be read is refused."""
    file = config_file(path)
    if file is None:
        return CheckpointFacts()
    _, quantisation = split_quantisation(read_config(file.parent))
    if quantisation is None or quantisation.get("quant_method") != QUANT_METHOD:
        accept(str(file), quantisation)
        return CheckpointFacts(quantisation)
    if quantisation.get("experts") is None:  # a directory that was prepared without copies, or a packed one
        accept(str(file), quantisation.get("source"))
        return CheckpointFacts(quantisation.get("source"))
    return CheckpointFacts(None, Path(quantisation["experts"]), quantisation.get("source"))


def open_expert_source(facts: CheckpointFacts, experts: Path | None) -> Source | None:
    """The source of the experts: `experts` if the caller names one, else the path in config.json; None: they are in the
    model's own directory."""
    if experts is not None:
        expert_facts = read_checkpoint_facts(experts)
        return open_expert_source(expert_facts, None) or open_source(experts, expert_facts.rest)
    return None if facts.experts is None else open_source(facts.experts, facts.experts_quantised)


def prepare(source: str | Path, directory: str | Path, experts: str | Path | None = None) -> PreparedDirectory:
    """Write `directory`, which must not exist, atomically. `experts` as in `load_model`."""
    checkpoint, target = Path(source).absolute(), Path(directory).absolute()
    if target.exists() or target.is_symlink():
        raise InputError(str(target), "something that exists", "a new directory", "remove it or name another")
    config, quantisation, weights = _open(checkpoint)
    method = {"quant_method": QUANT_METHOD} | ({} if quantisation is None else {"source": quantisation})
    if experts is not None:
        path = Path(experts).absolute()
        of_experts = None if config_file(path) is None else _open(path)[1]
        method = {"quant_method": QUANT_METHOD, "experts": str(path)}
        method |= {} if of_experts is None else {"source": of_experts}
    elif weights.quantised:
        method["experts"] = str(checkpoint)
    stock = to_stock_config(config) | {"quantization_config": method}
    with fresh_directory(target) as draft:
        if weights.quantised:
            _write_rest(weights, draft)
        links = _link(checkpoint, draft, weights=not weights.quantised)
        write_json(draft / "config.json", stock)
    description = None if quantisation is None else describe(quantisation)
    return PreparedDirectory(str(target), str(checkpoint), str(stock.get("model_type")), description, links)


def _open(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any] | None, Source]:
    """The configuration without its quantisation, the quantisation, and the weights."""
    file = config_file(checkpoint)
    if file is None:
        weights = open_source(checkpoint)
        embedded = weights.config()
        if embedded is None:
            raise InputError(
                str(checkpoint), "experts alone", "a model", "pass them as `experts`, together with a model's directory"
            )
        return embedded, None, weights
    config, quantisation = split_quantisation(read_config(file.parent))
    if quantisation is not None and quantisation.get("quant_method") == QUANT_METHOD:
        raise InputError(str(checkpoint), "a directory that is prepared already", "the checkpoint itself")
    return config, quantisation, open_source(checkpoint, quantisation)


def _link(checkpoint: Path, draft: Path, *, weights: bool) -> int:
    """Link the checkpoint's files except config.json, with or without its weights; returns how many."""
    if not checkpoint.is_dir():
        return 0
    entries = [entry for entry in sorted(checkpoint.iterdir()) if entry.name != "config.json" and entry.name[0] != "."]
    if not weights:
        entries = [
            entry for entry in entries if not entry.name.endswith(WEIGHT_SUFFIXES) and entry.name[:7] != "_layer_"
        ]
    for entry in entries:
        (draft / entry.name).symlink_to(entry.resolve())
    return len(entries)


def _write_rest(weights: Source, draft: Path) -> None:
    """Write the non-expert tensors as safetensors shards. Each expert layer gets a one-element tensor under the name of
    its matrix: a program without the "kt" method fails at its shape instead of initialising the experts randomly."""
    markers = [
        PlainTensor(f"{root}.experts.down_proj", torch.uint8, (1,), lambda: torch.zeros(1, dtype=torch.uint8))
        for root in weights.expert_roots
    ]
    shards = split_into_shards([*weights.rest(), *markers], {"format": "pt"})
    done, total = 0, sum(shard.bytes for shard in shards)

    def on_bytes(count: int) -> None:
        nonlocal done
        done += count
        progress.report("Writing what is not experts", done, total, "bytes")

    for shard in shards:
        shard.write(draft, on_bytes)
        weights.release()
    names = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    write_json(draft / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": names})
