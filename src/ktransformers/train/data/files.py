"""Reads rows of json, jsonl, csv and parquet files, each with its position in the file.

A JSON list is decoded element by element to keep the line of each, because an error message with a line number can be
found in an editor and a row number cannot.
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
    line: int  # in the file; for parquet the row number, from 1
    values: dict[str, Any]

    @property
    def position(self) -> str:
        return f"{self.file}, {'row' if self.file.endswith('.parquet') else 'line'} {self.line}"


def row_error(row: DataRow, given: object, expected: str, remedy: str = "") -> InputError:
    return InputError(row.position, given, expected, remedy)


def _elements(file: str, text: str) -> Iterator[tuple[int, Any]]:
    """(line, element) of a JSON list, decoded one by one."""
    decoder = json.JSONDecoder()
    line, counted_to = 1, 0

    def skip(position: int) -> int:
        while position < len(text) and text[position] in " \t\r\n":
            position += 1
        return position

    position = skip(0) + 1
    while True:
        position = skip(position)
        if position >= len(text):
            raise InputError(f"{file}, line {line}", "a list without end", "]")
        line += text.count("\n", counted_to, position)
        counted_to = position
        if text[position] == "]":
            return
        try:
            element, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}, line {error.lineno}", error.msg, "JSON") from error
        yield line, element
        position = skip(end)
        if position < len(text) and text[position] == ",":
            position += 1


def _json(file: str, text: str) -> Iterator[tuple[int, Any]]:
    first = text.lstrip("\ufeff \t\r\n")[:1]
    if first == "[":
        yield from _elements(file, text.lstrip("\ufeff"))
        return
    try:  # a single object, possibly over several lines
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
        raise InputError(str(path), f"a file of type {path.suffix or 'unknown'}", ", ".join(SUFFIXES))
    if path.suffix == ".csv":
        values_by_line = _csv(path)
    elif path.suffix == ".parquet":
        values_by_line = _parquet(path)
    else:
        try:
            values_by_line = _json(str(path), path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise InputError(str(path), str(error), "UTF-8") from error
    for line, values in values_by_line:
        row = DataRow(str(path), line, values)
        if not isinstance(values, dict):
            raise row_error(row, f"a {type(values).__name__}", "an object with named fields")
        yield row
