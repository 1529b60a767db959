"""Stock SGLang on a GPU machine without network: alone, with our `kt_kernel` behind its `--kt-*` flags, and with the
`kt-kernel` of the package index, on the same checkpoint within the same hour.

    python bench/sglang/run.py --parts build/carry_sglang --json sglang.json unpack model plain kt0 peer1 kt32 peer32
    python bench/sglang/run.py --json sglang.json load restart

Steps run in the order given, each with a time limit; the document is written after each, and steps of a later call are
added to it. Steps that are a server: see `VARIANTS`. `+` joins variants that are only compared with `plain` and not
timed, so that they may run side by side: `load+kt128+int8` asks kt128 and int8 while the load runs on kt32.

For each server: seconds until it answers, greedy answers and log-probabilities against those of `plain` (whose noise is
the distance between its answers one by one and in one batch), new tokens a second with 1 and 16 streams, memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from pack import extract_archive, join  # noqa: E402
from server import Server, ServerFailed, answers, compare, load, prefill_rate, rate  # noqa: E402

SOURCE = HERE.parents[1] / "src"
ENTRY_POINTS = "[sglang.srt.plugins]\nktransformers = ktransformers.serve.sglang.plugin:register\n"
SMALL = ("--chunked-prefill-size", "2048", "--cuda-graph-max-bs", "16")
# The release takes a mask where mainline SGLang passes a number; without these lines it raises TypeError.
PEER_MASK = """
_Wrapper = KTMoEWrapper


class KTMoEWrapper(_Wrapper):
    def __new__(cls, *args, num_gpu_experts=None, **words):
        if num_gpu_experts is not None and "gpu_experts_mask" not in words:
            import torch

            words["gpu_experts_mask"] = torch.arange(words["num_experts"]) < num_gpu_experts
        return _Wrapper.__new__(_Wrapper, *args, **words)
"""


@dataclass(frozen=True)
class Variant:
    """`gpu_experts` None: without --kt-* flags. `peer`: the index's kt-kernel in place of ours."""

    gpu_experts: int | None = None
    method: str = "BF16"
    peer: bool = False
    weights: str = "model"  # of --kt-weight-path
    extra: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    threads: int | None = None  # None: those of --threads


VARIANTS = {
    "plain": Variant(),
    "kt0": Variant(0),
    "kt0_14": Variant(0, threads=14),  # as many as kt_kernel takes of 16 CPUs
    "kt1": Variant(1),
    "kt32": Variant(32),
    "kt128": Variant(128),
    "random32": Variant(32, extra=("--kt-expert-placement-strategy", "random")),
    "int8": Variant(1, "AMXINT8"),
    "int4": Variant(1, "AMXINT4"),
    "fp8": Variant(1, "FP8", weights="model-fp8"),  # the same numbers, see make_model.py
    "deferred2": Variant(0, extra=("--kt-max-deferred-experts-per-token", "2")),
    "stock32": Variant(32, environment=(("SGLANG_PLUGINS", "none"),)),  # mainline's own class, without our plugin
    "lora": Variant(0, adapters=("a", "b")),
    "lora_experts": Variant(0, adapters=("c",)),  # LoRA on experts alone
    "lora_plain": Variant(adapters=("a", "b", "c")),
    "layerwise": Variant(0, extra=("--kt-gpu-prefill-token-threshold", "1024")),
    # Without prefill graphs: the release ends with a segmentation fault at the first request otherwise.
    "peer1": Variant(1, peer=True, extra=("--disable-prefill-cuda-graph",)),
    "peer32": Variant(32, peer=True, extra=("--disable-prefill-cuda-graph",)),
}
UNTIMED = {
    "random32",
    "stock32",
    "int8",
    "int4",
    "fp8",
    "deferred2",
    "kt1",
    "kt128",
    "lora",
    "lora_experts",
    "lora_plain",
}


