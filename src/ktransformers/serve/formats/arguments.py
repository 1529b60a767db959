"""Arguments of a call in other notations than JSON, and the end of a bracketed value in text that comes in pieces."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

_CONTROL = {code: json.dumps(chr(code))[1:-1] for code in range(32)}
_PLAIN = re.compile(r"[^\"'\\{}\[\]()]+")
_OPEN, _CLOSE = frozenset("{[("), frozenset("}])")
_NAMES = {"true": True, "false": False, "null": None}


class BracketScanner:
    """Finds the end of a value in brackets. `quotes` are the characters around its strings; `depth` is 1 if the opening
    bracket has been read."""

    def __init__(self, quotes: str, depth: int = 0) -> None:
        self._quotes, self._depth = quotes, depth
        self._quote = ""  # of the string that is open
        self._escaped = False

    def scan(self, text: str) -> tuple[str, int, bool]:
        """The value's text with control characters in strings escaped, how much was read, whether the value ended."""
        out: list[str] = []
        position = 0
        while position < len(text):
            plain = None if self._escaped else _PLAIN.match(text, position)
            piece = plain.group() if plain else text[position]
            out.append(piece.translate(_CONTROL) if self._quote else piece)
            position += len(piece)
            if plain is None and self._step(piece):
                return "".join(out), position, True
        return "".join(out), position, False

    def _step(self, character: str) -> bool:
        """Whether the value ends with this character."""
        if self._escaped:
            self._escaped = False
        elif self._quote:
            if character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in self._quotes:
            self._quote = character
        elif character in _OPEN:
            self._depth += 1
        elif character in _CLOSE:
            self._depth -= 1
            return self._depth <= 0
        return False


def dump_json(value: Any) -> str:
    """JSON text as UTF-8 can have it: only where a text has unpaired surrogates is it ASCII."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def load_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is; None: it is none."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def python_arguments(text: str) -> str | None:
    """JSON of keyword arguments of literals, `a=1, b='x'`; JSON's literals too. None: it is something else."""
    try:
        call = ast.parse(f"f({text.strip()})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        return dump_json({str(keyword.arg): _literal(keyword.value) for keyword in call.keywords})
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key
        }
    return ast.literal_eval(node)


def gemma_arguments(text: str) -> str | None:
    """JSON of arguments with bare keys and strings between `<|"|>`. None: they are something else."""
    strings: list[str] = []

    def take(found: re.Match[str]) -> str:
        strings.append(found[1])
        return f'"{len(strings) - 1}"'

    working = re.sub(r'<\|"\|>(.*?)<\|"\|>', take, text, flags=re.DOTALL)
    working = re.sub(
        r"([{,]\s*)([^\s\"{}\[\],:]+)\s*:", lambda found: f"{found[1]}{json.dumps('=' + found[2])}:", working
    )
    value = load_object(working)
    return None if value is None else dump_json(_restored(value, strings))


def _restored(value: Any, strings: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            key[1:] if key.startswith("=") else _restored(key, strings): _restored(item, strings)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_restored(item, strings) for item in value]
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= len(str(len(strings))):
        return strings[int(value)] if int(value) < len(strings) else value
    return value


def schema_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a schema allows; empty: it does not say. Keywords of another type than JSON schema has them
    say nothing, and a reference is followed once."""
    types: set[str] = set()
    followed: set[str] = set()
    pending = [schema]
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict):
            continue
        declared = schema.get("type")
        types.update(name for name in (declared, *_listed(declared)) if isinstance(name, str))
        if schema.get("nullable"):
            types.add("null")
        if not declared:
            values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else ())]
            types.update(_type_name(value) for value in values)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/") and reference not in followed:
            followed.add(reference)
            target: Any = root
            for part in reference[2:].split("/"):
                target = target.get(part) if isinstance(target, dict) else None
            pending.append(target)
        for union in ("anyOf", "oneOf", "allOf"):
            pending += _listed(schema.get(union))
    return frozenset(types)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def typed_value(text: str, types: frozenset[str], kind: str | None = None) -> Any:
    """The value of an argument that is written without quotes. `kind`: whether it is text in the notation's words."""
    if kind == "true" or types == {"string"}:
        return text
    try:
        value = json.loads(text.strip())
    except (ValueError, RecursionError):
        spelled = {"True": True, "False": False, "None": None}
        return spelled.get(text.strip(), text) if "string" not in types else text
    if isinstance(value, str):
        return value if kind == "false" or (types and "string" not in types) else text
    if kind == "false" or not types:
        return value
    own = _type_name(value)
    if own == "number" and "integer" in types and value.is_integer() and "number" not in types:
        return int(value)
    suits = own in types or (own == "integer" and "number" in types)
    return value if suits or "string" not in types else text


def nested_value(text: str, namespace: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """A value of nested tags with a namespace before each: an object, or a list of `<item>`. Without tags: a scalar."""
    opening = re.compile(rf"\s*{re.escape(namespace)}<([^<>/\s]+)>")
    schema = schema if isinstance(schema, dict) else {}
    declared = schema.get("properties")
    properties = declared if isinstance(declared, dict) else {}
    pairs: list[tuple[str, Any]] = []
    position = 0
    while found := opening.match(text, position):
        tag = found[1]
        end = _closing(text, found.end(), f"{namespace}<{tag}>", f"{namespace}</{tag}>")
        if end is None:
            return text
        inner = schema.get("items") if tag == "item" and "items" in schema else properties.get(tag)
        pairs.append((tag, nested_value(text[found.end() : end], namespace, inner, root)))
        position = end + len(f"{namespace}</{tag}>")
    if not pairs:
        return typed_value(text, schema_types(schema, root))
    if all(tag == "item" for tag, _ in pairs):
        return [value for _, value in pairs]
    return dict(pairs)


def _closing(text: str, position: int, opening: str, closing: str) -> int | None:
    depth = 1
    while depth:
        end = text.find(closing, position)
        if end < 0:
            return None
        depth += text.count(opening, position, end) - 1
        position = end + len(closing)
    return position - len(closing)
