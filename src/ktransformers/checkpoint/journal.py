"""Crash-safe writing of a directory over hours: files go to `OUT.partial`, and a journal records the finished ones.

The journal has one line of JSON per finished file after a first line with the plan. A file is renamed to its final
name, synced, hashed, and then recorded; a file without a record is written again. The directory is renamed to its final
name last. A lock on the journal excludes a second process; the system releases it when the process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

from ktransformers.checkpoint.packed import ShardRecord, find_damaged
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import sync, try_lock

JOURNAL_FILE = "journal.jsonl"


class ConversionJournal:
    def __init__(self, out: Path, plan: dict[str, Any]) -> None:
        """Start a conversion, or resume an interrupted one with the same plan."""
        self.out = out
        self.directory = out.with_name(f"{out.name}.partial")
        self.directory.mkdir(parents=True, exist_ok=True)
        self._stream = self._open_locked()
        self.shards: dict[str, ShardRecord] = {}
        self.details: dict[str, dict[str, Any]] = {}  # file -> what the converter records of it
        self.plan = plan
        lines = self._read_lines()
        if not lines:
            self._start(plan)
            return
        interrupted = lines[0].get("plan", {})
        if _comparable(interrupted) != _comparable(plan):
            self.close()
            raise InputError(
                str(self.directory),
                f"a conversion that was begun differently ({_difference(interrupted, plan)})",
                "the plan of this command",
                "remove it, or repeat the earlier command to finish it",
            )
        self.plan = interrupted  # with the id of its conversion
        for line in lines[1:]:
            self.shards[line["file"]] = ShardRecord.model_validate(line["record"])
            self.details[line["file"]] = line["about"]

    def _open_locked(self) -> TextIO:
        stream = (self.directory / JOURNAL_FILE).open("a+", encoding="utf-8")
        if not try_lock(stream.fileno()):
            stream.close()
            raise InputError(
                str(self.directory), "a conversion that is running", "no other conversion into it", "wait for it"
            )
        return stream

    def _read_lines(self) -> list[dict[str, Any]]:
        """Complete lines only: a kill may have truncated the last one, which is then removed from the file."""
        self._stream.seek(0)
        lines, complete_bytes = [], 0
        for line in self._stream:
            if not line.endswith("\n"):
                break
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
            complete_bytes += len(line.encode())
        os.ftruncate(self._stream.fileno(), complete_bytes)
        return lines

    def _start(self, plan: dict[str, Any]) -> None:
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

    def drop_damaged(self, threads: int = 4) -> list[str]:
        """Forget files that are missing or have a wrong checksum; returns their names."""
        damaged = find_damaged(self.directory, self.shards, threads)
        self.forget(damaged)
        return damaged

    def forget(self, names: Iterable[str]) -> None:
        """Forget these files, and remove drafts of unfinished ones."""
        for name in names:
            del self.shards[name], self.details[name]
        for entry in self.directory.glob(".*.partial"):
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def record(self, file: str, record: ShardRecord, details: dict[str, Any]) -> None:
        """Record a file that is complete, has its final name and is synced to disk."""
        self._append({"file": file, "record": record.model_dump(), "about": details})
        self.shards[file], self.details[file] = record, details

    def publish(self) -> None:
        """Sync all files and rename the directory to its final name."""
        with contextlib.suppress(FileNotFoundError):
            self.out.rmdir()  # an empty directory may exist
        for entry in self.directory.iterdir():
            if entry.is_file():
                sync(entry)
        sync(self.directory)
        self.directory.rename(self.out)
        sync(self.out.parent)
        (self.out / JOURNAL_FILE).unlink()  # after the rename: without a journal nothing could be resumed
        self.close()

    def close(self) -> None:
        self._stream.close()


def _comparable(plan: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plan.items() if key != "conversion"}


def _difference(interrupted: dict[str, Any], current: dict[str, Any]) -> str:
    for key in current:
        if key != "conversion" and interrupted.get(key) != current[key]:
            before, now = (json.dumps(plan.get(key), ensure_ascii=False) for plan in (interrupted, current))
            return f"{key} {before[:80]}, now {now[:80]}" if len(before) + len(now) < 200 else key
    return "by another version"
