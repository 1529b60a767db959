"""A cached prefix from each tier of the KV cache beside computing it again, through the server's own engine.

    python bench/kv_tiers.py --json kv_tiers.json
    python bench/kv_tiers.py --device cpu --layers 2 --prompt 512 --format int4:32

A model of real layer sizes is made in memory (`e2e_models.py`). A prompt of `--prompt` tokens and one more is answered
with one token: computed; with its blocks in host memory; with its blocks in the file alone, its page cache dropped by
`posix_fadvise`. Seconds are those from submission to the token, the median of `--rounds` rounds in alternation, with
another prompt in each. `copy` is the host tier's own part, from pinned memory into the slot, and its yardstick is one
large copy from pinned memory (on the CPU, from memory to memory) in the same run. `read` is the file's, with checksums,
beside a plain read of the same file in the same state.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from e2e_models import build_packed, recipes
from timing import Table, describe_machine, print_last_line, save

LINK_BYTES = 256 << 20
HEADS = ("prefix from", "seconds", "times faster", "GB/s", "of yardstick")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b", choices=list(recipes()))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--format", default="int4:32", help="of the experts")
    parser.add_argument("--policy", default="auto", help="of the placement; auto is the server's own")
    parser.add_argument("--share", type=float, default=1.0, help="of experts that are resident on the GPU; default 1")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens of the prefix, a multiple of 64")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of one step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", type=Path, help="a folder for the file; default: a temporary one")
    parser.add_argument("--fp8", action="store_true", help="keys and values in codes of 8 bits")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here")
    return parser.parse_args(argv)


class Silent:
    """A tokenizer for answers that are not read."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "." * len(tokens)


