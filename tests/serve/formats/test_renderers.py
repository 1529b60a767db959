"""Round trips of families whose template no package has as text: rendered by the package `renderers` (Apache-2.0),
which its own tests hold to the releases' templates. It is installed into a folder of the test."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from typing import Any

import pytest

from ktransformers.serve.formats import recognise
from tests.support.answers import TOOLS, common_beginning, parse

PACKAGES = ("renderers==0.1.12", "prime-pydantic-config", "openai-harmony", "tiktoken", "httpx", "openai")
ARGUMENTS = {"city": 'Zürich "x" </tool_call> <b>\n  (c)', "days": 3, "units": {"temperature": "a"}, "zip": "007"}
# Renderer -> names of the parsers, and a text of the release's template where it is needed.
ROWS = {
    "DeepSeekV3Renderer": ("deepseekv3", "deepseek-v3", ""),
    "DeepSeekR1Renderer": ("deepseekv3", "deepseek-r1", ""),
    "DeepSeekV4Renderer": ("deepseekv4", "deepseek-v4", ""),
    "KimiK2Renderer": ("kimi_k2", None, ""),
    "KimiK25Renderer": ("kimi_k2", "kimi_k2", ""),
    "GLM45Renderer": ("glm45", "glm45", ""),
    "GLM5Renderer": ("glm47", "glm45", ""),
    "GLM51Renderer": ("glm47", "glm45", ""),
    "GLM53Renderer": ("glm47", "glm45", ""),
    "MiniMaxM2Renderer": ("minimax-m2", "minimax", ""),
    "Hy3Renderer": ("hunyuan", "hunyuan", "<tool_calls:opensource>"),
}
ENDS = " <｜end▁of▁sentence｜> <|im_end|> <|user|> <|observation|> [e~[ <｜hy_eos:opensource｜>"


class CharacterTokenizer:
    """A token for each character, and one for each special token that is asked for."""

    unk_token_id = -1
    name_or_path = "characters"
    is_fast = False

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: dict[int, str] = {}

    def convert_tokens_to_ids(self, token: str) -> int:
        number = self._ids.setdefault(token, 2_000_000 + len(self._ids))
        self._texts[number] = token
        return number

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        parts = re.split(r"(<｜[^｜]+｜>|｜DSML｜|</?think>)", text)
        marked = [[self.convert_tokens_to_ids(part)] if at % 2 else map(ord, part) for at, part in enumerate(parts)]
        return [token for tokens in marked for token in tokens]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self._texts.get(token) or chr(token) for token in tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._ids

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_token_id"):
            return self.convert_tokens_to_ids(f"<{name}>")
        raise AttributeError(name)


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = str(tmp_path_factory.mktemp("renderers"))
    line = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        sys.executable,
        "install",
        "--quiet",
        "--target",
        folder,
        *PACKAGES,
    ]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-1]}")
    sys.path.append(folder)
    yield importlib.import_module("renderers")
    sys.path.remove(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_answers_of_families_without_a_template(renderers: Any, name: str) -> None:
    call_parser, reasoning_parser, text = ROWS[name]
    answer_format = recognise("", f"{text}{ENDS}", call_parser, reasoning_parser)
    tools = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in TOOLS
    ]
    for calls in ([("get_weather", ARGUMENTS), ("ping", {})], [("ping", {})], []):
        tokenizer = CharacterTokenizer()
        renderer = getattr(renderers, name)(tokenizer)
        user = {"role": "user", "content": "How is the weather?"}
        assistant: dict[str, Any] = {"role": "assistant", "reasoning_content": "I think so.", "content": "Let me see."}
        if calls:
            assistant["tool_calls"] = [
                {"id": f"functions.{called}:{at}", "type": "function", "function": {"name": called, "arguments": given}}
                for at, (called, given) in enumerate(calls)
            ]
        whole = tokenizer.decode(renderer.render_ids([user, assistant], tools=tools))
        prompt = tokenizer.decode(renderer.render_ids([user], tools=tools, add_generation_prompt=True))
        prefix = common_beginning(whole, prompt)
        answer = parse(answer_format.parser(prefix, TOOLS), whole[len(prefix) :])
        assert answer.calls == calls
        assert answer.text.strip() == "Let me see."
        assert answer.reasoning == ("I think so." if "I think so." in whole else "")
