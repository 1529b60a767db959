"""Chat templates by name, as data: the text before and after each kind of message.

The text matches LLaMA-Factory's templates of the same name, so an adapter works with both. A template is converted to
jinja for the tokenizer, which is saved with the adapter. Tool calls are not covered: the tokenizer's own template
defines them for the model, and a run without `template` uses that.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from ktransformers.errors import InputError

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class ChatTemplate:
    user: tuple[str, str]  # before and after the content
    assistant: tuple[str, str]
    system: tuple[str, str] = ("", "\n\n")
    prefix: str = ""
    default_system: str = ""
    bos: bool = False  # starts with the tokenizer's bos token
    eos: bool = False  # the assistant's turn ends with the tokenizer's eos token
    thinks: bool = False  # an answer without reasoning gets an empty think block
    tokens: tuple[str, ...] = ()  # must be single tokens of the tokenizer


_CHATML = ("<|im_start|>", "<|im_end|>")


def _chatml(default_system: str = "", thinks: bool = False) -> ChatTemplate:
    return ChatTemplate(
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        assistant=("<|im_start|>assistant\n", "<|im_end|>\n"),
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        default_system=default_system,
        thinks=thinks,
        tokens=_CHATML,
    )


def _kimi(default_system: str) -> ChatTemplate:
    return ChatTemplate(
        user=("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        assistant=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
        system=("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        default_system=default_system,
        tokens=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|im_end|>"),
    )


def _deepseek3(thinks: bool = False) -> ChatTemplate:
    return ChatTemplate(
        user=("<｜User｜>", ""),
        assistant=("<｜Assistant｜>", ""),
        system=("", ""),
        bos=True,
        eos=True,
        thinks=thinks,
        tokens=("<｜User｜>", "<｜Assistant｜>"),
    )


TEMPLATES: dict[str, ChatTemplate] = {
    "chatml": _chatml(),
    "qwen": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": _chatml(thinks=True),
    "qwen3_nothink": _chatml(),
    "qwen3_5": _chatml(thinks=True),
    "qwen3_5_nothink": _chatml(),
    "deepseek": ChatTemplate(user=("User: ", "\n\n"), assistant=("Assistant:", ""), bos=True, eos=True),
    "deepseek3": _deepseek3(),
    "deepseekr1": _deepseek3(thinks=True),
    "kimi": _kimi("You are a helpful assistant"),
    "kimi_vl": _kimi("You are a helpful assistant"),
    "moonlight": _kimi("You are a helpful assistant provided by Moonshot-AI."),
    "kimi_k2": _kimi("You are Kimi, an AI assistant created by Moonshot AI."),
    "llama3": ChatTemplate(
        user=("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        assistant=("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        system=("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>"),
        bos=True,
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "alpaca": ChatTemplate(
        user=("### Instruction:\n", "\n\n"),
        assistant=("### Response:\n", "\n\n"),
        default_system=(
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        ),
        eos=True,
    ),
    "default": ChatTemplate(
        user=("Human: ", "\n"), assistant=("Assistant:", "\n"), system=("System: ", "\n"), eos=True
    ),
    "empty": ChatTemplate(user=("", ""), assistant=("", ""), system=("", ""), eos=True),
}


def find_template(name: str) -> ChatTemplate:
    if name not in TEMPLATES:
        matches = difflib.get_close_matches(name, TEMPLATES, n=1)
        raise InputError(
            "template",
            name,
            f"`{matches[0]}`, perhaps" if matches else "one of " + ", ".join(TEMPLATES),
            "leave it out to use the tokenizer's own",
        )
    return TEMPLATES[name]


def to_jinja(template: ChatTemplate) -> str:
    """The template in jinja: system, then user and assistant in any order, then the generation prompt."""

    def text(literal: str) -> str:
        return "'" + literal.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"

    bos = "(bos_token or '')" if template.bos else "''"
    end = f"eos_token + {text(template.assistant[1])}" if template.eos else text(template.assistant[1])
    system = f"{text(template.system[0])} + system + {text(template.system[1])}"
    thought = f"({text(EMPTY_THOUGHT)} if '<think>' not in message['content'] else '')" if template.thinks else "''"
    begin = text(template.assistant[0])
    if template.thinks:
        begin += f" + ({text(EMPTY_THOUGHT)} if enable_thinking is defined and enable_thinking is false else '')"
    return (
        "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else "
        f"{text(template.default_system)} -%}}"
        f"{{{{- {bos} + {text(template.prefix)} -}}}}"
        f"{{%- if system -%}}{{{{- {system} -}}}}{{%- endif -%}}"
        "{%- for message in messages -%}"
        "{%- if message['role'] == 'user' -%}"
        f"{{{{- {text(template.user[0])} + message['content'] + {text(template.user[1])} -}}}}"
        "{%- elif message['role'] == 'assistant' -%}"
        f"{{{{- {text(template.assistant[0])} + {thought} + message['content'] + {end} -}}}}"
        "{%- elif message['role'] != 'system' -%}"
        "{{- raise_exception('this template has no form for ' + message['role']) -}}"
        "{%- endif -%}{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {begin} -}}}}{{%- endif -%}}"
    )


def missing_tokens(template: ChatTemplate, tokenizer: Any) -> list[str]:
    """Special tokens of the template that this tokenizer does not have."""
    vocabulary = tokenizer.get_vocab()
    return [token for token in template.tokens if token not in vocabulary]