class Run:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work, self.out = args, args.work, args.json.resolve().parent
        self.document: dict[str, Any] = {"bench": "sglang", "steps": {}}
        if args.json.exists():
            self.document = json.loads(args.json.read_text())
        self._answers = self.work / "answers.json"
        self._lock = threading.Lock()
        self.server_ready = threading.Event()  # of the first of steps side by side
        self._port = 30000 + os.getpid() % 500
        self.steps: dict[str, Callable[[], dict[str, Any]]] = {
            "unpack": self.unpack,
            "model": self.make_model,
            "load": self.load_test,
            "restart": self.restart,
            "own": self.own_server,
            "cache": self.save_cache,
        }

    def save(self, name: str, result: dict[str, Any]) -> None:
        with self._lock:
            self.document["steps"][name] = result
            half = self.args.json.with_name(self.args.json.name + ".part")
            half.write_text(json.dumps(self.document, indent=1) + "\n")
            half.replace(self.args.json)

    def step(self, name: str) -> None:
        begin = time.monotonic()
        try:
            result = self.steps[name]() if name in self.steps else self.measure(name)
        except (ServerFailed, subprocess.SubprocessError, OSError, SystemExit, KeyError, ValueError) as error:
            result = {"failed": f"{type(error).__name__}: {error}"}
        result["seconds"] = round(time.monotonic() - begin, 1)
        self.save(name, result)
        shown = {key: value for key, value in result.items() if key not in ("samples", "answers")}
        print(f"== {name}: {json.dumps(shown)}", flush=True)

    # What the machine needs.

    def unpack(self) -> dict[str, Any]:
        site, peer = self.work / "site", self.work / "peer"
        if not (site / "sglang").exists():
            join(self.args.parts, site)
            sources = self.args.parts / "flashinfer-sources.tar.xz"
            if sources.exists():
                extract_archive(sources, site)
        archive = self.args.parts / "kt-kernel.tar.xz"
        if archive.exists() and not (peer / "kt_kernel").exists():
            extract_archive(archive, peer)
            with (peer / "kt_kernel" / "__init__.py").open("a") as file:
                file.write(PEER_MASK)
        metadata = self.work / "plugin" / "ktransformers_plugin-0.dist-info"
        metadata.mkdir(parents=True, exist_ok=True)
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ktransformers-plugin\nVersion: 0\n")
        (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
        cache = self.args.parts / "cache.tar.xz"
        if cache.exists():
            extract_archive(cache, Path.home())
        return {"cache": cache.exists()}

    def make_model(self) -> dict[str, Any]:
        words = [sys.executable, str(HERE / "make_model.py"), str(self.model), "--layers", str(self.args.layers)]
        words += ["--adapter", "a", "--adapter", "b", "--adapter", "c", "--experts-only", "c"]
        words += ["--tiny"] if self.args.tiny else []
        subprocess.run(words, check=True, timeout=240)
        return {"layers": self.args.layers}

    @property
    def model(self) -> Path:
        path: Path = self.work / "model"
        return path

    def save_cache(self) -> dict[str, Any]:
        """Compiled kernels, so that the first start on a fresh machine takes a minute and not four."""
        target = self.out / "cache.tar.xz"
        names = [name for name in (".cache", ".triton") if (Path.home() / name).exists()]
        subprocess.run(["tar", "-C", str(Path.home()), "-cJf", str(target), *names], check=True, timeout=120)
        return {"mb": round(target.stat().st_size / 1e6, 1)}

    # Servers.

    def server(self, name: str) -> Server:
        variant, work = VARIANTS[name], self.work
        arguments = ["--model-path", str(self.model), *SMALL, *variant.extra]
        paths = [work / "site"]
        environment = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **dict(variant.environment)}
        if variant.gpu_experts is not None:
            experts = 8 if self.args.tiny and variant.gpu_experts == 128 else variant.gpu_experts
            arguments += ["--kt-weight-path", str(work / variant.weights), "--kt-method", variant.method]
            arguments += ["--kt-cpuinfer", str(variant.threads or self.args.threads)]
            arguments += ["--kt-threadpool-count", "1", "--kt-num-gpu-experts", str(experts)]
            paths = [work / "peer", *paths] if variant.peer else [self.args.source, work / "plugin", *paths]
            if variant.peer:
                environment["KT_KERNEL_CPU_VARIANT"] = "amx"
        if variant.adapters:
            adapters = [f"{name}={self.model.with_name(self.model.name + '-' + name)}" for name in variant.adapters]
            arguments += ["--enable-lora", "--lora-backend", "triton", "--max-loras-per-batch", "4"]
            arguments += ["--lora-paths", *adapters]
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")]).rstrip(":")
        with self._lock:
            self._port += 7
            return Server(name, self._port, arguments, environment, self.out / f"{name}.log")

    @contextlib.contextmanager
    def running(self, name: str) -> Any:
        server = self.server(name)
        try:
            server.start(self.args.start_timeout)
            self.server_ready.set()
            yield server
        finally:
            server.stop()

    def measure(self, name: str) -> dict[str, Any]:
        timed = name not in UNTIMED or self.args.time_all
        with self.running(name) as server:
            result = self.check(name, server)
            if timed:
                result["streams_1"] = rate(server, 1)
                result["streams_16"] = rate(server, 16)
                result["prompt_2000"] = prefill_rate(server, 2000)
            result["memory_mib"] = server.memory_mib()
        return result

    def check(self, name: str, server: Server) -> dict[str, Any]:
        """Greedy answers beside those of `plain`; of variants with adapters those of every adapter beside `lora_plain`,
        the server that computes the same adapters on the GPU."""
        result: dict[str, Any] = {"start_seconds": server.started}
        for adapter in ("", *VARIANTS[name].adapters):
            fields = {"lora_path": adapter} if adapter else {}
            label = f"/{adapter}" if adapter else ""
            single = answers(server, together=False, **fields)
            if name in ("plain", "lora_plain"):
                noise = compare(answers(server, together=True, **fields), single)
                result[f"noise{label}"] = noise
                self._keep(name + label, single)
                continue
            reference = f"{'lora_plain' if adapter else 'plain'}{label}"
            expected = self._kept().get(reference)
            result[f"against_{reference}"] = "not run" if expected is None else compare(single, expected)
        return result

    def _kept(self) -> dict[str, Any]:
        return json.loads(self._answers.read_text()) if self._answers.exists() else {}

    def _keep(self, name: str, single: list[dict[str, Any]]) -> None:
        with self._lock:
            self._answers.write_text(json.dumps({**self._kept(), name: single}))

    def load_test(self) -> dict[str, Any]:
        with self.running(self.args.load_variant) as server:
            result = load(server, self.args.load_seconds, 16, VARIANTS[self.args.load_variant].adapters)
            result["after"] = self.check(self.args.load_variant, server)
        return {"variant": self.args.load_variant, **result}

    def restart(self) -> dict[str, Any]:
        """SIGKILL in the middle of a load; what is left, and the next start's answers."""
        name = self.args.load_variant
        server = self.server(name)
        server.start(self.args.start_timeout)
        client = threading.Thread(target=load, args=(server, 4.0, 8))
        client.start()
        time.sleep(2)
        gone = server.kill()
        client.join()
        left = server.processes()
        with self.running(name) as again:
            result = self.check(name, again)
        return {
            "variant": name,
            "seconds_until_gone": gone,
            "processes_left": len(left),
            "gpu_mib": gpu_mib(),
            **result,
        }

    def own_server(self) -> dict[str, Any]:
        """Our own engine on the same shapes, for the distance between the two doors."""
        target = self.out / "serve_graphs.json"
        words = [
            sys.executable,
            str(HERE.parent / "serve_graphs.py"),
            "--layers",
            str(self.args.layers),
            "--format",
            "bf16",
        ]
        words += ["--shares", "0,0.25", "--streams", "1,16", "--prompt", "32", "--vocabulary", "32000"]
        # pydantic alone: the other packages of SGLang would replace the machine's newer ones.
        packages = self.work / "own"
        packages.mkdir(exist_ok=True)
        for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions.py"):
            if not (packages / name).exists():
                (packages / name).symlink_to(self.work / "site" / name)
        paths = f"{self.args.source}:{os.environ.get('PYTHONPATH', '')}:{packages}"
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run([*words, "--json", str(target)], check=True, timeout=240, env=environment)
        return {"document": json.loads(target.read_text())}


