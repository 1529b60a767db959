"""`kt agent`: a coding agent in this terminal on a model that is served here.

The server is `kt serve` on a free port, or one that runs already; it ends with the client if it was started for it. The
client gets the connection from `serve/agents.py`: variables, arguments and files of a folder that is removed at the
end. Ctrl-C belongs to the client; its exit code is that of `kt agent`.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ktransformers.cli.options import Json, print_result
from ktransformers.cli.progress import log
from ktransformers.ground.errors import InputError

if TYPE_CHECKING:
    from ktransformers.ground.options.serving import AgentOptions
    from ktransformers.serve.agents import Agent, AgentConnection, ClientSetup

AGENT_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
CONTEXT_FIELDS = ("context_length", "max_model_len", "max_context_length")  # of an entry of /v1/models

STOP_SECONDS = 20.0  # for a client to end what it has left behind


@dataclass(frozen=True)
class AgentLine:
    name: str
    model: str | None
    flags: tuple[str, ...]  # of `kt serve`
    client: tuple[str, ...]  # arguments of the client
    options: AgentOptions


def agent(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="NAME [MODEL] [FLAGS] [-- ARGUMENTS]", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Start a coding agent on a served model. Agents: claude, codex, opencode, qwen, cn, cline."""
    line = parse_agent(words or [])
    as_json = as_json or line.options.as_json
    if line.options.list_agents:
        print_result(agent_documents(), agent_lines(), as_json)
        return
    from ktransformers.serve.agents import AGENTS

    client = AGENTS.get(line.name)
    if client is None:
        raise InputError("NAME", line.name or "nothing", f"one of {', '.join(AGENTS)}", "`kt agent --list`")
    if shutil.which(client.command) is None and not line.options.print_only:
        raise InputError(client.command, "no such program on PATH", client.title, client.install)
    with ExitStack() as stack:
        key = os.environ.get(line.options.key_variable) if line.options.url is not None else None
        url, entries = _server(line, key, stack)
        model = _served_name(line, entries)
        context = _check_model(client, model, entries[model])
        if line.options.print_only:
            folder = Path.home() / ".cache" / f"kt-{client.command}"
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"kt-{line.name}-")))
        setup = client.setup(_connection(url, model, context, folder, key))
        command = [client.command, *setup.arguments, *line.client]
        if line.options.print_only:
            document = {"environment": setup.environment, "files": setup.files, "command": command}
            print_result(document, setup_lines(setup, folder, command, key, line.options.key_variable), as_json)
            return
        for name, text in setup.files.items():
            (folder / name).write_text(text)
        if client.stop:
            stack.callback(_stop_client, [client.command, *client.stop], setup.environment)
        code = run_client(command, setup.environment)
    raise typer.Exit(code)


def parse_agent(words: Sequence[str]) -> AgentLine:
    """`NAME [MODEL] [FLAGS] [-- ARGUMENTS]`; flags that are not of `kt agent` are of `kt serve`."""
    from ktransformers.ground.options.field import add_flags, build, options_of
    from ktransformers.ground.options.serving import AgentOptions
    from ktransformers.serve.flags import FlagParser

    ours, client = list(words), list[str]()
    if "--" in ours:
        at = ours.index("--")
        ours, client = ours[:at], ours[at + 1 :]
    parser = FlagParser(
        prog="kt agent",
        usage="kt agent NAME [MODEL] [FLAGS] [-- ARGUMENTS of the client]",
        description="Start a coding agent on a served model.",
        epilog="Other flags are those of `kt serve`, for the server that is started.",
        allow_abbrev=False,
    )
    add_flags(parser, options_of(AgentOptions))
    values, rest = parser.parse_known_args(ours)
    options: AgentOptions = build(AgentOptions, vars(values), by_flag=True)
    positional = [word for word in rest[:2] if not word.startswith("-")]
    if rest and rest[0].startswith("-"):
        positional = []
    name, model = (*positional, "", "")[:2]
    flags = tuple(rest[len(positional) :])
    if flags and options.url:
        raise InputError("flags", shlex.join(flags), "none of `kt serve` with --url", "the server has its own")
    return AgentLine(name, model or None, flags, tuple(client), options)


def agent_documents() -> list[dict[str, Any]]:
    from ktransformers.serve.agents import AGENTS

    return [
        {
            "name": name,
            "title": entry.title,
            "path": entry.path,
            "context": entry.context,
            "installed": shutil.which(entry.command),
            "install": entry.install,
        }
        for name, entry in AGENTS.items()
    ]


def agent_lines() -> list[str]:
    return [
        f"{entry['name']:<9} {entry['title']:<13} {entry['path']:<21} {entry['context']:>6} tokens  "
        + (f"installed: {entry['installed']}" if entry["installed"] else str(entry["install"]))
        for entry in agent_documents()
    ]


