"""The table of formats, under the names that SGLang gives its parsers, and how a model's format is recognised: by what
its chat template's text contains, else by its model type.
"""

from __future__ import annotations

import re

from ktransformers.serve.formats.syntax import CallSyntax, Thinking

_DSML_ARGUMENT = '<｜DSML｜parameter name="$KEY" string="$KIND">$VALUE</｜DSML｜parameter>\n'
_DSML_CALL = '<｜DSML｜invoke name="$NAME">\n$ARGS</｜DSML｜invoke>\n'
_M3 = "]<]minimax[>["

CALLS: dict[str, CallSyntax] = {
    "hermes": CallSyntax(
        '<tool_call>\n{"name": "$NAME", "arguments": $ARGS}\n</tool_call>', tail=r"\s*\}?\s*</tool_call>"
    ),
    "qwen3_coder": CallSyntax(
        "<tool_call>\n<function=$NAME>\n$ARGS</function>\n</tool_call>",
        "tags",
        "<parameter=$KEY>\n$VALUE\n</parameter>\n",
        head=r"(?:<tool_call>\s*)?<function=(?P<name>[\w.\-/]+)>",
        starts=("<function=",),
    ),
    "deepseekv3": CallSyntax(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$NAME\n```json\n$ARGS\n```<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ends_thinking=True,
    ),
    "deepseekv31": CallSyntax(
        "<｜tool▁call▁begin｜>$NAME<｜tool▁sep｜>$ARGS<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        between="",
        ends_thinking=True,
    ),
    "deepseekv32": CallSyntax(
        _DSML_CALL,
        "tags",
        _DSML_ARGUMENT,
        section=("\n\n<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        between="",
        ends_thinking=True,
    ),
    "deepseekv4": CallSyntax(
        _DSML_CALL,
        "tags",
        _DSML_ARGUMENT,
        section=("\n\n<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
        between="",
        ends_thinking=True,
    ),
    "kimi_k2": CallSyntax(
        "<|tool_call_begin|>functions.$NAME:$INDEX<|tool_call_argument_begin|>$ARGS<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        between="",
        call_id="functions.$NAME:$INDEX",
        ends_thinking=True,
    ),
    "glm45": CallSyntax(
        "<tool_call>$NAME\n$ARGS</tool_call>",
        "tags",
        "<arg_key>$KEY</arg_key>\n<arg_value>$VALUE</arg_value>\n",
        ends_thinking=True,
    ),
    "glm47": CallSyntax(
        "<tool_call>$NAME$ARGS</tool_call>",
        "tags",
        "<arg_key>$KEY</arg_key><arg_value>$VALUE</arg_value>",
        between="",
        ends_thinking=True,
    ),
    "minimax-m2": CallSyntax(
        '<invoke name="$NAME">\n$ARGS</invoke>\n',
        "tags",
        '<parameter name="$KEY">$VALUE</parameter>\n',
        section=("\n<minimax:tool_call>\n", "</minimax:tool_call>"),
        between="",
    ),
    "minimax-m3": CallSyntax(
        f'{_M3}<invoke name="$NAME">$ARGS{_M3}</invoke>\n',
        "tags",
        f"{_M3}<$KEY>$VALUE{_M3}</$KEY>",
        section=(f"{_M3}<tool_call>\n", f"{_M3}</tool_call>"),
        between="",
    ),
    "gpt-oss": CallSyntax(
        "<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGS<|call|>",
        between="<|start|>assistant",
        # The recipient stands before or behind the channel.
        head=r"(?:<\|start\|>assistant)?\s*(?:to=functions\.(?P<name>[\w.\-/]+))?\s*<\|channel\|>\s*(?:commentary|analysis)"
        r"(?(name)|\s*to=functions\.(?P<late>[\w.\-/]+))\s*(?:<\|constrain\|>)?\s*(?:json)?\s*<\|message\|>",
        starts=("<|start|>assistant", "to=functions.", "<|channel|>"),
    ),
    "llama3": CallSyntax(
        '{"name": "$NAME", "parameters": $ARGS}',
        between="; ",
        head=r'(?:<\|python_tag\|>)?\s*\{\s*"name"\s*:\s*"(?P<name>[\w.\-/]+)"\s*,\s*"(?:parameters|arguments)"\s*:',
        starts=("<|python_tag|>",),
        bare=True,
    ),
    "pythonic": CallSyntax("$NAME($ARGS)", "python", "$KEY=$VALUE", section=("[", "]"), between=", ", bare=True),
    "mistral": CallSyntax(
        "[TOOL_CALLS]$NAME[ARGS]$ARGS",
        between="",
        head=r"\[TOOL_CALLS\]\s*(?P<name>[\w.\-/]+)(?:\[CALL_ID\]\w+)?\[ARGS\]",
    ),
    "mistral_list": CallSyntax(
        '{"name": "$NAME", "arguments": $ARGS}',
        section=("[TOOL_CALLS] [", "]"),
        between=", ",
        tail=r'\s*(?:,\s*"id"\s*:\s*"[^"]*")?\s*\}',
    ),
    "gemma4": CallSyntax("<|tool_call>call:$NAME$ARGS<tool_call|>", "gemma", between=""),
    "hunyuan": CallSyntax(
        "<tool_call>$NAME<tool_sep>\n$ARGS</tool_call>\n",
        "tags",
        "<arg_key>$KEY</arg_key>\n<arg_value>$VALUE</arg_value>\n",
        section=("<tool_calls>\n", "</tool_calls>"),
        between="",
    ),
    "lfm2": CallSyntax(
        "$NAME($ARGS)", "python", "$KEY=$VALUE", section=("<|tool_call_start|>[", "]<|tool_call_end|>"), between=", "
    ),
    "cohere_command4": CallSyntax(
        '{"tool_call_id": "$INDEX", "tool_name": "$NAME", "parameters": $ARGS}',
        section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
        between=",\n    ",
    ),
}

THINKING: dict[str, Thinking] = {
    "qwen3": Thinking(resume="\n\n"),
    "deepseek-v3": Thinking(),
    "kimi": Thinking("◁think▷", "◁/think▷"),
    "minimax-m3": Thinking("<mm:think>", "</mm:think>"),
    "mistral": Thinking("[THINK]", "[/THINK]", anywhere=True, efforts=("none", "high")),
    "gpt-oss": Thinking(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        resume="<|start|>assistant",
        marks=(
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|start|>assistant",
            "<|end|>",
            "<|return|>",
            "<|call|>",
        ),
        anywhere=True,
        efforts=("low", "medium", "high"),
    ),
    "gemma4": Thinking("<|channel>thought\n", "<channel|>", anywhere=True),
    "cohere_command4": Thinking(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        marks=("<|START_RESPONSE|>", "<|START_TEXT|>", "<|END_RESPONSE|>", "<|END_TEXT|>"),
        anywhere=True,
    ),
    "hunyuan": Thinking(efforts=("no_think", "low", "high")),
}

# Other names of SGLang, and the format that they are.
CALL_ALIASES = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "interns1": "hermes",
    "step3p5": "qwen3_coder",
    "mimo": "qwen3_coder",
    "nanbeige": "qwen3_coder",
    "ling3": "glm45",
    "glm": "glm47",
}
THINKING_ALIASES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v4": "deepseek-v3",
    "glm45": "deepseek-v3",
    "kimi_k2": "deepseek-v3",
    "ling3": "deepseek-v3",
    "minimax": "deepseek-v3",
    "mimo": "qwen3",
    "nanbeige": "qwen3",
    "nemotron_3": "qwen3",
    "qwen3-thinking": "qwen3",
    "step3p5": "qwen3",
    "interns1": "qwen3",
}

