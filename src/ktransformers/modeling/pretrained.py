"""Reads config.json, generation_config.json and the tokenizer of a directory with transformers, and names the file that
is broken; finds what a checkpoint says of its weights, and the source of its experts.

transformers raises whatever its parsers raise (`OSError`, `KeyError`, a bare `Exception` of tokenizers, validation
errors of its own) and mostly does not say of which file; a broken generation_config.json it replaces by defaults
without a word. Files are parsed again only after an error, so that a file is judged by what transformers makes of it.

Code that a release brings is run for its tokenizer alone, and only with `trust_remote_code`; `tiktoken.model` is read
without it (`tiktoken_tokenizer.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from ktransformers.checkpoint.model_config import read_model_config
from ktransformers.ground.errors import InputError, KTError, nearest
from ktransformers.ground.files import short
from ktransformers.modeling.prepare import to_stock_config
from ktransformers.modeling.tiktoken_tokenizer import REMEDY, is_tiktoken_release, read_tiktoken, remote_code
from ktransformers.modeling.tokenizer_patterns import check_patterns

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of generation_config.json
# Sampling settings of generation_config.json -> the smallest and the largest value.
SAMPLING_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, 1 << 28),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 100.0),
}
MAX_TOKEN_ID = (1 << 24) - 1  # vocabularies have up to a few hundred thousand tokens
MAX_REASON = 200  # characters of a message of transformers


def _reason(error: object) -> str:
    """An error or a value in one line of bounded length."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= MAX_REASON else f"{words[:MAX_REASON]}..."


def find_broken_json(directory: Path, names: tuple[str, ...]) -> tuple[Path, str] | None:
    """The first of these files that exists and is not a JSON object, and why."""
    for name in names:
        file = directory / name
        if not file.is_file():
            continue
        try:
            document = json.loads(file.read_bytes().decode("utf-8"))
        except (ValueError, RecursionError) as error:
            return file, f"no JSON ({_reason(error)})"
        if not isinstance(document, dict):
            return file, f"a JSON {type(document).__name__}"
    return None


def require_json(directory: Path, names: tuple[str, ...] = (*TOKENIZER_JSON_FILES, GENERATION_FILE)) -> None:
    """Raises if one of these files exists and is not a JSON object; for files that are copied and not used."""
    broken = find_broken_json(directory, names)
    if broken is not None:
        raise InputError(str(broken[0]), broken[1], "a JSON object", "download it again")


def _find_broken_tokenizer(directory: Path) -> tuple[Path, str] | None:
    """The file because of which transformers could not open the tokenizer, None if it cannot be told."""
    broken = find_broken_json(directory, TOKENIZER_JSON_FILES)
    if broken is not None:
        return broken
    if (directory / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(directory / "tokenizer.json"))
        except Exception as error:  # tokenizers raises `Exception`
            return directory / "tokenizer.json", _reason(error)
    return None


def read_tokenizer(directory: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """The tokenizer of a directory; `options` are those of `AutoTokenizer.from_pretrained`."""
    folder = Path(directory)
    code = remote_code(folder)
    _check_added_tokens(folder)
    try:
        if not trust_remote_code and is_tiktoken_release(folder):
            tokenizer = read_tiktoken(folder)
            tokenizer.padding_side = options.get("padding_side", tokenizer.padding_side)
        else:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **options)
        check_patterns(tokenizer, folder)
        if type(longest := tokenizer.model_max_length) not in (int, float):
            given = f"{short(longest)}"
            raise InputError(
                f"{folder / 'tokenizer_config.json'}: model_max_length", given, "a number", "or no such key"
            )
        return tokenizer
    except KTError:
        raise
    except Exception as error:  # see above
        if not folder.is_dir():
            raise InputError("tokenizer", f"{directory} ({_reason(error)})", "a directory, or a hub id") from error
        broken = _find_broken_tokenizer(folder)
        if broken is not None:
            raise InputError(str(broken[0]), broken[1], "a file of a tokenizer", "download it again") from error
        if code is not None:
            given = f"a tokenizer that is code of the release, {code} ({_reason(error)})"
            expected = "one that transformers opens"
            remedy = "install what it imports" if trust_remote_code else REMEDY
            raise InputError(str(folder / "tokenizer_config.json"), given, expected, remedy) from error
        with naming_config(folder):
            AutoConfig.from_pretrained(folder, trust_remote_code=False)
        file = folder / "tokenizer_config.json"
        blamed = file if file.is_file() else folder
        raise InputError(str(blamed), _reason(error), "a tokenizer that transformers opens") from error


