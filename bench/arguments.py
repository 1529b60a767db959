"""Values of command-line options that several benches have: lists separated by commas."""

from __future__ import annotations


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def fractions(text: str) -> list[float]:
    return [float(word) for word in words(text)]
