"""The conversation: what every API that holds one parses its requests into, and the only thing that a chat template
renders. No API and no model family is in it.

    body -> Door.parse -> ChatRequest -> chat template -> tokens -> engine -> text -> AnswerParser -> AnswerEvents
         -> Emitter of the same door -> server-sent events or one document
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ToolChoice = Literal["auto", "none", "required", "named"]


@dataclass(frozen=True)
class Call:
    """A call that the assistant made in an earlier turn."""

    id: str
    name: str
    arguments: dict[str, Any] | str  # an object; text where the client sent what is no JSON object


@dataclass(frozen=True)
class Turn:
    role: Role
    text: str = ""
    reasoning: str = ""  # of the assistant, as the client sent it back
    calls: tuple[Call, ...] = ()
    call_id: str = ""  # of a tool's result: the call that it answers
    name: str = ""  # of a tool's result: the function, where the client or an earlier call names it
    is_error: bool = False  # of a tool's result
    extra: dict[str, Any] = field(default_factory=dict)  # other fields of the message, handed to the template


@dataclass(frozen=True)
class Tool:
    """A function that the assistant may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of an object
    strict: bool = False  # a call whose arguments do not follow the schema must not happen

    @classmethod
    def of(cls, name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None) -> Tool:
        """As requests describe it, where anything but the name may be absent."""
        return cls(name, description or "", parameters or {}, bool(strict))


@dataclass(frozen=True)
class Reasoning:
    """What a request says about thinking. None: nothing, the template's default holds."""

    enabled: bool | None = None
    effort: str | None = None  # none, minimal, low, medium, high, xhigh, max
    budget: int | None = None  # tokens after which the thinking block is closed


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    chosen_tools: tuple[str, ...] = ()  # `named`: one of these; with `auto` and `required`: only these may be called
    parallel_calls: bool = True
    reasoning: Reasoning = Reasoning()
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # the template's own variables
    add_generation_prompt: bool = True
    continue_final_turn: bool = False


@dataclass(frozen=True)
class Generation:
    """Everything of a request that is not its conversation."""

    model: str | None  # None: the model that is served
    max_tokens: int | None = None  # None: up to the context length
    n: int = 1
    stream: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)  # the settings of `Sampling` that the request gives
    logit_bias: dict[str, float] = field(default_factory=dict)
    stop_strings: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    keep_special: bool = False  # text of special tokens is part of the answer's text
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    schema: Any = None  # JSON schema that the answer's text has to follow; None: none
    return_token_ids: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """A parsed request of any door."""

    conversation: Conversation
    generation: Generation
    echo: dict[str, Any] = field(default_factory=dict)  # JSON: what the door's emitter needs to know of its request
    ignored: tuple[str, ...] = ()  # names of fields that have no effect here, for the log and a response header
