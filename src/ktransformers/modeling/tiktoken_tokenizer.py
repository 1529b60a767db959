"""Tokenizers of releases that ship `tiktoken.model` and a Python class for it (Kimi-K2), without running that class.

`tiktoken.model` has one token a line: its bytes in base64, and its rank, which is its id. Two constants are missing in
it: the pattern that splits text, and how many ids are reserved for special tokens. They are read from the release's
Python file as data: the file is parsed, the class attributes `pat_str` (a text, or texts joined by "|") and
`num_reserved_special_tokens` are taken, nothing is run. What the file computes in another form is refused, with the
option that runs it. The result is an ordinary fast tokenizer of transformers.

Special tokens are those of `added_tokens_decoder` in tokenizer_config.json; other reserved ids are
`<|reserved_token_ID|>`, as in the release's class.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import short

MODEL_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
PATTERN, RESERVED = "pat_str", "num_reserved_special_tokens"  # attributes of the release's class
EXTRA_RESERVED = 2  # ids beyond `num_reserved_special_tokens`: BOS and EOS
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
REMEDY = "--trust-remote-code runs it (trust_remote_code in a recipe)"


def remote_code(folder: Path) -> str | None:
    """`FILE.CLASS` of the code that a tokenizer names as its class; None: it has none."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return None
    auto_map = config.get("auto_map") if isinstance(config, dict) else None
    named = auto_map.get("AutoTokenizer") if isinstance(auto_map, dict) else None
    names = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    return names[0] if names else None


def is_tiktoken_release(folder: Path) -> bool:
    """Whether the tokenizer is a `tiktoken.model` for which transformers would need code of the release."""
    has_fast = (folder / "tokenizer.json").is_file()
    return (folder / MODEL_FILE).is_file() and not has_fast and remote_code(folder) is not None


def read_tiktoken(folder: Path) -> Any:
    """A `PreTrainedTokenizerFast`."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import TikTokenConverter

    config = json.loads((folder / CONFIG_FILE).read_text())
    pattern, reserved = _class_constants(folder)
    ranks = read_ranks(folder / MODEL_FILE)
    make_converter: Any = TikTokenConverter
    converter = make_converter(str(folder / MODEL_FILE), pattern=pattern)
    converter.load_tiktoken_bpe = lambda _: ranks  # transformers' own needs the package tiktoken
    tokenizer = converter.converted()
    named = _added_tokens(folder, config)
    first = len(ranks)
    added = []
    for token_id in range(first, first + reserved + EXTRA_RESERVED):
        content, special = named.pop(token_id, (f"<|reserved_token_{token_id}|>", False))
        added.append(AddedToken(content, normalized=False, special=special))
    if named:
        expected = f"ids {first} to {first + reserved + EXTRA_RESERVED - 1}, behind those of {MODEL_FILE}"
        raise InputError(f"{folder / CONFIG_FILE}: added_tokens_decoder", f"id {min(named)}", expected)
    tokenizer.add_tokens(added)
    options = {name: _text(config.get(name)) for name in NAMED_TOKENS if config.get(name) is not None}
    template = folder / TEMPLATE_FILE
    make_tokenizer: Any = PreTrainedTokenizerFast
    return make_tokenizer(
        tokenizer_object=tokenizer,
        chat_template=template.read_text() if template.is_file() else config.get("chat_template"),
        model_max_length=config.get("model_max_length") or int(1e30),
        clean_up_tokenization_spaces=False,
        **options,
    )


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token -> rank. Ranks are 0, 1, 2, ... in any order of lines."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            given = f"{short(line.decode('utf-8', 'replace'))} in line {number}"
            raise InputError(str(file), given, "a token in base64 and its rank", "download it again") from error
    if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
        raise InputError(str(file), f"{len(ranks)} tokens with gaps between their ranks", "ranks from 0 on")
    return ranks


def _text(token: Any) -> Any:
    """A token of tokenizer_config.json: a text, or a document with its content."""
    return token.get("content") if isinstance(token, dict) else token


def _added_tokens(folder: Path, config: dict[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> text, and whether decoding may skip it."""
    added = {}
    for token_id, token in (config.get("added_tokens_decoder") or {}).items():
        if not str(token_id).isdigit() or not isinstance(token, dict) or not isinstance(token.get("content"), str):
            given, where = short(token), f"{folder / CONFIG_FILE}: added_tokens_decoder"
            raise InputError(where, f"{token_id}: {given}", "ids with the content of a token")
        added[int(token_id)] = (token["content"], bool(token.get("special", True)))
    return added


def _class_constants(folder: Path) -> tuple[str, int]:
    """Pattern and number of reserved ids, of the class that tokenizer_config.json names."""
    name = remote_code(folder) or ""
    module, _, class_name = name.rpartition("--")[2].rpartition(".")
    file = folder / f"{module}.py"
    try:
        tree = ast.parse(file.read_text())
    except (OSError, ValueError, SyntaxError) as error:
        raise InputError(str(file), str(error), f"the class {class_name}, in Python") from error
    constants = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            constants = {
                target.id: _constant(statement.value)
                for statement in node.body
                if isinstance(statement, ast.Assign)
                for target in statement.targets
                if isinstance(target, ast.Name)
            }
    pattern, reserved = constants.get(PATTERN), constants.get(RESERVED)
    if not isinstance(pattern, str) or not isinstance(reserved, int):
        missing = PATTERN if not isinstance(pattern, str) else RESERVED
        raise InputError(str(file), f"{class_name} without a constant {missing}", "a tokenizer as Kimi-K2's", REMEDY)
    return pattern, reserved


def _constant(node: ast.expr) -> Any:
    """The value of a literal, or of literals joined by one; None for anything that would have to be run."""
    try:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            return str(ast.literal_eval(node.func.value)).join(ast.literal_eval(node.args[0]))
        return ast.literal_eval(node)
    except (ValueError, TypeError, IndexError):
        return None