@dataclass(frozen=True)
class Answer:
    seconds: float
    cached: int
    token: int


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from ktransformers.place import attach
        from ktransformers.serve.scheduler.forward import make_forward

        self.args, self.device = args, torch.device(args.device)
        recipe = replace(recipes()[args.shape], layers=args.layers, vocabulary=args.vocabulary)
        model = build_packed(recipe, self.device, args.format)
        self.forward = make_forward(model, fp8_cache=args.fp8)
        if self.device.type == "cuda":
            placement = attach(model, policy=args.policy)
            assert placement is not None and not placement.left, placement
            placement.place_residents(ratio=args.share)
        self.prompts = iter(range(1, 10**6))
        self.answer(self.engine(), self.prompt())  # allocates what a first step allocates
        self.layout = self.layout_of_slot()

    def engine(self, tiers: Any = None) -> Any:
        from ktransformers.serve.scheduler.engine import ServeEngine
        from ktransformers.serve.scheduler.scheduler import Limits

        length = self.args.prompt + 64
        engine = ServeEngine(self.forward, Limits(1, 8, self.args.chunk, 2 * length, length))
        if tiers is not None:
            engine.attach_tiers(tiers)
        return engine

    def layout_of_slot(self) -> Any:
        from ktransformers.serve.cache.cache_blocks import BlockLayout

        engine = self.engine()
        self.answer(engine, self.prompt()[:65])
        slot = engine.kv_cache.slots[0]
        layout = BlockLayout.of_memory(slot.memory, slot.states)
        assert layout is not None
        return layout

    def prompt(self) -> tuple[int, ...]:
        number, count = next(self.prompts), self.args.prompt + 1
        return tuple((number * 7919 + 31 * at * at + at) % self.args.vocabulary for at in range(count))

    def answer(self, engine: Any, prompt: tuple[int, ...]) -> Answer:
        from ktransformers.serve.sampling.sampling import Sampling
        from ktransformers.serve.scheduler.engine import FETCH_POLL_SECONDS
        from ktransformers.serve.scheduler.sequence import Event, GenerationRequest, Sequence

        events: list[Event] = []
        request = GenerationRequest(prompt, 1, Sampling(temperature=0), logprobs=0)
        started = time.perf_counter()
        engine.submit([Sequence(request, Silent(), events.append)])
        while not events or events[-1].finish is None:
            if not engine.step():  # as the engine's own thread: without a pause it would take the readers' time
                time.sleep(FETCH_POLL_SECONDS)
        seconds = time.perf_counter() - started
        if events[-1].error:
            raise SystemExit(events[-1].error)
        return Answer(seconds, events[-1].cached, next(score.token for event in events for score in event.scores))

    def tiers(self, path: Path | None = None) -> Any:
        """Tiers for two prompts; `path`: with a file, and host memory as its buffer."""
        from ktransformers.serve.cache.cache_tiers import CacheTiers
        from ktransformers.serve.cache.disk_tier import FILE_HEADER, DiskFile, DiskTier, record_size
        from ktransformers.serve.cache.host_tier import HostTier

        blocks = 2 * (self.args.prompt // 64 + 1)
        host = HostTier(self.layout.bytes, blocks * self.layout.bytes, pinned=self.device.type == "cuda")
        disk = None
        if path is not None:
            limit = FILE_HEADER + blocks * record_size(self.layout.bytes)
            disk = DiskTier(DiskFile(path, b"bench"), self.layout.bytes, limit, blocks)
        return CacheTiers(self.layout, b"bench", host, disk, buffers=path is not None)

    def link_rate(self) -> float:
        """Bytes/s of one large copy into the memory of slots."""
        import torch

        on_gpu = self.device.type == "cuda"
        source = torch.ones(LINK_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        target, taken = torch.zeros(LINK_BYTES, dtype=torch.uint8, device=self.device), []
        for _ in range(5):
            self.wait()
            started = time.perf_counter()
            target.copy_(source, non_blocking=True)
            self.wait()
            taken.append(time.perf_counter() - started)
        return LINK_BYTES / min(taken)

    def wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def from_host(self, prompt: tuple[int, ...]) -> tuple[Answer, float, float]:
        """The answer, and bytes and seconds of the copy into the slot."""
        tiers = self.tiers()
        engine = self.engine(tiers)
        self.answer(engine, prompt)
        assert tiers.flush()
        engine.kv_cache.evict_idle()
        self.answer(engine, prompt)  # the first copy of each row after it was written is not measured
        assert tiers.flush()
        engine.kv_cache.evict_idle()
        self.wait()
        before = tiers.host.counts.read_bytes, tiers.host.counts.read_seconds
        answer = self.answer(engine, prompt)
        assert tiers.flush()
        counts = tiers.host.counts
        return answer, counts.read_bytes - before[0], counts.read_seconds - before[1]

    def from_disk(self, prompt: tuple[int, ...], folder: Path) -> tuple[Answer, dict[str, float]]:
        path = folder / "kv_tiers.ktkv"
        path.unlink(missing_ok=True)
        tiers = self.tiers(path)
        self.answer(self.engine(tiers), prompt)
        started = time.perf_counter()
        assert tiers.flush(600)
        tiers.close()
        write = tiers.disk.counts
        rates = {"write_bytes": write.write_bytes, "write_seconds": write.write_seconds}
        rates["flush_seconds"] = time.perf_counter() - started
        rates["plain_read_bytes_per_s"] = read_plainly(path)
        drop_pages(path)
        started = time.perf_counter()
        tiers = self.tiers(path)
        rates["open_seconds"] = time.perf_counter() - started
        engine = self.engine(tiers)
        drop_pages(path)
        answer = self.answer(engine, prompt)
        rates |= {"read_bytes": tiers.disk.counts.read_bytes, "reader_seconds": tiers.disk.counts.read_seconds}
        tiers.close()
        path.unlink()
        return answer, rates


def drop_pages(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def read_plainly(path: Path) -> float:
    """Bytes/s of reading the file from its beginning with its page cache dropped."""
    drop_pages(path)
    buffer, size, started = bytearray(8 << 20), 0, time.perf_counter()
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            size += count
    return size / (time.perf_counter() - started)


def check(computed: Answer, fetched: Answer, expected: int) -> None:
    if fetched.cached != expected:
        raise SystemExit(f"kv_tiers.py: {fetched.cached} tokens were cached, expected {expected}")
    if fetched.token != computed.token:
        given = f"{fetched.token} for {computed.token}"
        print(f"kv_tiers.py: another token, {given}: a near-tie in 16 bits", file=sys.stderr)


def measure(bench: Bench, folder: Path) -> list[dict[str, Any]]:
    rounds = []
    for _ in range(bench.args.rounds):
        prompt = bench.prompt()
        bench.wait()
        computed = bench.answer(bench.engine(), prompt)
        host, copied, seconds = bench.from_host(prompt)
        disk, rates = bench.from_disk(prompt, folder)
        for fetched in (host, disk):
            check(computed, fetched, bench.args.prompt)
        row = {"computed_seconds": computed.seconds, "host_seconds": host.seconds, "disk_seconds": disk.seconds}
        row |= {"copy_bytes_per_s": copied / seconds, "link_bytes_per_s": bench.link_rate()}
        rounds.append(row | rates)
    return rounds


def main(argv: list[str] | None = None) -> int:
    import torch

    args = parse(argv)
    if args.device != "cpu" and not torch.cuda.is_available():
        print("kv_tiers.py: no CUDA device; --device cpu", file=sys.stderr)
        return 1
    if args.prompt < 64 or args.prompt % 64:
        print("kv_tiers.py: --prompt is a multiple of 64", file=sys.stderr)
        return 1
    begun = time.perf_counter()
    bench = Bench(args)
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        rounds = measure(bench, Path(folder))
    middle = {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}
    size = args.prompt // 64 * bench.layout.bytes
    read_rate = size / middle["disk_seconds"]
    document: dict[str, Any] = {
        "bench": "kv_tiers",
        "command": shlex.join(["python", "bench/kv_tiers.py", *(sys.argv[1:] if argv is None else argv)]),
        "machine": describe_machine(),
        "shape": args.shape,
        "layers": args.layers,
        "format": args.format,
        "prompt": args.prompt,
        "block_bytes": bench.layout.bytes,
        "rounds": rounds,
        "median": middle,
        "host_times_faster": middle["computed_seconds"] / middle["host_seconds"],
        "disk_times_faster": middle["computed_seconds"] / middle["disk_seconds"],
        "copy_of_link": middle["copy_bytes_per_s"] / middle["link_bytes_per_s"],
        "seconds": time.perf_counter() - begun,
    }
    if bench.device.type == "cuda":
        document["machine"]["gpu"] = torch.cuda.get_device_name(bench.device)
    print(f"prefix of {args.prompt} tokens, {size / 2**20:.0f} MiB in blocks of {bench.layout.bytes / 2**20:.2f} MiB")
    table = Table(HEADS, [12, 9, 12, 8, 30])
    table.row(["computing", f"{middle['computed_seconds']:.3f}", "1", "", ""])
    link, plain = middle["link_bytes_per_s"], middle["plain_read_bytes_per_s"]
    copy = f"{document['copy_of_link']:.0%} of {link / 1e9:.1f} GB/s (copy)"
    copied = f"{middle['copy_bytes_per_s'] / 1e9:.2f}"
    table.row(["host", f"{middle['host_seconds']:.4f}", f"{document['host_times_faster']:.1f}", copied, copy])
    read = f"{read_rate / plain:.0%} of {plain / 1e9:.2f} GB/s (read)"
    faster = f"{document['disk_times_faster']:.1f}"
    table.row(["disk", f"{middle['disk_seconds']:.4f}", faster, f"{read_rate / 1e9:.2f}", read])
    if args.json:
        save(document, args.json)
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
