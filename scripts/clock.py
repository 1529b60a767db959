"""Times the parts of `make test` and `make demo`, and prints them at the end.

    python3 scripts/clock.py time packages -- COMMAND   # runs it; its seconds go to build/clock.jsonl
    python3 scripts/clock.py show STARTED [--loop RUN]  # the parts that began since, in seconds of the epoch

Parts that were done before are missing. With `--loop` also what the stages of a `kt loop` in that directory took, and
when the first question was answered by the trained model. It needs no package, because it times their installation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

PARTS = Path(__file__).resolve().parents[1] / "build" / "clock.jsonl"
# Stages of a loop under the words of the table. A stage with another name counts for the last row.
STAGES = {
    "model, tasks, plan": ("model", "quantise", "tasks", "plan"),
    "training": ("train",),
    "proof": ("prove",),
    "judging": (),
}


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def time_part(name: str, command: list[str]) -> int:
    began = time.time()
    code = subprocess.run(command).returncode
    PARTS.parent.mkdir(parents=True, exist_ok=True)
    with PARTS.open("a") as parts:
        parts.write(json.dumps({"part": name, "began": began, "seconds": time.time() - began}) + "\n")
    return code


def parts_since(started: float) -> dict[str, float]:
    lines = PARTS.read_text().splitlines() if PARTS.is_file() else []
    # A second is lost where the shell counts whole ones.
    return {part["part"]: part["seconds"] for part in map(json.loads, lines) if part["began"] >= started - 1}


def loop_parts(run: Path, started: float) -> tuple[dict[str, float], float | None]:
    """Seconds of the stages that ended since, and after how many the answers were there."""
    parts = dict.fromkeys(STAGES, 0.0)
    for file in sorted((run / "stages").glob("*.json")):
        record = json.loads(file.read_text())
        if record["ended"] and datetime.fromisoformat(record["ended"]).timestamp() >= started:
            row = next((row for row, names in STAGES.items() if record["stage"] in names), "judging")
            parts[row] += record["seconds"]
    answers = run / "answers.json"
    answered = answers.stat().st_mtime - started if answers.is_file() else -1.0
    return {row: seconds for row, seconds in parts.items() if seconds}, answered if answered >= 0 else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    timed = verbs.add_parser("time")
    timed.add_argument("part")
    timed.add_argument("command", nargs=argparse.REMAINDER)
    shown = verbs.add_parser("show")
    shown.add_argument("started", type=float)
    shown.add_argument("--loop", type=Path)
    args = parser.parse_args(argv)
    if args.verb == "time":
        return time_part(args.part, args.command[1:] if args.command[:1] == ["--"] else args.command)
    parts = parts_since(args.started)
    answered = None
    if args.loop is not None:
        stages, answered = loop_parts(args.loop, args.started)
        parts |= stages
    for part, seconds in parts.items():
        print(f"{part:<24}{clock(seconds):>6}")
    if answered is not None:
        print(f"{'first trained answer at':<24}{clock(answered):>6}")
    print(f"{'in all':<24}{clock(time.time() - args.started):>6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