def run_code_note(directory: str | Path) -> str | None:
    """The line that says whose code `trust_remote_code` runs; None: the release brings none for its tokenizer."""
    code = remote_code(Path(directory))
    return None if code is None else f"WARNING: running code of the release, {code} in {directory}, as its tokenizer"


@contextmanager
def naming_config(directory: Path) -> Iterator[None]:
    """Turns an error of transformers about a configuration into an InputError that names config.json."""
    try:
        yield
    except KTError:
        raise
    except Exception as error:  # see above
        file, reason = find_broken_json(directory, (CONFIG_FILE,)) or (directory / CONFIG_FILE, _reason(error))
        raise InputError(str(file), reason, "a configuration that transformers opens") from error


def read_pretrained_config(directory: str | Path) -> PreTrainedConfig:
    """A model type that transformers lacks is read as its equivalent (Kimi-K2: deepseek_v3), without its own code."""
    folder = Path(directory)
    with naming_config(folder):
        if (folder / CONFIG_FILE).is_file():
            released = read_model_config(folder)
            stock = to_stock_config(released)
            if stock.get("model_type") != released.get("model_type"):
                equivalent: PreTrainedConfig = AutoConfig.for_model(stock.pop("model_type"), **stock)
                return equivalent
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    _check_activation(config, folder / CONFIG_FILE)
    return config


def _check_activation(config: PreTrainedConfig, file: Path) -> None:
    from transformers.activations import ACT2FN

    text = config.get_text_config()
    for name in ("hidden_act", "hidden_activation"):
        activation = getattr(text, name, None)
        if isinstance(activation, str) and activation not in ACT2FN:
            known = "an activation of transformers, such as silu"
            raise InputError(f"{file}: {name}", repr(activation), nearest(activation, ACT2FN, known))


def read_generation_config(directory: Path) -> GenerationConfig | None:
    """None if the directory has none."""
    file = directory / GENERATION_FILE
    if not file.is_file():
        return None
    try:
        config = GenerationConfig.from_pretrained(directory)
    except Exception as error:  # see above
        broken = find_broken_json(directory, (GENERATION_FILE,))
        reason = _reason(error) if broken is None else broken[1]
        raise InputError(str(file), reason, "a generation_config.json that transformers opens", "or none") from error
    for name in TOKEN_KEYS:
        value = getattr(config, name, None)
        tokens = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token, int) for token in tokens):
            raise InputError(f"{file}: {name}", _reason(value), "a token id, or a list of them")
    for name, (smallest, largest) in SAMPLING_RANGES.items():
        value = getattr(config, name, None)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (is_number and smallest <= value <= largest):
            raise InputError(f"{file}: {name}", short(value), f"a number from {smallest:g} to {largest:g}")
    return config


def _check_added_tokens(directory: Path) -> None:
    """Token ids that no vocabulary has, before a library makes a table of as many rows."""
    files = {"tokenizer.json": "added_tokens", "tokenizer_config.json": "added_tokens_decoder"}
    for name, key in files.items():
        file = directory / name
        try:
            added = json.loads(file.read_bytes()).get(key) or ()
        except (OSError, ValueError, AttributeError, RecursionError):  # none, or broken, which its reader says
            continue
        tokens = added if isinstance(added, list) else ()
        ids = added if isinstance(added, dict) else [token.get("id") for token in tokens if isinstance(token, dict)]
        for given in map(str, ids):
            if given.isdecimal() and int(given) > MAX_TOKEN_ID:
                raise InputError(f"{file}: {key}", f"token {given}", f"ids up to {MAX_TOKEN_ID}", "download it again")
