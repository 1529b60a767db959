"""A worker process of `prepare_pool`: `python -m ktransformers.serve.http.prepare_worker DIRECTORY`, where DIRECTORY
holds the server's tokenizer. The first frame has the settings and a probe text and is answered with the probe's tokens;
every further frame is a request and is answered with a prepared request or an error. The process ends with its stdin.

Stdout carries frames, so whatever a library prints goes to stderr. The process has a lower priority than the server,
whose loop and streams come first when cores are few, and a limit of memory. One that has grown large ends after its
answer, and the pool starts another.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, BinaryIO

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

    from ktransformers.serve.http import prepare_wire
    from ktransformers.serve.http.prepare import RequestPreparer

    tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    document, _ = read_frame(source)
    preparer = RequestPreparer(tokenizer, prepare_wire.settings_of(document["settings"]))
    write_frame(output, {"tokens": tokenizer(document["probe"])["input_ids"]}, b"")
    while True:
        try:
            document, body = read_frame(source)
        except EOFError:
            return
        reply, block = answer(preparer, document, body)
        last = resident_bytes() > RECYCLE_BYTES
        write_frame(output, reply | {"last": last}, block)
        if last:
            return


def answer(preparer: object, document: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    from ktransformers.ground.errors import is_panic
    from ktransformers.serve.http import prepare_wire
    from ktransformers.serve.http.error import ApiError
    from ktransformers.serve.http.prepare import RequestPreparer

    assert isinstance(preparer, RequestPreparer)
    templates = prepare_wire.templates_of(document["templates"])
    try:
        return prepare_wire.prepared_frame(preparer.prepare(str(document["kind"]), body, templates))
    except ApiError as error:
        return prepare_wire.error_frame(error)
    except BaseException as error:  # a function of the request alone: whatever fails, the request is the reason
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        reason = traceback.format_exc()[-MAX_TRACEBACK_CHARACTERS:]
        given = ApiError(400, f"the request cannot be prepared ({type(error).__name__}: {error})")
        return prepare_wire.error_frame(given, reason)


def read_frame(source: BinaryIO) -> tuple[dict[str, Any], bytes]:
    import json

    from ktransformers.serve.http.prepare_wire import LENGTHS

    head = source.read(LENGTHS.size)
    if len(head) < LENGTHS.size:
        raise EOFError
    document_bytes, block_bytes = LENGTHS.unpack(head)
    document = json.loads(source.read(document_bytes))
    return document, source.read(block_bytes)


def write_frame(output: BinaryIO, document: dict[str, Any], block: bytes) -> None:
    from ktransformers.serve.http.prepare_wire import frame_head

    output.write(frame_head(document, len(block)))
    output.write(block)
    output.flush()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
