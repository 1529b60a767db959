"""Which chat template belongs to the base and to each adapter.

An adapter that carries a template (`adapters/adapter_template.py`) is asked with it. The base has its tokenizer's, or
that of `--chat-template`; so have adapters that carry none. `template` of a YAML file is for the adapters that the file
names, or for the base if it names none; an adapter that was trained with the template of that name keeps its own file,
which has the recipe's system message and thinking switch in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktransformers.adapters.adapter_template import AdapterTemplate, read_adapter_template, with_ends
from ktransformers.adapters.chat_templates import read_template_file
from ktransformers.adapters.manifest import read_manifest
from ktransformers.serve.flags import Launch
from ktransformers.serve.target import Target
from ktransformers.serve.yaml_keys import yaml_template

LogLine = Callable[[str], None]


class ServedTemplates:
    def __init__(self, tokenizer: Any, launch: Launch, target: Target, log: LogLine) -> None:
        self._tokenizer, self._keys = tokenizer, target.keys
        self.base = read_template_file(launch.chat_template) if launch.chat_template else ""
        self._yaml_adapters: frozenset[Path] = frozenset(Path(path).resolve() for _, path in target.adapters)
        if target.adapters or not target.keys:
            return
        text = yaml_template(target.keys, tokenizer.chat_template)
        if text is not None and not self.base:
            self.base = text
            name = target.keys.get("template") or "that of the tokenizer, with the file's keys"
            log(f"chat template: {name}")

    def read(self, source: str | Path) -> AdapterTemplate | None:
        """The template of an adapter, with the ends of its answers; None: the base's."""
        own = read_adapter_template(source)
        if self._keys and Path(source).resolve() in self._yaml_adapters:
            own = self._of_yaml(Path(source), own)
        return None if own is None else with_ends(own, self._tokenizer)

    def _of_yaml(self, source: Path, own: AdapterTemplate | None) -> AdapterTemplate | None:
        trained_name = (read_manifest(source) or {}).get("template") if source.is_dir() else None
        if own is not None and trained_name is not None and trained_name == self._keys.get("template"):
            return own
        fallback = self._tokenizer.chat_template if own is None else own.text
        text = yaml_template(self._keys, fallback)
        if text is None or (own is not None and own.text == text):
            return own
        return AdapterTemplate(text, "the YAML file", {} if own is None else own.special_tokens)

    def describe(self, template: AdapterTemplate | None) -> str | None:
        """Words for the log if requests to the adapter are rendered otherwise than those to the base."""
        if template is None or template.text == self.base:
            return None
        if not self.base and not template.differs_from(self._tokenizer):
            return None
        ends = [*self._tokenizer.convert_ids_to_tokens(sorted(template.stop_tokens)), *template.stop_strings]
        return f"the chat template of {template.file} (answers end with {' or '.join(ends) or 'eos'})"
