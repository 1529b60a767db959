"""Decoding with recurrent states: Qwen3-Next's layers, one sequence after the other and all in one call.

    python bench/recurrent.py --json recurrent.json

Steps of new tokens through the server's forward pass, experts on the CPU and resident: `sequential` has transformers'
own cache, a call for each sequence; `batched` has states in slots, one call for all; `graphs` replays such steps from
CUDA graphs. Every sequence has tokens of its own, so that they choose different experts. Beside the steps are the time
that reading and writing the states takes at the device's read rate, and, where no expert is resident, the time that
reading the chosen experts takes at the rate of host memory; both rates are measured in the same run. Contexts are not
computed first: a state is as large after three tokens, and what lies in the keys changes no time. Sequences of
`sequential` have three tokens of context.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from e2e_models import Recipe, build_packed
from kernel_profile import print_kernels, profile_kernels
from timing import Table, describe_machine, print_last_line, save

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "max_position_embeddings": 262_144,
    "tie_word_embeddings": False,
}
TINY = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2}
TINY |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
TINY |= {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "intermediate_size": 64}
READ = 1 << 31  # bytes that are read to learn the device's rate
HEADS = ("way", "residents", "streams", "ms", "tokens/s", "states ms", "experts ms")
WARM = 8  # steps before the measured ones; graphs are captured in them


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def host_rate() -> float:
    """Bytes/s that the core's threads read from memory."""
    from ktransformers.ground.pool import default_pool

    pool = default_pool()
    return float(pool.rate("read", 0.2, bytes=(1 << 30) // pool.threads))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-next", choices=["qwen3-next", "tiny"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--format", default="int4:32", help="of the experts")
    parser.add_argument("--streams", type=numbers, default=[1, 16], help="default 1,16")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a cell")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a layer, of `graphs`")
    parser.add_argument("--device", default="cuda", help="cpu: without graphs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


class Bench:
    def __init__(self, args: argparse.Namespace, argv: list[str]) -> None:
        import torch

        self.args, self.device = args, torch.device(args.device)
        self.document: dict[str, Any] = {
            "bench": "recurrent",
            "command": shlex.join(["python", "bench/recurrent.py", *argv]),
            "machine": describe_machine(),
            "steps": [],
        }
        if self.device.type == "cuda":
            self.document["machine"]["gpu"] = torch.cuda.get_device_name(self.device)
        self.document["read_bytes_per_s"] = self.read_rate = self._read_rate()
        self.document["host_read_bytes_per_s"] = self.host_rate = host_rate()

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _read_rate(self) -> float:
        import torch

        size = (READ if self.device.type == "cuda" else 1 << 26) // 4
        data, taken = torch.zeros(size, dtype=torch.float32, device=self.device), []
        for _ in range(6):
            self._wait()
            begun = time.perf_counter()
            data.sum()
            self._wait()
            taken.append(time.perf_counter() - begun)
        return 4 * size / statistics.median(taken[1:])

    def slots(self, forward: Any, streams: int) -> list[Any]:
        """Sequences of `context` tokens, of which three were computed."""
        from ktransformers.serve.cache.kv_cache import KVSlot
        from ktransformers.serve.scheduler.forward import Chunk

        slots = KVSlot.together(streams, self.args.context + 4096)
        for index, slot in enumerate(slots):
            forward.run([Chunk(slot, [index + 1, index + 2, index + 3], 0, None)])
            slot.tokens[:] = [5] * (3 if slot.hf_cache is not None else self.args.context)
        return slots

    def chunks(self, slots: list[Any], step: int) -> list[Any]:
        """A new token of every sequence, another one for each and in each step."""
        from ktransformers.serve.scheduler.forward import Chunk

        tokens = [(7919 * step + 263 * index + 17) % self.args.vocabulary for index in range(len(slots))]
        return [Chunk(slot, [new], slot.length, None, greedy=True) for slot, new in zip(slots, tokens, strict=True)]

    def chosen_bytes(self, forward: Any, placement: Any, streams: int) -> tuple[float, int]:
        """How many experts of a layer a step chooses, and the bytes of those of all layers."""
        from ktransformers.place.residents import RoutingCounter

        slots, counter = self.slots(forward, streams), RoutingCounter(forward.model)
        forward.run(self.chunks(slots, 0))
        counter.close()
        chosen = [int((row > 0).sum()) for row in counter.counts.values()]
        sizes = [layer.packed.geometry.expert_bytes for layer in placement.layers]
        return statistics.mean(chosen), sum(count * size for count, size in zip(chosen, sizes, strict=True))

    def step_seconds(self, forward: Any, streams: int) -> float:
        slots, taken, begun = self.slots(forward, streams), list[float](), time.perf_counter()
        while len(taken) < WARM + 4 or time.perf_counter() - begun < self.args.seconds:
            chunks = self.chunks(slots, len(taken))
            start = time.perf_counter()
            forward.run(chunks)
            taken.append(time.perf_counter() - start)
            if len(taken) == WARM:
                begun = time.perf_counter()
            if slots[0].length + 2 > slots[0].capacity:
                break
        return statistics.median(taken[WARM:])

    def run(self) -> None:
        from ktransformers.place import attach
        from ktransformers.serve.scheduler.forward import SequentialForward, make_forward

        words = QWEN3_NEXT | (TINY if self.args.shape == "tiny" else {})
        recipe = Recipe("qwen3-next", words, (), layers=self.args.layers, vocabulary=self.args.vocabulary)
        model = build_packed(recipe, self.device, self.args.format)
        placement = attach(model, policy="auto", device="cpu" if self.device.type == "cpu" else None)
        assert placement is not None and not placement.left, placement
        table = Table(HEADS, [10, 9, 7, 9, 9, 9, 10])
        self.cells(SequentialForward(model), "sequential", placement, table)
        forward = make_forward(model)  # replaces modules' forwards
        self.document["bytes_per_token"] = forward.check_against_stock()
        self.document["bytes_per_sequence"] = forward.bytes_per_sequence
        self.cells(forward, "batched", placement, table)
        if self.device.type == "cuda":
            self.cells(forward, "graphs", placement, table)
        placement.detach()

    def cells(self, forward: Any, way: str, placement: Any, table: Table) -> None:
        from ktransformers.serve.graphs.step_graphs import StepGraphs

        for share in (0.0, 1.0):
            placement.place_residents(ratio=share)
            forward.graphs = StepGraphs(forward.model, placement) if way == "graphs" else None
            for streams in self.args.streams:
                chosen = self.chosen_bytes(forward, placement, streams) if way == "batched" and not share else None
                self.cell(forward, way, share, streams, table, chosen)
                if self.args.profile and way == "graphs":
                    self.profile(forward, share, streams)
            if forward.graphs is not None:
                forward.graphs.clear()
                forward.graphs = None

    def profile(self, forward: Any, share: float, streams: int) -> None:
        slots = self.slots(forward, streams)
        rows = profile_kernels(lambda: forward.run(self.chunks(slots, slots[0].length)), self.args.layers)
        self.document.setdefault("kernels", {})[f"{share:.0%}, {streams} streams"] = rows
        print_kernels(f"{share:.0%} resident, {streams} streams", rows)

    def cell(
        self, forward: Any, way: str, share: float, streams: int, table: Table, chosen: tuple[float, int] | None
    ) -> None:
        replayed = 0 if forward.graphs is None else forward.graphs.replayed
        taken = self.step_seconds(forward, streams)
        row = {"way": way, "share": share, "streams": streams, "seconds": taken, "tokens_per_s": streams / taken}
        if forward.graphs is not None:
            row["captured"] = forward.graphs.replayed > replayed
        states = 2 * streams * self.document.get("bytes_per_sequence", 0) / self.read_rate
        row["states_seconds"] = states
        if chosen is not None:
            row |= {"experts_of_layer": chosen[0], "experts_seconds": chosen[1] / self.host_rate}
        self.document["steps"].append(row)
        if self.args.json:
            save(self.document, self.args.json)
        note = " (not captured)" if row.get("captured") is False else ""
        cells = [way, f"{share:.0%}", str(streams), f"{1e3 * taken:.2f}", f"{streams / taken:.1f}"]
        experts = f"{1e3 * row['experts_seconds']:.2f}" if chosen is not None else ""
        table.row([*cells, f"{1e3 * states:.3f}", f"{experts}{note}"])


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        print("recurrent.py: no CUDA device; --device cpu measures without graphs", file=sys.stderr)
        return 1
    bench = Bench(args, sys.argv[1:] if argv is None else argv)
    bench.run()
    if args.json:
        save(bench.document, args.json)
    print_last_line(bench.document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
