"""Real servers on the CPU, each in a process of its own, and what the planner predicted for them.

`python -m tests.support.measured_serving NAME` builds a random model, serves it (`serve/launch.py` without its socket)
and prints predicted and measured memory as one JSON line; without a name it runs all of them and prints the table of
docs/plan.md. Every kind of cache is there: latents, windows passed to attention and windows in the mask alone,
recurrent and convolution states. All sequences run at once, and models are so shaped that what they cache is most of
what is planned; allocators return freed memory at once, as for training (`measured_training.py`).
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from tests.support.measured_training import TOKENIZER, run_parts, say

SEQUENCES, PROMPT, NEW_TOKENS = 8, 960, 64  # the first sequence still decodes when the last prompt is computed
CHUNK = 512  # prompt tokens of a step, as `kt serve` has it by default
VOCABULARY = 6400

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
DELTA = {
    "num_experts": 16,
    "shared_expert_intermediate_size": 256,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA2 = {
    "num_local_experts": 16,
    "shared_intermediate_size": 256,
    "layer_types": ["mamba", "mamba", "mamba", "attention"] * 2,
    "mamba_n_heads": 32,
    "mamba_d_head": 32,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}
MAMBA = {
    "num_experts": 16,
    "num_key_value_heads": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 3,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "mamba_d_state": 128,
    "mamba_dt_rank": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT | {"index_n_heads": 8, "index_head_dim": 128, "index_topk": 256},
    "gpt_oss": {"num_local_experts": 16, "sliding_window": 128},
    "phimoe": {"num_local_experts": 16, "sliding_window": 256},
    "qwen3_next": DELTA,
    "qwen3_moe": {"num_experts": 64},
    "granitemoehybrid": MAMBA2,
    "jamba": MAMBA,
    "lfm2_moe": {"num_experts": 16, "layer_types": ["conv", "full_attention"] * 4, "num_dense_layers": 0},
}
PACKED = {"qwen3_moe": "int4"}  # served from a packed directory, whose experts are mapped
# Prompt and new tokens of families whose stock modules are slow without kernels of their own.
LENGTHS = {"jamba": (544, 32), "qwen3_next": (544, 32), "granitemoehybrid": (544, 32)}


def build_case(name: str, folder: Path) -> dict[str, Any]:
    """A random model in `folder`, with a tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **COMMON | CASES[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    for file in TOKENIZER.glob("*.json"):
        shutil.copyfile(file, folder / "model" / file.name)
    if name in PACKED:
        from ktransformers.quant.convert import convert
        from ktransformers.quant.plan import make_plan, parse_formats

        convert(make_plan(folder / "model", parse_formats(PACKED[name])), folder / "packed")
    return {"parameters": sum(tensor.numel() for tensor in model.parameters())}


def serve_case(name: str, folder: Path) -> dict[str, Any]:
    from ktransformers.plan import Choice, Serving, open_shape, with_gpus
    from ktransformers.plan.calibrate import this_machine
    from ktransformers.plan.memory import predict_memory
    from ktransformers.plan.meter import Meter
    from ktransformers.serve.flags import Launch
    from ktransformers.serve.loading import open_service
    from ktransformers.serve.target import resolve_target

    prompt, new = LENGTHS.get(name, (PROMPT, NEW_TOKENS))
    launch = Launch(
        str(folder / ("packed" if name in PACKED else "model")),
        device="cpu",
        max_running_requests=SEQUENCES,
        chunked_prefill_size=CHUNK,
        max_total_tokens=SEQUENCES * (prompt + new),
    )
    service = open_service(launch, resolve_target(launch.target), lambda _: None)
    work = Serving(prompt + new, min(CHUNK, prompt), SEQUENCES, rest_bytes=service.engine.forward.model.dtype.itemsize)
    choice = Choice(PACKED.get(name, "bf16"))
    memory = predict_memory(open_shape(launch.target), work, choice, with_gpus(this_machine(), "none"))
    with Meter() as meter:
        before = meter.peak
        kept = _complete(service, prompt, new)
    planned = memory.host.get("KV cache", 0) + memory.host.get("states", 0)
    return {
        "planned": memory.host,
        "at start": before,
        "cache": {"predicted": planned, "measured": kept},
        "host memory": {"predicted": memory.host_bytes, "measured": meter.peak},
    }


def _complete(service: Any, prompt: int, new: int) -> int:
    """Generate from `SEQUENCES` random prompts that share nothing, all at once; returns the bytes of their slots and
    states at the peak."""
    from ktransformers.serve.sampling.sampling import Sampling
    from ktransformers.serve.scheduler.sequence import Event, GenerationRequest, Sequence

    finished = threading.Semaphore(0)
    ends: list[str] = []

    def deliver(event: Event) -> None:
        if event.finish is not None:
            ends.append(event.finish + event.error)
            finished.release()

    source = random.Random(0)
    prompts = [tuple(source.choices(range(3, VOCABULARY), k=prompt)) for _ in range(SEQUENCES)]
    requests = [GenerationRequest(tokens, new, Sampling(temperature=0)) for tokens in prompts]
    service.engine.start()
    service.engine.submit([Sequence(request, service.tokenizer, deliver) for request in requests])
    for _ in requests:
        finished.acquire()
    cache = service.engine.kv_cache  # of idle slots some may have been evicted with their states
    if any(slot.bytes() != slot.capacity * service.kv_bytes_per_token for slot in cache.slots):
        raise RuntimeError("slots hold something else than a token's bytes")
    kept: int = cache.peak_tokens * service.kv_bytes_per_token
    kept += cache.peak_states * service.engine.forward.bytes_per_sequence
    service.engine.stop()
    if ends != ["length"] * SEQUENCES:
        raise RuntimeError(f"sequences ended with {ends}")
    return kept


def measure(name: str) -> dict[str, Any]:
    """Built in one process and served in another, so that nothing of building is left in memory."""
    return run_parts("tests.support.measured_serving", name, ("build", "serve"))


HEAD = ("model", "parameters", "cache, predicted", "measured", "off", "host memory, predicted", "measured", "off")


def main() -> None:
    if len(sys.argv) == 4 and sys.argv[2] in ("build", "serve"):
        name, part, folder = sys.argv[1:]
        found = (build_case if part == "build" else serve_case)(name, Path(folder))
        sys.stdout.write(json.dumps(found) + "\n")
        return
    say(*HEAD)
    say(*("---" for _ in HEAD))
    for name in sys.argv[1:] or CASES:
        found = measure(name)
        cells = [name, f"{found['parameters'] / 1e6:.0f} million"]
        for what in ("cache", "host memory"):
            predicted, measured = found[what]["predicted"], found[what]["measured"]
            cells += [f"{predicted / 1e6:.0f} MB", f"{measured / 1e6:.0f} MB", f"{measured / predicted - 1:+.1%}"]
        say(*cells)


if __name__ == "__main__":
    main()
