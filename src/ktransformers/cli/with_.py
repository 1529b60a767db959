"""`kt with -- PROGRAM ...`: a program of somebody else's, with our experts known to its transformers and PEFT.

The program takes this process's place. All that it gets is one folder on PYTHONPATH (`nn/startup`), which its children
inherit; no file of it is changed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from ktransformers.errors import InputError

# The program's own options are its own, with or without `--` in front of it.
CONTEXT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def startup_folder() -> Path:
    return Path(__file__).resolve().parent.parent / "nn" / "startup"


def environment(given: dict[str, str]) -> dict[str, str]:
    """With our folder first on PYTHONPATH, once."""
    ours = str(startup_folder())
    rest = [place for place in given.get("PYTHONPATH", "").split(os.pathsep) if place and place != ours]
    return {**given, "PYTHONPATH": os.pathsep.join([ours, *rest])}


def with_(
    command: Annotated[list[str], typer.Argument(help="The program and its arguments.", metavar="PROGRAM [ARGUMENTS]")],
) -> None:
    """Run a program that uses transformers, such as llamafactory-cli, on packed experts.

    The model is a directory that `kt model prepare` wrote.
    """
    program = shutil.which(command[0])
    if program is None:
        raise InputError("program", command[0], "one that is on PATH", "name it with its folder")
    os.execve(program, command, environment(dict(os.environ)))
