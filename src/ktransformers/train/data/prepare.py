"""From the names in `dataset:` to token rows: read, limited, encoded, mixed, split, packed.

`max_samples` takes the first rows of each dataset, as LLaMA-Factory does. Packing puts rows into sequences of at most
cutoff_len, the longest first into the fullest that still has room; `lengths` keeps the borders, and position ids that
start again at each keep the rows from seeing one another. Everything is deterministic in the seed.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ktransformers.errors import InputError
from ktransformers.train.data.files import DataRow, read_rows
from ktransformers.train.data.formats import Sample, read_sample
from ktransformers.train.data.registry import DatasetSource, find_source
from ktransformers.train.data.render import PreferenceRow, Renderer, TrainRow
from ktransformers.train.settings import DataSettings

T = TypeVar("T")


@dataclass(frozen=True)
class ReadDataset:
    """One dataset, read and understood, not yet tokenised."""

    source: DatasetSource
    samples: list[tuple[DataRow, Sample]]


@dataclass(frozen=True)
class DataSplit:
    """What is trained on and what is evaluated on; rows are Tokens or PairTokens."""

    train: list[Any]
    evaluation: list[Any]
    dropped: int  # rows with nothing to learn within cutoff_len


def _fill_placeholders(values: Any, words: dict[str, str]) -> Any:
    if isinstance(values, str):
        for word, text in words.items():
            values = values.replace("{{" + word + "}}", text)
        return values
    if isinstance(values, dict):
        return {key: _fill_placeholders(value, words) for key, value in values.items()}
    return [_fill_placeholders(value, words) for value in values] if isinstance(values, list) else values


def read_dataset(name: str, settings: DataSettings) -> ReadDataset:
    source = find_source(name, settings.dataset_dir)
    given = {"name": settings.identity_name, "author": settings.identity_author}
    words = source.fill | {word: text for word, text in given.items() if word in source.fill and text is not None}
    limits = [limit for limit in (settings.max_samples, source.num_samples) if limit is not None]
    samples = []
    for row in itertools.islice(read_rows(source.path), min(limits) if limits else None):
        filled = DataRow(row.file, row.line, _fill_placeholders(row.values, words)) if words else row
        samples.append((filled, read_sample(filled, source)))
    if not samples:
        raise InputError("dataset", f"{name}, {source.path} without rows", "at least one row")
    return ReadDataset(source, samples)


def read_datasets(names: Sequence[str], settings: DataSettings) -> list[ReadDataset]:
    return [read_dataset(name, settings) for name in names]


def mix_datasets(parts: list[list[T]], settings: DataSettings, seed: int) -> list[T]:
    """One list of several: one after another, or drawn by their shares until the first or the last is used up."""
    if settings.mix_strategy == "concat" or len(parts) == 1:
        return [row for part in parts for row in part]
    shares = settings.interleave_probs or tuple(1.0 for _ in parts)
    if len(shares) != len(parts):
        raise InputError("interleave_probs", f"{len(shares)} shares", f"{len(parts)}, one for each dataset")
    draw = random.Random(seed)
    queues, spent = [iter(part) for part in parts], [False] * len(parts)
    mixed: list[T] = []
    while True:
        (which,) = draw.choices(range(len(parts)), shares)
        row = next(queues[which], None)
        if row is None:
            spent[which] = True
            if settings.mix_strategy == "interleave_under" or all(spent):
                return mixed
            queues[which] = iter(parts[which])
            row = next(queues[which])
        mixed.append(row)


def encode_all(found: list[ReadDataset], renderer: Renderer, settings: DataSettings) -> Iterator[list[Any]]:
    for part in found:
        if settings.stage == "dpo":
            yield [renderer.encode_pair(sample, row) for row, sample in part.samples]
        else:
            yield [renderer.encode(sample, row) for row, sample in part.samples]


def _has_labels(row: TrainRow | PreferenceRow | None) -> bool:
    if isinstance(row, PreferenceRow):
        return True
    return row is not None and any(label != -100 for label in row.labels[1:])


def prepare(
    found: list[ReadDataset], held_out: list[ReadDataset], renderer: Renderer, settings: DataSettings, seed: int
) -> DataSplit:
    encoded = [list(part) for part in encode_all(found, renderer, settings)]
    kept = [[row for row in part if _has_labels(row)] for part in encoded]
    dropped = sum(len(part) for part in encoded) - sum(len(part) for part in kept)
    rows = mix_datasets(kept, settings, seed)
    evaluation = [row for part in encode_all(held_out, renderer, settings) for row in part if _has_labels(row)]
    if settings.val_size and held_out:
        raise InputError("val_size", settings.val_size, "0 beside eval_dataset", "choose one of them")
    if settings.val_size:
        count = int(settings.val_size) if settings.val_size >= 1 else max(1, round(settings.val_size * len(rows)))
        if count >= len(rows):
            raise InputError("val_size", settings.val_size, f"fewer than the {len(rows)} rows")
        order = list(range(len(rows)))
        random.Random(seed).shuffle(order)
        chosen = set(order[:count])
        evaluation = [rows[index] for index in sorted(chosen)]
        rows = [row for index, row in enumerate(rows) if index not in chosen]
    if not rows:
        raise InputError(
            "dataset",
            f"{dropped} rows without an answer within cutoff_len {settings.cutoff_len}",
            "at least one",
            "raise it",
        )
    return DataSplit(rows, evaluation, dropped)


def pack_rows(rows: Sequence[TrainRow], capacity: int) -> list[list[TrainRow]]:
    """Rows into as few sequences of `capacity` tokens as best fit, longest first, finds."""
    room: list[tuple[int, int]] = []  # (tokens left, sequence), sorted
    packs: list[list[TrainRow]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        at = bisect.bisect_left(room, (len(row.ids), -1))
        if at == len(room):
            packs.append([row])
            left, which = capacity - len(row.ids), len(packs) - 1
        else:
            left, which = room.pop(at)
            packs[which].append(row)
            left -= len(row.ids)
        bisect.insort(room, (left, which))
    return packs
