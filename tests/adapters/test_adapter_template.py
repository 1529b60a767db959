"""The chat template that an adapter carries: every file that transformers, PEFT and earlier versions write it to, the
end of answers under it, and names of `template:` from elsewhere."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ktransformers.adapters.adapter_template import (
    AdapterTemplate,
    check_rendering_ends,
    read_adapter_template,
    with_ends,
)
from ktransformers.adapters.chat_templates import TEMPLATES, find_template, template_text, to_jinja, with_defaults
from ktransformers.ground.errors import InputError
from tests.support.training import TOKENIZER

OLD_RUN = Path(__file__).parents[1] / "data" / "v0.1.0" / "run"
TEMPLATE_FILES = Path(__file__).parents[1] / "data" / "chat_templates"
QUESTION = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TOKENIZER)


def test_adapter_of_version_0_1_has_its_template() -> None:
    template = read_adapter_template(OLD_RUN)
    manifest = json.loads((OLD_RUN / "kt_manifest.json").read_text())
    assert template is not None and manifest["chat_template"] == f"sha256:{template.sha256}"
    assert read_adapter_template(OLD_RUN / "checkpoint-2") is not None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", "T"),
        ("chat_template.json", json.dumps({"chat_template": "T"})),
        ("tokenizer_config.json", json.dumps({"chat_template": "T"})),
        (
            "tokenizer_config.json",
            json.dumps({"chat_template": [{"name": "tools", "template": "U"}, {"name": "default", "template": "T"}]}),
        ),
    ],
)
def test_template_of_a_stock_peft_adapter_is_found(tmp_path: Path, file: str, content: str) -> None:
    assert read_adapter_template(tmp_path) is None
    (tmp_path / file).write_text(content)
    template = read_adapter_template(tmp_path)
    assert template is not None and template.text == "T" and template.file == str(tmp_path / file)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("chat_template.jinja", b"x" * (2**20 + 1)),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"[1]"),
        ("tokenizer_config.json", b'{"chat_template": 3}'),
        ("chat_template.json", b"[" * 100_000),
    ],
)
def test_damaged_template_is_refused_with_its_file(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=file):
        read_adapter_template(tmp_path)


ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "text",
    ["{% if %}", "{{ raise_exception('no') }}", "{{ messages[0]['content'] }}", "{{ 'x' * 9999999999 }}", ENDLESS],
)
def test_template_that_renders_no_answer_is_refused(tokenizer: Any, text: str) -> None:
    with pytest.raises(InputError, match="somewhere"):
        with_ends(AdapterTemplate(text, "somewhere"), tokenizer)


def test_template_that_renders_a_question_without_end_is_refused(tokenizer: Any) -> None:
    question = [{"role": "user", "content": "?"}]
    with pytest.raises(InputError, match="chat template: given one that takes longer than 2 s"):
        check_rendering_ends(ENDLESS, question, tokenizer)
    check_rendering_ends("{{ raise_exception('transformers says so') }}", question, tokenizer)


def test_answers_end_with_a_token_or_with_text(tokenizer: Any) -> None:
    def ends(template: AdapterTemplate) -> tuple[list[str], tuple[str, ...]]:
        found = with_ends(template, tokenizer)
        return tokenizer.convert_ids_to_tokens(sorted(found.stop_tokens)), found.stop_strings

    marked = "{% for m in messages %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% endfor %}"
    assert ends(AdapterTemplate(marked, "masks")) == (["<|im_end|>"], ())
    own = AdapterTemplate((TEMPLATE_FILES / "qwen3.jinja").read_text(), "qwen3")
    assert ends(own) == (["<|im_end|>"], ())
    chatml, llama3 = (AdapterTemplate(to_jinja(TEMPLATES[name]), name) for name in ("chatml", "llama3"))
    assert ends(chatml) == (["<|im_end|>"], ())
    assert ends(llama3) == ([], ("<|eot_id|>",)), "several tokens of this tokenizer"
    two = replace(TEMPLATES["chatml"], assistant=("A:", "<|im_end|><|endoftext|>"))
    assert ends(AdapterTemplate(to_jinja(two), "two")) == (["<|im_end|>"], ())
    other_eos = AdapterTemplate(to_jinja(TEMPLATES["deepseek"]), "deepseek", {"eos_token": "<|endoftext|>"})
    assert ends(other_eos) == (["<|endoftext|>"], ()), "the tokenizer beside the adapter names another eos"
    assert other_eos.differs_from(tokenizer) and "<|endoftext|>" not in other_eos.render(tokenizer, QUESTION)


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v3"])
def test_defaults_of_the_recipe_are_inside_the_template(tokenizer: Any, name: str) -> None:
    """Rendered without options it gives what the options gave in training; a request still overrides them."""
    text = (TEMPLATE_FILES / f"{name}.jinja").read_text()

    def rendered(template: str, messages: list[dict[str, str]] = QUESTION, **options: Any) -> str:
        words = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True, **options
        )
        return str(words)

    system = {"role": "system", "content": "Be 'kind'\nand \\ brief."}
    own = {"role": "system", "content": "Other."}
    with_system = with_defaults(text, system["content"], None)
    assert rendered(with_system) == rendered(text, [system, *QUESTION])
    assert rendered(with_system, [own, *QUESTION]) == rendered(text, [own, *QUESTION])
    for thinking in (False, True):
        silent = with_defaults(text, system["content"], thinking)
        assert rendered(silent) == rendered(text, [system, *QUESTION], enable_thinking=thinking)
        for asked in (False, True):
            assert rendered(silent, enable_thinking=asked) == rendered(text, [system, *QUESTION], enable_thinking=asked)
    assert with_defaults(text, None, None) == text


def test_template_may_be_a_jinja_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("mine")
    assert template_text(str(tmp_path / "mine.jinja")) == "mine"
    with pytest.raises(InputError, match=r"no\.jinja"):
        template_text(str(tmp_path / "no.jinja"))


LLAMAFACTORY = """
from dataclasses import dataclass, field

