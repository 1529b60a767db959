"""Copies of packed experts into slots: the plan as numbers, and carried out byte by byte."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ktransformers.place.gpu.copy_plan import check_parts, plan_copies, runs


def test_experts_in_one_piece_are_copied_in_runs() -> None:
    plan = plan_copies([(3, 7, 2), (9, 0, 1)], 0, 100, 100)
    assert plan.tolist() == [[700, 300, 200], [0, 900, 100]]


def test_parts_are_copied_expert_by_expert_to_their_offset() -> None:
    given = [(3, 7, 2), (9, 0, 1)]
    assert plan_copies(given, 0, 60, 100).tolist() == [[700, 180, 60], [800, 240, 60], [0, 540, 60]]
    assert plan_copies(given, 60, 40, 100).tolist() == [[760, 120, 40], [860, 160, 40], [60, 360, 40]]
    assert plan_copies([], 60, 40, 100).shape == (0, 3)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_planned_copies_fill_exactly_the_assigned_slots(parts: int) -> None:
    draw = random.Random(parts)
    for _ in range(50):
        experts, slots, size = draw.randint(1, 12), 14, draw.randint(parts, 40)
        cuts = [0, *sorted(draw.sample(range(1, size), parts - 1)), size]
        whole = np.random.default_rng(draw.random().hex().encode()[0]).integers(1, 256, (experts, size), np.uint8)
        count = draw.randint(0, experts)
        assigned = list(
            zip(sorted(draw.sample(range(experts), count)), sorted(draw.sample(range(slots), count)), strict=True)
        )
        target = np.zeros(slots * size, np.uint8)
        written = 0
        for begin, end in itertools.pairwise(cuts):
            part = np.ascontiguousarray(whole[:, begin:end]).reshape(-1)
            for to, origin, number in plan_copies(runs(assigned, 3), begin, end - begin, size).tolist():
                target[to : to + number] = part[origin : origin + number]
                written += number
        want = np.zeros((slots, size), np.uint8)
        for expert, slot in assigned:
            want[slot] = whole[expert]
        assert np.array_equal(target.reshape(slots, size), want)
        assert written == count * size


@pytest.mark.parametrize("parts", [[], [(0, 40)], [(0, 60), (40, 60)], [(0, 40), (50, 50)], [(0, 100), (0, 100)]])
def test_parts_that_are_not_all_bytes_once_are_refused(parts: list[tuple[int, int]]) -> None:
    check_parts("down", [(60, 40), (0, 60)], 100)
    with pytest.raises(ValueError, match="down: given parts"):
        check_parts("down", parts, 100)
