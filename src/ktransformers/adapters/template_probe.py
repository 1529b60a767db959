"""Renders a chat template once: a program for `ground/sandbox.py`. A template of a downloaded adapter may loop or
multiply strings without end, and is rendered when the adapter is loaded.

The program imports neither ktransformers nor transformers, so that it starts in a fraction of a second; the environment
is that of transformers: sandboxed, blocks trimmed, `raise_exception`, `strftime_now`, `tojson`, and the tag
`generation`.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

MAX_RENDERED = 2**20  # characters


def render(text: str, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    from jinja2 import nodes
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` marks the assistant's text for masks; its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's own declaration)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    template = environment.from_string(text)
    return template.render(messages=messages, tools=None, documents=None, add_generation_prompt=False, **variables)


def answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        rendered = render(request["text"], request["messages"], request["variables"])
        return {"rendered": rendered} if len(rendered) <= MAX_RENDERED else {"error": f"{len(rendered)} characters"}
    except MemoryError:
        return {"error": "too much memory"}
    except Exception as error:  # templates raise anything
        return {"error": f"{type(error).__name__}: {error}"[:300]}
