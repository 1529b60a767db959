"""A folder as Kimi-K2 is released: model type kimi_k2 with code of its own, and a tokenizer of `tiktoken.model` and a
Python class. The model is a tiny DeepSeek-V3, the vocabulary has the bytes and a few merged words."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tests.support.tiny_models import build, save

WORDS = ("he", "ll", "hell", "hello", " w", "or", " wor", "ld", " world", "20", "202", "中", "国", "中国", "\n\n", "er")
PARTS = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
RESERVED = 6
SPECIAL = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "[PAD]", "[UNK]")
CODE = """raise SystemExit("code of the release was run")


class TikTokenTokenizer:
    num_reserved_special_tokens = {reserved}
    pat_str = "|".join({parts})
"""
# A tokenizer that has to be run; its tokens are characters.
TRUSTED_CODE = """
from transformers import PreTrainedTokenizer


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **kwargs):
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {chr(value): value for value in range(256)}

    def _tokenize(self, text, **kwargs):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) % 256

    def _convert_id_to_token(self, index):
        return chr(index)
"""

TEMPLATE = "{% for message in messages %}<|im_user|>{{ message['content'] }}<|im_end|>{% endfor %}"


def ranks() -> dict[bytes, int]:
    """Bytes first, then words, every one of which two earlier tokens merge to."""
    tokens = [bytes([value]) for value in range(256)]
    for word in WORDS:
        whole = word.encode()
        pieces = [whole[:at] for at in range(2, len(whole) + 1)]
        tokens += [piece for piece in pieces if piece not in tokens]
    return {token: rank for rank, token in enumerate(tokens)}


def write_tokenizer(folder: Path, code: str | None = None) -> None:
    table = ranks()
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in table.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    text = CODE.format(reserved=RESERVED, parts=list(PARTS)) if code is None else code
    (folder / "tokenization_kimi.py").write_text(text)
    config: dict[str, Any] = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "chat_template": TEMPLATE,
        "model_max_length": 4096,
        "added_tokens_decoder": {
            str(len(table) + at): {"content": token, "special": token != "<|im_user|>"}
            for at, token in enumerate(SPECIAL)
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_release(folder: Path, **changes: Any) -> Path:
    save(build("deepseek_v3", vocab_size=len(ranks()) + RESERVED + 2, **changes), folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config |= {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    }
    file.write_text(json.dumps(config))
    for name in ("configuration_deepseek.py", "modeling_deepseek.py"):
        (folder / name).write_text('raise SystemExit("code of the release was run")\n')
    write_tokenizer(folder)
    return folder
