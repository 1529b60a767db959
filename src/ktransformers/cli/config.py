"""`kt config`: what was set once for all commands, in config.yaml under XDG_CONFIG_HOME."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from ktransformers.cli import ask

config = typer.Typer(name="config", help="Settings of this user.", no_args_is_help=True)


def keys(incomplete: str) -> list[str]:
    """For shells."""
    from ktransformers import settings

    return [key for key in settings.keys() if key.startswith(incomplete)]  # noqa: SIM118 (a function)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Key = Annotated[str, typer.Argument(help="SECTION.NAME; `kt config show` lists them.", autocompletion=keys)]


@config.callback()
def group() -> None:
    """Settings of this user."""


def plain(value: Any) -> str:
    """As `kt config set` takes it."""
    return ",".join(value) if isinstance(value, list) else "" if value is None else str(value)


@config.command()
def show(
    key: Annotated[str | None, typer.Argument(help="One key alone.", autocompletion=keys)] = None,
    as_json: Json = False,
) -> None:
    """Show every key, its value and what it is."""
    from ktransformers import settings

    found = settings.effective_values() if key is None else {key: settings.value(key)}
    given = {f"{section}.{name}" for section, names in settings.read_config_file().items() for name in names}
    if as_json:
        print(json.dumps({word: {"value": found[word], "set": word in given} for word in found}, indent=2))
        return
    for word, value in found.items():
        mark = "*" if word in given else " "
        print(f"{mark} {word:<20} {plain(value) or '-':<24} {settings.keys()[word]}")


@config.command()
def get(key: Key, as_json: Json = False) -> None:
    """Print the value of one key."""
    from ktransformers import settings

    value = settings.value(key)
    print(json.dumps(value) if as_json else plain(value))


@config.command("set")
def set_key(
    key: Key,
    value: Annotated[str, typer.Argument(help="The value; several with commas; '' forgets it.")],
    as_json: Json = False,
) -> None:
    """Set one key."""
    from ktransformers import settings

    now = settings.set_value(key, value or None)
    print(json.dumps({key: now}) if as_json else f"{key} = {plain(now)}")


@config.command()
def path(as_json: Json = False) -> None:
    """Print where the file is."""
    from ktransformers import settings

    file = settings.config_file()
    print(json.dumps({"path": str(file), "exists": file.exists()}) if as_json else file)


@config.command()
def reset(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Forget everything that was set."""
    from ktransformers import settings

    file = settings.config_file()
    if file.exists():
        ask.for_consent(f"delete {file}?", yes, quiet=as_json)
    there = settings.reset()
    if as_json:
        print(json.dumps({"path": str(file), "reset": there}))
    else:
        print(f"{file} is deleted" if there else f"nothing was set: {file} is not there")


@config.command()
def init(as_json: Json = False) -> None:
    """Write a file with every key in a comment, where there is none."""
    from ktransformers import settings
    from ktransformers.files import write_text

    file = settings.config_file()
    made = not file.exists()
    if made:
        lines, section = [], ""
        for key, value in settings.effective_values().items():
            if key.partition(".")[0] != section:
                section = key.partition(".")[0]
                lines.append(f"# {section}:")
            lines.append(f"#   {key.partition('.')[2]}: {json.dumps(value)}  # {settings.keys()[key]}")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, "\n".join(lines) + "\n")
    if as_json:
        print(json.dumps({"path": str(file), "written": made}))
    else:
        print(f"{file} is {'written: every line is a comment, take off the # of what you set' if made else 'there'}")
