"""transformers' own continuous batching on the model of `serve.py`: what its `serve --continuous-batching` runs, less
the HTTP around it. Prints one JSON line for each test and number of streams.

    python bench/peers/serve_transformers.py MODEL --prompt 512 --new 128 --streams 1,8,16

The scheduler itself says when each token was made. Its cache is given room for the streams of the bench: left alone it
would take most of the machine's memory.
"""

from __future__ import annotations

import random
import time
from typing import Any

from serve_cells import cells, measure, parse, tell

PAGE = 256  # tokens of a block of its cache
BATCH = 8192  # tokens of a step, transformers' default


def run(manager: Any, prompts: list[list[int]], new: int) -> list[list[float]]:
    """When each token of each answer was made, from the start on."""
    begun = time.perf_counter()
    wanted = set(manager.add_requests(inputs=prompts, max_new_tokens=new, record_timestamps=True))
    times: list[list[float]] = []
    while wanted:
        result = manager.get_result(timeout=1)
        if result is None:
            if not manager.is_running():
                raise SystemExit("continuous batching ended by itself")
            continue
        if result.is_finished():
            wanted.discard(result.request_id)
            times.append([at - begun for at in result.timestamps])
    return times


def main() -> None:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    args = parse(__doc__)
    begun = time.perf_counter()
    dtype = getattr(torch, args.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    tell({"about": about | {"load_seconds": time.perf_counter() - begun}})
    draw, top = random.Random(0), model.config.vocab_size
    longest = max(args.prompt, args.new) + PAGE
    blocks = 2 * max(args.streams) * -(-longest // PAGE)
    sizes = ContinuousBatchingConfig(num_blocks=blocks, max_batch_tokens=BATCH)
    config = GenerationConfig(max_new_tokens=args.new + 1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=sizes
    ) as manager:

        def call(prompt: int, new: int, streams: int) -> float:
            prompts = [[draw.randrange(3, top) for _ in range(prompt)] for _ in range(streams)]
            times = run(manager, prompts, new + 1)
            if not new:
                return streams * prompt / max(arrivals[0] for arrivals in times)
            ready, end = max(arrivals[0] for arrivals in times), max(arrivals[-1] for arrivals in times)
            return sum(at > ready for arrivals in times for at in arrivals) / (end - ready)

        for test, prompt, new, streams in cells(args):
            words = {"contender": f"transformers {args.dtype}", "test": test, "streams": streams}
            tell(words | measure(args, call, prompt, new, streams))


if __name__ == "__main__":
    main()
