"""Options of `kt serve`, those that `kt run` has for an answer to one prompt, and those that `kt agent` has for its
client. Those of SGLang's launch lines have the same names; the keys are those of LLaMA-Factory's file for inference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from ktransformers.ground.errors import InputError
from ktransformers.ground.linear_storage import rest_word
from ktransformers.ground.options.field import CLOSED, option

NO_LIMIT = 2**31  # tokens of a step for --chunked-prefill-size -1


@dataclass(frozen=True, config=CLOSED)
class ServingOptions:
    target: str = option(..., "--model --model-path", "the same as MODEL", metavar="MODEL")
    lora_paths: tuple[tuple[str, str], ...] = option(
        (), "--lora-paths", "adapters to load: NAME=DIR, or DIR alone", metavar="NAME=DIR"
    )
    served_model_name: str | None = option(
        None, "--served-model-name", "what requests call the base; default: the directory's name"
    )
    host: str | None = option(None, "--host -H", "address to listen on; default: 127.0.0.1, this machine alone")
    port: int | None = option(None, "--port -p", "port to listen on; default: 30000", ge=0)
    api_key: str | None = option(None, "--api-key", "requests must send this key")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "--allowed-hosts",
        "names that requests may be sent to besides the address of --host; *: any",
        metavar="NAME",
    )
    cors_origins: tuple[str, ...] = option(
        (),
        "--cors-origins",
        "origins of web pages that may send requests, such as https://example.org; *: any; default: none",
        metavar="ORIGIN",
    )
    watch: Path | None = option(None, "--watch", "a training output directory: serve its checkpoints as they are saved")
    max_running_requests: int | None = option(
        None,
        "--max-running-requests",
        "sequences in a batch, at most; default: as many as the KV cache has room for, up to 256 on a CPU and "
        "--cuda-graph-max-bs on a GPU",
        ge=1,
    )
    max_queued_requests: int = option(
        128, "--max-queued-requests", "sequences in the queue; more are answered 429", ge=1
    )
    chunked_prefill_size: int | None = option(
        None,
        "--chunked-prefill-size",
        "prompt tokens in one step, at most; -1: no limit; default: on a CPU as many as the plan has memory for, up to "
        "4096; on a GPU 512",
        keys="chunk_size",
    )
    context_length: int | None = option(
        None,
        "--context-length",
        "prompt and new tokens of one request; default: the model's limit",
        keys="kt_maxlen",
        ge=2,
    )
    max_body_bytes: int = option(16 * 2**20, "--max-body-bytes", "bytes of one request", ge=1024)
    max_prompts: int = option(128, "--max-prompts", "prompts of one /v1/completions", ge=1)
    max_messages: int = option(4096, "--max-messages", "messages of one chat", ge=1)
    max_tools: int = option(128, "--max-tools", "tools of one chat", ge=1)
    max_schema_properties: int = option(1000, "--max-schema-properties", "properties of one JSON schema", ge=1)
    max_schema_depth: int = option(64, "--max-schema-depth", "levels of objects and lists of one JSON schema", ge=4)
    prepare_workers: int = option(2, "--prepare-workers", "processes that parse and tokenise requests", ge=1)
    prepare_timeout: float = option(10.0, "--prepare-timeout", "seconds that this may take for one request", ge=0.1)
    request_timeout: float = option(0.0, "--request-timeout", "seconds until a request is aborted; 0: never")
    dtype: str = option(
        "auto", "--dtype", "auto, bfloat16, float16 or float32: everything but the experts", keys="infer_dtype"
    )
    trust_remote_code: bool = option(
        False,
        "--trust-remote-code",
        "run the code that a release brings as its tokenizer; models are those of transformers",
    )
    device: str | None = option(
        None, "--device", "cpu or cuda: everything but the experts; default: cuda where there is one"
    )
    chat_template: Path | None = option(
        None, "--chat-template", "a file with a Jinja template in place of the base model's"
    )
    tool_call_parser: str | None = option(
        None, "--tool-call-parser", "format of tool calls, in SGLang's words; default: recognised by the chat template"
    )
    reasoning_parser: str | None = option(
        None, "--reasoning-parser", "format of reasoning, in SGLang's words; default: recognised by the chat template"
    )
    strict_fields: bool = option(False, "--strict-fields", "refuse requests with unknown fields; default: ignore them")
    strict_model_names: bool = option(
        False, "--strict-model-names", "refuse names claude-* and gpt-*; default: they are names of the base"
    )
    threads: int | None = option(
        None,
        "--kt-cpuinfer --cpu-threads",
        "threads of the experts; default: chosen by the machine",
        keys="kt_num_threads cpu_infer",
    )
    groups: int | None = option(
        None,
        "--kt-threadpool-count",
        "groups of threads, one per NUMA node; default: all nodes",
        keys="kt_threadpool_count",
    )
    always_on: Path | None = option(
        None, "--kt-expert-lora-path --kt-lora-path", "an adapter whose experts apply to every request"
    )
    experts: Path | None = option(
        None, "--kt-weight-path --weights-path", "where the experts come from: packed, GGUF or kt-kernel's files"
    )
    method: str | None = option(None, "--kt-method", "format of the experts; see docs/serve.md")
    deterministic: bool = option(
        False,
        "--deterministic --enable-deterministic-inference",
        "the same request has the same answer whatever else is served, in 16 bits too; slower; on the CPU",
    )
    prefault: bool = option(False, "--prefault", "read all pages of a packed directory before the first request")
    lock: bool = option(False, "--lock", "the same, and lock them in memory; `ulimit -l` must allow it")
    no_verify: bool = option(False, "--no-verify", "do not compare packed experts with their checksums on first use")
    gpus: int | None = option(
        None,
        "--tensor-parallel-size --tp-size --tp",
        "GPUs that whole layers are distributed over, not heads; default: 1, or as many as the plan needs",
        ge=1,
    )
    hosts_address: str | None = option(
        None,
        "--hosts-address --nodes-address",
        "several nodes: ADDRESS:PORT on which rank 0 waits for the others; default: MASTER_ADDR and MASTER_PORT + 1",
        metavar="ADDRESS:PORT",
    )
    hosts_timeout: float = option(
        60.0,
        "--hosts-timeout --nodes-timeout",
        "several nodes: seconds after which a node that does not answer is gone",
        gt=0,
        allow_inf_nan=False,
    )
    expert_partition: Literal["experts", "layers", "frequency"] = option(
        "experts",
        "--kt-expert-partition",
        "several nodes: experts (ranges of ids), layers, or frequency, by the counts of --init-expert-location",
    )
    first_host_experts: int | None = option(
        None,
        "--first-host-experts --first-node-experts",
        "several nodes: experts of each layer on rank 0; the others share the rest; default: as many as every node",
    )
    cuda_graph_max_bs: int = option(
        256, "--cuda-graph-max-bs", "largest batch that is captured in a CUDA graph, 256 at most", ge=1
    )
    disable_cuda_graph: bool = option(False, "--disable-cuda-graph", "decode without CUDA graphs")
    disable_overlap_schedule: bool = option(
        False,
        "--disable-overlap-schedule",
        "CUDA graphs: launch a decode step only when the host has read the tokens of the step before",
    )
    rest: str = option(
        "keep",
        "--dense-dtype --rest",
        "dtype of dense weights, the linear layers other than experts: keep (as released), bf16, or a format such as "
        "int8, int4:32 or fp8 that they are quantized to",
    )
    attention_backend: str = option(
        "triton",
        "--attention-backend --decode-attention-backend",
        "of decode steps on a GPU: triton, in CUDA graphs, or torch, without them; SGLang's other words are accepted",
    )
    log_level: str = option("warning", "--log-level", "of the HTTP server")
    force: bool = option(False, "--force", "serve even if the plan says that it does not fit")

    @field_validator("lora_paths", mode="before")
    @classmethod
    def _read_lora_paths(cls, paths: Any) -> Any:
        pairs = [_read_lora_path(path) if isinstance(path, str) else path for path in paths]
        names = [name for name, _ in pairs]
        if len(set(names)) < len(names):
            raise InputError("lora-paths", ", ".join(names), "every name once")
        return tuple(pairs)

    @field_validator("api_key")
    @classmethod
    def _is_a_key(cls, key: str | None) -> str | None:
        if key is not None and not key.strip():
            raise InputError("api-key", "an empty key", "a key", "without --api-key requests need none")
        return key

    @field_validator("chunked_prefill_size")
    @classmethod
    def _read_limit(cls, tokens: int | None) -> int | None:
        if tokens is not None and tokens < 1 and tokens != -1:
            raise InputError("chunked-prefill-size", tokens, "1 or more, or -1")
        return NO_LIMIT if tokens == -1 else tokens

    @field_validator("rest")
    @classmethod
    def _read_format(cls, word: str) -> str:
        return rest_word(word)

    @property
    def pages(self) -> str:
        """How a packed directory is mapped."""
        return "lock" if self.lock else "prefault" if self.prefault else "lazy"

    @property
    def verify(self) -> bool | None:
        return False if self.no_verify else None


def _read_lora_path(word: str) -> tuple[str, str]:
    name, separator, directory = word.partition("=")
    if not separator:
        name, directory = Path(word).name, word
    if not re.fullmatch(r"[\w.-]+", name) or not directory:
        raise InputError("lora-paths", repr(word), "NAME=DIR; names have letters, digits, dots and dashes")
    return name, directory


@dataclass(frozen=True, kw_only=True, config=CLOSED)
class PromptOptions:
    prompt: str | None = None
    adapter: str | None = option(None, "--adapter", "name of the adapter to ask; default: a training output's own")
    system: str | None = option(None, "--system", "system message")
    max_tokens: int = option(512, "--max-tokens", "at most that many tokens of answer", ge=1)
    temperature: float | None = option(None, "--temperature", "0 is greedy; default: the model's", ge=0, le=2)
    dry_run: bool = option(False, "--dry-run", "print the plan and the command of the server, load nothing")


@dataclass(frozen=True, config=CLOSED)
class AgentOptions:
    url: str | None = option(None, "--url", "a running server to use, instead of starting one")
    adapter: str | None = option(None, "--adapter", "name of the adapter to ask; default: a training output's own")
    key_variable: str = option("OPENAI_API_KEY", "--key-variable", "environment variable with the key of --url")
    print_only: bool = option(False, "--print", "print the environment, files and command, and start nothing")
    list_agents: bool = option(False, "--list", "list the clients, and which are installed")
    as_json: bool = option(False, "--json", "print what --print or --list prints as one JSON document")
