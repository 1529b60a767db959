"""Chat templates by name, as data: the text before and after each kind of message.

The text matches LLaMA-Factory's templates of the same name, so an adapter works with both; a name that is not here is
looked up in an installed LLaMA-Factory. A template is converted to jinja for the tokenizer, which is saved with the
adapter. Functions, calls and their results have a form in the templates whose released Jinja shows one (`ToolFormat`);
for the others the tokenizer's own template defines it, and a run without `template` uses that.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_text

JINJA_SUFFIXES = (".jinja", ".jinja2", ".j2")
MAX_TEMPLATE_BYTES = 2**20
_BOS_SLOT, _EOS_SLOT = "\ue002", "\ue003"  # private-use characters that no template contains
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class ToolFormat:
    """Functions as JSON at the end of the system message, calls after the content of an answer, results in a turn."""

    functions: tuple[str, str]  # before the first, each of which begins a line, and after the last
    call: tuple[str, str, str]  # before its name, between name and arguments, after them
    result: tuple[str, str]
    turn: tuple[str, str]  # around results that follow each other


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
    tools: ToolFormat | None = None


# Of Qwen2.5 and Qwen3.
_QWEN_TOOLS = ToolFormat(
    functions=(
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    ),
    call=('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
    result=("\n<tool_response>\n", "\n</tool_response>"),
    turn=("<|im_start|>user", "<|im_end|>\n"),
)
_CHATML = ("<|im_start|>", "<|im_end|>")


def _chatml(default_system: str = "", thinks: bool = False, tools: ToolFormat | None = None) -> ChatTemplate:
    return ChatTemplate(
        user=("<|im_start|>user\n", "<|im_end|>\n"),
        assistant=("<|im_start|>assistant\n", "<|im_end|>\n"),
        system=("<|im_start|>system\n", "<|im_end|>\n"),
        default_system=default_system,
        thinks=thinks,
        tokens=_CHATML,
        tools=tools,
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
    "qwen": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", tools=_QWEN_TOOLS),
    "qwen3": _chatml(thinks=True, tools=_QWEN_TOOLS),
    "qwen3_nothink": _chatml(tools=_QWEN_TOOLS),
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


def templates_with_tools() -> list[str]:
    """Names of templates that show functions, calls and results."""
    return [name for name, template in TEMPLATES.items() if template.tools is not None]


def find_template(name: str) -> ChatTemplate:
    """The template of that name: ours, else that of an installed LLaMA-Factory."""
    template = TEMPLATES.get(name) or _llamafactory_template(name)
    if template is not None:
        return template
    matches = difflib.get_close_matches(name, TEMPLATES, n=1)
    perhaps = f"`{matches[0]}`, perhaps; " if matches else ""
    raise InputError(
        "template",
        name,
        f"{perhaps}one of {', '.join(TEMPLATES)}, or a file with a Jinja template",
        "leave it out to use the tokenizer's own; other names are looked up in LLaMA-Factory where it is installed",
    )


def template_text(name: str) -> str:
    """The Jinja template that `template:` names: the content of a file, or a named template."""
    if name.endswith(JINJA_SUFFIXES) or "/" in name:
        return read_template_file(Path(name).expanduser())
    return to_jinja(find_template(name))


def read_template_file(file: Path) -> str:
    return read_text(file, "a Jinja template", limit=MAX_TEMPLATE_BYTES)


def with_defaults(text: str, default_system: str | None, enable_thinking: bool | None) -> str:
    """The template with the recipe's system message and thinking switch as defaults that a request may override, so
    that every server which renders it gives the tokens of training."""
    if enable_thinking is not None:
        switch = "true" if enable_thinking else "false"
        text = f"{{%- if enable_thinking is not defined %}}{{% set enable_thinking = {switch} %}}{{% endif %}}\n{text}"
    if default_system is not None:
        message = f"{{'role': 'system', 'content': {_literal(default_system)}}}"
        first = "{%- if messages[0]['role'] != 'system' %}"
        text = f"{first}{{% set messages = [{message}] + messages %}}{{% endif %}}\n{text}"
    return text


def _llamafactory_template(name: str) -> ChatTemplate | None:
    """LLaMA-Factory's template of that name as ours; its user turn ends with the beginning of the assistant's."""
    spec = importlib.util.find_spec("llamafactory")
    if spec is None or spec.origin is None:  # without origin it is a folder of that name, not the package
        return None
    try:
        templates: Any = importlib.import_module("llamafactory.data.template").TEMPLATES
    except ImportError as error:
        problem = f"{name}, which is not ours, and a LLaMA-Factory that cannot be imported ({error})"
        raise InputError("template", problem, f"one of {', '.join(TEMPLATES)}, or a Jinja file") from error
    template = templates.get(name)
    if template is None:
        return None
    kind, thinks = type(template).__name__, type(template).__name__ == "ReasoningTemplate"
    other_thought = thinks and "".join(template.thought_words) != EMPTY_THOUGHT
    if kind not in ("Template", "ReasoningTemplate") or other_thought:
        raise InputError(
            "template",
            f"{name}, which LLaMA-Factory renders by code of its own ({kind})",
            "a template of turns",
            "write it as a Jinja file and name that file",
        )
    prefix, _ = _slot_texts(template.format_prefix.slots)
    assistant = _slot_texts(template.format_assistant.slots)
    end = assistant[1].replace(_EOS_SLOT, "", 1)
    return ChatTemplate(
        user=_slot_texts(template.format_user.slots),
        assistant=(assistant[0], end),
        system=_slot_texts(template.format_system.slots),
        prefix=prefix.replace(_BOS_SLOT, ""),
        default_system=template.default_system,
        bos=_BOS_SLOT in prefix,
        eos=_EOS_SLOT in assistant[1],
        thinks=thinks,
        tokens=tuple(template.stop_words),
    )


def _slot_texts(slots: Any) -> tuple[str, str]:
    """The text before and after the content; LLaMA-Factory writes special tokens as a set, other tokens as a dict."""
    text = ""
    for slot in slots:
        if isinstance(slot, set):
            text += _BOS_SLOT if "bos_token" in slot else _EOS_SLOT
        else:
            text += slot if isinstance(slot, str) else slot["token"]
    before, _, after = text.partition("{{content}}")
    return before, after


def _literal(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def to_jinja(template: ChatTemplate) -> str:
    """The template in jinja: system, then the other messages in any order, then the generation prompt."""

    text = _literal
    bos = "(bos_token or '')" if template.bos else "''"
    end = f"eos_token + {text(template.assistant[1])}" if template.eos else text(template.assistant[1])
    system = f"{text(template.system[0])} + system + {text(template.system[1])}"
    thought = f"({text(EMPTY_THOUGHT)} if '<think>' not in content else '')" if template.thinks else "''"
    begin = text(template.assistant[0])
    if template.thinks:
        begin += f" + ({text(EMPTY_THOUGHT)} if enable_thinking is defined and enable_thinking is false else '')"
    refused = (
        "{%- if message['tool_calls'] -%}{{- raise_exception('this template has no form for calls') -}}{%- endif -%}"
    )
    functions, calls, results = ("", refused, "") if template.tools is None else _tools_in_jinja(template.tools)
    return (
        "{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else "
        f"{text(template.default_system)} -%}}"
        f"{functions}"
        f"{{{{- {bos} + {text(template.prefix)} -}}}}"
        f"{{%- if system -%}}{{{{- {system} -}}}}{{%- endif -%}}"
        "{%- for message in messages -%}"
        "{%- set content = message['content'] or '' -%}"
        "{%- if message['role'] == 'user' -%}"
        f"{{{{- {text(template.user[0])} + content + {text(template.user[1])} -}}}}"
        "{%- elif message['role'] == 'assistant' -%}"
        f"{{{{- {text(template.assistant[0])} + {thought} + content -}}}}"
        f"{calls}"
        f"{{{{- {end} -}}}}"
        f"{results}"
        "{%- elif message['role'] != 'system' -%}"
        "{{- raise_exception('this template has no form for ' + message['role']) -}}"
        "{%- endif -%}{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {begin} -}}}}{{%- endif -%}}"
    )


def _tools_in_jinja(tools: ToolFormat) -> tuple[str, str, str]:
    """Functions added to `system`; calls of `message`; the branch of its role for results."""
    text = _literal
    name, arguments, end = (text(part) for part in tools.call)
    functions = (
        "{%- if tools -%}"
        "{%- set shown = namespace(text='') -%}"
        "{%- for tool in tools -%}{%- set shown.text = shown.text + '\\n' + (tool | tojson) -%}{%- endfor -%}"
        f"{{%- set functions = {text(tools.functions[0])} + shown.text + {text(tools.functions[1])} -%}}"
        "{%- set system = (system + '\\n\\n' if system else '') + functions -%}"
        "{%- endif -%}"
    )
    calls = (
        "{%- for call in message['tool_calls'] or [] -%}"
        "{%- set call = call['function'] or call -%}"
        "{{- '\\n' if content or not loop.first else '' -}}"
        f"{{{{- {name} + call['name'] + {arguments} -}}}}"
        "{{- call['arguments'] if call['arguments'] is string else call['arguments'] | tojson -}}"
        f"{{{{- {end} -}}}}"
        "{%- endfor -%}"
    )
    results = (
        "{%- elif message['role'] == 'tool' -%}"
        f"{{{{- {text(tools.turn[0])} if loop.first or loop.previtem['role'] != 'tool' else '' -}}}}"
        f"{{{{- {text(tools.result[0])} + content + {text(tools.result[1])} -}}}}"
        f"{{{{- {text(tools.turn[1])} if loop.last or loop.nextitem['role'] != 'tool' else '' -}}}}"
    )
    return functions, calls, results


def missing_tokens(template: ChatTemplate, tokenizer: Any) -> list[str]:
    """Special tokens of the template that this tokenizer does not have."""
    vocabulary = tokenizer.get_vocab()
    return [token for token in template.tokens if token not in vocabulary]
