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

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short

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


def _listed(file: str, fields: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = fields.get(f"tokenizer.ggml.{key}")
    if not isinstance(values, list) or not all(type(value) is kind for value in values):
        given = "nothing" if values is None else short(values)
        raise InputError(f"{file}: tokenizer.ggml.{key}", given, f"a list of {kind.__name__}")
    return values


def tokenizer_files(file: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text. `fields` are the metadata of `file`, whose name appears in errors."""
    model_name, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model_name != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise InputError(
            file,
            f"a tokenizer of model {short(model_name)} and pre-tokenizer {short(pre)}",
            f"model 'gpt2' (byte-level BPE) with a pre-tokenizer of {', '.join(PRE_TOKENIZERS)}",
            "take the model as a Hugging Face directory, which brings its tokenizer",
        )
    tokens, types = _listed(file, fields, "tokens", str), _listed(file, fields, "token_type", int)
    if len(types) != len(tokens):
        raise InputError(
            f"{file}: tokenizer.ggml.token_type", f"{len(types)} types", f"one for each of {len(tokens)} tokens"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _listed(file, fields, "merges", str)]
    try:
        model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the library raises plain exceptions for merges of unknown tokens
        raise InputError(f"{file}: tokenizer.ggml.merges", str(error)[:200], "merges of its tokens") from None
    tokenizer = Tokenizer(model)
    if pre in NFC_NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    typed = {
        kind: [
            AddedToken(token, special=kind == CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == kind
        ]
        for kind in (CONTROL, USER_DEFINED)
    }
    tokenizer.add_special_tokens(typed[CONTROL])
    tokenizer.add_tokens(typed[USER_DEFINED])
    special = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(tokens):
                raise InputError(
                    f"{file}: tokenizer.ggml.{name}_token_id", short(number), f"one of {len(tokens)} tokens"
                )
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
    length = fields.get(f"{fields.get('general.architecture')}.context_length")
    if isinstance(length, int) and length > 0:
        config["model_max_length"] = length
    template = fields.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        config["chat_template"] = template
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False) + "\n",
    }
