"""`kt with -- PROGRAM ...`: runs another program with our experts available to its transformers and PEFT.

The program replaces this process. It gets one folder on PYTHONPATH (`modeling/startup`), which its children inherit;
none of its files is changed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ktransformers.ground.errors import InputError

# Options after the program's name belong to the program, with or without `--` before it.
WITH_CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def startup_folder() -> Path:
    return Path(__file__).resolve().parent.parent / "modeling" / "startup"


def environment(variables: dict[str, str]) -> dict[str, str]:
    """The environment with our folder first on PYTHONPATH, once."""
    ours = str(startup_folder())
    rest = [
        directory for directory in variables.get("PYTHONPATH", "").split(os.pathsep) if directory and directory != ours
    ]
    return {**variables, "PYTHONPATH": os.pathsep.join([ours, *rest])}


def with_(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.", metavar="PROGRAM [ARGUMENTS]")],
) -> None:
    """Run a program that uses transformers on packed experts.

    llamafactory-cli, for example. The model is a directory that `kt model prepare` wrote.
    """
    program = shutil.which(command[0])
    if program is None:
        raise InputError("program", command[0], "one that is on PATH", "name it with its folder")
    os.execve(program, command, environment(dict(os.environ)))
