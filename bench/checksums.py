"""What comparing experts with their checksums costs when they are first copied to a GPU: formats x numbers of experts.

    python bench/checksums.py --formats bf16,int4:32 --experts 1,8,128 --json checksums.json

Experts of a packed directory are compared with their CRC-32C once, on all threads, before the first copy
(`ExpertCache.fetch`). A cell times copies of so many experts of one layer into an empty cache until they are there:
without checksums, with checksums that were not compared yet, and with those that were. Columns: the three times, the
comparison alone and its rate, the rates of link and memory measured in the same run, and the first copy over the one
without checksums. Copy and comparison read the same bytes one after the other, so the floor of the first copy is their
sum. Experts are in host memory already; reading them from a disk comes on top in both cases. With `--device cpu` copies
stay in host memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arguments import numbers, words
from shapes import SHAPES
from timing import Table, describe_machine, print_last_line, save

if TYPE_CHECKING:
    import torch

    from ktransformers.nn import ExpertStore
    from ktransformers.place.gpu.expert_cache import ExpertCache, LayerBytes

READ_BYTES = 1 << 30  # in all, beyond any cache
HEADS = ("format", "experts", "MB", "copy ms", "first ms", "again ms", "check ms", "check GB/s", "link GB/s", "ratio")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-30b")
    parser.add_argument("--formats", type=words, default=["bf16", "int4:32"])
    parser.add_argument("--experts", type=numbers, default=[1, 8, 128], help="in one copy")
    parser.add_argument("--device", help="default: cuda:0 where there is one, else cpu")
    parser.add_argument("--pin", choices=["map", "stage"], default="map")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the document here, after every cell")
    return parser.parse_args(argv)


def adopted(packed: ExpertStore, checksums: torch.Tensor | None) -> ExpertStore:
    """A store of the same memory whose experts were not compared yet."""
    from ktransformers.nn import ExpertStore

    store = ExpertStore(packed.num_experts, packed.hidden_size, packed.intermediate_size, formats=packed.formats)
    memory = packed.memory()
    store.adopt(gate_up=memory["gate_up"], down=memory["down"], checksums=checksums, source="a file")
    return store


def source_of(store: ExpertStore) -> LayerBytes:
    from ktransformers.place.gpu.expert_cache import ExpertPart, LayerBytes

    first, down = (tuple(ExpertPart(*part) for part in store.parts()[name]) for name in ("gate_up", "down"))
    return LayerBytes(first, down, store.verify, store.place_pages)


def seconds(call: Callable[[], object], wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - start


def copy_time(cache: ExpertCache, source: LayerBytes, experts: list[int], wait: Callable[[], None]) -> float:
    cache.evict_layer(0)
    return seconds(lambda: cache.fetch(0, source, experts), wait)


def measure(
    packed: ExpertStore, cache: ExpertCache, experts: list[int], rounds: int, wait: Callable[[], None]
) -> dict[str, float]:
    """Medians over rounds; what is compared takes turns."""
    import torch

    checksums = torch.tensor(packed.checksums())
    plain = source_of(adopted(packed, None))
    copy_time(cache, plain, experts, wait)  # registers the memory with the driver
    times: dict[str, list[float]] = {"copy": [], "first": [], "again": [], "check": []}
    for _ in range(rounds):
        times["copy"].append(copy_time(cache, plain, experts, wait))
        checked = source_of(adopted(packed, checksums))
        times["first"].append(copy_time(cache, checked, experts, wait))
        times["again"].append(copy_time(cache, checked, experts, wait))
        unchecked = adopted(packed, checksums)
        times["check"].append(seconds(lambda store=unchecked: store.verify(experts), wait))  # type: ignore[misc]
    return {name: statistics.median(values) for name, values in times.items()}


def main(argv: list[str] | None = None) -> int:
    import torch
    from place import stores

    from ktransformers.ground.pool import default_pool
    from ktransformers.place.gpu.expert_cache import ExpertCache
    from ktransformers.place.gpu.pinned import RegisteredMemory
    from ktransformers.place.placement import geometry_of

    args = parse(argv)
    cuda = torch.cuda.is_available() if args.device is None else args.device.startswith("cuda")
    device, shape = torch.device(args.device or ("cuda:0" if cuda else "cpu")), SHAPES[args.shape]
    wait: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if cuda else (lambda: None)
    machine = describe_machine() | {"gpu": torch.cuda.get_device_name(device) if cuda else None}
    machine["read_gbs"] = default_pool().rate("read", 0.05, bytes=READ_BYTES // default_pool().threads) / 1e9
    document: dict[str, Any] = {"bench": "checksums", "machine": machine, "shape": shape.name, "pin": args.pin}
    document["cells"] = []
    table = Table(HEADS, [8, 7, 7, 7, 8, 8, 8, 10, 9, 5])
    for spec in args.formats:
        (packed,) = stores(shape, spec, 1)
        registered = RegisteredMemory(1 << 62) if cuda and args.pin == "map" else None
        cache = ExpertCache(geometry_of(packed), shape.experts, device, registered)
        for count in (min(count, shape.experts) for count in args.experts):
            taken = measure(packed, cache, list(range(count)), args.rounds, wait)
            size = count * cache.expert_bytes
            cell = {"format": spec, "experts": count, "bytes": size, **{f"{name}_s": s for name, s in taken.items()}}
            cell |= {"ratio": taken["first"] / taken["copy"], "check_gbs": size / taken["check"] / 1e9}
            cell |= {"link_gbs": size / taken["copy"] / 1e9}
            document["cells"].append(cell)
            times = [f"{1e3 * taken[name]:.2f}" for name in ("copy", "first", "again", "check")]
            rates = [f"{cell['check_gbs']:.1f}", f"{cell['link_gbs']:.1f}", f"{cell['ratio']:.2f}"]
            table.row([spec, str(count), f"{size / 1e6:.1f}", *times, *rates])
            if args.json:
                save(document, args.json)
        if registered is not None:
            wait()
            registered.close()
    print(f"memory is read at {machine['read_gbs']:.1f} GB/s")
    print_last_line(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
