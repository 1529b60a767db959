"""`kt chat`: a terminal client for any server that speaks the OpenAI API, or for a model that it serves meanwhile.

Responses are streamed; after each one the number of tokens and their rate, counted from the first token, are printed.
Ctrl-C ends the response, which closes the stream and so cancels the request, not the chat. With `--json` every response
is one line of JSON and nothing else is printed, so that questions can be piped in and answers out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.ground.errors import InputError, KTError

if TYPE_CHECKING:
    from ktransformers.ground.client import Client

COMMANDS = '''/adapter NAME   ask this adapter; a directory is loaded first; without NAME list them
/base           ask the model without an adapter
/model NAME     ask another model, e.g. base:adapter; without NAME list them
/system TEXT    set the system message; without TEXT remove it
/save FILE      write the conversation: messages as JSON for .json, else as text
/clear          forget the conversation
/exit           end, as Ctrl-D does

Ctrl-C stops an answer. A line that ends in \\ goes on in the next; """ begins and ends a text of several lines.'''


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
    def __init__(
        self, client: Client, model: str, options: dict[str, Any], quiet: bool = False, plain: bool = False
    ) -> None:
        self.client, self.model, self.options, self.quiet, self.plain = client, model, options, quiet, plain
        self.system: str | None = None
        self.messages: list[dict[str, str]] = []
        self.file: Path | None = None  # in which the conversation is saved

    def remember(self, file: Path) -> None:
        """Continue the conversation in the file, and save it there after every response."""
        self.file = file
        if not file.parent.is_dir():
            raise InputError("history-file", file, "a file in a folder that exists")
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

    def sent_messages(self) -> list[dict[str, str]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.messages

    def ask(self, text: str) -> ChatAnswer:
        """Send a message; print the response while it is streamed."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._stream()
        except KTError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": answer.content})
        if self.file is not None:
            from ktransformers.ground.files import write_json

            try:
                write_json(self.file, self.messages)
            except OSError as error:
                raise KTError(f"{self.file}: {error.strerror}; the answer is not saved") from error
        return answer

    def _stream(self) -> ChatAnswer:
        from ktransformers.cli.chat_view import choose_view

        answer, tokens, pieces, first_token_time = "", 0, 0, 0.0
        started = time.monotonic()
        body = {"model": self.model, "messages": self.sent_messages(), **self.options}
        view = choose_view(self.quiet, self.plain)
        interrupted = False
        try:
            with closing(self.client.stream(body)) as stream:
                for part in stream:
                    tokens = (part.get("usage") or {}).get("completion_tokens", tokens)
                    for choice in part.get("choices", []):
                        delta = choice["delta"]
                        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
                        piece = delta.get("content") or ""
                        if thought or piece:
                            first_token_time, pieces = first_token_time or time.monotonic(), pieces + 1
                        if thought:
                            view.thought(thought)
                        if piece:
                            answer += piece
                            view.piece(piece)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            view.close()
        if interrupted and not self.quiet:
            print("[interrupted]")
        first = first_token_time - started if first_token_time else None
        return ChatAnswer(self.model, answer, tokens or pieces, first, time.monotonic() - started)

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
        elif word == "/adapter":
            self._choose_adapter(rest)
        elif word == "/base":
            self._choose(self.model.partition(":")[0])
        elif word == "/save":
            self._save(rest)
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

    def _choose_adapter(self, given: str) -> None:
        base = self.model.partition(":")[0]
        directory = Path(given).expanduser()
        if given and (directory / "adapter_config.json").is_file():
            given = directory.resolve().name
            if f"{base}:{given}" not in self.client.models():
                self.client.load_adapter(given, str(directory.resolve()))
        self._choose(f"{base}:{given.removeprefix(f'{base}:')}" if given else "")

    def _save(self, given: str) -> None:
        from ktransformers.ground.files import write_json, write_text

        if not given:
            print("(/save FILE)")
            return
        file = Path(given).expanduser()
        try:
            if file.suffix == ".json":
                write_json(file, self.sent_messages())
            else:
                parts = [f"## {message['role']}\n\n{message['content']}\n" for message in self.sent_messages()]
                write_text(file, "\n".join(parts))
        except OSError as error:
            raise KTError(f"{file}: {error.strerror}") from error
        print(f"({len(self.messages)} messages in {file})")


def chat(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[URL|MODEL]",
            help="A server; or a model, a training output, or a YAML file of a training or a loop, which is served "
            "meanwhile. [default: server.host and server.port]",
        ),
    ] = None,
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
    plain: Annotated[bool, typer.Option("--plain", help="Print answers as they are, without markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON for each answer.")] = False,
) -> None:
    """Talk to a server or to a model. /help lists the commands."""
    from ktransformers.cli.chat_server import is_address, served
    from ktransformers.ground.client import Client

    if target is not None and (host is not None or port is not None):
        raise InputError("host, port", "given together with URL or MODEL", "one of them")
    with ExitStack() as stack:
        started = target is not None and not is_address(target)
        if started:
            assert target is not None
            url = stack.enter_context(served(target, quiet=as_json))
        else:
            url = target or _server_url(host, port)
        client = Client(url if "://" in url else f"http://{url}", None if started else os.environ.get(key_variable))
        origins = client.template_origins()
        models = list(origins)
        if model is not None and model not in models:
            raise InputError("model", model, f"one of {', '.join(models)}")
        settings = {"max_tokens": max_tokens, "temperature": temperature}
        options = {name: value for name, value in settings.items() if value is not None}
        own = models[1] if started and len(models) > 1 else models[0]  # the adapter that MODEL is
        history = ChatHistory(client, model or own, options, quiet=as_json, plain=plain)
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
    from ktransformers.ground.settings import read

    server = read().server
    address = host or server.host
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, address)
    return f"http://{address}:{port if port is not None else server.port}"


def _run_chat(history: ChatHistory) -> None:
    from ktransformers.cli.chat_input import line_editing, read_message

    if not sys.stdin.isatty() or history.quiet:
        for line in sys.stdin:
            if line.strip() and not _take_turn(history, line.strip()):
                return
        return
    print(f"{history.model} at {history.client.url}; /help lists the commands")
    with line_editing():
        while True:
            try:
                message = read_message(f"{history.model}> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /exit ends the chat)")
                continue
            if message.strip() and not _take_turn(history, message):
                return


def _take_turn(history: ChatHistory, message: str) -> bool:
    """One command or question; False: end the chat."""
    try:
        if message.startswith("/") and not history.quiet:
            return history.command(message)
        answer = history.ask(message)
        print(json.dumps(asdict(answer), ensure_ascii=False) if history.quiet else answer.line(), flush=True)
    except KTError as error:
        if history.quiet:
            raise
        print(f"kt: {error}", file=sys.stderr)
    return True
