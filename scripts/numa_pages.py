"""Where the pages of packed experts lie on a host with several NUMA nodes: packs a layer, maps the same layer from a
file, computes with both, and asks the kernel for the node of every page.

    python scripts/numa_pages.py FOLDER          # of a file system that is no tmpfs, with 13 MB free
    python scripts/numa_pages.py FOLDER --read   # the file is there already, FOLDER may be read-only

Prints one line per case and exits with 1 if a page lies on another node than that of the threads that compute with it,
if numbers differ from those of one group of threads, or if the mapped experts took memory of their own. As root it also
empties the page cache first, so that the pages are read in by this process, and fills it from one node, so that they
have to be moved. Needs numpy and the native core alone. docs/log.md says how to run it in a guest with two nodes.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ktransformers import _core

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 4, 1024, 512, 8
PAGE = os.sysconf("SC_PAGESIZE")
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}[os.uname().machine]  # system call
NAMES = ("gate_up", "down")
Parts = dict[str, list[tuple[int, int]]]  # of each matrix and node: offset in an expert's bytes, bytes


def nodes_of(address: int, size: int) -> Counter[int]:
    """How many pages that begin in the range lie on each node; a negative number is an error of the kernel."""
    first = -(-address // PAGE) * PAGE
    pages = list(range(first, address + size, PAGE))
    status = (ctypes.c_int * len(pages))()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(MOVE_PAGES, 0, ctypes.c_ulong(len(pages)), (ctypes.c_void_p * len(pages))(*pages), None, status, 0):
        raise OSError(ctypes.get_errno(), "move_pages")
    return Counter(status)


def allowed_nodes() -> list[int]:
    """Nodes that have a CPU of this process, in the order of the pool's groups."""
    cpus, nodes = os.sched_getaffinity(0), []
    for folder in Path("/sys/devices/system/node").glob("node[0-9]*"):
        listed = re.findall(r"(\d+)(?:-(\d+))?", (folder / "cpulist").read_text())
        if any(cpus & set(range(int(first), int(last or first) + 1)) for first, last in listed):
            nodes.append(int(folder.name[4:]))
    return sorted(nodes)


def cpus_of(node: int) -> set[int]:
    listed = re.findall(r"(\d+)(?:-(\d+))?", Path(f"/sys/devices/system/node/node{node}/cpulist").read_text())
    return {cpu for first, last in listed for cpu in range(int(first), int(last or first) + 1)}


def matrices() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    random = np.random.default_rng(0)
    shapes = {
        "gate": (EXPERTS, INTERMEDIATE, HIDDEN),
        "up": (EXPERTS, INTERMEDIATE, HIDDEN),
        "down": (EXPERTS, HIDDEN, INTERMEDIATE),
    }
    return {name: random.standard_normal(shape, np.float32) / 32 for name, shape in shapes.items()}


def forward(experts: _core.Experts) -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng(1)
    hidden, out = random.standard_normal((TOKENS, HIDDEN), np.float32), np.zeros((TOKENS, HIDDEN), np.float32)
    ids = np.arange(2 * TOKENS, dtype=np.int64).reshape(TOKENS, 2) % EXPERTS
    experts.forward(hidden, ids, np.full((TOKENS, 2), 0.5, np.float32), out)
    return out


def anonymous_bytes() -> int:
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(re.findall(r"^Anonymous:\s+(\d+)", text, re.M)[0]) * 1024


