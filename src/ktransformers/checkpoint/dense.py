"""Reads a dense Llama-class model from a GGUF file or a Hugging Face directory; `DenseModel` is the common interface.

Tensors are read by their Hugging Face names in the dtype of the file; quantized ones of a GGUF file are dequantized to
float32 (`sources/gguf.py`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ktransformers.checkpoint.model_config import check_model_config, read_model_config
from ktransformers.checkpoint.shards import Shards
from ktransformers.checkpoint.sources.gguf import GGUFSource
from ktransformers.checkpoint.sources.gguf_config import Keys, decoder_config, head_size
from ktransformers.ground.errors import InputError

# Tokenizer, chat template, generation settings and licence: copied unchanged.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "LICENSE",
)
# model_type -> whether q, k and v may have biases (qwen2 always has them)
QKV_BIAS_BY_TYPE = {"llama": False, "mistral": False, "qwen2": True}


@dataclass(frozen=True)
class DenseModel:
    source: str  # for messages and the model card
    config: dict[str, Any]  # with the keys of a Llama config.json
    licence: str | None
    biased: bool  # q, k and v have biases
    read: Callable[[str], Tensor]  # by Hugging Face name
    write_tokenizer: Callable[[Path], None]  # into a directory that exists

    @property
    def tied(self) -> bool:
        return bool(self.config["tie_word_embeddings"])


def open_dense(path: str | Path) -> DenseModel:
    """The model in a GGUF file or in a Hugging Face directory."""
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        return _open_gguf(path)
    if (path / "config.json").is_file():
        return _open_directory(path)
    raise InputError(str(path), "neither of them", "a .gguf file or a Hugging Face directory with a config.json")


def _open_directory(path: Path) -> DenseModel:
    file = path / "config.json"
    config = read_model_config(path)
    model_type = config.get("model_type")
    if model_type not in QKV_BIAS_BY_TYPE:
        expected = f"a dense model, one of {', '.join(QKV_BIAS_BY_TYPE)}"
        raise InputError(str(file), f"model_type {model_type!r}", expected)
    for key in ("attention_bias", "mlp_bias", "sliding_window", "quantization_config"):
        windowed = config.get("use_sliding_window", model_type != "qwen2")
        if config.get(key) and (key != "sliding_window" or windowed):
            raise InputError(str(file), f"{key} = {config[key]!r}", "a model without it")
    shards = Shards.of_directory(path)
    config.setdefault("tie_word_embeddings", "lm_head.weight" not in shards)

    def read(name: str) -> Tensor:
        if name not in shards:
            raise InputError(name, f"no such tensor in {path}", "every tensor of a Llama-class model")
        tensor = shards.read_finite(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise InputError(name, f"dtype {shards.dtype(name)}", "BF16, F16 or F32", "take an unquantised checkpoint")
        return tensor

    def write_tokenizer(directory: Path) -> None:
        for name in TOKENIZER_FILES:
            if (path / name).is_file():
                shutil.copyfile(path / name, directory / name)

    return DenseModel(str(path), config, None, QKV_BIAS_BY_TYPE[model_type], read, write_tokenizer)


def _open_gguf(path: Path) -> DenseModel:
    from ktransformers.checkpoint.gguf_tokenizer import tokenizer_files

    source = GGUFSource(path, [path])
    fields = source.fields
    config = _gguf_config(path, fields, source.shapes)
    tensors = {tensor.name: tensor for tensor in source.rest()}

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise InputError(name, f"no such tensor in {path}", "every tensor of a Llama-class model")
        return tensors[name].numbers()

    def write_tokenizer(directory: Path) -> None:
        for name, text in tokenizer_files(str(path), fields).items():
            (directory / name).write_text(text)
        ids = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None
        }
        (directory / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")

    return DenseModel(str(path), config, fields.get("general.license"), False, read, write_tokenizer)


def _gguf_config(path: Path, fields: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    family = fields.get("general.architecture")
    for given, unsupported in (
        (f"architecture {family!r}", family != "llama"),
        ("a model that has experts already", bool(fields.get("llama.expert_count"))),
        ("frequency factors of RoPE (rope_freqs.weight)", "rope_freqs.weight" in tensors),
        ("scaled RoPE", fields.get("llama.rope.scaling.type", "none") != "none"),
        ("biases", any(name.endswith(".bias") for name in tensors)),
    ):
        if unsupported:
            raise InputError(
                str(path), given, "a dense model of architecture 'llama'", "take it as a Hugging Face directory"
            )
    keys = Keys(str(path), fields, tensors)
    config = decoder_config(keys)
    config |= {"intermediate_size": keys.size("feed_forward_length"), "head_dim": head_size(keys, config)}
    check_model_config(config, str(path))
    return config