@dataclass
class Slots:
    slots: list

@dataclass
class Template:
    format_user: Slots
    format_assistant: Slots
    format_system: Slots
    format_prefix: Slots
    default_system: str = ""
    stop_words: list = field(default_factory=list)
    thought_words: tuple = ("<think>\\n", "\\n</think>\\n\\n")

class ReasoningTemplate(Template): ...
class Llama2Template(Template): ...

parts = dict(
    format_user=Slots(["<u>{{content}}</u><a>"]), format_assistant=Slots(["{{content}}", {"eos_token"}, "\\n"]),
    format_system=Slots(["<s>{{content}}</s>"]), format_prefix=Slots([{"bos_token"}, {"token": "<x>"}]),
    default_system="Be it's own.",
)
TEMPLATES = {"shiny": Template(**parts), "shiny_think": ReasoningTemplate(**parts), "fused": Llama2Template(**parts)}
"""


def test_other_names_are_those_of_an_installed_llamafactory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    with pytest.raises(InputError, match=r"chatml, .*deepseek.*or a file with a Jinja template.*LLaMA-Factory"):
        find_template("shiny")
    package = tmp_path / "llamafactory" / "data"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    (package / "template.py").write_text(LLAMAFACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    talk = [*QUESTION, {"role": "assistant", "content": "Yes."}, *QUESTION]
    try:
        words = tokenizer.apply_chat_template(talk, chat_template=template_text("shiny"), tokenize=False)
        bos, eos = tokenizer.bos_token, tokenizer.eos_token
        assert words == f"{bos}<x><s>Be it's own.</s><u>Hi</u><a>Yes.{eos}\n<u>Hi</u><a>"
        thinking = tokenizer.apply_chat_template(talk[:2], chat_template=template_text("shiny_think"), tokenize=False)
        assert f"<a><think>\n\n</think>\n\nYes.{eos}" in thinking
        with pytest.raises(InputError, match=r"Llama2Template.*Jinja"):
            find_template("fused")
        with pytest.raises(InputError, match="dull"):
            find_template("dull")
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "llamafactory"]:
            del sys.modules[name]