class Check:
    def __init__(self, path: Path, nodes: list[int]) -> None:
        self.path, self.nodes, self.failed = path, nodes, False
        self.pool = _core.Pool()
        self.want: np.ndarray[Any, np.dtype[np.float32]] | None = None
        self.parts: Parts = {}

    def report(self, case: str, pages: list[Counter[int]], out: np.ndarray[Any, Any], extra: str = "") -> None:
        wrong = sum(count for node, on in zip(self.nodes, pages, strict=True) for n, count in on.items() if n != node)
        equal = self.want is None or np.array_equal(out, self.want)
        self.want = out if self.want is None else self.want
        ok = wrong == 0 and equal
        self.failed |= not ok
        texts = ["ok  " if ok else "FAIL", f"{case}:", str([dict(on) for on in pages]), extra]
        print(*texts, *([] if equal else ["NUMBERS DIFFER"]), flush=True)

    def packed(self) -> _core.Experts:
        experts = _core.Experts(self.pool, EXPERTS, HIDDEN, INTERMEDIATE)
        experts.pack(0, **matrices())
        out, pages = forward(experts), [Counter[int]() for _ in self.nodes]
        for name, parts in experts.parts().items():
            self.parts[name] = [(offset, data.shape[1]) for offset, data in parts]
            for on, (_, data) in zip(pages, parts, strict=True):
                on.update(nodes_of(data.ctypes.data, data.nbytes))
        self.report("packed from tensors", pages, out)
        return experts

    def write(self, experts: _core.Experts) -> None:
        with self.path.open("wb") as file:
            for name in NAMES:
                file.write(experts.memory()[name].data)
                file.write(bytes(-file.tell() % PAGE))
            os.fsync(file.fileno())
        np.save(self.path.with_suffix(".npy"), np.array(experts.checksums(), np.int64))

    def mapped(self, case: str, verify: bool, place: Callable[[_core.Experts], None]) -> None:
        before, experts, data = (
            anonymous_bytes(),
            _core.Experts(self.pool, EXPERTS, HIDDEN, INTERMEDIATE),
            _core.map_file(str(self.path)),
        )
        views, at = {}, 0
        for name in NAMES:
            size = EXPERTS * sum(width for _, width in self.parts[name])
            views[name] = data[at : at + size]
            at += size + -size % PAGE
        checksums = np.load(self.path.with_suffix(".npy")) if verify else None
        experts.adopt(**views, checksums=checksums, source=str(self.path))
        place(experts)
        out, pages = forward(experts), [Counter[int]() for _ in self.nodes]
        for name, parts in self.parts.items():
            each = sum(width for _, width in parts)
            for expert in range(EXPERTS):
                for on, (offset, width) in zip(pages, parts, strict=True):
                    on.update(nodes_of(views[name].ctypes.data + expert * each + offset, width))
        maps = [
            line.split() for line in Path("/proc/self/numa_maps").read_text().splitlines() if str(self.path) in line
        ]
        totals = " ".join(word for line in maps for word in line if re.match(r"N\d+=", word))
        own = anonymous_bytes() - before
        self.failed |= own > data.nbytes // 10
        sizes = f"(numa_maps {totals}; {own >> 10} KB of its own, {data.nbytes >> 10} KB mapped)"
        self.report(case, pages, out, sizes)

    def fill_cache(self, node: int | None) -> bool:
        """Empty the page cache, and read the file on a node; False: not allowed."""
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3\n")
        except OSError:
            return False
        if node is not None:
            allowed = os.sched_getaffinity(0)
            os.sched_setaffinity(0, cpus_of(node))
            self.path.read_bytes()
            os.sched_setaffinity(0, allowed)
        return True

    def run(self, read: bool) -> None:
        experts = self.packed()
        if not read:
            self.write(experts)
        one = _core.Experts(_core.Pool(threads=2, groups=1), EXPERTS, HIDDEN, INTERMEDIATE)
        one.pack(0, **matrices())
        self.failed |= not np.array_equal(forward(one), self.want)
        del one, experts
        for verify in (True, False):
            words = "checksums" if verify else "no checksums"
            for node in (None, *self.nodes):
                cache = "not cached" if node is None else f"cached on node {node}"
                if self.fill_cache(node):
                    self.mapped(f"mapped, {words}, {cache}", verify, lambda experts: None)
        self.fill_cache(None)
        self.mapped("mapped, all pages at once", True, lambda experts: experts.place_pages())


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--read", action="store_true", help="read FOLDER/layer instead of writing it")
    given = arguments.parse_args()
    nodes = allowed_nodes()
    if len(nodes) < 2:
        print(f"this process has CPUs of {len(nodes)} NUMA node; nothing to show")
        return 0
    check = Check(given.folder / "layer", nodes)
    print(f"{check.pool.threads} threads in {check.pool.groups} groups on nodes {nodes}, {_core.isa()}")
    check.run(given.read)
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
