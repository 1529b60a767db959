"""A tiny model whose answers are scripted: each token that the script wants is the only one that the sampler may draw.

Everything else is the server's own: prompts are rendered and tokenized, the engine computes every step, text is
detokenized, parsed and emitted. The script sees what the model sees, the decoded prompt, so what it says about a tool's
result can only come from the request.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.serve.http.service import PrepareOptions, Service
from ktransformers.serve.scheduler.sequence import GenerationRequest
from tests.support.scripted import Script
from tests.support.serving import DATA, VOCABULARY, EngineHarness
from tests.support.tiny_models import build, save

EOS = 2
CONTEXT = 65536
RESULT = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
# How tools say that there is no such file.
MISSING = r"(?i:no such file|not found|does not exist)"

Answer = Callable[[str], str]


class ScriptedService(Service):
    """`answer`: from a decoded prompt to the text that is generated."""

    answer: Answer

    def generation_requests(self, prepared: Any, request_id: str = "") -> list[GenerationRequest]:
        return [self._forced(request) for request in super().generation_requests(prepared, request_id)]

    def _forced(self, request: GenerationRequest) -> GenerationRequest:
        answer = self.answer(self.tokenizer.decode(list(request.prompt)))
        tokens = (*self.tokenizer(answer, add_special_tokens=False)["input_ids"], EOS)
        return replace(request, grammar=functools.partial(Script, tokens, request.grammar))


def write_model(directory: Path) -> Path:
    """Large enough in context for the prompts of any client."""
    save(build("qwen3_moe", vocab_size=VOCABULARY, max_position_embeddings=CONTEXT, eos_token_id=EOS), directory)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DATA / "minimind_6400" / file, directory / file)
    shutil.copy(DATA / "chat_templates" / "qwen3.jinja", directory / "chat_template.jinja")
    return directory


def scripted_service(directory: Path, answer: Answer) -> ScriptedService:
    from ktransformers.serve.http.registry import Registry

    harness = EngineHarness(directory, {})
    engine = harness.engine(context_length=CONTEXT, max_total_tokens=4 * CONTEXT, chunked_prefill_size=2048)
    registry = Registry("scripted", harness.lora_modules, str(directory), engine.drop_adapter)
    service = ScriptedService(
        engine,
        registry,
        harness.tokenizer,
        timeout=300,
        prepare=PrepareOptions(workers=1, seconds=60),
        kv_bytes_per_token=harness.kv_bytes_per_token,
    )
    service.answer = answer
    return service


def call(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as Qwen3 writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Tools:
    """A client's tools as the script uses them: from what is wanted to a name and arguments."""

    read: Callable[[str], tuple[str, dict[str, Any]]]
    edit: Callable[[str, str, str], tuple[str, dict[str, Any]]]
    run: Callable[[str], tuple[str, dict[str, Any]]]


@dataclass(frozen=True)
class FileTask:
    """Three turns with files of `folder`. TASK-ONE: read, edit, run a command, and have a call fail; TASK-TWO: what was
    the value; TASK-THREE: an answer that is longer than anybody waits for."""

    tools: Tools
    folder: str

    def steps(self) -> tuple[tuple[str, dict[str, Any]], ...]:
        """Calls of the first turn: names and arguments."""
        notes = f"{self.folder}/notes.txt"
        return (
            self.tools.read(notes),
            self.tools.edit(notes, "state: draft", "state: final"),
            self.tools.run(f"cat {notes}; echo SUM=$(cksum < {notes} | cut -d' ' -f1)"),
            self.tools.read(f"{self.folder}/missing.txt"),
        )

    def __call__(self, prompt: str) -> str:
        task, after = _last_task(prompt)
        if "<tools>" not in prompt or not task:
            return "A title"
        if task == "TASK-THREE":
            return "one word more " * 20000
        if task == "TASK-TWO":
            return f"The sum was {_sum(prompt)} and is still {_sum(prompt)}."
        results, steps = RESULT.findall(after), self.steps()
        if len(results) < len(steps):
            number = len(results) + 1
            said = f"<think>\nStep {number} is next.\n</think>\n\nI go on with step {number}.\n"
            return said + call(*steps[len(results)])
        failure = re.search(MISSING, results[-1])
        return f"The sum is {_sum(after)}. The other file: {failure.group() if failure else 'was read'}."


def _last_task(prompt: str) -> tuple[str, str]:
    """The marker that stands last in the prompt, and what follows it."""
    at, task = max((prompt.rfind(task), task) for task in ("TASK-ONE", "TASK-TWO", "TASK-THREE"))
    return (task, prompt[at:]) if at >= 0 else ("", "")


def _sum(text: str) -> str:
    found = re.findall(r"SUM=(\d+)", text)
    return found[-1] if found else "unknown"


def _named(name: str, **words: str) -> Callable[..., tuple[str, dict[str, Any]]]:
    """A tool whose arguments are given in the order of `words`; a value in braces is replaced with an argument."""

    def arguments_of(*values: str) -> tuple[str, dict[str, Any]]:
        return name, {word: values[int(value)] if value.isdigit() else value for word, value in words.items()}

    return arguments_of


def _shell_edit(name: str, word: str) -> Callable[[str, str, str], tuple[str, dict[str, Any]]]:
    """Of a client that edits with commands."""
    return lambda path, old, new: (name, {word: f"sed -i 's/{old}/{new}/' {path}"})


CLIENT_TOOLS = {
    "claude": Tools(
        _named("Read", file_path="0"),
        _named("Edit", file_path="0", old_string="1", new_string="2"),
        _named("Bash", command="0", description="sum"),
    ),
    "opencode": Tools(
        _named("read", filePath="0"),
        _named("edit", filePath="0", oldString="1", newString="2"),
        _named("bash", command="0"),
    ),
    "qwen": Tools(
        _named("read_file", file_path="0"),
        _named("edit", file_path="0", old_string="1", new_string="2"),
        lambda command: ("run_shell_command", {"command": command, "is_background": False}),
    ),
    "cn": Tools(
        _named("Read", filepath="0"),
        _named("Edit", file_path="0", old_string="1", new_string="2"),
        _named("Bash", command="0"),
    ),
    "cline": Tools(
        lambda path: ("read_files", {"files": [{"path": path}]}),
        _named("editor", path="0", old_text="1", new_text="2"),
        lambda command: ("run_commands", {"commands": [command]}),
    ),
    "codex": Tools(
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        _shell_edit("exec_command", "cmd"),
        lambda command: ("exec_command", {"cmd": command}),
    ),
}
