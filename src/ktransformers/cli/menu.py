"""`kt` alone on a terminal: the state of the machine, and a menu of the verbs."""

from __future__ import annotations

from typing import Any

import typer
import typer.main

from ktransformers.cli import ask, machine_state
from ktransformers.cli.ask import MenuChoice
from ktransformers.ground import model_registry

MENU = (
    *("chat", "run", "serve", "train", "eval", "prove", "plan", "quant", "merge", "loop", "bench"),
    *("model list", "model known", "model download", "doctor", "config show"),
)
SHOWN = 4  # of each kind


def state_lines() -> list[tuple[str, str]]:
    """Models, adapters, running servers and the last trainings."""
    from ktransformers.serve.running import running_servers

    models = [entry.name for entry in model_registry.all_models() if entry.exists]
    runs = machine_state.find_runs()
    adapters = [run for run in runs if (run.path / machine_state.ADAPTER_FILE).is_file()]
    servers = [f"{server.url} {server.model}" for server in running_servers()]
    trainings = [run for run in runs if run.trained]
    return [
        ("models", _listed(models, f"none; `kt model known` lists {len(model_registry.known_models())} to download")),
        ("adapters", _listed([machine_state.shorten(run.path) for run in adapters], "none below this folder")),
        ("servers", _listed(servers, "none is running")),
        ("runs", _listed([f"{machine_state.shorten(run.path)} ({run.note})" for run in trainings], "none yet")),
    ]


def _listed(names: list[str], none: str) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more if names else none


def choose_verb(app: typer.Typer) -> list[str]:
    """The words of a verb."""
    from ktransformers import __version__

    ask.tell(f"ktransformers {__version__}")
    for name, value in state_lines():
        ask.tell(f"{name:<9} {value}")
    ask.tell("")
    choices = [MenuChoice(verb, _help_of(app, verb)) for verb in MENU]
    word = ask.choose("what to do", [*choices, MenuChoice("help", "all verbs"), MenuChoice("quit")], "chat")
    if word == "quit":
        raise typer.Exit(0)
    return ["--help"] if word == "help" else word.split()


def _help_of(app: typer.Typer, verb: str) -> str:
    command: Any = typer.main.get_command(app)
    for name in verb.split():
        command = command.commands[name]
    return str(command.get_short_help_str(limit=90))
