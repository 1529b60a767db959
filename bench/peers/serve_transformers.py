"""transformers' own continuous batching on the model of `serve.py`: what its `serve --continuous-batching` runs, less
the HTTP around it. Prints one JSON line for each test and number of streams.

    python bench/peers/serve_transformers.py MODEL --prompt 512 --new 128 --streams 1,4,8,16

The scheduler itself says when each token was made. A manager is opened for each cell; its first repetition is thrown
away.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import Watch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--streams", type=lambda text: [int(word) for word in text.split(",")], default=[1, 4, 8, 16])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float16 or float32")
    return parser.parse_args()


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
    from transformers import AutoModelForCausalLM, GenerationConfig

    args = parse()
    dtype = getattr(torch, args.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    draw, top = random.Random(0), model.config.vocab_size
    for test, prompt, new in ((f"pp{args.prompt}", args.prompt, 1), (f"tg{args.new}", 16, args.new + 1)):
        for streams in args.streams:
            config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
            samples, watch = [], Watch()
            with model.continuous_batching_context_manager(generation_config=config) as manager:
                for repetition in range(args.repetitions + 1):
                    watch = Watch() if repetition == 1 else watch
                    prompts = [[draw.randrange(3, top) for _ in range(prompt)] for _ in range(streams)]
                    times = run(manager, prompts, new)
                    if not repetition:
                        continue
                    if new == 1:
                        samples.append(streams * prompt / max(told[0] for told in times))
                    else:
                        ready, end = max(told[0] for told in times), max(told[-1] for told in times)
                        samples.append(sum(at > ready for told in times for at in told) / (end - ready))
            cell = {"contender": f"transformers {args.dtype}", "test": test, "streams": streams, "samples": samples}
            print(json.dumps({**cell, "foreign": watch.foreign()}), flush=True)


if __name__ == "__main__":
    main()
