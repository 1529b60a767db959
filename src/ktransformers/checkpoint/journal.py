"""A directory that is written over hours and may be interrupted at any moment: `OUT.partial` and its journal.

The journal is one line of JSON for each finished file, behind a first line that says what is being made. A file is
renamed to its name, synced, hashed, and then entered; what is not entered does not count and is written again. The
directory gets its own name at the very end. A lock on the journal keeps a second process out; it dies with the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

from ktransformers.checkpoint.packed import ShardRecord, find_damaged
from ktransformers.errors import InputError
from ktransformers.files import sync

JOURNAL_FILE = "journal.jsonl"


class ConversionJournal:
    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        """Begin, or go on where a conversion with the same plan stopped."""
        self.out = out
        self.directory = out.with_name(f"{out.name}.partial")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._stream = self._locked()
        self.shards: dict[str, ShardRecord] = {}
        self.about: dict[str, dict[str, Any]] = {}  # file -> what else is known of it
        self.plan = plan
        lines = self._lines()
        if not lines:
            self._restart(plan)
            return
        begun = lines[0].get("plan", {})
        if _comparable(begun) != _comparable(plan):
            self.close()
            raise InputError(
                str(self.directory),
                f"a conversion that was begun differently ({_difference(begun, plan)})",
                "the one that is asked for now",
                "remove it, or repeat the earlier command to finish it",
            )
        self.plan = begun  # with its number
        for line in lines[1:]:
            self.shards[line["file"]] = ShardRecord.model_validate(line["record"])
            self.about[line["file"]] = line["about"]

    def _locked(self) -> TextIO:
        stream = (self.directory / JOURNAL_FILE).open("a+", encoding="utf-8")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.close()
            raise InputError(
                str(self.directory), "a conversion that is running", "no other one", "wait for it"
            ) from None
        return stream

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines only: a kill may have cut the last one, and what it said does not count."""
        self._stream.seek(0)
        lines, whole = [], 0
        for line in self._stream:
            if not line.endswith("\n"):
                break
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
            whole += len(line.encode())
        os.ftruncate(self._stream.fileno(), whole)
        return lines

    def _restart(self, plan: dict[str, Any]) -> None:
        for entry in self.directory.iterdir():
            if entry.name != JOURNAL_FILE:
                raise InputError(
                    str(self.directory), f"{entry.name} and no journal", "a conversion that was begun", "remove it"
                )
        self._append({"plan": plan})

    def _append(self, line: dict[str, Any]) -> None:
        self._stream.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def recheck(self, threads: int = 4) -> list[str]:
        """Drop entries of files that are gone or whose contents do not fit; the names of those dropped."""
        wrong = find_damaged(self.directory, self.shards, threads)
        for name in wrong:
            del self.shards[name], self.about[name]
        for entry in self.directory.glob(".*.partial"):
            entry.unlink()
        return wrong

    def enter(self, file: str, record: ShardRecord, about: dict[str, Any]) -> None:
        """The file is whole, under its name and on the disk."""
        self._append({"file": file, "record": record.model_dump(), "about": about})
        self.shards[file], self.about[file] = record, about

    def publish(self) -> None:
        """Everything is there: the directory gets its name."""
        with contextlib.suppress(FileNotFoundError):
            self.out.rmdir()  # an empty one was allowed
        for entry in self.directory.iterdir():
            if entry.is_file():
                sync(entry)
        sync(self.directory)
        self.directory.rename(self.out)
        sync(self.out.parent)
        (self.out / JOURNAL_FILE).unlink()  # after the rename: without it what was begun could not be gone on with
        self.close()

    def discard(self) -> None:
        """Remove what was begun."""
        shutil.rmtree(self.directory)
        self.close()

    def close(self) -> None:
        self._stream.close()


def _comparable(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key != "conversion"}


def _difference(begun: dict[str, Any], asked: dict[str, Any]) -> str:
    for key in asked:
        if key != "conversion" and begun.get(key) != asked[key]:
            one, other = (json.dumps(words.get(key), ensure_ascii=False) for words in (begun, asked))
            return f"{key} {one[:80]}, now {other[:80]}" if len(one) + len(other) < 200 else key
    return "by another version"
