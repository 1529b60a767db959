"""Turns the names in `dataset:` into token rows: read, limit, encode, mix, split, pack.

`max_samples` takes the first rows of each dataset, as in LLaMA-Factory. Packing places rows into sequences of at most
cutoff_len by best fit, longest row first; `lengths` keeps the boundaries, and position ids restart at each row so that
rows do not attend to each other. Everything is deterministic in the seed.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ktransformers.ground.errors import InputError
from ktransformers.train.data.files import DataRow, read_rows
from ktransformers.train.data.formats import Sample, read_sample
from ktransformers.train.data.registry import DatasetSource, find_source
from ktransformers.train.data.render import IGNORE_INDEX, PreferenceRow, Renderer, TrainRow
from ktransformers.train.settings import DataSettings

T = TypeVar("T")
MOST_END_TOKENS = 8  # that end a turn


@dataclass(frozen=True)
class ReadDataset:
    """One dataset, read and parsed, not yet tokenised."""

    source: DatasetSource
    samples: list[tuple[DataRow, Sample]]


@dataclass(frozen=True)
class DataSplit:
    """Rows for training and for evaluation, of type TrainRow or PreferenceRow."""

    train: list[Any]
    evaluation: list[Any]
    dropped: int  # rows without a label within cutoff_len
    ends: int = 0  # rows of `train` whose labels are the end of a turn alone


def _fill_placeholders(values: Any, replacements: dict[str, str]) -> Any:
    if isinstance(values, str):
        for placeholder, text in replacements.items():
            values = values.replace("{{" + placeholder + "}}", text)
        return values
    if isinstance(values, dict):
        return {key: _fill_placeholders(value, replacements) for key, value in values.items()}
    return [_fill_placeholders(value, replacements) for value in values] if isinstance(values, list) else values


def read_dataset(name: str, settings: DataSettings) -> ReadDataset:
    source = find_source(name, settings.dataset_dir)
    identity = {"name": settings.identity_name, "author": settings.identity_author}
    replacements = source.fill | {
        placeholder: text for placeholder, text in identity.items() if placeholder in source.fill and text is not None
    }
    limits = [limit for limit in (settings.max_samples, source.num_samples) if limit is not None]
    samples = []
    for row in itertools.islice(read_rows(source.path), min(limits) if limits else None):
        filled = DataRow(row.file, row.line, _fill_placeholders(row.values, replacements)) if replacements else row
        samples.append((filled, read_sample(filled, source)))
    if not samples:
        raise InputError("dataset", f"{name}, {source.path} without rows", "at least one row")
    return ReadDataset(source, samples)


def read_datasets(names: Sequence[str], settings: DataSettings) -> list[ReadDataset]:
    return [read_dataset(name, settings) for name in names]


def mix_datasets(parts: list[list[T]], settings: DataSettings, seed: int) -> list[T]:
    """Combines datasets: concatenated, or sampled by probability until the first or the last is exhausted."""
    if settings.mix_strategy == "concat" or len(parts) == 1:
        return [row for part in parts for row in part]
    probabilities = settings.interleave_probs or tuple(1.0 for _ in parts)
    if len(probabilities) != len(parts):
        raise InputError("interleave_probs", f"{len(probabilities)} shares", f"{len(parts)}, one for each dataset")
    rng = random.Random(seed)
    queues, exhausted = [iter(part) for part in parts], [False] * len(parts)
    mixed: list[T] = []
    while True:
        (index,) = rng.choices(range(len(parts)), probabilities)
        row = next(queues[index], None)
        if row is None:
            exhausted[index] = True
            if settings.mix_strategy == "interleave_under" or all(exhausted):
                return mixed
            queues[index] = iter(parts[index])
            row = next(queues[index])
        mixed.append(row)


def encode_all(datasets: list[ReadDataset], renderer: Renderer, settings: DataSettings) -> Iterator[list[Any]]:
    for dataset in datasets:
        if settings.stage == "dpo":
            yield [renderer.encode_pair(sample, row) for row, sample in dataset.samples]
        else:
            yield [renderer.encode(sample, row) for row, sample in dataset.samples]


def _has_labels(row: TrainRow | PreferenceRow | None) -> bool:
    if isinstance(row, PreferenceRow):
        return True
    return row is not None and any(label != IGNORE_INDEX for label in row.labels[1:])


def _labels_end_alone(row: TrainRow | PreferenceRow, tokenizer: Any) -> bool:
    labels = row.chosen if isinstance(row, PreferenceRow) else [x for x in row.labels if x != IGNORE_INDEX]
    return len(labels) <= MOST_END_TOKENS and not tokenizer.decode(labels, skip_special_tokens=True).strip()


def prepare(
    datasets: list[ReadDataset], held_out: list[ReadDataset], renderer: Renderer, settings: DataSettings, seed: int
) -> DataSplit:
    encoded = [list(part) for part in encode_all(datasets, renderer, settings)]
    useful = [[row for row in part if _has_labels(row)] for part in encoded]
    dropped = sum(len(part) for part in encoded) - sum(len(part) for part in useful)
    rows = mix_datasets(useful, settings, seed)
    evaluation = [row for part in encode_all(held_out, renderer, settings) for row in part if _has_labels(row)]
    if settings.val_size and held_out:
        raise InputError("val_size", settings.val_size, "0 with eval_dataset", "choose one of them")
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
    ends = sum(_labels_end_alone(row, renderer.tokenizer) for row in rows)
    return DataSplit(rows, evaluation, dropped, ends)


def pack_rows(rows: Sequence[TrainRow], capacity: int) -> list[list[TrainRow]]:
    """Packs rows into sequences of `capacity` tokens by best fit, longest first."""
    free: list[tuple[int, int]] = []  # (free tokens, sequence), sorted
    packs: list[list[TrainRow]] = []
    for row in sorted(rows, key=lambda row: -len(row.ids)):
        position = bisect.bisect_left(free, (len(row.ids), -1))
        if position == len(free):
            packs.append([row])
            remaining, index = capacity - len(row.ids), len(packs) - 1
        else:
            remaining, index = free.pop(position)
            packs[index].append(row)
            remaining -= len(row.ids)
        bisect.insort(free, (remaining, index))
    return packs
