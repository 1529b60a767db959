"""A Hugging Face tokenizer rebuilt from the metadata of a GGUF file: `tokenizer.json` and `tokenizer_config.json`.

A GGUF file holds the vocabulary, the token types and the merges of byte-level BPE, but of the pre-tokenizer, which
splits text into words before the merges, only a name (`tokenizer.ggml.pre`). Two tokenizers with the same merges and
different pre-tokenizers agree on most text but not on all, so a name that is not in PRE_TOKENIZERS is refused, never
guessed. The class in the configuration is `PreTrainedTokenizerFast`, because a specific class (GPT2Tokenizer) replaces
the pre-tokenizer of the file by its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ktransformers.errors import InputError

CONTROL, USER_DEFINED = 3, 4  # token types: special tokens, and text that is always one token

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_apart() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _split(pattern: str) -> Any:
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), plain])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_apart,
    "starcoder": _digits_apart,
    "refact": _digits_apart,
    "llama-bpe": lambda: _split(LLAMA3),
    "llama3": lambda: _split(LLAMA3),
    "qwen2": lambda: _split(QWEN2),
}
NFC_NORMALISED = {"qwen2"}  # pre-tokenizers whose text is normalised to NFC first


def tokenizer_files(file: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text. `fields` are the metadata of `file`, whose name appears in errors."""
    model_name, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model_name != "gpt2" or pre not in PRE_TOKENIZERS:
        raise InputError(
            file,
            f"a tokenizer of model {model_name!r} and pre-tokenizer {pre!r}",
            f"model 'gpt2' (byte-level BPE) with a pre-tokenizer of {', '.join(PRE_TOKENIZERS)}",
            "take the model as a Hugging Face directory, which brings its tokenizer",
        )
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    if pre in NFC_NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == USER_DEFINED
        ]
    )
    special = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            special[f"{key}_token"] = tokens[number]
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **special,
    }
    length = fields.get(f"{fields['general.architecture']}.context_length")
    if length:
        config["model_max_length"] = int(length)
    if template := fields.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
