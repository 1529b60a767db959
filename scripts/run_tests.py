"""Runs the tests of `make test`: two processes of pytest side by side, each of which takes a folder of tests at a time.

    python scripts/run_tests.py                 # everything but the slow tests
    python scripts/run_tests.py --jobs 1 -- -x  # one after the other; options behind -- go to pytest

Most tests compute in one thread, so that one process leaves the second core idle. Folders that take long begin first.
What judges latencies comes last and by itself (`ALONE`). The output of a folder is shown when it has ended: its last
line if all its tests passed, otherwise all of it. The exit code is 0 if every folder passed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
LONGEST_FIRST = (
    "serve",
    "kernels",
    "train",
    "quantized",
    "experts",
    "plan",
    "test_damaged_files.py",
    "loop",
    "place",
    "quant",
    "cli",
    "prove",
    "adapters",
)
ALONE = ("kernels/test_interrupt.py", "test_import.py", "serve/http")
NO_TESTS = 5  # pytest's exit code where all are deselected
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|deselected|errors?|xfailed)")


def _tests_in(paths: tuple[Path, ...]) -> set[Path]:
    return {file for path in paths for file in (path.rglob("test_*.py") if path.is_dir() else [path])}


@dataclass(frozen=True)
class Group:
    paths: tuple[Path, ...]
    ignored: tuple[Path, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(str(path.relative_to(ROOT)) for path in self.paths)

    def files(self) -> set[Path]:
        return _tests_in(self.paths) - _tests_in(self.ignored)


def make_groups() -> tuple[list[Group], Group]:
    """Those that run side by side, the longest first, and the one that runs by itself."""
    alone = Group(tuple(TESTS / name for name in ALONE))
    folders = sorted({file.parent for file in TESTS.rglob("test_*.py")} - {TESTS})
    tops = [folder for folder in folders if folder.parent == TESTS and folder not in alone.paths]
    single = [TESTS / name for name in LONGEST_FIRST if name.endswith(".py")]
    rest = [file for file in sorted(TESTS.glob("test_*.py")) if file not in (*single, *alone.paths)]
    groups = [Group((path,), tuple(file for file in alone.paths if path in file.parents)) for path in (*single, *tops)]
    order = {TESTS / name: place for place, name in enumerate(LONGEST_FIRST)}
    return sorted([*groups, Group(tuple(rest))], key=lambda group: order.get(group.paths[0], len(order))), alone


def run(group: Group, options: list[str]) -> tuple[bool, Counter[str]]:
    command = [sys.executable, "-m", "pytest", "-q", *map(str, group.paths)]
    command += [f"--ignore={path}" for path in group.ignored] + options
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        code = subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT).returncode
        output.seek(0)
        text = output.read()
    summary = next((line for line in reversed(text.splitlines()) if COUNTED.search(line)), "no summary")
    passed = code in (0, NO_TESTS)
    shown = f"{group.name}: {summary.strip('= ')}" if passed else f"{text}\n{group.name}: exit code {code}"
    print(f"{shown} [{time.monotonic() - start:.0f} s]", flush=True)
    return passed, Counter({word: int(count) for count, word in COUNTED.findall(summary)})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("options", nargs="*", help="of pytest, behind --")
    args = parser.parse_args(argv)
    start = time.monotonic()
    groups, alone = make_groups()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda group: run(group, args.options), groups))
    results.append(run(alone, args.options))
    totals = sum((counts for _, counts in results), Counter[str]())
    counted = ", ".join(f"{count} {word}" for word, count in totals.items())
    failed = sum(not passed for passed, _ in results)
    print(f"{counted} in {time.monotonic() - start:.0f} s" + (f"; {failed} folders failed" if failed else ""))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
