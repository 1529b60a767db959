"""Documents that no editor writes and a download may hold: each ends in one line that names the file and the place."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from pydantic import BaseModel

from ktransformers.ground import files
from ktransformers.ground.errors import InputError
from ktransformers.ground.files import (
    path_exists,
    read_json,
    read_json_object,
    read_yaml,
    read_yaml_mapping,
    short,
    validate,
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1,\n "b": }', r"d\.json, line 2: given no JSON .* at column 7"),
        (b'{"a":\n\n "\xff"}', r"d\.json, line 3: given a byte that is not UTF-8"),
        (b"[" * 100_000, r"d\.json: given what JSON does not hold"),
        (b'{"a": ' + b"1" * 5000 + b"}", r"d\.json: given what JSON does not hold"),
        (b'{"a": "\\ud800"}', r"d\.json: given half of a surrogate pair"),
        (b"[1]", r"d\.json: given a JSON list, expected a JSON object"),
        (b"", r"d\.json, line 1: given no JSON"),
    ],
)
def test_json_that_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_json_object(tmp_path / "d.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a: [1,\nb: 2", r"d\.yaml, line 2: given no YAML"),
        (b"a: 2001-99-99", r"d\.yaml: given no YAML \(ValueError"),
        (b"a: !!int x", r"d\.yaml: given no YAML \(ValueError"),
        (b"a: \0", r"d\.yaml: given no YAML"),
        (b"- " * 5000, r"d\.yaml: given no YAML \(RecursionError"),
        (b"a: &a [*a]", r"d\.yaml: given more than"),
        (b"\xff", r"d\.yaml, line 1: given a byte that is not UTF-8"),
        (b"- 1", r"d\.yaml: given a YAML list, expected a mapping"),
        (b"1: 2", r"d\.yaml: given a YAML dict, expected a mapping"),
    ],
)
def test_yaml_that_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_yaml_mapping(tmp_path / "d.yaml")


def test_aliases_of_aliases_are_refused_at_once(tmp_path: Path) -> None:
    """Nine lines that stand for a thousand million values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (tmp_path / "d.yaml").write_text("\n".join(lines))
    start = time.monotonic()
    with pytest.raises(InputError, match="once its aliases are followed"):
        read_yaml(tmp_path / "d.yaml")
    assert time.monotonic() - start < 20


def test_paths_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, message in (
        (tmp_path / "x", "no such file"),
        (tmp_path, "does not open"),
        (tmp_path / ("x" * 300), "does not open"),
    ):
        with pytest.raises(InputError, match=message):
            read_json(path)
    monkeypatch.setattr(files, "MAX_YAML_BYTES", 10)
    (tmp_path / "long.yaml").write_text("a: " + "b" * 20)
    with pytest.raises(InputError, match=r"long\.yaml: given 23 bytes, expected YAML of at most 10 bytes"):
        files.read_text(tmp_path / "long.yaml", "YAML", limit=10)
    assert path_exists(tmp_path)
    for name in ("x" * 300, "a/" + "x" * 300, "a\0b", "~no-such-user-here/x", ""):
        assert path_exists(name) is (name == "")


def test_fields_are_named_and_values_are_short() -> None:
    class Inner(BaseModel):
        sizes: list[int]

    class Outer(BaseModel):
        inner: dict[str, Inner]

    with pytest.raises(InputError, match=r"f\.json: inner\.a\.sizes\.1: given 'x', expected a valid integer") as caught:
        validate(Outer, {"inner": {"a": {"sizes": [1, "x"]}}}, "f.json")
    with pytest.raises(InputError, match=r"^f\.json: inner: given 'xxx") as caught:
        validate(Outer, {"inner": "x" * 10**6}, "f.json")
    assert len(str(caught.value)) < 500
    loop: list[object] = []
    loop.append(loop)
    for value in ("x" * 10**6, [["x"] * 1000] * 1000, loop, 1 << 10**6, json):
        assert len(short(value)) <= 400
