"""Makes the transcripts in `tests/data/agents` of what `make test-agents` recorded: requests as clients sent them, with
long texts shortened, without paths and ids of the machine.

    python tests/agents/transcripts.py RECORDS tests/data/agents

A session repeats its history in every request, so messages and the other fields of requests are listed once and named
by their index.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FOLDER = "/home/me/project"
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
REPLACED = (
    (re.compile(r"/tmp/pytest-of-[^/]+/pytest-\d+/[^/\s\"]+/work"), FOLDER),
    (re.compile(r"/tmp/pytest-of-[^/]+/pytest-\d+/[^/\s\"]+/home"), "/home/me"),
    (re.compile(r"-tmp-pytest-of-[\w-]+"), "-home-me-project"),
    (re.compile(UUID), "00000000-0000-0000-0000-000000000000"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "0" * 64),
)
LONG, KEPT = 300, 100  # characters of a text, and of its begin and end where it is longer


def shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: shortened(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [shortened(entry) for entry in value]
    if not isinstance(value, str):
        return value
    for pattern, text in REPLACED:
        value = pattern.sub(text, value)
    return value if len(value) <= LONG else f"{value[:KEPT]}\n[...]\n{value[-KEPT:]}"


def without_descriptions(schema: Any) -> Any:
    """A tool whose texts are left out; a property may be called description."""
    if isinstance(schema, list):
        return [without_descriptions(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: without_descriptions(entry)
        for name, entry in schema.items()
        if name not in ("description", "title", "definition") or not isinstance(entry, str)
    }


def transcript(recorded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    fields, messages, requests = list[Any](), list[Any](), list[Any]()
    for entry in recorded:
        body = shortened(entry["body"])
        history = "input" if "input" in body else "messages"
        said = [_index(messages, message) for message in body.pop(history)]
        if "tools" in body:
            body["tools"] = without_descriptions(body["tools"])
        requests.append({"path": entry["path"], "history": history, "fields": _index(fields, body), "said": said})
    return {"fields": fields, "messages": messages, "requests": requests}


def _index(listed: list[Any], value: Any) -> int:
    if value not in listed:
        listed.append(value)
    return listed.index(value)


def main(records: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for first in sorted(records.glob("*-first.json")):
        name = first.stem.removesuffix("-first")
        recorded = [entry for turn in ("first", "second") for entry in json.loads(_text(records, name, turn))]
        lines = json.dumps(transcript(recorded), ensure_ascii=False, indent=None, separators=(", ", ": "))
        (out / f"{name}.json").write_text(lines + "\n")


def _text(records: Path, name: str, turn: str) -> str:
    return (records / f"{name}-{turn}.json").read_text()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
