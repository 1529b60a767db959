"""Request bodies as OpenAI defines them, with the fields that vLLM and SGLang add, validated by pydantic.

Fields of OpenAI without an effect here are accepted and ignored; an unknown field is refused, as OpenAI's server does.
Types are strict: a number in quotes is not a number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_TOP_LOGPROBS = 20  # alternatives that a request may ask for
MAX_LOGIT_BIAS = 1024  # tokens with a bias
MAX_STOP_TOKENS = 1024

Count = Annotated[int, Field(ge=0, le=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, le=2**31)]
ModelName = Annotated[str, Field(max_length=1024)]
StopString = Annotated[str, Field(max_length=1024)]
# Lists end at their first error: a list of a million wrong entries is one error, not a million.
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class OpenModel(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = False  # accepted, unused


class JsonSchema(StrictModel):
    name: str
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CommonRequest(StrictModel):
    model: ModelName
    max_tokens: Count | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[Finite, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    # OpenAI's, accepted and ignored
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None

    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def usage_in_stream(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(CommonRequest):
    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Literal[1] | None = None  # as many candidates as are returned
    suffix: Annotated[str, Field(max_length=0)] | None = None  # no fill-in-the-middle


class ContentPart(OpenModel):
    type: str
    text: str | None = None


class CalledFunction(OpenModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallMessage(OpenModel):
    function: CalledFunction


class Message(OpenModel):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCallMessage] | None = None


class Function(OpenModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(OpenModel):
    type: Literal["function"]
    function: Function


class ChosenFunction(OpenModel):
    name: str


class ToolChoice(OpenModel):
    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(CommonRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_ids: bool = False  # vLLM's: the rendered prompt as `prompt_token_ids`
    # OpenAI's, accepted and ignored
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None


class LoadAdapter(StrictModel):
    lora_name: Annotated[str, Field(pattern=r"^[\w.-]+$", max_length=256)]
    lora_path: Annotated[str, Field(min_length=1)]
    load_inplace: bool = False  # replace a loaded adapter of the same name
    pinned: bool | None = None  # SGLang's, ignored


class UnloadAdapter(StrictModel):
    lora_name: str
    lora_int_id: int | None = None  # vLLM's, ignored
