"""Rows of json, jsonl, csv and parquet files, each with the place that it came from.

A json list is read with the line of every element kept, because "row 41 312" helps nobody who edits the file by hand.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.errors import InputError

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")


@dataclass(frozen=True)
class DataRow:
    file: str
    line: int  # in the file; of a parquet file the number of the row, from 1
    values: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.file}, {'row' if self.file.endswith('.parquet') else 'line'} {self.line}"


def row_error(row: DataRow, given: object, expected: str, remedy: str = "") -> InputError:
    return InputError(row.place, given, expected, remedy)


def _elements(file: str, text: str) -> Iterator[tuple[int, Any]]:
    """(line, element) of a json list, decoded one by one."""
    decoder = json.JSONDecoder()
    line, counted = 1, 0

    def skip(at: int) -> int:
        while at < len(text) and text[at] in " \t\r\n":
            at += 1
        return at

    at = skip(0) + 1
    while True:
        at = skip(at)
        if at >= len(text):
            raise InputError(f"{file}, line {line}", "a list without end", "]")
        line += text.count("\n", counted, at)
        counted = at
        if text[at] == "]":
            return
        try:
            element, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}, line {error.lineno}", error.msg, "JSON") from error
        yield line, element
        at = skip(end)
        if at < len(text) and text[at] == ",":
            at += 1


def _json(file: str, text: str) -> Iterator[tuple[int, Any]]:
    first = text.lstrip("\ufeff \t\r\n")[:1]
    if first == "[":
        yield from _elements(file, text.lstrip("\ufeff"))
        return
    try:  # one object alone, over as many lines as it likes
        yield 1, json.loads(text)
        return
    except json.JSONDecodeError:
        pass
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}, line {number}", error.msg, "one JSON object on each line") from error


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(2**30)
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        line = 2
        for values in reader:
            if None in values or None in values.values():
                raise InputError(f"{path}, line {line}", "too many or too few columns", f"{reader.fieldnames}")
            yield line, values
            line = reader.line_num + 1


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    number = 0
    for batch in parquet.ParquetFile(path).iter_batches():
        for values in batch.to_pylist():
            number += 1
            yield number, values


def read_rows(path: Path) -> Iterator[DataRow]:
    if not path.is_file():
        raise InputError(str(path), "no such file", "a data file")
    if path.suffix not in SUFFIXES:
        raise InputError(str(path), f"a file of kind {path.suffix or 'unknown'}", ", ".join(SUFFIXES))
    if path.suffix == ".csv":
        found = _csv(path)
    elif path.suffix == ".parquet":
        found = _parquet(path)
    else:
        try:
            found = _json(str(path), path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(str(path), str(error), "UTF-8") from error
    for line, values in found:
        row = DataRow(str(path), line, values)
        if not isinstance(values, dict):
            raise row_error(row, f"a {type(values).__name__}", "an object with named fields")
        yield row
