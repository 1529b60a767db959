"""`kt chat`: a terminal client for any server that speaks the OpenAI API.

Answers are streamed; after each one the number of tokens and their rate are shown, counted from the first token. An
interrupt (Ctrl-C) ends the answer, not the chat. With `--json` every answer is one line of JSON and nothing else is
printed, so that a pipe of questions becomes a pipe of answers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.errors import InputError, KTError

if TYPE_CHECKING:
    from ktransformers.serve.client import Client

COMMANDS = """/clear          forget the conversation
/system TEXT    set the system message; without TEXT remove it
/model NAME     ask another model, e.g. base:adapter; without NAME list them
/exit           end"""


@dataclass(frozen=True)
class ChatAnswer:
    model: str
    content: str
    tokens: int
    first: float | None  # seconds until the first token; None: there was none
    seconds: float

    def line(self) -> str:
        if self.first is None:
            return "[no answer]"
        taken = self.seconds - self.first
        rate = f", {(self.tokens - 1) / taken:.1f} tokens/s" if self.tokens > 1 and taken > 0 else ""
        return f"[{self.tokens} tokens{rate}, first after {self.first:.2f} s]"


class ChatHistory:
    def __init__(self, client: Client, model: str, options: dict[str, Any], quiet: bool = False) -> None:
        self.client, self.model, self.options, self.quiet = client, model, options, quiet
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []
        self.file: Path | None = None  # where the conversation is kept

    def remember(self, file: Path) -> None:
        """Go on with what the file has, and keep it up to date."""
        self.file = file
        if file.exists():
            try:
                said = json.loads(file.read_text())
                self.messages = [{"role": str(one["role"]), "content": str(one["content"])} for one in said]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    "history-file", f"{file} ({error})", "a list of messages, as `kt chat` writes it"
                ) from error

    def ask(self, text: str) -> ChatAnswer:
        """Prints the answer while it comes."""
        self.messages.append({"role": "user", "content": text})
        first = [{"role": "system", "content": self.system}] if self.system else []
        answer, tokens, begun = "", 0, 0.0
        started = time.monotonic()
        try:
            for part in self.client.stream({"model": self.model, "messages": first + self.messages, **self.options}):
                tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
                for choice in part.get("choices", []):
                    piece = choice["delta"].get("content") or ""
                    begun = begun or (time.monotonic() if piece else 0.0)
                    answer += piece
                    print("" if self.quiet else piece, end="", flush=True)
        except KeyboardInterrupt:
            print("" if self.quiet else " [interrupted]", end="")
        except KTError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})
        if self.file is not None:
            from ktransformers.files import write_json

            write_json(self.file, self.messages)
        now = time.monotonic()
        return ChatAnswer(self.model, answer, tokens, begun - started if begun else None, now - started)

    def command(self, line: str) -> bool:
        """False: end."""
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word in ("/exit", "/quit"):
            return False
        if word == "/clear":
            self.messages.clear()
            print("(forgotten)")
        elif word == "/system":
            self.system = rest or None
            print(f"(system message {'set' if rest else 'removed'})")
        elif word == "/model":
            self._choose(rest)
        else:
            print(COMMANDS)
        return True

    def _choose(self, name: str) -> None:
        known = self.client.models()
        if name in known:
            self.model = name
        for one in known:
            print(f"{'*' if one == self.model else ' '} {one}")
        if name and name not in known:
            print(f"({name} is not served)")


def chat(
    url: Annotated[str | None, typer.Argument(help="The server. [default: server.host and server.port]")] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model to ask, e.g. base:adapter. [default: the first]")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="At most that many tokens of answer.")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", "-t", min=0, max=2, help="0 is greedy.")] = None,
    host: Annotated[str | None, typer.Option("--host", "-H", help="Instead of URL.")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Instead of URL.")] = None,
    history_file: Annotated[
        Path | None, typer.Option(help="Keep the conversation in this file, and go on with it.")
    ] = None,
    key_variable: Annotated[str, typer.Option(help="Environment variable with the API key.")] = "OPENAI_API_KEY",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each answer.")] = False,
) -> None:
    """Talk to a server in the terminal; /help lists the commands."""
    from ktransformers.serve.client import Client

    if url is not None and (host is not None or port is not None):
        raise InputError("host, port", "given beside URL", "one of them")
    url = url or _address(host, port)
    client = Client(url if "://" in url else f"http://{url}", os.environ.get(key_variable))
    known = client.models()
    if model is not None and model not in known:
        raise InputError("model", model, f"one of {', '.join(known)}")
    given = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    talk = ChatHistory(client, model or known[0], options, quiet=as_json)
    talk.system = system
    if history_file is not None:
        talk.remember(history_file)
    _loop(talk)


def _address(host: str | None, port: int | None) -> str:
    """Where `kt serve` listens by itself; one that listens on every address is reached at this machine's own."""
    from ktransformers.settings import read

    server = read().server
    place = host or server.host
    place = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(place, place)
    return f"http://{place}:{port if port is not None else server.port}"


def _loop(talk: ChatHistory) -> None:
    shown = sys.stdin.isatty() and not talk.quiet
    if shown:
        import readline  # noqa: F401 (editing and history in the prompt)

        print(f"{talk.model} at {talk.client.url}; /help lists the commands")
    while True:
        try:
            line = input(f"{talk.model}> " if shown else "").strip()
        except (EOFError, KeyboardInterrupt):
            print("" if talk.quiet else "\n", end="")
            return
        if not line:
            continue
        try:
            if line.startswith("/") and not talk.quiet:
                if not talk.command(line):
                    return
                continue
            answer = talk.ask(line)
            print(json.dumps(asdict(answer), ensure_ascii=False) if talk.quiet else f"\n{answer.line()}", flush=True)
        except KTError as error:
            if talk.quiet:
                raise
            print(f"kt: {error}", file=sys.stderr)
