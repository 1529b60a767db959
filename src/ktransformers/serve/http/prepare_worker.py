"""A worker process of `prepare_pool`: `python -m ktransformers.serve.http.prepare_worker DIRECTORY`, where DIRECTORY
holds the server's tokenizer. The first frame has the settings and a probe text and is answered with the probe's tokens;
every further frame is a request and is answered with a prepared request or an error, or a grammar and is answered with
the bytes that it takes when it is compiled. Before a worker answers a request, it may ask once for answers that the
server remembers, by their keys. The process ends with its stdin.

Stdout carries frames, so whatever a library prints goes to stderr. The process has a lower priority than the server,
whose loop and streams come first when cores are few, and a limit of memory. One that has grown large ends after its
answer, and the pool starts another.

The server and a worker exchange frames through two pipes: a frame is two lengths, a JSON document and a block of
bytes; the block is the body of a request, or the tokens and offsets of its prompts as int32. Nothing is pickled, and
the server decodes no more JSON than a prepared request has.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import signal
import struct
import sys
import traceback
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from ktransformers.ground.errors import is_panic
from ktransformers.ground.system import resident_bytes
from ktransformers.serve.doors.conversation import Tool
from ktransformers.serve.http.error import ApiError
from ktransformers.serve.http.grammar_source import GrammarCompiler, GrammarSource
from ktransformers.serve.http.limits import RequestLimits
from ktransformers.serve.http.prepare import (
    ModelTemplate,
    PreparedChat,
    PreparedRequest,
    PrepareSettings,
    RequestPreparer,
    ThinkingBlock,
    TokenizedPrompt,
)
from ktransformers.serve.http.sampled_answers import PromptEnd, Recall, SampledAnswer, recall_nothing

GRAMMAR = "grammar"  # the kind of a frame whose body is a GrammarSource
LENGTHS = struct.Struct("<II")  # of the document and of the block
RECALL = "recall"  # of a document: keys of answers that the worker asks for
MEMORY_BYTES = 4 * 2**30
RECYCLE_BYTES = 2**29  # resident memory after which a process is replaced
NICENESS = 5
MAX_TRACEBACK_CHARACTERS = 4000


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the server closes the pipe
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sys.modules["torch"] = None  # type: ignore[assignment]  # tokenizers need none, and it takes seconds to import
    serve_frames(sys.stdin.buffer, output, sys.argv[1], trust_remote_code="--trust-remote-code" in sys.argv[2:])


def serve_frames(source: BinaryIO, output: BinaryIO, directory: str, *, trust_remote_code: bool = False) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    document, _ = read_frame(source)
    settings = settings_of(document["settings"])
    preparer, compiler = RequestPreparer(tokenizer, settings), GrammarCompiler(tokenizer, settings.vocabulary)
    write_frame(output, {"tokens": tokenizer(document["probe"])["input_ids"]}, b"")
    recall = functools.partial(recall_through, source, output)
    while True:
        try:
            document, body = read_frame(source)
        except EOFError:
            return
        reply, block = answer(preparer, compiler, document, body, recall)
        last = resident_bytes() > RECYCLE_BYTES
        write_frame(output, reply | {"last": last}, block)
        if last:
            return


def answer(
    preparer: RequestPreparer,
    compiler: GrammarCompiler,
    document: dict[str, Any],
    body: bytes,
    recall: Recall = recall_nothing,
) -> tuple[dict[str, Any], bytes]:
    templates = templates_of(document["templates"])
    try:
        if document["kind"] == GRAMMAR:
            return {"bytes": compiler.measure(GrammarSource(*json.loads(body)))}, b""
        return prepared_frame(preparer.prepare(str(document["kind"]), body, templates, recall))
    except ApiError as error:
        return error_frame(error)
    except BaseException as error:  # a function of the request alone: whatever fails, the request is the reason
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = traceback.format_exc()[-MAX_TRACEBACK_CHARACTERS:]
        given = ApiError(400, f"the request cannot be prepared ({type(error).__name__}: {error})")
        return error_frame(given, reason)


def read_frame(source: BinaryIO) -> tuple[dict[str, Any], bytes]:
    head = source.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        raise EOFError
    document_bytes, block_bytes = LENGTHS.unpack(head)
    document = json.loads(source.read(document_bytes))
    return document, source.read(block_bytes)


def write_frame(output: BinaryIO, document: dict[str, Any], block: bytes) -> None:
    output.write(frame_head(document, len(block)))
    output.write(block)
    output.flush()


def recall_through(source: BinaryIO, output: BinaryIO, keys: Sequence[str]) -> dict[str, SampledAnswer]:
    """Ask the server for remembered answers."""
    write_frame(output, {RECALL: keys}, b"")
    return answers_of(*read_frame(source))


def answers_frame(answers: Mapping[str, SampledAnswer]) -> tuple[dict[str, Any], bytes]:
    document = {
        key: {**vars(one), "tokens": len(one.tokens), "arguments": list(one.arguments)} for key, one in answers.items()
    }
    return document, b"".join(one.tokens.tobytes() for one in answers.values())


def answers_of(document: dict[str, Any], block: bytes) -> dict[str, SampledAnswer]:
    numbers = array("i")
    numbers.frombytes(block)
    answers, at = {}, 0
    for key, fields in document.items():
        tokens, at = numbers[at : at + fields["tokens"]], at + fields["tokens"]
        answers[key] = SampledAnswer(**fields | {"tokens": tokens, "arguments": tuple(fields["arguments"])})
    return answers


def frame_head(document: dict[str, Any], block_bytes: int) -> bytes:
    """Everything of a frame that comes before the block."""
    text = json.dumps(document).encode()
    return LENGTHS.pack(len(text), block_bytes) + text


def settings_document(settings: PrepareSettings) -> dict[str, Any]:
    return dataclasses.asdict(settings)


def settings_of(document: dict[str, Any]) -> PrepareSettings:
    fields = dict(document)
    return PrepareSettings(**fields | {"limits": RequestLimits(**fields["limits"]), "eos": tuple(fields["eos"])})


def templates_document(templates: Mapping[str, ModelTemplate]) -> dict[str, Any]:
    return {name: dataclasses.asdict(template) for name, template in templates.items()}


def templates_of(document: dict[str, Any]) -> dict[str, ModelTemplate]:
    return {name: ModelTemplate(**fields) for name, fields in document.items()}


def prepared_frame(request: PreparedRequest) -> tuple[dict[str, Any], bytes]:
    numbers = array("i")
    prompts = []
    for prompt in request.prompts:
        numbers.extend(prompt.tokens)
        numbers.extend(prompt.offsets or ())
        prompts.append({"text": prompt.text, "tokens": len(prompt.tokens), "has_offsets": prompt.offsets is not None})
    document = dataclasses.asdict(dataclasses.replace(request, prompts=()))
    return {"prepared": document | {"prompts": prompts}}, numbers.tobytes()


def prepared_of(document: dict[str, Any], block: bytes) -> PreparedRequest:
    numbers = array("i")
    numbers.frombytes(block)
    prompts, at = [], 0

    def take(count: int) -> tuple[int, ...]:
        nonlocal at
        at += count
        return tuple(numbers[at - count : at])

    for prompt in document["prompts"]:
        tokens = take(prompt["tokens"])
        offsets = take(prompt["tokens"]) if prompt["has_offsets"] else None
        prompts.append(TokenizedPrompt(prompt["text"], tokens, offsets))
    lists: dict[str, Any] = {name: tuple(document[name]) for name in ("stop_strings", "stop_tokens", "ignored")}
    chat = None if document["chat"] is None else chat_of(document["chat"])
    grammar = None if document["grammar"] is None else GrammarSource(*document["grammar"])
    return PreparedRequest(**document | lists | {"prompts": tuple(prompts), "chat": chat, "grammar": grammar})


def chat_of(document: dict[str, Any]) -> PreparedChat:
    thinking = document["thinking"]
    if thinking is not None:
        thinking = ThinkingBlock(**thinking | {"open": tuple(thinking["open"]), "close": tuple(thinking["close"])})
    tools = tuple(Tool(**tool) for tool in document["tools"])
    end = None if document["prompt_end"] is None else PromptEnd(**document["prompt_end"])
    return PreparedChat(**document | {"tools": tools, "thinking": thinking, "prompt_end": end})


def error_frame(error: ApiError, unexpected: str = "") -> tuple[dict[str, Any], bytes]:
    """`unexpected`: the traceback of an exception that is no ApiError."""
    fields = {"status": error.status, "message": str(error), "param": error.param, "code": error.code}
    return {"error": fields, "unexpected": unexpected}, b""


def error_of(document: dict[str, Any]) -> ApiError:
    return ApiError(document["status"], document["message"], param=document["param"], code=document["code"])


if __name__ == "__main__":
    main()
