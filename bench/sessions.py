"""What a turn of a long session with tools computes: sessions replayed through a server, by chat template.

    python bench/sessions.py --turns 50 --json sessions.json

A tiny random model is served; its answers are given, token by token: written by the template, then with other white
space and cut into tokens at random, as models sample. The client gives the arguments of calls another order and a field
more, and keeps the thinking or drops it. Every `--task` turns the user asks for something new, and in
between a call is answered with a result. Columns: prompt tokens that were computed; those that are new, which is what
was rendered behind the last answer; tokens that were computed again because the template wrote history otherwise; the
ratio of computed tokens to new ones without these; the most that a turn computed beyond what differs from the
sequence that the server had; what would have been computed with every prompt tokenised from its text alone.

Then the time to a first token behind a long history, beside that of its new tokens alone, and its parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import socket
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import util
from pathlib import Path
from typing import Any

from arguments import numbers, words
from timing import Table, describe_machine, print_last_line, save

TOKENIZER = Path(__file__).resolve().parents[1] / "tests" / "data" / "minimind_6400"
TEMPLATES = "qwen2_5,qwen3,qwen3_6,qwen3_8,glm4moe,llama3_1,gptoss,nemotron_3_nano,gemma4,lfm2_v2"
# Template -> the tokens that end an answer with a call and one without.
ENDS = {
    "gptoss": ("<|call|>", "<|return|>"),
    "glm4moe": ("<|observation|>", "<|user|>"),
    "gemma4": ("<|tool_response>", "<turn|>"),
    "llama3_1": ("<|eot_id|>", "<|eot_id|>"),
}
NO_TEXT_WITH_CALLS = ("gptoss", "llama3_1")
SPECIAL = re.compile(r"<\|[\w\"]+\|?>|<\w+\|>|\[gMASK\]|<sop>|<bos>")
SOFT = ("<think>", "</think>", "<tool_call>", "</tool_call>")
BLOCK = 64
EDIT = {
    "name": "edit",
    "description": "Replaces text in a file.",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "old": {"type": "string"},
            "line": {"type": "integer"},
            "replace_all": {"type": "boolean"},
        },
        "required": ["path"],
    },
}
TOOLS = [{"type": "function", "function": EDIT}]
WORDS = (
    "wind",
    "cloud",
    "evening",
    "river",
    "stone",
    "window",
    "letter",
    "garden",
    "road",
    "silver",
    "morning",
    "light",
)
HEADS = ("template", "model", "thinking", "prompts", "computed", "new", "taken", "ratio", "beyond", "as text")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", type=words, default=words(TEMPLATES), help="names of TRL's templates")
    parser.add_argument("--recurrent", type=words, default=["qwen3_6"], help="templates also with a recurrent model")
    parser.add_argument("--drops", type=words, default=words("qwen3,qwen3_8"), help="templates also without thinking")
    parser.add_argument("--turns", type=int, default=50, help="answers of a session")
    parser.add_argument("--task", type=int, default=10, help="answers between two messages of the user")
    parser.add_argument("--history", type=numbers, default=[4000, 16000], help="tokens before a timed turn")
    parser.add_argument("--rounds", type=int, default=5, help="of timed turns")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


def make_tokenizer(template: str) -> Any:
    from transformers import AddedToken, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.chat_template = template
    special = dict.fromkeys(
        [*SPECIAL.findall(template), "<|im_end|>", *(end for ends in ENDS.values() for end in ends)]
    )
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in special], special_tokens=True)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in SOFT])
    return tokenizer


def make_service(tokenizer: Any, model_type: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ktransformers.experts.interface import select_implementation
    from ktransformers.nn import attach
    from ktransformers.serve.http.registry import Registry
    from ktransformers.serve.http.service import PrepareOptions, Service
    from ktransformers.serve.scheduler.engine import Limits, ServeEngine
    from ktransformers.serve.scheduler.forward import make_forward
    from ktransformers.serve.scheduler.lora import LoraModules

    sizes = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4}
    linear: dict[str, Any] = {}
    if model_type == "qwen3_5_moe_text":
        linear = {f"linear_{kind}_head_dim": 16 for kind in ("key", "value")} | {"shared_expert_intermediate_size": 32}
        linear |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
        linear |= {"layer_types": ["linear_attention", "full_attention"]}
    config = AutoConfig.for_model(
        model_type,
        vocab_size=-(-len(tokenizer) // 64) * 64,
        num_experts_per_tok=2,
        max_position_embeddings=65536,
        eos_token_id=2,
        **sizes,
        **heads,
        **linear,
    )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    attach(model)
    select_implementation(model)
    limits = Limits(max_total_tokens=131072, context_length=65536)
    engine = ServeEngine(make_forward(model), limits)
    registry = Registry("tiny", LoraModules(model), "tiny", engine.drop_adapter)
    return Service(engine, registry, tokenizer, prepare=PrepareOptions(workers=1, seconds=60.0))


class Script:
    """A grammar that allows one token after the other."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = list(tokens)

    def allowed(self, size: int) -> Any:
        import torch

        return torch.arange(size) == self._tokens[0]

    def accept(self, token: int) -> None:
        self._tokens.pop(0)


