"""What a user types in `kt chat`: lines with history and editing by readline, and texts of several lines.

A line that ends in a backslash goes on in the next one; three double quotes begin a text that ends with the next three.
The history is a file for each user, readable by that user alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

QUOTES = '"""'
CONTINUED = "... "
HISTORY_LINES = 2000

ReadLine = Callable[[str], str]


def read_message(prompt: str, read: ReadLine = input) -> str:
    """One message; raises EOFError and KeyboardInterrupt as `read` does."""
    line = read(prompt)
    if line.lstrip().startswith(QUOTES):
        return _quoted(line.lstrip().removeprefix(QUOTES), read)
    parts = [line]
    while parts[-1].endswith("\\"):
        parts[-1] = parts[-1].removesuffix("\\")
        parts.append(read(CONTINUED))
    return "\n".join(parts).strip()


def _quoted(first: str, read: ReadLine) -> str:
    parts = [first]
    while QUOTES not in parts[-1]:
        parts.append(read(CONTINUED))
    parts[-1] = parts[-1].partition(QUOTES)[0]
    return "\n".join(parts).strip("\n")


def history_file() -> Path:
    from ktransformers.ground.settings import data_folder

    return data_folder() / "chat_history"


@contextlib.contextmanager
def line_editing() -> Iterator[None]:
    """Editing and history of the lines that are read, kept in `history_file`; without readline neither."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = history_file()
    with contextlib.suppress(OSError):
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a home that cannot be written costs the history alone
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            readline.write_history_file(file)
