"""The option `--no-verify` of commands that load a model: packed experts are not compared with their checksums. It sets
KT_VERIFY, so that every model of the command is loaded so, also in processes that it starts.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer


def skip_checksums(no_verify: bool) -> bool:
    if no_verify:
        os.environ["KT_VERIFY"] = "0"
    return no_verify


NoVerify = Annotated[
    bool,
    typer.Option(
        "--no-verify", help="Do not compare packed experts with their checksums on first use.", callback=skip_checksums
    ),
]