@dataclass
class Recorder:
    """The next answer of a service, and what became of each prompt."""

    service: Any
    answer: list[int] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        original, remember = self.service.generation_requests, self.service.remember

        def requests(prepared: Any, request_id: str = "") -> list[Any]:
            (request,) = original(prepared, request_id)
            script, stops = list(self.answer), request.stop_tokens | set(self.answer[-1:])
            return [replace(request, grammar=(lambda: Script(script)) if script else None, stop_tokens=stops)]

        def record(prepared: Any, said: Any, tokens: Any, *, ended: bool, cached: int) -> None:
            self.prompts.append(list(prepared.prompts[0].tokens))
            self.cached.append(cached)
            self.ends.append(prepared.chat.prompt_end)
            remember(prepared, said, tokens, ended=ended, cached=cached)

        self.service.generation_requests, self.service.remember = requests, record


@contextmanager
def serve(service: Any) -> Iterator[str]:
    import uvicorn

    from ktransformers.serve.http.api import create_app

    ready = threading.Event()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(create_app(service, ready=ready.set), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        ready.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
        finally:
            server.should_exit = True
            thread.join()


def ask(url: str, messages: list[dict[str, Any]], **fields: Any) -> Any:
    """The answer's message."""
    body = json.dumps({"messages": messages, "tools": TOOLS, **fields}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def first_token_seconds(url: str, messages: list[dict[str, Any]]) -> float:
    body = json.dumps(
        {"messages": messages, "tools": TOOLS, "stream": True, "max_tokens": 2, "temperature": 0}
    ).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    start = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        events = 0
        for line in response:
            events += line.startswith(b"data:")
            if events == 2:  # the first one has the role
                seconds = time.perf_counter() - start
    return seconds


class Session:
    """A conversation whose answers are scripted."""

    def __init__(
        self, name: str, template: str, tokenizer: Any, recorder: Recorder, url: str, *, keeps_thinking: bool
    ) -> None:
        self._name, self._template, self._tokenizer = name, template, tokenizer
        self._keeps_thinking = keeps_thinking
        self._recorder, self._url = recorder, url
        self._rng = random.Random(name)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "You edit files. " * 20}]
        self._ends = ENDS.get(name, ("<|im_end|>", "<|im_end|>"))

    def _text(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))

    def turn(self, number: int, task: int) -> str:
        """Asks once; the beginning of what was new in the prompt."""
        if number % task == 0:
            new = f"Task {number}:"
            self.messages.append({"role": "user", "content": f"{new} {self._text(60)}"})
        else:
            new = f"Result {number}:"
            called = self.messages[-1]["tool_calls"][0]
            result = {"role": "tool", "tool_call_id": called["id"], "content": f"{new} {self._text(60)}"}
            self.messages.append(result)
        calls = (number + 1) % task != 0
        self._recorder.answer = self._sampled(number, calls)
        message = ask(self._url, self.messages)
        back: dict[str, Any] = {"role": "assistant", "content": message["content"]}
        if self._keeps_thinking and "reasoning_content" in message:
            back["reasoning_content"] = message["reasoning_content"]
        if calls:
            (call,) = message["tool_calls"]
            given = json.loads(call["function"]["arguments"])
            arguments = {"replace_all": False, **dict(reversed(given.items()))}
            back["tool_calls"] = [{**call, "function": {"name": "edit", "arguments": json.dumps(arguments)}}]
        self.messages.append(back)
        return new

    def _sampled(self, number: int, calls: bool) -> list[int]:
        """An answer in the template's format, with other white space, in tokens that no tokenizer would make."""
        message: dict[str, Any] = {"role": "assistant", "reasoning_content": f"I think of {self._text(12)}."}
        if not calls or self._name not in NO_TEXT_WITH_CALLS:
            message["content"] = f"Number {number}: {self._text(5)}."
        if calls:
            arguments = {"path": f"/home/{number}.txt", "old": self._text(8), "line": number}
            function = {"name": "edit", "arguments": arguments}
            message["tool_calls"] = [{"type": "function", "id": "a", "function": function}]
            if self._name == "gemma4":  # which writes text behind the results
                message["content"] = ""
        asked = [{"role": "user", "content": "Hi"}]
        whole, prompt = self._render([*asked, message], False), self._render(asked, True)
        begin = next(at for at in range(len(whole)) if at >= len(prompt) or whole[at] != prompt[at])
        end = re.compile("|".join(map(re.escape, {*self._ends, "<|im_end|>", "<|return|>"}))).search
        found = end(whole, begin)
        while found is not None and (later := end(whole, found.end())) is not None:
            found = later
        text = (whole if found is None else whole[: found.start()])[begin:].replace('": ', '":')
        cuts = {0, len(text)}
        marks = [(found.start(), found.end()) for found in re.finditer(f"{SPECIAL.pattern}|</?\\w+>", text)]
        for cut in self._rng.sample(range(1, len(text)), min(len(text) - 1, 24)):
            if not any(start < cut < stop for start, stop in marks):
                cuts.add(cut)
        places = sorted(cuts)
        pieces = [text[start:stop] for start, stop in itertools.pairwise(places)]
        tokens = [token for piece in pieces for token in self._tokenizer(piece, add_special_tokens=False)["input_ids"]]
        return [*tokens, self._tokenizer.convert_tokens_to_ids(self._ends[not calls])]

    def _render(self, messages: list[dict[str, Any]], generation_prompt: bool) -> str:
        options = {"tools": TOOLS, "chat_template": self._template, "tokenize": False}
        return str(self._tokenizer.apply_chat_template(messages, add_generation_prompt=generation_prompt, **options))


