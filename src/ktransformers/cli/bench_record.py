"""The record of a run of `kt bench`: its table, its public form, and the comparison of two.

A record has what a stranger needs to repeat the run: machine, commit, flags, model, roofs, memory and the samples of
every cell. The public form keeps these fields alone, and of texts only words without paths, so that it can be sent in.
`docs/numbers.md` and the pages of `docs/models` are generated from such files (`scripts/numbers.py`).
"""

from __future__ import annotations

import re
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktransformers.ground.errors import InputError
from ktransformers.ground.files import read_json_object
from ktransformers.ground.report import gigabytes

if TYPE_CHECKING:
    from ktransformers.plan.roofs import Roofs

VERSION = 1
COLUMNS = ("model", "size", "params", "isa", "test", "streams", "t/s", "first token", "of roof")
PUBLIC_WORD = re.compile(r"[\w.:,+=-]{1,64}")  # no path, no address, and shorter than keys are
SECRET_FLAGS = ("--api-key", "--served-model-name", "--kt-hosts", "--host")


def begin(
    facts: dict[str, Any], flags: Sequence[str], roofs: Roofs, refused: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    from dataclasses import asdict

    from ktransformers.ground import system
    from ktransformers.plan.roofs import describe_machine

    gpus = [{"name": gpu.name, "memory": gpu.memory} for gpu in system.gpus()]
    record: dict[str, Any] = {"bench": "kt", "version": VERSION, "model": facts, "flags": list(flags)}
    record |= {"machine": describe_machine() | {"gpus": gpus}, "commit": commit(), "roofs": asdict(roofs)}
    return record | {"rows": [], "refused": list(refused)}


def commit() -> str | None:
    """Of the source tree that this package is in; None where it is installed."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def model_type(directory: Path) -> str:
    from ktransformers.ground.model_registry import read_facts

    return read_facts(directory).model_type or "unknown"


def read_record(file: Path) -> dict[str, Any]:
    record = read_json_object(file, "a record of `kt bench`")
    if (record.get("bench"), record.get("version")) != ("kt", VERSION):
        raise InputError(str(file), "another document", f"a record of `kt bench`, version {VERSION}")
    return record


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def heading() -> str:
    return "\n".join([line(COLUMNS), line(["---"] * len(COLUMNS))])


def seconds_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms"


def rate_text(samples: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(samples):.2f}" if len(samples) > 1 else ""
    return f"{statistics.fmean(samples):.2f}{spread}"


def tests_of(row: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Name, tokens/s, time to the first token and share of the roof: of the prompts, and of new tokens behind them."""
    prompt, decode = (statistics.fmean(row[name]) for name in ("prompt_rate", "decode_rate"))
    first = seconds_text(statistics.median(row["first_token"]))
    yield f"pp{row['prompt']}", rate_text(row["prompt_rate"]), first, f"{prompt / row['prompt_roof']:.0%}"
    name = f"tg{row['new']} @ d{row['prompt']}"
    yield name, rate_text(row["decode_rate"]), "", f"{decode / row['decode_roof']:.0%}"


def size_text(model: dict[str, Any]) -> str:
    return f"{gigabytes(model['expert_bytes'])} {model['format']}"


def params_text(model: dict[str, Any]) -> str:
    return f"{model['params'] / 1e9:.2f} B" if model["params"] >= 1e9 else f"{model['params'] / 1e6:.1f} M"


def table_lines(record: dict[str, Any], row: dict[str, Any]) -> list[str]:
    model, machine = record["model"], record["machine"]
    facts = (f"{model['name']} ({model['type']})", size_text(model), params_text(model), machine["isa"])
    return [line((*facts, test, str(row["streams"]), *rest)) for test, *rest in tests_of(row)]


def memory_text(memory: dict[str, Any]) -> str:
    """`5.1 GB used, 5.2 GB predicted (+2 %)`."""
    if not memory["used"]:
        return f"{gigabytes(memory['predicted'])} predicted"
    error = memory["predicted"] / memory["used"] - 1
    return f"{gigabytes(memory['used'])} used, {gigabytes(memory['predicted'])} predicted ({error:+.1%})"


def memory_lines(record: dict[str, Any]) -> list[str]:
    memory = record["memory"]
    mapped = memory["host"].get("mapped")
    lines = [f"host: {memory_text(memory['host'])}" + (f"; {gigabytes(mapped)} mapped from files" if mapped else "")]
    return lines + [f"gpu {index}: {memory_text(one)}" for index, one in enumerate(memory["gpus"])]


def footer(record: dict[str, Any], note: str) -> list[str]:
    roofs, lines = record["roofs"], memory_lines(record)
    rates = [f"DRAM {roofs['dram'] / 1e9:.1f} GB/s", f"CPU products {roofs['tiles'] / 1e12:.2f} TFLOPS"]
    if roofs["link"]:
        rates += [f"link {roofs['link'] / 1e9:.1f} GB/s", f"HBM {roofs['hbm'] / 1e9:.0f} GB/s"]
        rates += [f"GPU products {roofs['gpu'] / 1e12:.0f} TFLOPS"]
    lines.append(f"roofs: {', '.join(rates)}")
    for cell in record["refused"]:
        missing = ", ".join(f"{gigabytes(size)} of {place}" for place, size in cell["lacking"].items())
        lines.append(f"not measured: prompts of {cell['prompt']}, {cell['streams']} streams: {missing} missing")
    return [f"{note}; {dtypes_text(record['model'])}" if note else dtypes_text(record["model"]), *lines]


def dtypes_text(model: dict[str, Any]) -> str:
    cache = "the model's dtype" if model["cache"] == "auto" else model["cache"]
    return f"experts in {model['format']}, dense weights {model['dense']}, KV cache in {cache}"


def public(record: dict[str, Any]) -> dict[str, Any]:
    """To send in: a model's folder is named by its type, and flags lose every value that may be a path or a key."""
    model = dict(record["model"])
    if not model["random"]:
        model["name"] = model["type"]
    flags, secret = list[str](), False
    for word in record["flags"]:
        name = word.partition("=")[0] in SECRET_FLAGS
        flags += [] if secret or name or not PUBLIC_WORD.fullmatch(word) else [word]
        secret = name and "=" not in word
    kept = ("bench", "version", "machine", "commit", "roofs", "rows", "refused", "memory")
    document: dict[str, Any] = {name: record[name] for name in kept if name in record}
    return document | {"model": model, "flags": flags}


def compare(first: dict[str, Any], second: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells that both have, with the second's rates over the first's."""
    by_cell = {(row["prompt"], row["new"], row["streams"]): row for row in second["rows"]}
    rows = []
    for row in first["rows"]:
        cell = (row["prompt"], row["new"], row["streams"])
        tests = (("prompt_rate", f"pp{row['prompt']}"), ("decode_rate", f"tg{row['new']} @ d{row['prompt']}"))
        for name, test in tests if cell in by_cell else ():
            before, after = statistics.fmean(row[name]), statistics.fmean(by_cell[cell][name])
            of_test = {"test": test, "streams": row["streams"], "first": before, "second": after}
            rows.append(of_test | {"ratio": after / before})
    if not rows:
        raise InputError("--compare", "two records without a cell in common", "the same --prompts, --new and --streams")
    return rows


def comparison_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [line(("test", "streams", "A t/s", "B t/s", "B / A")), line(["---"] * 5)]
    for row in rows:
        rates = (f"{row['first']:.2f}", f"{row['second']:.2f}", f"{row['ratio']:.2f}")
        lines.append(line((row["test"], str(row["streams"]), *rates)))
    return "\n".join(lines)
