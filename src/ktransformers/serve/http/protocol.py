"""Request bodies as OpenAI defines them, with the fields that vLLM and SGLang add, validated by pydantic.

Types are strict: a number in quotes is not a number. Fields of OpenAI without an effect here are accepted. So are
unknown fields, whose names `parse_body` returns: every client has a few of its own provider's.
"""

from __future__ import annotations

import json
import reprlib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ktransformers.serve.doors.conversation import Generation
from ktransformers.serve.doors.fields import (
    EXPECTED,
    Fields,
    Finite,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    TopK,
    TopP,
)
from ktransformers.serve.http.error import ApiError

MAX_TOP_LOGPROBS = 20  # alternatives that a request may ask for
MAX_LOGIT_BIAS = 1024  # tokens with a bias
MAX_STOP_TOKENS = 1024
GIVEN_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)

Count = Annotated[int, Field(ge=0, le=2**31)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
ModelName = Annotated[str, Field(max_length=1024)]
StopString = Annotated[str, Field(max_length=1024)]
Identifier = Annotated[str, Field(max_length=1024)]
# Of OpenAI's lengths.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
# Lists end at their first error: a list of a million wrong entries is one error, not a million.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]


class OpenModel(BaseModel):
    """Unknown fields belong to the document, as those of a message do, which templates read."""

    model_config = ConfigDict(extra="allow", strict=True)


Body = TypeVar("Body", bound=Fields)


def parse_body(body: bytes | bytearray, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
    """The request, and the names of its fields that nothing here knows."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise ApiError(400, f"body: {errors[0]['msg']}") from error
        name, message = _describe_errors(errors, document)
        raise ApiError(400, message, param=name or None) from error
    return request, tuple(request.unknown_fields())


def _describe_errors(errors: list[ErrorDetails], document: Any) -> tuple[str, str]:
    """(name of the first wrong field, what was given and expected there). A field of several types has an error for
    each of them, at a place that names the type as well."""
    name = _field_name(errors[0], document)
    same = [one for one in errors if _field_name(one, document) == name]
    expected = [EXPECTED.get(one["type"], one["msg"]).format_map(one.get("ctx", {})) for one in same]
    given = "nothing" if errors[0]["type"] == "missing" else reprlib.repr(errors[0]["input"])
    return name, f"{name or 'body'}: given {given}, expected {' or '.join(dict.fromkeys(expected))}"


def _field_name(error: ErrorDetails, document: Any) -> str:
    """The path of the field in the document, without the names of types that pydantic puts into it."""
    names: list[str] = []
    for part in error["loc"]:
        inside = part in document if isinstance(document, dict) else False
        if inside or (isinstance(document, list) and isinstance(part, int) and part < len(document)):
            document = document[part]
        elif error["type"] != "missing" or part != error["loc"][-1]:
            continue
        names.append(str(part))
    return ".".join(names)


class StreamOptions(Fields):
    include_usage: bool = False
    # Accepted without effect: OpenAI's padding, and usage in every part of vLLM's and SGLang's streams.
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Fields):
    name: str
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's; of its kinds of constraints only a JSON schema."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    json_object: bool | None = None


def _as_unlimited(value: Any) -> Any:
    """-1 as some clients send it for no limit."""
    return None if value == -1 and not isinstance(value, bool) else value


MaxTokens = Annotated[Count | None, BeforeValidator(_as_unlimited)]


class CommonRequest(Fields):
    model: ModelName | None = None  # none: the one that is served
    max_tokens: MaxTokens = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    seed: Seed | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None  # vLLM's of earlier releases
    structured_outputs: StructuredOutputs | None = None
    # OpenAI's, accepted and ignored
    user: Identifier | None = None
    metadata: Metadata | None = None
    store: bool | None = None
    service_tier: str | None = None

    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def answer_schema(self) -> Any:
        """The JSON schema that the answer has to follow; None: none."""
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                message = "response_format: given no schema, expected json_schema.schema"
                raise ApiError(400, message, param="response_format")
            return wanted.json_schema.schema_
        if wanted is not None and wanted.type == "json_object":
            return {"type": "object"}
        if self.guided_json is not None:
            return _read_schema("guided_json", self.guided_json)
        if self.structured_outputs is None:
            return None
        if self.structured_outputs.json_ is not None:
            return _read_schema("structured_outputs.json", self.structured_outputs.json_)
        return {"type": "object"} if self.structured_outputs.json_object else None

    def generation(self, max_tokens: int | None, logprobs: int | None, *, return_token_ids: bool = False) -> Generation:
        return Generation(
            model=self.model or None,
            max_tokens=max_tokens,
            n=self.n or 1,
            stream=bool(self.stream),
            sampling={name: value for name in GIVEN_SAMPLING if (value := getattr(self, name)) is not None},
            logit_bias=self.logit_bias or {},
            stop_strings=self.stop_strings(),
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            keep_special=not self.skip_special_tokens,
            logprobs=logprobs,
            schema=self.answer_schema(),
            return_token_ids=return_token_ids,
        )


def _read_schema(name: str, given: dict[str, Any] | str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        message = f"{name}: given text that is no JSON ({error}), expected a JSON schema"
        raise ApiError(400, message, param=name) from error


def _no_suffix(suffix: str) -> str:
    if suffix:
        raise PydanticCustomError("no_suffix", "no text: this server does not fill in the middle")
    return suffix


class CompletionRequest(CommonRequest):
    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None  # as many candidates as are returned
    suffix: Annotated[str, AfterValidator(_no_suffix)] | None = None


class TokenizeRequest(Fields):
    """vLLM's: text, or the body of a chat completion."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    model: ModelName | None = None
    tokens: Tokens


class LoadAdapter(Fields):
    lora_name: Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=256)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False  # replace a loaded adapter of the same name
    pinned: bool | None = None  # SGLang's, ignored


class UnloadAdapter(Fields):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's, ignored
