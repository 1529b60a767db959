"""The tokenizer of a run, with the chat template that is trained; it is saved with the adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ktransformers.adapters.chat_templates import (
    TEMPLATES,
    missing_tokens,
    template_text,
    templates_with_tools,
    with_defaults,
)
from ktransformers.ground.errors import InputError
from ktransformers.modeling.pretrained import read_tokenizer, run_code_note
from ktransformers.train.data.files import row_error
from ktransformers.train.data.prepare import ReadDataset
from ktransformers.train.settings import TrainSettings


def load_tokenizer(directory: Path, settings: TrainSettings) -> tuple[Any, list[str]]:
    """With notes on it."""
    model, data = settings.model, settings.data
    tokenizer = read_tokenizer(
        directory, trust_remote_code=model.trust_remote_code, use_fast=model.use_fast_tokenizer, padding_side="right"
    )
    code = run_code_note(directory) if model.trust_remote_code else None
    notes = [] if code is None else [code]
    if tokenizer.eos_token is None:
        given = f"the tokenizer of {directory}, which has no eos token"
        raise InputError("model_name_or_path", given, "one, which ends an answer", "tokenizer_config.json: eos_token")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if data.template is not None:
        missing = missing_tokens(TEMPLATES[data.template], tokenizer) if data.template in TEMPLATES else []
        if missing:
            listed = ", ".join(missing)
            notes.append(f"template {data.template}: {listed} are not tokens of this model and are split into several")
        tokenizer.chat_template = template_text(data.template)
    templates = tokenizer.chat_template
    if isinstance(templates, dict):  # several by name, one of them for tools
        tokenizer.chat_template = {
            name: with_defaults(text, data.default_system, data.enable_thinking) for name, text in templates.items()
        }
    elif templates is not None:
        tokenizer.chat_template = with_defaults(templates, data.default_system, data.enable_thinking)
    return tokenizer, notes


def check_template(tokenizer: Any, datasets: list[ReadDataset]) -> None:
    """Raises for rows that the template cannot show."""
    template = tokenizer.chat_template
    for dataset in datasets:
        for row, sample in dataset.samples:
            if template is not None and sample.tools and "tools" not in str(template):
                problem, expected = "tools, which the chat template does not show", "a template with a form for tools"
                named = ", ".join(templates_with_tools())
                raise row_error(row, problem, f"{expected}: {named}", "or leave `template` out: the tokenizer's own")
            if template is None and sample.needs_template:
                problem = f"nothing, the tokenizer has none, and {row.position} is a conversation"
                raise InputError("template", problem, "a name", "docs/train.md lists them")
