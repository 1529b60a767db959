"""Answers of `kt chat` on a terminal: markdown, rendered block by block while it is streamed.

A block ends at an empty line outside of a code fence. Finished blocks are printed once and stay; the last one is
redrawn until it ends, its last lines alone if it is higher than the terminal. Control characters of an answer are
dropped, so that no model can send escape sequences to a terminal. Without a terminal text is printed as it comes.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # but tab and new line
FENCE = re.compile(r"^ {0,3}(```+|~~~+)")
REFRESHES = 8  # a second
MARGIN = 4  # lines of the terminal that a block leaves free


class AnswerView(Protocol):
    def thought(self, text: str) -> None:
        """The next piece of the model's reasoning."""

    def piece(self, text: str) -> None: ...

    def close(self) -> None: ...


class NoView:
    """For --json."""

    def thought(self, text: str) -> None:
        pass

    def piece(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class PlainView:
    def __init__(self, terminal: bool) -> None:
        self._terminal, self._thinking = terminal, False

    def thought(self, text: str) -> None:
        if self._terminal:
            print(f"\x1b[2m{CONTROL.sub('', text)}\x1b[0m", end="", flush=True)
            self._thinking = True

    def piece(self, text: str) -> None:
        if self._thinking:
            print("\n")
            self._thinking = False
        print(CONTROL.sub("", text) if self._terminal else text, end="", flush=True)

    def close(self) -> None:
        print(flush=True)


def split_blocks(text: str) -> tuple[list[str], str]:
    """Finished blocks of markdown, and the beginning of the next one."""
    blocks, lines, fence = list[str](), list[str](), ""
    *whole, last = text.split("\n")
    for line in whole:
        mark = FENCE.match(line)
        if mark is not None and not fence:
            fence = mark[1]
        elif mark is not None and mark[1].startswith(fence) and line.strip() == mark[1]:
            fence = ""
        if line.strip() or fence:
            lines.append(line)
        elif lines:
            blocks.append("\n".join(lines))
            lines = []
    return blocks, "\n".join([*lines, last])


def make_markdown(text: str) -> Any:
    """rich's Markdown, with tags of HTML as the text that they are: a model that writes <think> means it."""
    from markdown_it import MarkdownIt
    from rich.markdown import Markdown

    shown = Markdown("", hyperlinks=False)
    shown.parsed = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table").parse(text)
    return shown


class MarkdownView:
    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live

        self._console = console or RichConsole(highlight=False)
        self._text, self._printed = "", 0  # blocks that stay on the screen
        self._thoughts = ""  # shown until the answer begins
        self._live = Live(console=self._console, transient=True, refresh_per_second=REFRESHES)
        self._live.start()

    def thought(self, text: str) -> None:
        from rich.text import Text

        self._thoughts += CONTROL.sub("", text)
        lines = self._thoughts.split("\n")[-max(1, self._console.height - MARGIN) :]
        self._live.update(Text("\n".join(lines), style="dim"))

    def piece(self, text: str) -> None:
        from rich.text import Text

        self._text += CONTROL.sub("", text.replace("\r\n", "\n"))
        blocks, rest = split_blocks(self._text)
        for block in blocks:
            self._print(block)
        self._text = rest
        height = max(1, self._console.height - MARGIN)
        lines = rest.split("\n")
        self._live.update(make_markdown(rest) if len(lines) < height // 2 else Text("\n".join(lines[-height:])))

    def _print(self, block: str) -> None:
        if self._printed:
            self._console.print()
        self._console.print(make_markdown(block))
        self._printed += 1

    def close(self) -> None:
        from rich.text import Text

        self._live.update(Text(""))
        self._live.stop()
        if self._text.strip():
            self._print(self._text)
        self._text = ""


def choose_view(quiet: bool, plain: bool) -> AnswerView:
    if quiet:
        return NoView()
    terminal = sys.stdout.isatty()
    return MarkdownView() if terminal and not plain and os.environ.get("TERM") != "dumb" else PlainView(terminal)
