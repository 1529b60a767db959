"""`kt config`: settings for all commands, in config.yaml under XDG_CONFIG_HOME."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ktransformers.cli import ask
from ktransformers.cli.options import Json, print_result

config = typer.Typer(name="config", help="Settings of this user.", no_args_is_help=True)


def complete_keys(incomplete: str) -> list[str]:
    """Shell completion of keys."""
    from ktransformers.ground import settings

    return [key for key in settings.keys() if key.startswith(incomplete)]  # noqa: SIM118 (a function)


Key = Annotated[str, typer.Argument(help="SECTION.NAME; `kt config show` lists them.", autocompletion=complete_keys)]


@config.callback()
def config_group() -> None:
    """Settings of this user."""


def format_value(value: Any) -> str:
    """A value as `kt config set` takes it."""
    return ",".join(value) if isinstance(value, list) else "" if value is None else str(value)


@config.command()
def show(
    key: Annotated[str | None, typer.Argument(help="One key alone.", autocompletion=complete_keys)] = None,
    as_json: Json = False,
) -> None:
    """Show every key with its value and meaning."""
    from ktransformers.ground import settings

    values = settings.effective_values() if key is None else {key: settings.value(key)}
    given = {f"{section}.{name}" for section, names in settings.read_config_file().items() for name in names}
    document = {word: {"value": value, "set": word in given} for word, value in values.items()}
    lines = [
        f"{'*' if word in given else ' '} {word:<20} {format_value(value) or '-':<24} {settings.keys()[word]}"
        for word, value in values.items()
    ]
    print_result(document, lines, as_json)


@config.command()
def get(key: Key, as_json: Json = False) -> None:
    """Print the value of one key."""
    from ktransformers.ground import settings

    value = settings.value(key)
    print_result(value, [format_value(value)], as_json)


@config.command("set")
def set_key(
    key: Key,
    value: Annotated[str, typer.Argument(help="The value; several with commas; '' unsets it.")],
    as_json: Json = False,
) -> None:
    """Set one key."""
    from ktransformers.ground import settings

    now = settings.set_value(key, value or None)
    print_result({key: now}, [f"{key} = {format_value(now)}"], as_json)


@config.command()
def path(as_json: Json = False) -> None:
    """Print the path of the file."""
    from ktransformers.ground import settings

    file = settings.config_file()
    print_result({"path": str(file), "exists": file.exists()}, [str(file)], as_json)


@config.command()
def reset(yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False, as_json: Json = False) -> None:
    """Delete all settings."""
    from ktransformers.ground import settings

    file = settings.config_file()
    if file.exists():
        ask.for_consent(f"delete {file}?", yes, quiet=as_json)
    existed = settings.reset()
    line = f"{file} is deleted" if existed else f"nothing was set: {file} does not exist"
    print_result({"path": str(file), "reset": existed}, [line], as_json)


@config.command()
def init(as_json: Json = False) -> None:
    """Write a file with every key in a comment, if there is none."""
    from ktransformers.ground import settings
    from ktransformers.ground.files import write_text

    file = settings.config_file()
    written = not file.exists()
    if written:
        lines, section = [], ""
        for key, value in settings.effective_values().items():
            if key.partition(".")[0] != section:
                section = key.partition(".")[0]
                lines.append(f"# {section}:")
            lines.append(f"#   {key.partition('.')[2]}: {json.dumps(value)}  # {settings.keys()[key]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "\n".join(lines) + "\n")
    state = "written: every line is a comment, remove the # of what you set" if written else "there already"
    print_result({"path": str(file), "written": written}, [f"{file} is {state}"], as_json)