def common(first: list[int], second: list[int]) -> int:
    return next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))


def replay(name: str, template: str, model_type: str, turns: int, task: int, *, keeps_thinking: bool) -> dict[str, Any]:
    tokenizer = make_tokenizer(template)
    service = make_service(tokenizer, model_type)
    recorder = Recorder(service)
    cell: dict[str, Any] = {"template": name, "model": model_type, "turns": turns, "prompt_tokens": 0, "computed": 0}
    cell |= {"keeps_thinking": keeps_thinking, "new": 0, "taken": 0, "most_beyond": 0, "computed_as_text": 0}
    stored: list[int] = []
    stored_as_text: list[int] = []
    with serve(service) as url:
        session = Session(name, template, tokenizer, recorder, url, keeps_thinking=keeps_thinking)
        for number in range(turns):
            asked = len(session.messages)
            new = session.turn(number, task)
            prompt, cached, end = recorder.prompts[-1], recorder.cached[-1], recorder.ends[-1]
            differs = len(prompt) - (common(stored, prompt) if stored else 0)
            fresh = len(prompt) - end.continued_tokens
            if end.continuation != "continued" and number:
                text = tokenizer.decode(prompt)
                tail = text[text.rfind(new) :]
                # And what stands before it since the last special token of the turn.
                fresh = len(tokenizer(tail, add_special_tokens=False)["input_ids"]) + 4
            cell["prompt_tokens"] += len(prompt)
            cell["computed"] += len(prompt) - cached
            cell["new"] += fresh
            cell["taken"] += max(0, differs - fresh)
            cell["most_beyond"] = max(cell["most_beyond"], len(prompt) - cached - differs)
            body = json.dumps({"messages": session.messages[: asked + 1], "tools": TOOLS}).encode()
            plain = list(service.preparer.prepare("chat", body, {}).prompts[0].tokens)
            cell["computed_as_text"] += len(plain) - common(stored_as_text, plain) if stored else len(plain)
            stored = [*prompt, *recorder.answer[:-1]]
            stored_as_text = [*plain, *recorder.answer[:-1]]
        cell["prefixes"] = dict(service.prefixes)
    cell["ratio"] = (cell["computed"] - cell["taken"]) / cell["new"]
    return cell


