"""The chat template that an adapter was trained with, read from its directory, and how answers end under it.

`kt train` saves it as transformers does: `chat_template.jinja`, in older files `chat_template.json` or the field
`chat_template` of tokenizer_config.json. Requests to the adapter are rendered with it, requests to the base with the
base's own. If tokenizer_config.json names other bos or eos tokens than the base has, the template gets those. The end
of an answer is found by rendering one: a single or special token becomes a stop token, other text a stop string,
because a template of another family may spell its end of turn in several tokens of this tokenizer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ktransformers.adapters import template_probe
from ktransformers.adapters.chat_templates import MAX_TEMPLATE_BYTES, read_template_file
from ktransformers.checkpoint.gguf_directory import TOKENIZERS
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import parse_json, read_text, write_json, write_text
from ktransformers.ground.sandbox import GIB, SandboxError, run_sandboxed

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_JSON = "chat_template.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
MAX_TOKENIZER_CONFIG_BYTES = 2**26  # it lists added tokens
SPECIAL_TOKENS = ("bos_token", "eos_token")
PROBE_SECONDS, PROBE_BYTES = 2, GIB // 2  # of a process that renders a template
ANSWER = "\ue000"  # stands for the content of an answer


@dataclass(frozen=True)
class AdapterTemplate:
    text: str  # Jinja
    file: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token of the adapter's tokenizer
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def differs_from(self, tokenizer: Any) -> bool:
        """Whether a server that knows this tokenizer alone would render another prompt."""
        other_token = any(getattr(tokenizer, name) != token for name, token in self.special_tokens.items())
        return self.text != tokenizer.chat_template or other_token

    def render(
        self, tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            chat_template=self.text,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens,
        )
        return text


def read_adapter_template(source: str | Path) -> AdapterTemplate | None:
    """None if the adapter carries no template: then the base's is used."""
    if not os.path.isdir(source):  # False also for a path that the system refuses; the reader of tensors names it
        return None
    directory = Path(source)
    config_file = directory / TOKENIZER_CONFIG
    config = _read_object(config_file, MAX_TOKENIZER_CONFIG_BYTES) if config_file.is_file() else {}
    special_tokens = {name: text for name in SPECIAL_TOKENS if (text := _token_text(config.get(name))) is not None}
    if (directory / TEMPLATE_FILE).is_file():
        file = directory / TEMPLATE_FILE
        return AdapterTemplate(read_template_file(file), str(file), special_tokens)
    for file in (directory / TEMPLATE_JSON, config_file):
        fields = _read_object(file, MAX_TOKENIZER_CONFIG_BYTES) if file.is_file() else {}
        text = _default_template(fields.get("chat_template"), file)
        if text is not None:
            return AdapterTemplate(text, str(file), special_tokens)
    return None


def _read_object(file: Path, limit: int) -> dict[str, Any]:
    expected = "a JSON object, as transformers writes it"
    document = parse_json(read_text(file, expected, limit=limit), str(file), expected)
    if not isinstance(document, dict):
        raise InputError(str(file), f"a JSON {type(document).__name__}", expected)
    return document


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value  # an AddedToken is an object
    return text if isinstance(text, str) else None


def _default_template(value: Any, file: Path) -> str | None:
    """transformers writes one template as a string, several as a list of names and templates."""
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > MAX_TEMPLATE_BYTES:
        expected = f"a Jinja template of at most {MAX_TEMPLATE_BYTES} characters"
        raise InputError(f"{file}: chat_template", type(value).__name__, expected)
    return value


def with_ends(template: AdapterTemplate, tokenizer: Any) -> AdapterTemplate:
    """The template with the tokens or text that end an answer; raises InputError if it renders no answer."""
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANSWER}]
    variables = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    rendered = _render_in_process(template, messages, variables | dict(template.special_tokens))
    _, answer, end = rendered.rpartition(ANSWER)
    if not answer:
        raise InputError(template.file, "a chat template that drops the answer", "one that shows all messages")
    eos = template.special_tokens.get("eos_token")
    tokens = set() if eos is None else {tokenizer.convert_tokens_to_ids(eos)} - {None, tokenizer.unk_token_id}
    end = end.rstrip()
    ids: list[int] = tokenizer(end, add_special_tokens=False)["input_ids"] if end else []
    if ids and (len(ids) == 1 or ids[0] in _marker_tokens(tokenizer)):
        return replace(template, stop_tokens=frozenset({*tokens, ids[0]}))
    return replace(template, stop_tokens=frozenset(tokens), stop_strings=(end,) if end else ())


def _render_in_process(template: AdapterTemplate, messages: list[dict[str, str]], variables: dict[str, str]) -> str:
    """Rendered by a process with limits, because the template may come from anywhere."""
    try:
        answer = _render_within_limits(template.text, messages, variables)
    except SandboxError:
        answer = {"error": "it took too much time or memory"}
    if "error" in answer:
        expected = "one that renders a question and an answer"
        raise InputError(template.file, f"a chat template that fails ({answer['error']})", expected)
    return str(answer["rendered"])


def _render_within_limits(text: str, messages: list[dict[str, str]], variables: dict[str, str]) -> dict[str, str]:
    request = {"text": text, "messages": messages, "variables": variables}
    program = Path(template_probe.__file__).read_text()
    answer: dict[str, str] = run_sandboxed(program, request, seconds=PROBE_SECONDS, memory=PROBE_BYTES, packages=True)
    return answer


def check_rendering_ends(text: str, messages: list[dict[str, str]], tokenizer: Any) -> None:
    """Refuse a chat template that renders these messages without end, before this process renders them. What else is
    wrong with it is left to transformers."""
    variables = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    try:
        _render_within_limits(text, messages, variables)
    except SandboxError as error:
        expected = "one that renders a question"
        raise InputError("chat template", f"one that {error}", expected, "pass --chat-template") from error


def write_adapter_template(adapter: str | Path, merged: Path) -> None:
    """Gives a merged model the template that its adapter was trained with: the file, the special tokens, and the end of
    answers among the end tokens of generation_config.json."""
    from ktransformers.modeling.pretrained import read_tokenizer

    template = read_adapter_template(adapter)
    if template is None:
        return
    tokenizer = read_tokenizer(merged) if any((merged / name).is_file() for name in TOKENIZERS) else None
    if tokenizer is not None and not template.differs_from(tokenizer):
        return
    write_text(merged / TEMPLATE_FILE, template.text)
    if tokenizer is None:
        return
    config_file = merged / TOKENIZER_CONFIG
    if template.special_tokens and config_file.is_file():
        write_json(config_file, _read_object(config_file, MAX_TOKENIZER_CONFIG_BYTES) | dict(template.special_tokens))
    settings_file = merged / GENERATION_CONFIG
    settings = _read_object(settings_file, MAX_TEMPLATE_BYTES) if settings_file.is_file() else {}
    eos = settings.get("eos_token_id", tokenizer.eos_token_id)
    ends = {*(eos if isinstance(eos, list) else [eos]), *with_ends(template, tokenizer).stop_tokens} - {None}
    if ends:
        write_json(settings_file, settings | {"eos_token_id": sorted(ends)})


def _marker_tokens(tokenizer: Any) -> set[int]:
    """Tokens that ordinary text cannot contain."""
    return {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
