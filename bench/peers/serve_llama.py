"""llama.cpp on the model of `serve.py`, through llama-cpp-python: BF16 and Q4_K, several sequences in one batch.

    python bench/peers/serve_llama.py MODEL --prompt 512 --new 128 --streams 1,8,16

The checkpoint is written as GGUF beside itself, once (needs the gguf package), and quantised by llama.cpp. As in
llama-bench the tokens are random and nothing is sampled: the price of choosing a token is left out, in its favour.
llama.cpp has to be built for the processor (`GGML_NATIVE`, or AVX-512 and AMX by name): what it detected is printed.
"""

from __future__ import annotations

import ctypes
import random
import time
from pathlib import Path
from typing import Any

from serve_cells import cells, measure, parse, tell
from serve_gguf import vocabulary, write_gguf


def quantise(source: Path, target: Path) -> None:
    import llama_cpp

    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    half = target.with_name(target.name + ".part")
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(half).encode(), ctypes.byref(how))
    if code:
        raise SystemExit(f"llama.cpp could not quantise {source}: {code}")
    half.replace(target)


class Llama:
    """A model; `open` makes room for so many sequences."""

    def __init__(self, file: Path, threads: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._threads = threads
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        if not self._model:
            raise SystemExit(f"llama.cpp could not open {file}")
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self._context: Any = None

    def open(self, streams: int, room: int) -> None:
        self._shut()
        context = self._api.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = streams * (room + 256), 2048, 512
        context.n_seq_max, context.n_threads, context.n_threads_batch = streams, self._threads, self._threads
        self._context = self._api.llama_init_from_model(self._model, context)
        if not self._context:
            raise SystemExit(f"llama.cpp has no room for {streams} sequences of {room} tokens")

    def clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """(token, position, sequence, wants logits), at most 2048 at once."""
        for start in range(0, len(tokens), 2048):
            part = tokens[start : start + 2048]
            self._batch.n_tokens = len(part)
            for at, (token, position, sequence, wanted) in enumerate(part):
                self._batch.token[at], self._batch.pos[at] = token, position
                self._batch.n_seq_id[at], self._batch.seq_id[at][0] = 1, sequence
                self._batch.logits[at] = wanted
            if code := self._api.llama_decode(self._context, self._batch):
                raise SystemExit(f"llama_decode answered {code}")
        self._api.llama_synchronize(self._context)

    def _shut(self) -> None:
        if self._context:
            self._api.llama_free(self._context)
            self._context = None

    def close(self) -> None:
        self._shut()
        self._api.llama_batch_free(self._batch)
        self._api.llama_model_free(self._model)


def speed(llama: Llama, prompt: int, new: int, streams: int, top: int, draw: random.Random) -> float:
    """Tokens/s of all streams; `new` 0 measures reading."""
    llama.clear()

    def token() -> int:
        return draw.randrange(3, top)

    first = [(token(), at, one, at == prompt - 1) for one in range(streams) for at in range(prompt)]
    begun = time.perf_counter()
    llama.decode(first)
    if not new:
        return streams * prompt / (time.perf_counter() - begun)
    begun = time.perf_counter()
    for at in range(new):
        llama.decode([(token(), prompt + at, one, True) for one in range(streams)])
    return streams * new / (time.perf_counter() - begun)


def main() -> None:
    import llama_cpp

    args = parse(__doc__)
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # lives as long as llama.cpp may call it
    llama_cpp.llama_log_set(quiet, None)
    llama_cpp.llama_backend_init()
    about = {"llama_cpp": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode()}
    begun = time.perf_counter()
    files = {"BF16": args.model / "bf16.gguf", "Q4_K": args.model / "q4_k.gguf"}
    if not files["BF16"].is_file():
        write_gguf(args.model, files["BF16"])
    about |= {"gguf_seconds": time.perf_counter() - begun, "threads": args.threads}
    begun = time.perf_counter()
    if not files["Q4_K"].is_file():
        quantise(files["BF16"], files["Q4_K"])
    tell({"about": about | {"quantise_seconds": time.perf_counter() - begun}})
    draw, top = random.Random(0), vocabulary(args.model)
    for name, file in files.items():
        llama = Llama(file, args.threads)

        def call(prompt: int, new: int, streams: int, llama: Llama = llama) -> float:
            return speed(llama, prompt, new, streams, top, draw)

        for test, prompt, new, streams in cells(args):
            llama.open(streams, prompt + new + 2)
            words = {"contender": f"llama.cpp {name}", "test": test, "streams": streams}
            tell(words | measure(args, call, prompt, new, streams))
        llama.close()


if __name__ == "__main__":
    main()