def time_turns(template: str, history: int, rounds: int) -> dict[str, Any]:
    """First tokens of second turns whose first has `history` tokens, and of their new tokens alone."""
    from ktransformers.serve.http.sampled_answers import recall_nothing

    tokenizer = make_tokenizer(template)
    service = make_service(tokenizer, "qwen3_moe")
    Recorder(service)
    rng = random.Random(0)
    text = " ".join(rng.choices(WORDS, k=history))
    text = tokenizer.decode(tokenizer(text)["input_ids"][:history])
    seconds: dict[str, list[float]] = {"alone": [], "second": [], "prepare": [], "again": []}
    with serve(service) as url:
        for number in range(rounds):
            first: list[dict[str, Any]] = [{"role": "user", "content": f"{number} {text}"}]
            answer = ask(url, first, max_tokens=8, temperature=0)
            new = {"role": "user", "content": f"{number} And then?"}
            told = [*first, {"role": "assistant", "content": answer["content"] or "a"}, new]
            seconds["alone"].append(first_token_seconds(url, [new]))
            seconds["second"].append(first_token_seconds(url, told))
            body = json.dumps({"messages": told, "tools": TOOLS}).encode()
            preparer = service.preparer
            for name in ("prepare", "again"):  # its first message is known the second time
                start = time.perf_counter()
                preparer.prepare("chat", body, {}, recall_nothing)
                seconds[name].append(time.perf_counter() - start)
    best = {name: min(times) for name, times in seconds.items()}
    cell = {"history": history, **{f"{name}_s": value for name, value in best.items()}}
    cell["median_second_s"] = statistics.median(seconds["second"])
    return cell | {"us_per_token": 1e6 * (best["second"] - best["alone"]) / history}


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    trl = util.find_spec("trl")
    if trl is None or trl.origin is None:
        print("sessions.py: the templates are those of the package trl, which is not installed", file=sys.stderr)
        return 1
    folder = Path(trl.origin).parent / "chat_templates"
    document: dict[str, Any] = {"bench": "sessions", "machine": describe_machine(), "cells": [], "first_tokens": []}
    table = Table(HEADS, [16, 17, 8, 8, 8, 7, 7, 6, 6, 8])
    rows = [(name, "qwen3_moe", True) for name in args.templates]
    rows += [(name, "qwen3_moe", False) for name in args.drops]
    rows += [(name, "qwen3_5_moe_text", True) for name in args.recurrent]
    for name, model_type, keeps in rows:
        template = (folder / f"{name}.jinja").read_text()
        cell = replay(name, template, model_type, args.turns, args.task, keeps_thinking=keeps)
        document["cells"].append(cell)
        shown = [cell[key] for key in ("prompt_tokens", "computed", "new", "taken")]
        beyond = [f"{cell['ratio']:.3f}", str(cell["most_beyond"]), str(cell["computed_as_text"])]
        table.row([name, model_type, "kept" if keeps else "dropped", *map(str, shown), *beyond])
        if args.json:
            save(document, args.json)
    print()
    columns = ("history", "alone_s", "second_s", "prepare_s", "again_s", "us_per_token")
    table = Table(("history", "alone ms", "second ms", "prepare ms", "again ms", "us a token"), [8, 9, 10, 10, 9, 10])
    for history in args.history:
        cell = time_turns((folder / "qwen3.jinja").read_text(), history, args.rounds)
        document["first_tokens"].append(cell)
        times = [f"{1e3 * cell[name]:.1f}" for name in columns[1:-1]]
        table.row([str(history), *times, f"{cell['us_per_token']:.2f}"])
        if args.json:
            save(document, args.json)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
