"""Decoding with latent attention (MLA): the kernel alone, DeepSeek-V2-Lite whole, and the attention of DeepSeek-V3.

    python bench/latents.py --parts kernel,model,attention --json latents.json

`kernel`: attention of new tokens over latents, beside the larger of its bytes over the GPU's read rate and its
operations over the rate of a large bf16 product, both measured in the same run. `model`: steps of DeepSeek-V2-Lite
through the server's own forward pass and graphs, with a cache of latents and with the expanded one, experts on the CPU
and resident; also a chunk of a prompt. `attention`: all layers of DeepSeek-V3's attention without experts, one long
context. The contents of slots are random: contexts are not computed first, because speed does not depend on them.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from e2e_models import Recipe, build_packed, recipes
from kernel_profile import print_kernels, profile_kernels
from timing import Table, describe_machine, print_last_line, save

PARTS = ("kernel", "model", "attention")
KERNEL_SHAPES = {"v2-lite": (16, 512, 64), "v3": (128, 512, 64)}  # heads, rank, rope
KERNEL_CELLS = ((1, 512), (1, 8192), (16, 512), (16, 8192), (1, 139_000))  # rows, context
READ = 1 << 31  # bytes that are read to learn the GPU's rate
PRODUCT = 8192  # rows and columns of the product whose rate is the roof of operations
V3_ATTENTION = {  # DeepSeek-V3 with dense MLPs of almost no size
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 16,
    "first_k_dense_replace": 61,
    "max_position_embeddings": 163_840,
    "tie_word_embeddings": False,
}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default all")
    parser.add_argument("--shape", default="dsv2-lite", choices=["dsv2-lite", "tiny-latent"], help="of `model`")
    parser.add_argument("--layers", type=int, default=27, help="of `model`")
    parser.add_argument("--attention-layers", type=int, default=61)
    parser.add_argument("--format", default="int4:32", help="of the experts")
    parser.add_argument("--streams", type=numbers, default=[1, 16], help="default 1,16")
    parser.add_argument("--contexts", type=numbers, default=[512, 8192], help="default 512,8192")
    parser.add_argument("--attention-contexts", type=numbers, default=[8192, 139_000])
    parser.add_argument("--chunk", type=int, default=512, help="tokens of the prompt that is measured")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a cell and way")
    parser.add_argument("--fp8", action="store_true", help="latents in codes of 8 bits, of `attention`")
    parser.add_argument("--profile", action="store_true", help="also print the kernels of a layer, of `attention`")
    parser.add_argument("--device", default="cuda", help="cpu only shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: no part; known: {', '.join(PARTS)}")
    return args


class Bench:
    def __init__(self, args: argparse.Namespace, argv: list[str]) -> None:
        import torch

        self.args, self.device = args, torch.device(args.device)
        self.document: dict[str, Any] = {
            "bench": "latents",
            "command": shlex.join(["python", "bench/latents.py", *argv]),
            "machine": describe_machine(),
        }
        if self.device.type == "cuda":
            self.document["machine"]["gpu"] = torch.cuda.get_device_name(self.device)
        self.read_rate, self.product_rate = self.rates()
        self.document |= {"read_bytes_per_s": self.read_rate, "product_flops": self.product_rate}
        print(f"reads {self.read_rate / 1e9:.0f} GB/s, multiplies {self.product_rate / 1e12:.0f} TFLOPS", flush=True)

    def record(self, part: str, row: dict[str, Any]) -> None:
        self.document.setdefault(part, []).append(row)
        if self.args.json:
            save(self.document, self.args.json)

    def seconds(self, call: Callable[[], Any], repeat: int = 5, calls: int = 20) -> float:
        """Of one call: the median of `repeat` rounds."""
        import torch

        wait: Callable[[], Any] = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        call()
        taken = []
        for _ in range(repeat):
            wait()
            begun = time.perf_counter()
            for _ in range(calls):
                call()
            wait()
            taken.append((time.perf_counter() - begun) / calls)
        return statistics.median(taken)

    def rates(self) -> tuple[float, float]:
        import torch

        size = (READ if self.device.type == "cuda" else 1 << 26) // 4
        side = PRODUCT if self.device.type == "cuda" else 256
        data = torch.zeros(size, dtype=torch.float32, device=self.device)
        a = torch.zeros(side, side, dtype=torch.bfloat16, device=self.device)
        return 4 * size / self.seconds(data.sum, calls=3), 2 * side**3 / self.seconds(lambda: a @ a, calls=5)

    def kernel(self) -> None:
        import torch

        from ktransformers.serve.attention.latent import LatentProjection
        from ktransformers.serve.attention.spec import AttentionSpec
        from ktransformers.serve.attention.step import DeviceStep, Span
        from ktransformers.serve.cache.kv_cache import KVSlot
        from ktransformers.serve.graphs.paged_attention import attend_latents

        table_of_cells = Table(("shape", "rows", "context", "us", "GB/s", "TFLOPS", "of roof"), [8, 5, 8, 8, 7, 7, 8])
        cells = KERNEL_CELLS if self.device.type == "cuda" else ((1, 64),)
        for name, (heads, rank, rope) in KERNEL_SHAPES.items():
            linear = torch.nn.Linear(rank, heads * 256, bias=False, device="meta")
            spec = AttentionSpec(0, 0.1, None, None, None, LatentProjection(linear, heads, rank, 128, rope, 128))
            for rows, context in cells:
                options = {"dtype": torch.bfloat16, "device": self.device}
                query = torch.randn(heads, rows, rank + rope, **options) * 0.1
                key = torch.randn(1, rows, rank + rope, **options)
                slots = KVSlot.together(rows, context + 1)
                (cache, *_) = held = slots[0].memory.of_layer(0, key)
                cache.normal_()
                spans = [Span(slot, row, row + 1, context) for row, slot in enumerate(slots)]
                step = DeviceStep.of_spans(spans, self.device)
                call = self.captured(lambda: attend_latents(step, held, spec, query, key))  # noqa: B023
                taken = self.seconds(call)
                moved = rows * context * (rank + rope) * 2
                operations = 2 * rows * context * heads * (2 * rank + rope)
                roof = max(moved / self.read_rate, operations / self.product_rate)
                row_of_cell = {"shape": name, "rows": rows, "context": context, "seconds": taken, "roof_seconds": roof}
                self.record("kernel", row_of_cell)
                rates = [f"{moved / taken / 1e9:.0f}", f"{operations / taken / 1e12:.1f}", f"{roof / taken:.0%}"]
                table_of_cells.row([name, str(rows), str(context), f"{1e6 * taken:.1f}", *rates])

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """In a CUDA graph of ten calls as the server runs it; launches would take longer than a short context."""
        import torch

        if self.device.type != "cuda":
            return call
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                call()
        return _Tenth(graph.replay)

    def steps(self, forward: Any, graphs: Any, streams: int, context: int) -> tuple[float, bool, int]:
        """Seconds of a step of new tokens, whether it was captured, and bytes of the cache a token."""
        from ktransformers.serve.scheduler.forward import Chunk

        slots, vocabulary = self.slots(forward, streams, context), forward.model.config.vocab_size
        forward.graphs = graphs
        before, taken, warm = graphs.replayed if graphs is not None else 0, list[float](), 8
        begun = time.perf_counter()
        while len(taken) < warm + 4 or time.perf_counter() - begun < self.args.seconds:
            tokens = [(7919 * len(taken) + 263 * index + 17) % vocabulary for index in range(streams)]
            chunks = [
                Chunk(slot, [new], slot.length, None, greedy=True) for slot, new in zip(slots, tokens, strict=True)
            ]
            start = time.perf_counter()
            forward.run(chunks)
            taken.append(time.perf_counter() - start)
            if len(taken) == warm:
                begun = time.perf_counter()
            if slots[0].length + 2 > slots[0].capacity:
                for slot in slots:
                    del slot.tokens[context:]
        forward.graphs = None
        captured = graphs is not None and graphs.replayed - before >= len(taken) - warm
        return statistics.median(taken[warm:]), captured, slots[0].memory.block_bytes // 64

    def profile(self, forward: Any, graphs: Any, context: int) -> None:
        from ktransformers.serve.scheduler.forward import Chunk

        slot = self.slots(forward, 1, context)[0]
        forward.graphs = graphs
        rows = profile_kernels(
            lambda: forward.run([Chunk(slot, [7], slot.length, None, greedy=True)]), self.args.attention_layers
        )
        forward.graphs = None
        self.document.setdefault("kernels", {})[str(context)] = rows
        print_kernels(f"{context} tokens of context", rows)

    def slots(self, forward: Any, streams: int, context: int) -> list[Any]:
        """With `context` tokens of random contents."""
        import torch

        from ktransformers.serve.cache.kv_cache import KVSlot
        from ktransformers.serve.scheduler.forward import Chunk

        slots = KVSlot.together(streams, context + 1024, fp8=forward.fp8_cache)
        for slot in slots:
            forward.run([Chunk(slot, [1, 2, 3], 0, None)])
            with torch.inference_mode():
                for held in (*slot.keys.values(), *slot.values.values()):
                    held.copy_(torch.randn(held.shape, dtype=torch.bfloat16, device=held.device) * 0.1)
                for held in (*slot.key_scales.values(), *slot.value_scales.values()):
                    held.fill_(127)  # a scale of 1
            slot.tokens[:] = [5] * context
        return slots

    def chunk_rate(self, forward: Any, context: int) -> float:
        """Tokens/s of a chunk of a prompt behind `context` tokens."""
        from ktransformers.serve.scheduler.forward import Chunk

        slot = self.slots(forward, 1, context)[0]

        def call() -> None:
            del slot.tokens[context:]
            forward.run([Chunk(slot, [7] * self.args.chunk, context, None, greedy=True)])

        return float(self.args.chunk / self.seconds(call, repeat=3, calls=1))

    def model(self) -> None:
        from ktransformers.place import attach
        from ktransformers.serve.graphs.step_graphs import StepGraphs
        from ktransformers.serve.scheduler import forward as forward_module

        recipe = replace(recipes()[self.args.shape], layers=self.args.layers)
        heads = ("cache", "residents", "streams", "context", "ms", "tokens/s", "bytes/token", "note")
        table = Table(heads, [9, 9, 7, 8, 8, 9, 11, 14])
        use_latents = forward_module.use_latents

        def without(is_served: Callable[[], bool]) -> Any:
            return replace(use_latents(is_served), recognise=lambda model: ())

        model = build_packed(recipe, self.device, self.args.format)
        placement = attach(model, policy="auto", device="cpu" if self.device.type == "cpu" else None)
        assert placement is not None and not placement.left, placement
        stock = model.config._attn_implementation
        for cache in ("expanded", "latents"):  # the second changes the modules and stays
            model.set_attn_implementation(stock)
            forward_module.use_latents = use_latents if cache == "latents" else without
            forward = forward_module.Forward(model)
            for share in (0.0, 1.0):
                placement.place_residents(ratio=share)
                graphs = StepGraphs(model, placement) if self.device.type == "cuda" else None
                for streams in self.args.streams:
                    for context in self.args.contexts:
                        taken, captured, size = self.steps(forward, graphs, streams, context)
                        row = {"cache": cache, "share": share, "streams": streams, "context": context}
                        row |= {"seconds": taken, "tokens_per_s": streams / taken, "bytes_per_token": size}
                        self.record("model", row | {"captured": captured})
                        cells = [cache, f"{share:.0%}", str(streams), str(context), f"{1e3 * taken:.2f}"]
                        note = "" if captured else "not captured"
                        table.row([*cells, f"{streams / taken:.1f}", str(size), note])
                if graphs is not None:
                    graphs.clear()
            for context in self.args.contexts:
                rate = self.chunk_rate(forward, context)
                row = {"cache": cache, "context": context, "tokens": self.args.chunk, "tokens_per_s": rate}
                self.record("prompts", row)
                table.row([cache, "100%", "1", str(context), "", f"pp {rate:.0f}", "", ""])
        forward_module.use_latents = use_latents
        placement.detach()

    def attention(self) -> None:
        import torch
        from e2e_models import _blank, _fill

        from ktransformers.serve.graphs.step_graphs import StepGraphs
        from ktransformers.serve.scheduler.forward import make_forward

        words = V3_ATTENTION
        if self.device.type == "cpu":
            words = {**words, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32}
        recipe = Recipe("v3-attention", words, (), layers=self.args.attention_layers, vocabulary=1024)
        model = _blank(recipe, self.device, "eager")
        _fill(model, self.device)
        for layer in model.model.layers:
            layer.mlp = torch.nn.Identity()  # the bench is of attention alone
        weights = sum(one.numel() * one.element_size() for name, one in model.named_parameters() if "embed" not in name)
        forward: Any = make_forward(model, fp8_cache=self.args.fp8)
        heads, width, products = 128, 576, 1088
        table = Table(("context", "ms", "launched ms", "bar ms", "bytes roof ms", "GB"), [8, 8, 12, 8, 14, 6])
        for context in self.args.attention_contexts:
            graphs = StepGraphs(model, None) if self.device.type == "cuda" else None
            taken, captured, size = self.steps(forward, graphs, 1, context)
            launched, _, _ = self.steps(forward, None, 1, context)
            layers = self.args.attention_layers
            cache = context * width * 2 * layers
            operations = 2 * context * heads * products * layers
            bar = weights / (0.8 * self.read_rate) + operations / 250e12
            roof = (weights + cache) / self.read_rate
            row = {"context": context, "seconds": taken, "captured": captured, "launched_seconds": launched}
            row |= {"bar_seconds": bar, "bytes_roof_seconds": roof, "weights": weights, "cache": cache}
            self.record("attention", row | {"bytes_per_token": size})
            times = [f"{1e3 * one:.2f}" for one in (taken, launched, bar, roof)]
            table.row([str(context), *times, f"{(weights + cache) / 1e9:.1f}"])
            if self.args.profile and graphs is not None:
                self.profile(forward, graphs, context)
            torch.cuda.empty_cache()


class _Tenth:
    """A tenth of a call that does ten times the work: every tenth call does it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self._count = call, 0

    def __call__(self) -> None:
        if self._count % 10 == 0:
            self._call()
        self._count += 1


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        print("latents.py: no CUDA device; --device cpu only shows that it runs", file=sys.stderr)
        return 1
    begun = time.perf_counter()
    bench = Bench(args, sys.argv[1:] if argv is None else argv)
    for part in args.parts:
        getattr(bench, part)()
    bench.document["seconds"] = time.perf_counter() - begun
    if args.json:
        save(bench.document, args.json)
    print_last_line(bench.document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
