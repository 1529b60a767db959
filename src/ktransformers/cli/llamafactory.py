"""`kt llamafactory`: `use_kt: true` in the LLaMA-Factory of this environment, switched on and off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ktransformers.cli.options import Json, print_result

if TYPE_CHECKING:
    from ktransformers.train.llamafactory.switch import SwitchState

llamafactory = typer.Typer(
    name="llamafactory", help="`use_kt: true` in the LLaMA-Factory of this environment.", no_args_is_help=True
)


@llamafactory.callback()
def llamafactory_group() -> None:
    """`use_kt: true` in the LLaMA-Factory of this environment."""


def print_state(state: SwitchState, as_json: bool) -> None:
    document = {"on": state.on, "file": str(state.file), "packages": state.packages, "problem": state.problem}
    packages = [f"{name} {version}" for name, version in state.packages.items() if version is not None]
    problem = state.problem or "these versions work with use_kt"
    print_result(document, [f"{'on' if state.on else 'off'}: {state.file}", *packages, problem], as_json)


@llamafactory.command()
def on(as_json: Json = False) -> None:
    """Let `llamafactory-cli` use packed experts where a file says `use_kt: true`: one .pth file in site-packages."""
    from ktransformers.train.llamafactory.switch import read_state, turn_on

    turn_on()
    print_state(read_state(), as_json)


@llamafactory.command()
def off(as_json: Json = False) -> None:
    """Remove that file."""
    from ktransformers.train.llamafactory.switch import read_state, turn_off

    turn_off()
    print_state(read_state(), as_json)


@llamafactory.command()
def status(as_json: Json = False) -> None:
    """Whether it is on, and whether the installed versions work together."""
    from ktransformers.train.llamafactory.switch import read_state

    print_state(read_state(), as_json)
