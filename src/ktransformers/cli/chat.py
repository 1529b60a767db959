"""`kt chat`: a terminal client for any server that speaks the OpenAI API.

Responses are streamed; after each one the number of tokens and their rate, counted from the first token, are printed.
Ctrl-C ends the response, not the chat. With `--json` every response is one line of JSON and nothing else is printed, so
that questions can be piped in and answers out.
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
    first: float | None  # seconds until the first token; None: no token came
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
        self.file: Path | None = None  # in which the conversation is saved

    def remember(self, file: Path) -> None:
        """Continue the conversation in the file, and save it there after every response."""
        self.file = file
        if file.exists():
            try:
                messages = json.loads(file.read_text())
                self.messages = [
                    {"role": str(message["role"]), "content": str(message["content"])} for message in messages
                ]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    "history-file", f"{file} ({error})", "a list of messages, as `kt chat` writes it"
                ) from error

    def ask(self, text: str) -> ChatAnswer:
        """Send a message; print the response while it is streamed."""
        self.messages.append({"role": "user", "content": text})
        system_messages = [{"role": "system", "content": self.system}] if self.system else []
        answer, tokens, first_token_time = "", 0, 0.0
        started = time.monotonic()
        try:
            for part in self.client.stream(
                {"model": self.model, "messages": system_messages + self.messages, **self.options}
            ):
                tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
                for choice in part.get("choices", []):
                    piece = choice["delta"].get("content") or ""
                    first_token_time = first_token_time or (time.monotonic() if piece else 0.0)
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
        return ChatAnswer(
            self.model, answer, tokens, first_token_time - started if first_token_time else None, now - started
        )

    def command(self, line: str) -> bool:
        """Execute a command; False: end the chat."""
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
        models = self.client.template_origins()
        if name in models:
            self.model = name
            if (note := template_note(name, models[name])) is not None:
                print(note)
        for model_name in models:
            print(f"{'*' if model_name == self.model else ' '} {model_name}")
        if name and name not in models:
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
        Path | None, typer.Option(help="Save the conversation in this file, and continue it.")
    ] = None,
    key_variable: Annotated[str, typer.Option(help="Environment variable with the API key.")] = "OPENAI_API_KEY",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each answer.")] = False,
) -> None:
    """Talk to a server in the terminal; /help lists the commands."""
    from ktransformers.serve.client import Client

    if url is not None and (host is not None or port is not None):
        raise InputError("host, port", "given beside URL", "one of them")
    url = url or _server_url(host, port)
    client = Client(url if "://" in url else f"http://{url}", os.environ.get(key_variable))
    origins = client.template_origins()
    models = list(origins)
    if model is not None and model not in models:
        raise InputError("model", model, f"one of {', '.join(models)}")
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in settings.items() if value is not None}
    history = ChatHistory(client, model or models[0], options, quiet=as_json)
    if (note := template_note(history.model, origins[history.model])) is not None:
        print(f"kt: {note}", file=sys.stderr)
    history.system = system
    if history_file is not None:
        history.remember(history_file)
    _run_chat(history)


def template_note(model: str, origin: str | None) -> str | None:
    """The line to show if the server renders messages to this model otherwise than those to its base."""
    return f"{model} is asked with the chat template that it was trained with" if origin == "adapter" else None


def _server_url(host: str | None, port: int | None) -> str:
    """The URL of the configured server. A wildcard address is replaced with the loopback address."""
    from ktransformers.settings import read

    server = read().server
    address = host or server.host
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, address)
    return f"http://{address}:{port if port is not None else server.port}"


def _run_chat(history: ChatHistory) -> None:
    interactive = sys.stdin.isatty() and not history.quiet
    if interactive:
        import readline  # noqa: F401 (editing and history in the prompt)

        print(f"{history.model} at {history.client.url}; /help lists the commands")
    while True:
        try:
            line = input(f"{history.model}> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            print("" if history.quiet else "\n", end="")
            return
        if not line:
            continue
        try:
            if line.startswith("/") and not history.quiet:
                if not history.command(line):
                    return
                continue
            answer = history.ask(line)
            print(json.dumps(asdict(answer), ensure_ascii=False) if history.quiet else f"\n{answer.line()}", flush=True)
        except KTError as error:
            if history.quiet:
                raise
            print(f"kt: {error}", file=sys.stderr)