def gpu_mib() -> int:
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(words, check=True, capture_output=True, text=True, timeout=20).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError):
        return -1


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="+", help="unpack, model, load, restart, own, cache, or variants joined by +")
    parser.add_argument("--parts", type=Path, default=Path("build/carry_sglang"), help="what pack.py wrote")
    parser.add_argument("--work", type=Path, default=Path.home() / "sglang-bench", help="for packages and checkpoint")
    parser.add_argument("--source", type=Path, default=SOURCE, help="directory with ktransformers and kt_kernel")
    parser.add_argument("--json", type=Path, default=Path("sglang.json"), metavar="FILE")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--threads", type=int, default=12, help="--kt-cpuinfer; default 12")
    parser.add_argument("--start-timeout", type=float, default=240)
    parser.add_argument("--load-variant", default="kt32", choices=sorted(VARIANTS))
    parser.add_argument("--load-seconds", type=float, default=300)
    parser.add_argument("--time-all", action="store_true", help="time variants that are only compared otherwise")
    parser.add_argument("--tiny", action="store_true", help="a tiny checkpoint, to try these scripts")
    args = parser.parse_args(argv)
    known = {"unpack", "model", "load", "restart", "own", "cache", *VARIANTS}
    for word in args.steps:
        if unknown := [name for name in word.split("+") if name not in known]:
            parser.error(f"{unknown[0]} is no step; known: {', '.join(sorted(known))}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    for word in args.steps:
        first, *beside = word.split("+")
        main_thread = threading.Thread(target=run.step, args=(first,))
        run.server_ready.clear()
        main_thread.start()
        # SGLang sizes its KV cache by the memory that is free before and after it loads, so starts must not overlap.
        while beside and main_thread.is_alive() and not run.server_ready.wait(1):
            pass
        for name in beside:  # one after the other beside the first
            run.step(name)
        main_thread.join()
    print(json.dumps({"json": str(args.json), "failed": failed_steps(run.document)}))
    return 1 if failed_steps(run.document) else 0


def failed_steps(document: dict[str, Any]) -> list[str]:
    return [name for name, result in document["steps"].items() if "failed" in result]


if __name__ == "__main__":
    sys.exit(main())
