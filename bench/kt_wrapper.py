"""`KTMoEWrapper` of ktransformers and of kt-kernel 0.7.2 through the same calls, in alternating rounds of one run.

    python bench/kt_wrapper.py --peer-site DIR --methods BF16,AMXINT8 --tokens 1,16,512 --out FILE

DIR holds an unpacked kt-kernel; without it only ours is timed. Each method gets two processes that differ in nothing
but the `kt_kernel` that they import: they load the same files or tensors, and are timed in turns, because the speed of
a machine drifts. With a CUDA device hidden states are on it and calls are ordered by a stream, eagerly or replayed from
a CUDA graph over all layers; kt-kernel's inference needs one. Training (methods that end in _SFT) is a saving forward
and a backward on host tensors. AMXINT8_W8A8 and AMXINT4_W8A8 are ours with activations in 8 bits, as kt-kernel's
AMXINT8 and AMXINT4 always have them, which they are timed beside. Errors are relative to float32 over the weights that
both were given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {"experts": 128, "top_k": 8, "hidden": 2048, "intermediate": 768}  # of Qwen3-30B-A3B
TINY = {"experts": 8, "top_k": 2, "hidden": 256, "intermediate": 128}
FILES = {"BF16": "bf16", "FP8": "fp8:128x128", "RAWINT4": "int4:32"}  # methods that read a checkpoint
METHODS = "BF16,AMXINT8,AMXINT4,FP8,RAWINT4,AMXBF16_SFT"
RANK = 8
ROUTINGS = 8  # batches that calls take turns with, so that experts do not stay in the cache
SOURCE = Path(__file__).resolve().parents[1] / "src"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-site", help="folder with kt-kernel's packages")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--tokens", default="1,16,512,2048,8192")
    parser.add_argument("--threads", type=int, default=max(1, len(os.sched_getaffinity(0)) - 4))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of each process, for each cell")
    parser.add_argument("--seconds", type=float, default=0.4, help="of timed calls in a round")
    parser.add_argument("--tiny", action="store_true", help="a tiny layer, to try this script")
    parser.add_argument("--out", help="write JSON")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--site", help=argparse.SUPPRESS)
    parser.add_argument("--weights", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


# The process under test.


def import_wrapper(site: Path) -> Any:
    """`KTMoEWrapper` of the `kt_kernel` below `site`. An editable install of ours answers imports before PYTHONPATH
    does, and ours would be timed beside itself, so its finder is removed."""
    if site.resolve() != SOURCE:
        sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
    import kt_kernel

    if not Path(kt_kernel.__file__).is_relative_to(site.absolute()):
        raise SystemExit(f"kt_kernel was imported from {kt_kernel.__file__}, expected one below {site}")
    return kt_kernel.KTMoEWrapper


class Worker:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        KTMoEWrapper = import_wrapper(Path(args.site))

        self.torch, self.args, self.method = torch, args, args.worker
        self.sft = args.worker.endswith("_SFT")
        self.device = "cuda" if torch.cuda.is_available() and not self.sft else "cpu"
        sizes = [int(word) for word in args.tokens.split(",")]
        KTMoEWrapper.set_capture_batch_sizes([size for size in sizes if size <= 64])
        self.gate, self.up, self.down = self.tensors(0)
        self.kept: list[list[Any]] = []  # LoRA of each layer
        start = time.perf_counter()
        self.layers = [self.layer(KTMoEWrapper, index, max(sizes)) for index in range(args.layers)]
        self.load_seconds = time.perf_counter() - start
        self.graphs: dict[int, Any] = {}

    def tensors(self, layer: int) -> Any:
        """Weights as bf16, from the checkpoint of the method or random."""
        torch, shape = self.torch, SHAPE
        if self.args.weights and (Path(self.args.weights) / "reference.safetensors").is_file():
            from safetensors import safe_open

            with safe_open(Path(self.args.weights) / "reference.safetensors", "pt") as file:
                return [file.get_tensor(name) for name in ("gate", "up", "down")]
        chance = torch.Generator().manual_seed(layer)
        experts, hidden, inner = shape["experts"], shape["hidden"], shape["intermediate"]
        shapes = ((experts, inner, hidden), (experts, inner, hidden), (experts, hidden, inner))
        return [torch.randn(size, generator=chance, dtype=torch.float32).mul_(0.02).bfloat16() for size in shapes]

    def layer(self, factory: Any, index: int, max_tokens: int) -> Any:
        torch = self.torch
        given = {
            "layer_idx": index,
            "num_experts": SHAPE["experts"],
            "num_experts_per_tok": SHAPE["top_k"],
            "hidden_size": SHAPE["hidden"],
            "moe_intermediate_size": SHAPE["intermediate"],
            "gpu_experts_mask": None,
            "cpuinfer_threads": self.args.threads,
            "threadpool_count": 1,
            "weight_path": self.args.weights or "",
            "chunked_prefill_size": max_tokens,
            "method": self.method,
        }
        if self.sft:
            given |= {"mode": "sft", "lora_rank": RANK, "lora_alpha": 16.0}
        wrapper = factory(**given)
        order = torch.arange(SHAPE["experts"])
        if self.method in FILES:
            wrapper.load_weights(order)
        else:
            wrapper.load_weights_from_tensors(self.gate, self.up, self.down, order)
        if self.sft:
            self.init_lora(wrapper)
        return wrapper

    def init_lora(self, wrapper: Any) -> None:
        torch, experts = self.torch, SHAPE["experts"]
        hidden, inner = SHAPE["hidden"], SHAPE["intermediate"]
        factors = []
        for columns, rows in ((hidden, inner), (hidden, inner), (inner, hidden)):
            factors.append((torch.randn(experts, RANK, columns) * 0.02).bfloat16())
            factors.append((torch.randn(experts, rows, RANK) * 0.02).bfloat16())
        self.kept.append([*factors, *(torch.zeros_like(factor) for factor in factors)])
        wrapper.init_lora_weights(*self.kept[-1])

    def batch(self, tokens: int, seed: int) -> Any:
        torch = self.torch
        chance = torch.Generator().manual_seed(seed)
        hidden = torch.randn(tokens, SHAPE["hidden"], generator=chance).bfloat16()
        ids = torch.rand(tokens, SHAPE["experts"], generator=chance).topk(SHAPE["top_k"]).indices
        weights = torch.rand(tokens, SHAPE["top_k"], generator=chance).softmax(-1)
        return [tensor.to(self.device) for tensor in (hidden, ids, weights)]

    def time(self, tokens: int, graph: bool, seconds: float) -> float:
        """Milliseconds of a layer, the median over calls of all layers."""
        batches = [self.batch(tokens, seed) for seed in range(ROUTINGS)]
        run = self.replay(tokens) if graph else self.train if self.sft else self.eager
        times: list[float] = []
        run(batches[0])
        self.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 5:
            start = time.perf_counter()
            run(batches[len(times) % ROUTINGS])
            self.wait()
            times.append((time.perf_counter() - start) / len(self.layers))
        return 1e3 * statistics.median(times)

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def stream(self) -> int:
        return self.torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0

    def eager(self, batch: Any) -> None:
        for layer in self.layers:
            layer.forward(*batch, self.stream())

    def train(self, batch: Any) -> None:
        hidden, ids, weights = batch
        for layer in self.layers:
            layer.forward(hidden, ids, weights, True)
            layer.backward(hidden)

    def replay(self, tokens: int) -> Any:
        if tokens not in self.graphs:
            static = self.batch(tokens, 0)
            self.eager(static)
            self.wait()
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.graph(graph):
                self.eager(static)
            self.graphs[tokens] = graph, static
        graph, static = self.graphs[tokens]

        def run(batch: Any) -> None:
            for target, source in zip(static, batch, strict=True):
                target.copy_(source)
            graph.replay()

        return run

    def error(self, tokens: int = 32) -> float:
        torch, functional = self.torch, self.torch.nn.functional
        hidden, ids, weights = self.batch(tokens, 99)
        layer = self.layers[0]
        out = (
            layer.forward(hidden, ids, weights, False)
            if self.sft
            else layer.forward(*self.batch(tokens, 99), self.stream())
        )
        self.wait()
        x, ids, weights = hidden.float().cpu(), ids.cpu(), weights.cpu()
        expected = torch.zeros(tokens, SHAPE["hidden"])
        scale = 16.0 / RANK
        for expert in ids.unique().tolist():
            rows, slots = (ids == expert).nonzero(as_tuple=True)
            gate, up, down = (matrix[expert].float() for matrix in (self.gate, self.up, self.down))
            if self.sft:
                a = [factor[expert].float() for factor in self.kept[0][:6]]
                gate, up, down = gate + scale * a[1] @ a[0], up + scale * a[3] @ a[2], down + scale * a[5] @ a[4]
            inner = functional.silu(x[rows] @ gate.T) * (x[rows] @ up.T)
            expected.index_add_(0, rows, (inner @ down.T) * weights[rows, slots, None])
        return float((out.float().cpu() - expected).norm() / expected.norm())

    def serve(self) -> None:
        answer = {"load_s": round(self.load_seconds, 2), "device": self.device}
        while True:
            sys.stdout.write(f"@{json.dumps(answer)}\n")
            sys.stdout.flush()
            line = sys.stdin.readline()
            if not line:
                return
            asked = json.loads(line)
            answer = {"error": self.error()} if asked["what"] == "error" else {
                "ms": self.time(asked["tokens"], asked["graph"], asked["seconds"])
            }  # fmt: skip


# The driver.


class Process:
    """A worker; None answers after it died."""

    def __init__(self, args: argparse.Namespace, method: str, weights: str | None, site: str | None) -> None:
        command = [sys.executable, "-P", __file__, "--worker", method, "--tokens", args.tokens]
        command += ["--threads", str(args.threads), "--layers", str(args.layers), *(["--tiny"] if args.tiny else [])]
        command += ["--site", site or str(SOURCE), *(["--weights", weights] if weights else [])]
        paths = [site or str(SOURCE), *filter(None, os.environ.get("PYTHONPATH", "").split(":"))]
        if site:
            paths = [path for path in paths if Path(path).resolve() != SOURCE]
        env = os.environ | {"PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "4"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
        self.facts = self.read()

    def read(self) -> dict[str, Any] | None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        return None

    def ask(self, **asked: Any) -> dict[str, Any] | None:
        if self.facts is None or self.process.poll() is not None:
            return None
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def write_checkpoint(folder: Path, spec: str, layers: int) -> None:
    """Random experts in a released layout, the same in every layer, and their numbers as bf16."""
    import torch
    from safetensors.torch import save_file

    from ktransformers.checkpoint import decode, encode

    folder.mkdir()
    chance = torch.Generator().manual_seed(0)
    experts, hidden, inner = SHAPE["experts"], SHAPE["hidden"], SHAPE["intermediate"]
    tensors: dict[str, Any] = {}
    reference: dict[str, list[Any]] = {"gate": [], "up": [], "down": []}
    for expert in range(experts):
        for role, (rows, columns) in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
            matrix = torch.randn(rows, columns, generator=chance).mul_(0.02).bfloat16()
            parts: dict[str, Any] = {"weight": matrix}
            if spec != "bf16":
                encoded = encode(matrix, spec)
                matrix = decode(encoded)[0].bfloat16()
                codes, scales = encoded.qweight[0], encoded.scales[0]
                if spec.startswith("fp8"):
                    parts = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale_inv": scales}
                else:
                    shape = torch.tensor([rows, columns])
                    parts = {"weight_packed": codes.view(torch.int32), "weight_scale": scales, "weight_shape": shape}
            reference[role].append(matrix)
            for layer in range(layers):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj"
                tensors |= {f"{name}.{ending}": tensor.clone() for ending, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    save_file({role: torch.stack(parts) for role, parts in reference.items()}, folder / "reference.safetensors")


def measure(args: argparse.Namespace, method: str, weights: str | None) -> dict[str, Any]:
    workers = {"ours": Process(args, method, weights, None)}
    if args.peer_site:
        workers["kt-kernel"] = Process(args, method.removesuffix("_W8A8"), weights, args.peer_site)
    result: dict[str, Any] = {"method": method, "load_s": {}, "error": {}, "cells": []}
    for name, worker in workers.items():
        result["load_s"][name] = worker.facts and worker.facts["load_s"]
        result["error"][name] = (worker.ask(what="error") or {}).get("error")
    cuda = bool(workers["ours"].facts and workers["ours"].facts["device"] == "cuda")
    for tokens in map(int, args.tokens.split(",")):
        for graph in (False, True) if cuda and tokens <= 64 else (False,):
            times: dict[str, list[float]] = {name: [] for name in workers}
            for _ in range(args.rounds):
                for name, worker in workers.items():
                    answer = worker.ask(what="time", tokens=tokens, graph=graph, seconds=args.seconds)
                    if answer:
                        times[name].append(answer["ms"])
                    time.sleep(0.1)  # kt-kernel's threads spin for 50 ms after a call
            cell: dict[str, Any] = {"tokens": tokens, "graph": graph}
            cell |= {name: round(statistics.median(found), 4) if found else None for name, found in times.items()}
            if cell.get("kt-kernel") and cell["ours"]:
                cell["ratio"] = round(cell["kt-kernel"] / cell["ours"], 2)
            result["cells"].append(cell)
            print(method, cell, flush=True)
    for worker in workers.values():
        worker.close()
    print(method, {key: result[key] for key in ("load_s", "error")}, flush=True)
    return result


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.tiny:
        SHAPE.update(TINY)
    if args.worker:
        Worker(args).serve()
        return
    sys.path.insert(0, str(SOURCE))
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for method in args.methods.split(","):
            weights = Path(folder) / method
            if method in FILES:
                write_checkpoint(weights, FILES[method], args.layers)
            else:
                weights.mkdir()  # kt-kernel writes quantised experts there
            results.append(measure(args, method, str(weights)))
            if args.out:
                write(args, argv if argv is not None else sys.argv[1:], results)


def write(args: argparse.Namespace, words: list[str], results: list[dict[str, Any]]) -> None:
    """The document so far; a run that is cut off has lost one method."""
    document = {
        "command": " ".join(["python", "bench/kt_wrapper.py", *words]),
        "shape": SHAPE,
        "threads": args.threads,
        "layers": args.layers,
        "results": results,
    }
    Path(args.out).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
