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

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import check_text, is_file, may_have_surrogates, parse_json, read_text, short, shorten

SUFFIXES = (".json", ".jsonl", ".parquet", ".csv")
MAX_DATASET_BYTES = 64 << 30


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
    separated = True

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
        if not separated:
            raise InputError(f"{file}, line {line}", f"{text[position]!r} between two rows", "a comma")
        try:
            element, end = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise InputError(f"{file}, line {error.lineno}", error.msg, "JSON") from None
        except (ValueError, RecursionError) as error:  # an integer of thousands of digits, thousands of levels
            raise InputError(f"{file}, line {line}", f"what JSON does not hold ({error})", "JSON") from None
        yield line, element
        position = skip(end)
        separated = position < len(text) and text[position] == ","
        if separated:
            position += 1


def _json(file: str, text: str) -> Iterator[tuple[int, Any]]:
    first = text.lstrip("\ufeff \t\r\n")[:1]
    if first == "[":
        yield from _elements(file, text.lstrip("\ufeff"))
        return
    text = text.lstrip("\ufeff")
    try:  # a single object, possibly over several lines
        single = json.loads(text)
    except (ValueError, RecursionError):
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield number, parse_json(line, f"{file}, line {number}", "one JSON object on each line")
    else:
        yield 1, single


def _csv(path: Path) -> Iterator[tuple[int, Any]]:
    csv.field_size_limit(2**30)
    with path.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream)
        line = 1
        try:
            columns = list(reader.fieldnames or ())
            if len(set(columns)) < len(columns):
                raise InputError(f"{path}, line 1", f"columns {short(columns)}", "each name once")
            line = reader.line_num + 1
            for values in reader:
                if None in values or None in values.values():
                    given = f"{len(values) + len(values.get(None) or ()) - (None in values)} values or fewer"
                    raise InputError(f"{path}, line {line}", given, f"the columns {short(columns)}")
                yield line, values
                line = reader.line_num + 1
        except csv.Error as error:
            raise InputError(f"{path}, line {line}", f"no CSV ({error})", "rows of comma-separated values") from None
        except UnicodeDecodeError as error:
            raise InputError(f"{path}, after line {line - 1}", f"no UTF-8 ({error.reason})", "UTF-8") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet as parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield number, values
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        # Arrow's reader reports damaged pages by any of these; a text that is not UTF-8 is a ValueError.
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}, row {number + 1}", f"no Parquet ({reason})", "Parquet", "write it again") from None


def read_rows(path: Path) -> Iterator[DataRow]:
    if not is_file(path):
        raise InputError(shorten(path), "no such file", "a data file")
    if path.suffix not in SUFFIXES:
        raise InputError(str(path), f"a file of type {path.suffix or 'unknown'}", ", ".join(SUFFIXES))
    escaped = False
    if path.suffix == ".csv":
        values_by_line = _csv(path)
    elif path.suffix == ".parquet":
        values_by_line = _parquet(path)
    else:
        text = read_text(path, "rows in JSON", limit=MAX_DATASET_BYTES)
        escaped = may_have_surrogates(text)
        values_by_line = _json(str(path), text)
    for line, values in values_by_line:
        row = DataRow(str(path), line, values)
        if not isinstance(values, dict):
            raise row_error(row, f"a {type(values).__name__}", "an object with named fields")
        if escaped:
            check_text(values, row.position)
        yield row
