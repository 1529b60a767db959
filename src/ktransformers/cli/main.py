"""`kt`: the list of verbs.

`kt --help` imports the module of every verb, so these import at the top only what is cheap; torch and the native core
are imported inside the verbs.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, Any

import typer

from ktransformers import __version__
from ktransformers.cli import ask
from ktransformers.cli.agent import AGENT_CONTEXT, agent
from ktransformers.cli.bench import BENCH_CONTEXT, bench, microbench
from ktransformers.cli.chat import chat
from ktransformers.cli.check import check
from ktransformers.cli.config import config
from ktransformers.cli.convert import convert
from ktransformers.cli.doctor import doctor
from ktransformers.cli.download import download, verify
from ktransformers.cli.eval import evaluate
from ktransformers.cli.llamafactory import llamafactory
from ktransformers.cli.loop import loop
from ktransformers.cli.make import upcycle
from ktransformers.cli.merge import merge
from ktransformers.cli.model import model, rm
from ktransformers.cli.options import UsageError, add_quiet
from ktransformers.cli.plan import plan
from ktransformers.cli.prove import prove
from ktransformers.cli.quant import quant
from ktransformers.cli.rules import rules
from ktransformers.cli.run import RUN_CONTEXT, run
from ktransformers.cli.serve import SERVE_CONTEXT, serve
from ktransformers.cli.train import sft, train
from ktransformers.cli.version import version
from ktransformers.cli.with_ import WITH_CONTEXT, with_
from ktransformers.ground.errors import KTError, MissingArgumentError

app = typer.Typer(
    name="kt",
    help="Fit, fine-tune, serve and judge Mixture-of-Experts models on one workstation: experts in host memory, GPU "
    "or none.",
    pretty_exceptions_enable=False,
    context_settings={"max_content_width": 120},
    rich_markup_mode=None,  # plain help: importing a Markdown parser took half of the time
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    shown: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if shown:
        print(f"ktransformers {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.command(context_settings=AGENT_CONTEXT)(agent)
app.command(context_settings=BENCH_CONTEXT)(bench)
app.command()(chat)
app.command()(convert)
app.command()(doctor)
app.command()(loop)
app.command()(merge)
app.command()(microbench)
app.command()(plan)
app.command()(prove)
app.command()(quant)
app.command()(rules)
app.command(context_settings=RUN_CONTEXT)(run)
app.command(context_settings=SERVE_CONTEXT)(serve)
app.command()(train)
app.command()(version)
app.command("eval")(evaluate)
app.command("with", context_settings=WITH_CONTEXT)(with_)
app.add_typer(model)
model.command("make")(upcycle)
model.command()(upcycle)
model.command()(check)
model.command()(download)
model.command()(verify)
model.command("remove", hidden=True)(rm)
app.add_typer(config)
app.add_typer(llamafactory)
app.add_typer(sft)
sft.command("chat")(chat)
sft.command("export")(merge)
add_quiet(app)


# Errors of the file system, not of the program: reported in one line, without a traceback.
FILE_SYSTEM_ERRORS = (
    *(errno.EACCES, errno.EPERM, errno.EROFS),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
)


PROXY_VARIABLES = {"http_proxy", "all_proxy"}
LOOPBACK = "127.0.0.1,localhost,::1"


def usage_line(error: Any) -> str:
    """`train: missing argument 'file'; see kt train --help`."""
    message = error.format_message().rstrip(".")
    path = error.ctx.command_path if error.ctx is not None else "kt"
    verb = path.partition(" ")[2]
    pause = "" if message.endswith("?") else ";"
    return f"{verb}{': ' if verb else ''}{message[:1].lower()}{message[1:]}{pause} see {path} --help"


def main() -> None:
    """Asks for what a command lacks, on a terminal, and runs it. Every error that a user can act on is one line,
    `kt: ...`; the exit code is 2 for a command line that cannot be read, 1 for anything else."""
    code: object
    _reach_loopback_directly()
    _replace_undecodable()
    try:
        words = sys.argv[1:]
        if ask.can_ask():
            from ktransformers.cli.guide import complete

            words = complete(app, words)
        code = app(args=words, prog_name="kt", standalone_mode=False)
    except typer.Exit as stopped:  # a question that was answered with no
        code = stopped.exit_code
    except UsageError as error:
        if "\n" in error.format_message():  # a group without a command: its help
            error.show()
            code = 2
        else:
            code = _fail(usage_line(error), 2)
    except (typer.Abort, KeyboardInterrupt):
        code = _fail("stopped", 130)
    except MissingArgumentError as error:
        code = _fail(str(error), 2)
    except KTError as error:
        code = _fail(str(error))
    except OSError as error:
        if error.errno not in FILE_SYSTEM_ERRORS:
            raise
        code = _fail(f"{error.filename or 'the disk'}: {error.strerror}")
    sys.exit(code if isinstance(code, int) else 0)


def _reach_loopback_directly() -> None:
    """Servers of this machine are never behind a proxy of the environment; child processes inherit this."""
    listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if listed != "*" and any(name.lower() in PROXY_VARIABLES for name in os.environ):
        os.environ["no_proxy"] = ",".join(filter(None, [listed, LOOPBACK]))


def _replace_undecodable() -> None:
    """Characters that the encoding of the terminal lacks, and bytes that are none, are replaced and raise no error;
    stderr does so by itself."""
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _fail(line: str, code: int = 1) -> int:
    print(f"kt: {line}", file=sys.stderr)
    return code
