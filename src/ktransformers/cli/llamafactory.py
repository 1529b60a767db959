"""`kt llamafactory`: USE_KT=1 for the LLaMA-Factory of this environment, switched on and off."""

from __future__ import annotations

import json
from typing import Annotated

import typer

llamafactory = typer.Typer(
    name="llamafactory", help="`use_kt: true` in the LLaMA-Factory of this environment.", no_args_is_help=True
)


@llamafactory.callback()
def llamafactory_group() -> None:
    """`use_kt: true` in the LLaMA-Factory of this environment."""


@llamafactory.command()
def on() -> None:
    """Let `USE_KT=1 llamafactory-cli` use packed experts: one .pth file in site-packages."""
    from ktransformers.llamafactory.switch import read_state, turn_on

    print(f"on: {turn_on()}")
    print("USE_KT=1 llamafactory-cli train FILE.yaml now honours `use_kt: true`")
    if (problem := read_state().problem) is not None:
        print(f"but: {problem}")


@llamafactory.command()
def off() -> None:
    """Remove that file."""
    from ktransformers.llamafactory.switch import turn_off

    file = turn_off()
    print("off: it was not on" if file is None else f"off: removed {file}")


@llamafactory.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Whether it is on, and whether the installed versions work together."""
    from ktransformers.llamafactory.switch import read_state

    state = read_state()
    if as_json:
        document = {"on": state.on, "file": str(state.file), "packages": state.packages, "problem": state.problem}
        print(json.dumps(document, indent=2))
        return
    print(f"{'on' if state.on else 'off'}: {state.file}")
    for name, version in state.packages.items():
        if version is not None:
            print(f"{name} {version}")
    print(state.problem or "these versions work with use_kt")
