"""Regular expressions of tokenizers: released ones are taken, those that backtrack without end are refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ktransformers.ground.errors import InputError
from ktransformers.modeling.pretrained import read_tokenizer
from ktransformers.modeling.tokenizer_patterns import may_backtrack, patterns_of

RELEASED = [  # of GPT-2, GPT-4 and Llama 3, Qwen2, o200k, DeepSeek-V3, Mistral's Tekken, Falcon3
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s+",
    r"[^\r\n\p{L}\p{N}]?((?=[\p{L}])([^a-z]))*((?=[\p{L}])([^A-Z]))+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+(?!\S)|\s+",
    r"\p{N}{1,3}(?=(?:\p{N}{3})*\b)",
]
SUSPECTED = [
    r"(([a-z_.0-9])+)+!",
    r"(x+x+)+y",
    r"(a|a)*b",
    r"(?:a+){2,}b",
    r"(?:a*){1,16}b",
    r"a*a*a*a*a*b",
    r"x(?:[^)\]]*y?\))+",
]
HARMLESS = [r"(?>a+)+b", r"(?:a++)+b", r"(?:ab)+", r"[(+*)]+", r"\(\+\)+", r"(?:a{3})*", r"[[a-c](+]+|\p{L}+"]


@pytest.mark.parametrize("pattern", RELEASED + HARMLESS)
def test_patterns_without_nested_repetition(pattern: str) -> None:
    assert not may_backtrack(pattern)


@pytest.mark.parametrize("pattern", SUSPECTED)
def test_patterns_to_be_tried(pattern: str) -> None:
    assert may_backtrack(pattern)


def save(folder: Path, **components: Any) -> Path:
    backend = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    for name, component in components.items():
        setattr(backend, name, component)
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]").save_pretrained(folder)
    return folder


BAD = Regex(r"(x+x+)+y")


@pytest.mark.parametrize("component", ["pre_tokenizer", "normalizer", "nested", "decoder"])
def test_tokenizer_that_backtracks_without_end_is_refused(component: str, tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "pre_tokenizer": {"pre_tokenizer": pre_tokenizers.Split(BAD, "isolated")},
        "normalizer": {"normalizer": normalizers.Replace(BAD, " ")},
        "nested": {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(BAD, "removed")])},
        "decoder": {"decoder": decoders.Sequence([decoders.Replace(BAD, " "), decoders.Fuse()])},
    }
    folder = save(tmp_path, **parts[component])
    if component == "decoder":  # a vocabulary of one letter has no text to decode
        from transformers import AutoTokenizer

        assert list(patterns_of(AutoTokenizer.from_pretrained(folder))) == [r"(x+x+)+y"]
        return
    start = time.monotonic()
    with pytest.raises(InputError, match=r"tokenizer\.json: given the pattern .*which does not end on some texts"):
        read_tokenizer(folder)
    assert time.monotonic() - start < 15


def test_tokenizer_with_a_suspected_pattern_that_is_fast_is_taken(tmp_path: Path) -> None:
    folder = save(tmp_path, pre_tokenizer=pre_tokenizers.Split(Regex(r"(?:\p{L}+ )+"), "isolated"))
    assert read_tokenizer(folder)("a")["input_ids"] == [0]
