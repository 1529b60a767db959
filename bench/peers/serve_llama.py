"""llama.cpp on the model of `serve.py`, through llama-cpp-python: BF16 and Q4_K, several sequences in one batch.

    python bench/peers/serve_llama.py MODEL --prompt 512 --new 128 --streams 1,4,8,16

The checkpoint is written as GGUF beside itself, once (needs the gguf package), and quantised by llama.cpp. As in
llama-bench the tokens are random and nothing is sampled: the price of choosing a token is left out, in its favour.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import Watch

ROLES = {"gate": "ffn_gate_exps", "up": "ffn_up_exps", "down": "ffn_down_exps"}
PLAIN = {  # name in the checkpoint -> name in GGUF, and whether llama.cpp wants float32
    "self_attn.q_proj.weight": ("attn_q.weight", False),
    "self_attn.k_proj.weight": ("attn_k.weight", False),
    "self_attn.v_proj.weight": ("attn_v.weight", False),
    "self_attn.o_proj.weight": ("attn_output.weight", False),
    "self_attn.q_norm.weight": ("attn_q_norm.weight", True),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", True),
    "input_layernorm.weight": ("attn_norm.weight", True),
    "post_attention_layernorm.weight": ("ffn_norm.weight", True),
    "mlp.gate.weight": ("ffn_gate_inp.weight", True),
}


def write_gguf(model: Path, target: Path) -> None:
    """Qwen3-MoE in BF16, without a vocabulary: tokens are numbers."""
    import gguf
    import numpy as np

    config = json.loads((model / "config.json").read_text())
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    half = target.with_name(target.name + ".part")
    writer = gguf.GGUFWriter(half, "qwen3moe", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)

    def read(name: str) -> Any:
        """[...] uint16, the bits of bf16."""
        with (model / index[name]).open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            entry = json.loads(stream.read(length))[name]
            first, last = entry["data_offsets"]
            stream.seek(8 + length + first)
            return np.frombuffer(stream.read(last - first), dtype=np.uint16).reshape(entry["shape"])

    def add(name: str, bits: Any, exact: bool) -> None:
        if exact:
            writer.add_tensor(name, (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            data = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)

    add("token_embd.weight", read("model.embed_tokens.weight"), False)
    add("output.weight", read("lm_head.weight"), False)
    add("output_norm.weight", read("model.norm.weight"), True)
    for layer in range(config["num_hidden_layers"]):
        root = f"model.layers.{layer}"
        for theirs, (ours, exact) in PLAIN.items():
            add(f"blk.{layer}.{ours}", read(f"{root}.{theirs}"), exact)
        for role, ours in ROLES.items():
            experts = [
                read(f"{root}.mlp.experts.{expert}.{role}_proj.weight") for expert in range(config["num_experts"])
            ]
            add(f"blk.{layer}.{ours}.weight", np.stack(experts), False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half.replace(target)


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
    """A model with room for so many sequences."""

    def __init__(self, file: Path, streams: int, room: int, threads: int) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx, context.n_batch, context.n_ubatch = streams * room, 2048, 512
        context.n_seq_max, context.n_threads, context.n_threads_batch = streams, threads, threads
        self._context = llama_cpp.llama_init_from_model(self._model, context)
        if not self._context:
            raise SystemExit(f"llama.cpp could not open {file}")
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

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

    def close(self) -> None:
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


def measure(llama: Llama, streams: int, prompt: int, new: int, top: int, draw: random.Random) -> float:
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4, 8, 16])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", help="cpu is the only one")
    parser.add_argument("--dtype", help="of no meaning here: BF16 and Q4_K are measured")
    return parser.parse_args()


def main() -> None:
    import llama_cpp

    args = parse()
    llama_cpp.llama_backend_init()
    top = json.loads((args.model / "config.json").read_text())["vocab_size"]
    files = {"BF16": args.model / "bf16.gguf", "Q4_K": args.model / "q4_k.gguf"}
    if not files["BF16"].is_file():
        write_gguf(args.model, files["BF16"])
    if not files["Q4_K"].is_file():
        quantise(files["BF16"], files["Q4_K"])
    draw = random.Random(0)
    for name, file in files.items():
        for test, prompt, new in ((f"pp{args.prompt}", args.prompt, 0), (f"tg{args.new}", 16, args.new)):
            for streams in args.streams:
                llama = Llama(file, streams, prompt + new + 2, args.threads)
                measure(llama, streams, prompt, min(new, 4), top, draw)
                watch = Watch()
                samples = [measure(llama, streams, prompt, new, top, draw) for _ in range(args.repetitions)]
                llama.close()
                cell = {"contender": f"llama.cpp {name}", "test": test, "streams": streams, "samples": samples}
                print(json.dumps({**cell, "foreign": watch.foreign()}), flush=True)


if __name__ == "__main__":
    main()
