"""`kt chat`: a terminal client for any server that speaks the OpenAI API.

Answers are streamed; after each one the number of tokens
and their rate are shown, counted from the first token. An interrupt (Ctrl-C) ends the answer, not the chat.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.errors import InputError, KTError

if TYPE_CHECKING:
    from ktransformers.serve.client import Client

COMMANDS = """/clear          forget the conversation
/system TEXT    set the system message; without TEXT remove it
/model NAME     ask another model, e.g. base:adapter; without NAME list them
/exit           end"""


class Conversation:
    def __init__(self, client: Client, model: str, options: dict[str, Any]) -> None:
        self.client, self.model, self.options = client, model, options
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []

    def ask(self, text: str) -> str:
        """Prints the answer while it comes; the line with its speed."""
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
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [interrupted]", end="")
        except KTError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer})
        taken = time.monotonic() - (begun or started)
        rate = f", {(tokens - 1) / taken:.1f} tokens/s" if tokens > 1 and taken > 0 else ""
        return f"[{tokens} tokens{rate}, first after {max(0.0, begun - started):.2f} s]" if begun else "[no answer]"

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
    url: Annotated[str, typer.Argument(help="The server.")] = "http://127.0.0.1:30000",
    model: Annotated[str | None, typer.Option(help="Model to ask, e.g. base:adapter. [default: the first]")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="At most that many tokens of answer.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, max=2, help="0 is greedy.")] = None,
    key_variable: Annotated[str, typer.Option(help="Environment variable with the API key.")] = "OPENAI_API_KEY",
) -> None:
    """Talk to a server in the terminal; /help lists the commands."""
    from ktransformers.serve.client import Client

    client = Client(url if "://" in url else f"http://{url}", os.environ.get(key_variable))
    known = client.models()
    if model is not None and model not in known:
        raise InputError("model", model, f"one of {', '.join(known)}")
    given = {"max_tokens": max_tokens, "temperature": temperature}
    options = {name: value for name, value in given.items() if value is not None}
    talk = Conversation(client, model or known[0], options)
    talk.system = system
    _loop(talk)


def _loop(talk: Conversation) -> None:
    shown = sys.stdin.isatty()
    if shown:
        import readline  # noqa: F401 (editing and history in the prompt)

        print(f"{talk.model} at {talk.client.url}; /help lists the commands")
    while True:
        try:
            line = input(f"{talk.model}> " if shown else "").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                if not talk.command(line):
                    return
                continue
            said = talk.ask(line)
            print(f"\n{said}")
        except KTError as error:
            print(f"kt: {error}", file=sys.stderr)