# Texts of a chat template that all have to be there, the first row wins.
CALL_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<｜DSML｜function_calls>",), "deepseekv32"),
    (("<｜DSML｜", "tool_calls>"), "deepseekv4"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseekv3"),
    (("<｜tool▁calls▁begin｜>",), "deepseekv31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax-m2"),
    (("minimax[>[",), "minimax-m3"),
    (("<|channel|>", "functions."), "gpt-oss"),
    (("<|tool_call>call:",), "gemma4"),
    (("<tool_calls", "<tool_sep"), "hunyuan"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|START_ACTION|>",), "cohere_command4"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral"),
    (("[TOOL_CALLS]",), "mistral_list"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    # GLM-4.5 tells the model to write a line break behind the function's name, GLM-4.7 does not.
    (("<tool_call>{function-name}\n", "<arg_key>"), "glm45"),
    (("<tool_call>", "<arg_key>"), "glm47"),
    (("<tool_call>", "</tool_call>"), "hermes"),
    (("<|start_header_id|>", '"parameters": '), "llama3"),
    (("<|header_start|>", "[func_name1("), "pythonic"),
    (("<|header_start|>", '"parameters": '), "llama3"),
    (("[func_name1(params_name1=",), "pythonic"),
)
THINKING_SIGNS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>analysis",), "gpt-oss"),
    (("<|channel>",), "gemma4"),
    (("<mm:think>",), "minimax-m3"),
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "cohere_command4"),
    (("◁think▷",), "kimi"),
    (("</think", "<tool_sep"), "hunyuan"),
    (("</think>", "<|im_start|>"), "qwen3"),
    (("</think>",), "deepseek-v3"),
)
# Releases without a Jinja template.
CALLS_OF_TYPE = {"deepseek_v4": "deepseekv4", "deepseek_v32": "deepseekv32"}
THINKING_OF_TYPE = {"deepseek_v4": "deepseek-v3", "deepseek_v32": "deepseek-v3"}

# Tokens between turns: no part of an answer's text where the template has them.
TURN_MARKS = (
    "<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>",
    "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<|user|>", "<|assistant|>", "<|observation|>",
    "<|im_assistant|>", "<turn|>", "<|turn>", "<|tool_response>", "<|start|>assistant", "<|end|>", "<|return|>",
    "<|call|>", "[e~[", "<|END_OF_TURN_TOKEN|>", "<｜hy_eos｜>", "<｜hy_eos:opensource｜>",
)  # fmt: skip


def find(signs: tuple[tuple[tuple[str, ...], str], ...], template: str) -> str:
    text = template.replace("\\n", "\n")
    return next((name for needles, name in signs if all(needle in text for needle in needles)), "")


def tag_suffix(template: str) -> str:
    """Hunyuan's releases end the names of all their tags alike, as `<tool_calls:opensource>`."""
    found = re.search(r"<tool_calls(:\w+)>", template)
    return found[1] if found else ""


def suffixed(text: str, suffix: str) -> str:
    return re.sub(r"(</?(?:tool_calls?|tool_sep|arg_key|arg_value|think))>", rf"\1{suffix}>", text)
