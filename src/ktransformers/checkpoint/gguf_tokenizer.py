"""A Hugging Face tokenizer rebuilt from the metadata of a GGUF file: `tokenizer.json` and `tokenizer_config.json`.

A GGUF file holds the vocabulary, the kinds of tokens and the merges of byte-level BPE, but not the rule that cuts text
into words before the merges: of that it holds a name (`tokenizer.ggml.pre`). Two tokenizers with the same merges and
different rules agree on most text and differ on the rest, so a name that is not in RULES is refused, never guessed. The
class in the configuration is the plain fast one, because a class with a name (GPT2Tokenizer) brings a rule of its own
and overrules the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ktransformers.errors import InputError

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens: special ones, and text that is always one token

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


RULES: dict[str, Callable[[], Any]] = {
    "gpt-2": _byte_level,
    "smollm": _digits_apart,
    "starcoder": _digits_apart,
    "refact": _digits_apart,
    "llama-bpe": lambda: _split(LLAMA3),
    "llama3": lambda: _split(LLAMA3),
    "qwen2": lambda: _split(QWEN2),
}
NORMALISED = {"qwen2"}  # text goes through NFC first


def tokenizer_files(file: str, fields: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text. `fields` are the metadata of `file`, which is named in errors."""
    kind, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or rule not in RULES:
        raise InputError(
            file,
            f"a tokenizer of model {kind!r} and rule {rule!r}",
            f"model 'gpt2' (byte-level BPE) with a rule of {', '.join(RULES)}",
            "take the model as a Hugging Face directory, which brings its tokenizer",
        )
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    model = models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(model)
    if rule in NORMALISED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = RULES[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, k in zip(tokens, kinds, strict=True)
            if k == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, k in zip(tokens, kinds, strict=True) if k == USER_DEFINED]
    )
    named = {}
    for word, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = fields.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None:
            named[f"{word}_token"] = tokens[number]
    if fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        first = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A {first} $B", special_tokens=[(first, tokens.index(first))]
        )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
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