def _server(line: AgentLine, key: str | None, stack: ExitStack) -> tuple[str, dict[str, dict[str, Any]]]:
    """The address of the server and what it lists: that of --url, a running one without MODEL, or one for MODEL."""
    from ktransformers.cli import ask
    from ktransformers.cli.chat_server import served
    from ktransformers.ground.client import Client
    from ktransformers.serve.flags import parse
    from ktransformers.serve.running import running_servers

    if line.options.url is not None:
        address = line.options.url
        url = address if "://" in address else f"http://{address}"
    elif line.model is None and not line.flags and len(servers := running_servers()) == 1:
        url = servers[0].url
        log(f"uses the server at {url}")
    elif line.options.print_only:
        raise InputError("--print", "no server", "--url of one that is running", "start `kt serve MODEL` first")
    else:
        target = ask.for_model(line.model)
        launch = parse([target, *line.flags])
        if (launch.host, launch.port, launch.api_key) != (None, None, None):
            given = "host, port or api-key"
            raise InputError("flags", given, "none of them", "start `kt serve` with them and pass its address as --url")
        url = stack.enter_context(served(target, False, line.flags))
    client = Client(url, key)
    return client.url, client.model_entries()


def _served_name(line: AgentLine, entries: dict[str, dict[str, Any]]) -> str:
    """The name that requests have: the base, the adapter that is asked for, or that of the training output MODEL."""
    names = list(entries)
    wanted = line.options.adapter or (line.model if line.options.url else None)
    if wanted is None:
        return f"{names[0]}:{trained}" if line.model and (trained := _trained_adapter(line.model)) else names[0]
    for name in (wanted, f"{names[0]}:{wanted}"):
        if name in entries:
            return name
    raise InputError("adapter" if line.options.adapter else "MODEL", wanted, f"one of {', '.join(names)}")


def _trained_adapter(model: str) -> str | None:
    """The name of the adapter that MODEL is; None: it is a base, whatever adapters the flags add."""
    from ktransformers.cli.chat_server import serve_words
    from ktransformers.serve.target import resolve_target

    return next((name for name, _ in resolve_target(serve_words(model)[0]).adapters), None)


def _check_model(client: Agent, model: str, entry: dict[str, Any]) -> int:
    """The context length of the model, if it is enough for the client."""
    abilities = entry.get("capabilities")
    if client.needs_tools and isinstance(abilities, list) and "tools" not in abilities:
        expected = f"a model that calls tools, which {client.title} needs"
        raise InputError("MODEL", f"{model}, whose chat template has none", expected)
    context = next((int(entry[name]) for name in CONTEXT_FIELDS if entry.get(name)), client.context)
    if context < client.context:
        expected = f"{client.context} or more for {client.title}"
        raise InputError("context-length", f"{context} tokens of {model}", expected, "a larger --context-length")
    return context


def _connection(url: str, model: str, context: int, folder: Path, key: str | None) -> AgentConnection:
    from ktransformers.serve.agents import NO_KEY, AgentConnection

    return AgentConnection(url, model, context, folder, key or NO_KEY)


def setup_lines(
    setup: ClientSetup, folder: Path, command: Sequence[str], key: str | None, key_variable: str
) -> list[str]:
    """A shell script that does by hand what `kt agent` does. It reads the key from its variable. The files may
    hold it, and only their owner can read them."""

    def word(text: str) -> str:
        parts = text.split(key) if key else [text]
        return f'"${{{key_variable}}}"'.join(shlex.quote(part) for part in parts)

    lines = ["(umask 077", f"mkdir -p {shlex.quote(str(folder))}"] if setup.files else []
    for name, text in setup.files.items():
        path = shlex.quote(str(folder / name))
        lines += [f"rm -f {path}", f"printf '%s' {word(text)} > {path}"]
    lines += [")"] if setup.files else []
    lines += [f"export {name}={word(value)}" for name, value in setup.environment.items()]
    return [*lines, shlex.join(command)]


def run_client(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the client in this terminal and returns its exit code, or 128 and the signal that ended it."""
    with _client_signals() as attach:
        child = subprocess.Popen(command, env={**os.environ, **environment})
        attach(child)
        try:
            code = child.wait()
        finally:
            if child.poll() is None:
                child.kill()
    return code if code >= 0 else 128 - code


def _stop_client(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Ends what the client has left behind. That it cannot be ended is no error of the session."""
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(command, env={**os.environ, **environment}, timeout=STOP_SECONDS, check=False, **quiet)


@contextmanager
def _client_signals() -> Iterator[Any]:
    """Ctrl-C reaches the client from the terminal and is ignored here; SIGTERM and SIGHUP are passed on to it."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: Any) -> None:
        for child in children:
            child.send_signal(number)

    def ignore(number: int, frame: Any) -> None:
        return

    handlers = {signal.SIGINT: ignore, signal.SIGTERM: pass_on, signal.SIGHUP: pass_on}
    earlier = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield children.append
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
